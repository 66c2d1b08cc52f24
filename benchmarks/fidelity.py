"""What each weight format costs in perplexity: the real base model, re-quantized to each.

    python -m benchmarks.fidelity [--tokens 3948] [--formats BF16 awq ...]

The packaged model (4 bits itself) is dequantized once; that bf16 model is the reference. It is then
written in every format, served by the engine in fp32 with an fp32 cache, and its perplexity over
tests/data/english_4k.txt taken, in windows of 1,024 tokens. `int4, 32` and its kin are written by
`loramux quantize`; the others are rounded to the nearest by tests/checkpoint_formats.py, so they
say what the format can hold, not what AWQ's or GPTQ's own search would find. So small a model,
rounded to 4 bits a second time on another grid, loses far more than a large one: compare formats.
Its rows of 576 fit no K format's block of 256, so that of those only `down_proj` is in it; the rest
is Q8_0, as llama.cpp's own tool writes it.
"""

import argparse
import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM

from benchmarks.arguments import at_least_one
from benchmarks.packaged import packaged_base_model
from engine.quantize import Options, quantize
from engine.text import TextCodec
from tests.checkpoint_formats import FORMATS, Served
from tests.parity.driver import Driver
from tests.parity.test_real_model import TEXT, mean_loss, transformers_model

REFERENCE = "BF16"
ROUNDED = {
    "int4, 32": Options(32),
    "int4, 64": Options(64),
    "int4, 32, symmetric": Options(32, symmetric=True),
}
WITHOUT_PURPOSE = ("F32", "F16", "GGUF F32", "GGUF F16", "GGUF BF16")
"""Plain numbers hold the reference exactly (F16 nearly)."""


def formats() -> list[str]:
    """Those that this model can be written in and that may differ from the reference."""
    return [REFERENCE, *ROUNDED, *(name for name in FORMATS
            if name != REFERENCE and name not in WITHOUT_PURPOSE)]  # fmt: skip


def reference_model(base: Path) -> LlamaForCausalLM:
    """The base's dequantized weights, rounded to bf16, as fp32."""
    model = transformers_model(base)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    return model


def written(name: str, model: Any, folder: Path) -> Path:
    """The model in a format, on the disk."""
    if name in ROUNDED:
        source = FORMATS[REFERENCE](model, folder / "source").path
        quantize(source, folder / "rounded", ROUNDED[name])
        return folder / "rounded"
    write: Callable[[Any, Path], Served] = FORMATS[name]
    return write(model, folder / "base").path


def measure(base: Path, names: list[str], most_tokens: int) -> Iterator[dict[str, Any]]:
    """A record for each format, the reference first."""
    tokens = TextCodec.load(base).encode(TEXT.read_text())[:most_tokens]
    model, reference = reference_model(base), None
    for name in names:
        with tempfile.TemporaryDirectory(prefix="loramux-fidelity-") as scratch:
            path = written(name, model, Path(scratch))
            files = [path] if path.is_file() else path.glob("*.safetensors")
            size = sum(file.stat().st_size for file in files)
            driver = Driver(path, Path(scratch), arena_bytes=192 << 20, threads=0,
                            form_cache_bytes=0)  # fmt: skip
            began = time.perf_counter()
            perplexity = math.exp(mean_loss(driver, tokens, chunk=256))
            reference = reference or perplexity
            yield {
                "format": name,
                "mib": size / 2**20,
                "tokens": len(tokens),
                "perplexity": perplexity,
                "change": perplexity / reference - 1,
                "seconds": time.perf_counter() - began,
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", type=Path, default=None)
    parser.add_argument("--tokens", type=at_least_one, default=3948)
    parser.add_argument("--formats", nargs="+", choices=formats(), default=formats())
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    names = [REFERENCE, *(name for name in arguments.formats if name != REFERENCE)]
    records = []
    print("format                                 MiB  perplexity   change")
    for record in measure(arguments.base or packaged_base_model(), names, arguments.tokens):
        records.append(record)
        print(
            f"{record['format']:<34} {record['mib']:>7.1f} {record['perplexity']:>11.4f} "
            f"{record['change']:>+8.3%}",
            flush=True,
        )
    if arguments.output:
        arguments.output.write_text(json.dumps(records))


if __name__ == "__main__":
    main()
