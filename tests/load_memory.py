"""`python -m tests.load_memory load|quantize …`: what a process of its own takes at most. Linux.

Prints JSON: `peak`, the most resident memory (mapped files included) above what the process had
once everything was imported, and `forms`, the bytes of what a loaded model serves from. On the fake
device those lie in the process too.
"""

import itertools
import json
import re
import sys
from pathlib import Path
from typing import Any

import torch

from engine.config import EngineConfig
from engine.model.llama import Llama
from engine.native.layout import PackedLinear
from engine.native.model import NativeLlama
from engine.quantize import Options, quantize
from engine.runner import CpuExecutor
from tests.device_weights import device_weights, load_on_fake_device

MIB = 1 << 20


def memory(name: str) -> int:
    """VmRSS or VmHWM, in bytes."""
    status = Path("/proc/self/status").read_text()
    found = re.search(rf"^{name}:\s+(\d+) kB", status, re.MULTILINE)
    assert found is not None
    return int(found[1]) << 10


def forms_bytes(model: Any) -> int:
    """By arithmetic: a number a weight where it is dense, and half a byte where it is int4; the
    panels of the compiled pass; what lies on a device."""
    if isinstance(model, NativeLlama):
        return sum(part.data.numel() for part in model._kept if isinstance(part, PackedLinear))
    if not isinstance(model, Llama):
        return sum(tensor.nbytes for tensor in device_weights(model))
    total = 0
    for linear in itertools.chain(*model.linears_by_shape()):
        weights = linear.out_features * linear.in_features
        if linear._dense is not None:
            total += weights * linear._dense._dtype.itemsize
        if linear._int4 is not None:
            total += weights // 2 + weights // 32 * 4
    return total


def load(base: Path, data_dir: Path, path: Any) -> Any:
    """The model as an executor holds it. `path`: a linear path, or cuda."""
    config = EngineConfig(
        base_model=base, data_dir=data_dir, arena_bytes=4 * MIB, threads=1, backend="cpu",
        linear_path="auto" if path == "cuda" else path, max_batch_tokens=64,
    )  # fmt: skip
    return load_on_fake_device(config) if path == "cuda" else CpuExecutor(config)._model


def main() -> None:
    command, source, target = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    warm = torch.ops.mkldnn._reorder_linear_weight(torch.ones(64, 64), 32)
    torch.ops.mkldnn._linear_pointwise(torch.ones(2, 64), warm, None, "none", [], "")
    if command == "load":  # a small model first: kernels are loaded with it, and are not weights
        load(Path(sys.argv[4]), target / "warm-up", sys.argv[5])
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from now on
    before, forms = memory("VmRSS"), 0
    if command == "load":
        forms = forms_bytes(load(source, target, sys.argv[5]))
    else:
        quantize(source, target, Options())
    sys.stdout.write(json.dumps({"peak": memory("VmHWM") - before, "forms": forms}))


if __name__ == "__main__":
    main()
