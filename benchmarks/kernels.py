"""What every kernel must move and multiply, its floor on a device, and how near it comes here.

    python -m benchmarks.kernels [--model llama-8b|smollm2] [--device h200|cpu]
                                 [--bandwidth BYTES_A_SECOND] [--flops A_SECOND] [--only WORD]

The shapes are one layer's. With a CUDA device here, or on a CPU with `--device cpu`, each call must
equal its plain reference and is then timed; the floor is that of the bandwidth and rate measured in
the same run, unless they are given. `--device h200` where no CUDA device is counts alone. Bytes are
those of docs/kernels.md, 2 a number, also where this CPU's faces keep 4. Needs torch and numpy, and
triton for CUDA; no model and no network.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence

import torch

from benchmarks.arguments import add_speeds
from benchmarks.kernels_parts import (
    attention,
    clock,
    fp8,
    fused,
    int4,
    lora,
    pointwise,
    sample,
)
from benchmarks.kernels_parts.case import TOLERANCE, Case, Sizes, Target
from benchmarks.step_roofline import H200, LLAMA_8B, SMOLLM2

MODELS = {
    "llama-8b": (LLAMA_8B, Sizes((1, 32, 128), 1024, 512)),
    "smollm2": (SMOLLM2, Sizes((1, 4, 32), 160, 256)),
}
PARTS = (pointwise, attention, int4, fp8, sample, lora, fused)
HEAD = f"{'':60}{'MB':>9}{'Gflop':>9}{'floor ms':>10}"


def cases(target: Target, only: str = "") -> Iterator[Case]:
    """Those whose name holds `only`."""
    for part in PARTS:
        yield from (case for case in part.cases(target) if only in case.name)


def counted(case: Case, bandwidth: float, flops: float) -> str:
    work = case.work
    floor = work.floor_ms(bandwidth, flops)
    return f"{case.name:60}{work.bytes / 1e6:9.3f}{work.operations / 1e9:9.3f}{floor:10.4f}"


def run(target: Target, bandwidth: float, flops: float, only: str = "") -> bool:
    """Prints every case; false when one is wrong, which is not timed."""
    print(f"{HEAD}{'error':>10}{'ms':>10}{'of floor':>9}")
    right = True
    for case in cases(target, only):
        line, trial = counted(case, bandwidth, flops), case.open()
        if trial is None:
            print(f"{line}  not possible here", flush=True)
            continue
        error = trial.error()
        if not error <= TOLERANCE:
            right = False
            print(f"{line}{error:10.1e}  WRONG, not timed", flush=True)
            continue
        took = clock.milliseconds(trial.call, target.device)
        share = case.work.floor_ms(bandwidth, flops) / took
        print(f"{line}{error:10.1e}{took:10.4f}{share:9.0%}", flush=True)
    return right


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kernels",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    here = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--model", choices=MODELS)
    parser.add_argument("--device", choices=("h200", "cpu"))
    add_speeds(parser)
    parser.add_argument("--only", default="", help="cases whose name holds this")
    wanted = parser.parse_args(argv)
    on_gpu = wanted.device == "h200" or (wanted.device is None and here == "cuda")
    shape, sizes = MODELS[wanted.model or ("llama-8b" if on_gpu else "smollm2")]
    device = torch.device("cuda" if on_gpu and here == "cuda" else "cpu")
    counts_alone = on_gpu and here != "cuda"
    known = H200 if counts_alone else (None, None)
    bandwidth = wanted.bandwidth or known[0] or clock.bandwidth(device)
    flops = wanted.flops or known[1] or clock.rate(device)
    name = "H200" if counts_alone else device.type
    print(f"{shape.name}, {name}: {bandwidth / 1e9:.0f} GB/s, {flops / 1e9:.0f} Gflop/s")
    target = Target(shape, sizes, device, triton=on_gpu)
    if not any(True for _ in cases(target, wanted.only)):
        parser.error(f"argument --only: no case's name holds {wanted.only!r}")
    if not counts_alone:
        return 0 if run(target, bandwidth, flops, wanted.only) else 1
    print(HEAD)
    for case in cases(target, wanted.only):
        print(counted(case, bandwidth, flops))
    return 0


if __name__ == "__main__":
    sys.exit(main())
