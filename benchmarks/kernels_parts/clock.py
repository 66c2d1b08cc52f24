"""Times a call, and measures what this device can move and multiply."""

import statistics
from collections.abc import Callable

import torch

from benchmarks.step_roofline import least_seconds, measured_bandwidth, measured_flops

FLUSH_BYTES = 256 << 20


def milliseconds(call: Callable[[], object], device: torch.device) -> float:
    """On CUDA the median of a replayed graph with the L2 cache flushed; on a CPU the least."""
    if device.type == "cuda":
        return _graph_ms(call)
    call()
    return 1e3 * least_seconds(call)


def bandwidth(device: torch.device) -> float:
    """Bytes a second: read and written by a large copy on CUDA, read by a large sum on a CPU."""
    if device.type != "cuda":
        return measured_bandwidth()
    source = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / (_graph_ms(lambda: target.copy_(source)) / 1e3)


def rate(device: torch.device) -> float:
    """Operations a second of a large product: bf16 on CUDA, fp32 on a CPU."""
    if device.type != "cuda":
        return measured_flops()
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device=device) for _ in range(2))
    return 2 * 8192**3 / (_graph_ms(lambda: a @ b) / 1e3)


def _graph_ms(call: Callable[[], object], repeats: int = 30) -> float:
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    times = []
    for _ in range(repeats):
        flush.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)
