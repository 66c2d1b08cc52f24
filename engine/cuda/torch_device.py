"""The device behind torch.cuda."""

import contextlib
import gc
import logging
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import triton
from torch import Tensor

from engine.cuda.device import BackendUnavailable, Device, Event, Graph, Memory, Stream

log = logging.getLogger(__name__)

cuda: Any = torch.cuda  # much of it is untyped

PAGE = 4096
"""Bytes of which locked memory is a multiple, begin and end."""


class CudaEvent:
    def __init__(self, stream: Any) -> None:
        self.raw = cuda.Event()
        self.raw.record(stream)

    def done(self) -> bool:
        return bool(self.raw.query())

    def wait(self) -> None:
        self.raw.synchronize()


class CudaDevice(Device):
    """The first CUDA device that this process sees (CUDA_VISIBLE_DEVICES chooses it)."""

    def __init__(self) -> None:
        """Raises BackendUnavailable where there is none."""
        if not cuda.is_available():
            raise BackendUnavailable(
                "The backend cuda was asked for, but torch finds no CUDA device. Check the driver "
                "with nvidia-smi and that torch is a CUDA build, or start with --backend cpu."
            )
        self.torch_device = torch.device("cuda", cuda.current_device())
        self.name = cuda.get_device_name(self.torch_device)
        self._streams = {"steps": cuda.Stream(), "copies": cuda.Stream()}
        self._pool: Any = cuda.graph_pool_handle()
        self._compiles = _CompileCount()

    @property
    def compiles(self) -> int:
        return self._compiles.total

    def empty(self, nbytes: int) -> Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8, device=self.torch_device)

    def pinned(self, nbytes: int) -> Tensor:
        # torch's own pinned allocator rounds up to a power of two, and budgets are exact
        pages = -(-nbytes // PAGE) * PAGE
        owner = np.zeros(pages + PAGE, np.uint8)
        start = -owner.ctypes.data % PAGE
        host = owner[start : start + pages]
        runtime: Any = cuda.cudart()
        if pages and int(runtime.cudaHostRegister(host.ctypes.data, pages, 0)) == 0:
            weakref.finalize(owner, runtime.cudaHostUnregister, host.ctypes.data).atexit = False
        elif pages:
            log.warning("%d bytes of host memory could not be locked; copies will wait", pages)
        return torch.from_numpy(host[:nbytes])

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        with cuda.stream(self._streams[stream]):
            yield

    def copy(self, stream: Stream, destination: Tensor, source: Tensor) -> None:
        with cuda.stream(self._streams[stream]):
            destination.copy_(source, non_blocking=True)

    def record(self, stream: Stream) -> CudaEvent:
        return CudaEvent(self._streams[stream])

    def wait(self, stream: Stream, event: Event) -> None:
        if not isinstance(event, CudaEvent):
            raise TypeError("the event is of another device")
        self._streams[stream].wait_event(event.raw)

    def capture(self, work: Callable[[], None]) -> Graph:
        graph = cuda.CUDAGraph()
        # loader threads may lock host memory meanwhile: only this thread's calls are watched
        with cuda.graph(
            graph,
            pool=self._pool,
            stream=self._streams["steps"],
            capture_error_mode="thread_local",
        ):
            work()
        self.captures += 1
        captured: Graph = graph
        return captured

    def memory(self) -> Memory:
        free, total = cuda.mem_get_info(self.torch_device)
        return Memory(
            total,
            free,
            cuda.memory_reserved(self.torch_device),
            cuda.max_memory_allocated(self.torch_device),
        )

    def reset_peak(self) -> None:
        cuda.reset_peak_memory_stats(self.torch_device)

    def release_unused(self) -> None:
        gc.collect()
        cuda.empty_cache()

    def synchronize(self) -> None:
        cuda.synchronize(self.torch_device)


class _CompileCount:
    """Counts what Triton compiles in this process, from now on."""

    def __init__(self) -> None:
        self.total = 0
        runtime: Any = triton.knobs.runtime
        before = runtime.jit_post_compile_hook

        def count(**event: Any) -> Any:
            self.total += 1
            return None if before is None else before(**event)

        runtime.jit_post_compile_hook = count
