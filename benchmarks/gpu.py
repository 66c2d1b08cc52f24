"""Checks and times everything of this repository that runs on the CUDA device that is here.

    python -m benchmarks.gpu [all|kernels|engine]

First every kernel (`benchmarks.kernels`): it must equal its plain reference, and only then is it
timed, beside the time that its bytes or its operations alone would take at the copy bandwidth and
the bf16 rate measured in the same run. The last of them are the fused 4-bit linears beside the
separate ones: the rows that `engine/kernels/fuse.py` may take. Then the whole engine
(`gpu_check`, `gpu_engine`): right or not, graphs beside eager steps, decodes and prompts against
their floors, adapters against the base, loads beside steps. Needs torch, triton and numpy, no model
and no network; meant to stay under 8 minutes.
"""

import argparse
import gc
import sys
import time

import torch

from benchmarks import gpu_check, gpu_engine, kernels
from benchmarks.kernels_parts import clock
from benchmarks.kernels_parts.case import Target


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", nargs="?", choices=("all", "kernels", "engine"), default="all")
    part = parser.parse_args().part
    if not torch.cuda.is_available():
        print("no CUDA device here; nothing was checked", file=sys.stderr)
        return 1
    device = torch.device("cuda")
    bandwidth, rate = clock.bandwidth(device), clock.rate(device)
    name = torch.cuda.get_device_name()
    print(f"{name}: copy {bandwidth / 1e12:.2f} TB/s, bf16 {rate / 1e12:.0f} TFLOP/s")
    right = True
    if part != "engine":
        shape, sizes = kernels.MODELS["llama-8b"]
        begin = time.perf_counter()
        right = kernels.run(Target(shape, sizes, device, triton=True), bandwidth, rate)
        print(f"the kernels took {time.perf_counter() - begin:.0f} s")
        give_back()
    if part != "kernels":
        right = engine(bandwidth, rate) and right
    return 0 if right else 1


def engine(bandwidth: float, rate: float) -> bool:
    """Whether the whole engine is right; times only what is."""
    gpu_engine.linear.kept_int4 = gpu_engine.packed_once()
    begin = time.perf_counter()
    print(f"\n{'the whole engine':56}{'error':>10}")
    right = gpu_check.check(gpu_engine.LLAMA_8B)
    give_back()
    if right:
        gpu_engine.time_all(bandwidth, rate)
    print(f"the whole engine took {time.perf_counter() - begin:.0f} s")
    return right


def give_back() -> None:
    """Memory of what is over, so that an engine finds it free."""
    gc.collect()
    torch.cuda.empty_cache()


if __name__ == "__main__":
    raise SystemExit(main())
