"""`python -m engine.quantize SOURCE TARGET`: a checkpoint folder, its linears rounded to 4 bits.

The seven linears of every block become 4-bit codes, in compressed-tensors' pack-quantized layout,
which transformers and vLLM read as well as this engine; the embedding, the head, norms and biases
stay as they are, and so does every other file of the folder. One tensor is worked on at a time.

Progress is told on stdout, a JSON object a line, the result in the last one.
"""

import argparse
import errno
import json
import logging
import os
import secrets
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn, cast

import numpy as np
import numpy.typing as npt

from engine.errors import EngineError
from engine.model.config import CheckpointRefused, ModelConfig, read_json
from engine.model.description import module_names
from engine.model.loader import FolderCheckpoint
from engine.model.rounding import Rounded, ScaleType, round_groups, stored_scales
from engine.model.safetensors_file import SafetensorsWriter, TensorPlan
from engine.model.weights import BlockWeight

GROUPS = (32, 64, 128)
SHARD_BYTES = 4 << 30
_CHUNK_WEIGHTS = 1 << 22
_LEFT_OUT = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth",
             ".gguf", ".h5", ".msgpack", ".onnx")  # fmt: skip
"""Endings of files that hold or list weights: the target has its own."""


class QuantizeRefused(EngineError):
    """The checkpoint cannot be rounded, or the result cannot be written; the message says why."""

    code = "quantize_refused"


@dataclass(frozen=True, slots=True)
class Options:
    """`group`: columns that share a scale, one of GROUPS."""

    group: int = 32
    symmetric: bool = False
    force: bool = False
    shard_bytes: int = SHARD_BYTES


@dataclass(frozen=True, slots=True)
class Result:
    """Sizes are of the weight files. Errors are |W - W'| / |W| in the Frobenius norm."""

    source_bytes: int
    target_bytes: int
    linears: int
    bits_per_weight: float  # of the linears, with their scales and zeros
    mean_error: float
    largest_error: float
    largest_error_module: str


Progress = Callable[[int, int, str], None]
"""Weights done, weights in all, and the module at hand."""


def quantize(
    source: Path, target: Path, options: Options, progress: Progress | None = None
) -> Result:
    """Writes `target` beside itself and renames it when it is whole.

    Raises QuantizeRefused and CheckpointRefused; then nothing is left of the attempt.
    """
    checkpoint = _open(source)
    _check_target(source, target, force=options.force)
    work = _Work(checkpoint, source, options)
    unfinished = target.parent / f".{target.name}.{secrets.token_hex(4)}.unfinished"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _check_space(target.parent, work.nbytes)
        unfinished.mkdir()
        result = work.write(unfinished, progress or (lambda done, total, module: None))
        _put_in_place(unfinished, target)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise QuantizeRefused(f"the disk of {target.parent} is full") from error
        raise QuantizeRefused(f"cannot write {target}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return result


def _open(source: Path) -> FolderCheckpoint:
    if not source.exists():
        raise QuantizeRefused(f"there is no {source}: name a Hugging Face checkpoint folder")
    if not source.is_dir():
        raise QuantizeRefused(
            f"{source} is a file: a Hugging Face folder with config.json and *.safetensors is due"
        )
    method = (read_json(source / "config.json").get("quantization_config") or {}).get(
        "quant_method"
    )
    if method is not None:
        raise QuantizeRefused(
            f"{source} is quantized already ({method}); round the checkpoint that it was made from"
        )
    return FolderCheckpoint(source)


def _check_target(source: Path, target: Path, *, force: bool) -> None:
    here, there = source.resolve(), target.resolve()
    if here == there or here in there.parents or there in here.parents:
        raise QuantizeRefused("source and target must be two folders, neither inside the other")
    if not os.path.lexists(target):
        return
    if not force:
        raise QuantizeRefused(f"{target} exists already; --force replaces it")
    if target.is_symlink() or not target.is_dir():
        raise QuantizeRefused(f"{target} is no folder; --force replaces checkpoint folders alone")
    holds = [entry.name for entry in target.iterdir()]
    if holds and not ("config.json" in holds and any(n.endswith(".safetensors") for n in holds)):
        raise QuantizeRefused(
            f"{target} holds something other than a checkpoint; --force replaces checkpoint "
            "folders alone"
        )


def _check_space(folder: Path, nbytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < nbytes:
        raise QuantizeRefused(
            f"the disk of {folder} is too full: {nbytes / 2**20:.0f} MiB are needed, "
            f"{free / 2**20:.0f} MiB are free"
        )


def _put_in_place(unfinished: Path, target: Path) -> None:
    """A target that exists is moved aside, and is back if the new one cannot take its place."""
    if not target.exists():
        unfinished.rename(target)
        return
    old = target.parent / f".{target.name}.{secrets.token_hex(4)}.replaced"
    target.rename(old)
    try:
        unfinished.rename(target)
    except OSError:
        old.rename(target)
        raise
    shutil.rmtree(old, ignore_errors=True)


# --------------------------------------------------------------------------- the work


@dataclass(frozen=True, slots=True)
class _Item:
    """A tensor of the source and the tensors that it becomes."""

    name: str
    weight: BlockWeight
    plans: dict[str, TensorPlan]
    rounded: bool

    @property
    def nbytes(self) -> int:
        return sum(plan.nbytes for plan in self.plans.values())


class _Work:
    """What is written where, known before anything is."""

    def __init__(self, checkpoint: FolderCheckpoint, source: Path, options: Options) -> None:
        self._checkpoint, self._source, self._options = checkpoint, source, options
        self._items = list(self._plan())
        self._copied = [
            file
            for file in sorted(source.iterdir())
            if file.is_file() and not file.name.endswith(_LEFT_OUT) and file.name != "config.json"
        ]
        self._errors: list[tuple[float, str]] = []

    @property
    def nbytes(self) -> int:
        """About what the target takes."""
        copied = sum(file.stat().st_size for file in self._copied)
        return sum(item.nbytes + 512 for item in self._items) + copied + (1 << 16)

    def _plan(self) -> Iterator[_Item]:
        rounded = set(module_names(self._checkpoint.config)[1:-1])
        for name in tensor_names(self._checkpoint.config):
            weight = self._checkpoint.weight(name)
            assert isinstance(weight, BlockWeight)  # a folder without quantization has no other
            module = name.removesuffix(".weight")
            if module not in rounded:
                yield _Item(name, weight, {name: TensorPlan(weight.type, weight.shape)}, False)
                continue
            rows, columns = weight.shape
            group = self._options.group
            if columns % group:
                fitting = [g for g in GROUPS if columns % g == 0]
                raise QuantizeRefused(
                    f"{module} has {columns} columns, not a multiple of {group}"
                    + (f"; --group-size {fitting[-1]} fits it" if fitting else "")
                )
            plans = {
                f"{module}.weight_packed": TensorPlan("I32", (rows, columns // 8)),
                f"{module}.weight_scale": TensorPlan(weight.type, (rows, columns // group)),
                f"{module}.weight_shape": TensorPlan("I64", (2,)),
            }
            if not self._options.symmetric:
                plans[f"{module}.weight_zero_point"] = TensorPlan(
                    "I32", (-(-rows // 8), columns // group)
                )
            yield _Item(module, weight, plans, True)

    def write(self, folder: Path, progress: Progress) -> Result:
        shards = _shards(self._items, self._options.shard_bytes)
        total = sum(np.prod(item.weight.shape, dtype=int) for item in self._items)
        places: dict[str, str] = {}
        done = nbytes = 0
        for number, items in enumerate(shards, start=1):
            name = "model.safetensors"
            if len(shards) > 1:
                name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            plans = {name: plan for item in items for name, plan in item.plans.items()}
            places |= dict.fromkeys(plans, name)
            writer = SafetensorsWriter(folder / name, plans)
            try:
                for item in items:
                    progress(done, total, item.name)
                    self._write_item(item, writer)
                    done += int(np.prod(item.weight.shape))
                    self._checkpoint.release()
                writer.close()
            except BaseException:
                writer.abandon()
                raise
            nbytes += writer.nbytes
        progress(done, total, "")
        self._write_around(folder, places if len(shards) > 1 else None)
        return self._result(nbytes)

    def _write_item(self, item: _Item, writer: SafetensorsWriter) -> None:
        weight = item.weight
        if not item.rounded:
            rows = max(1, _CHUNK_WEIGHTS // weight.columns)
            for start in range(0, weight.rows.shape[0], rows):
                writer.write(item.name, weight.rows[start : start + rows].reshape(-1))
            return
        rows = max(8, _CHUNK_WEIGHTS // weight.columns // 8 * 8)  # zeros are packed by eight rows
        off = size = 0.0
        for start in range(0, weight.shape[0], rows):
            values = weight.decode(start, start + rows)
            try:
                rounded = round_groups(
                    values,
                    self._options.group,
                    _scale_type(weight.type),
                    symmetric=self._options.symmetric,
                )
            except CheckpointRefused as error:
                raise QuantizeRefused(f"{item.name}: {error.message}") from error
            self._write_rounded(item.name, rounded, weight.type, writer)
            size += float(np.vdot(values, values))
            values -= rounded.values()
            off += float(np.vdot(values, values))
        writer.write(f"{item.name}.weight_shape", np.array(weight.shape, "<i8").view(np.uint8))
        self._errors.append(((off / size) ** 0.5 if size else 0.0, item.name))

    def _write_rounded(
        self, module: str, rounded: Rounded, kind: str, writer: SafetensorsWriter
    ) -> None:
        scale = stored_scales(rounded.scale, _scale_type(kind))
        writer.write(f"{module}.weight_packed", _words(rounded.q))
        writer.write(f"{module}.weight_scale", scale.reshape(-1))
        if not self._options.symmetric:
            rows = rounded.zero.shape[0]
            zero = np.pad(rounded.zero, ((0, -rows % 8), (0, 0)))
            eights = zero.reshape(-1, 8, zero.shape[1]).swapaxes(1, 2)  # [rows / 8, groups, 8]
            writer.write(f"{module}.weight_zero_point", _words(eights))

    def _write_around(self, folder: Path, places: dict[str, str] | None) -> None:
        """config.json, the shards' index, and the files that are not weights."""
        for file in self._copied:
            shutil.copyfile(file, folder / file.name)
        config = read_json(self._source / "config.json")
        config["quantization_config"] = quantization_config(self._options)
        _write_json(folder / "config.json", config)
        if places is not None:
            size = sum(item.nbytes for item in self._items)
            index = {"metadata": {"total_size": size}, "weight_map": places}
            _write_json(folder / "model.safetensors.index.json", index)

    def _result(self, nbytes: int) -> Result:
        linears = [item for item in self._items if item.rounded]
        largest, module = max(self._errors)
        weights = sum(int(np.prod(item.weight.shape)) for item in linears)
        return Result(
            source_bytes=sum(f.stat().st_size for f in self._source.glob("*.safetensors")),
            target_bytes=nbytes,
            linears=len(linears),
            bits_per_weight=8 * sum(item.nbytes for item in linears) / weights,
            mean_error=sum(error for error, _ in self._errors) / len(self._errors),
            largest_error=largest,
            largest_error_module=module,
        )


def tensor_names(config: ModelConfig) -> list[str]:
    """Every tensor that a checkpoint of this architecture holds, in the order of the forward."""
    edges = ["model.embed_tokens.weight", "model.norm.weight"]
    if not config.tied_head:
        edges.append("lm_head.weight")
    names: list[str] = []
    for module in module_names(config)[1:-1]:
        block, _, target = module.rpartition(".")
        layer = block.rpartition(".")[0]
        if target == "q_proj":
            norms = ("input_layernorm", "post_attention_layernorm")
            names += [f"{layer}.{norm}.weight" for norm in norms]
            if config.qk_norm:
                names += [f"{block}.{norm}.weight" for norm in ("q_norm", "k_norm")]
        names.append(f"{module}.weight")
        if config.qkv_bias and target in ("q_proj", "k_proj", "v_proj"):
            names.append(f"{module}.bias")
    return [edges[0], *names, *edges[1:]]


def quantization_config(options: Options) -> dict[str, Any]:
    """What config.json says of such a folder, as compressed-tensors writes it."""
    weights = {
        "num_bits": 4,
        "type": "int",
        "symmetric": options.symmetric,
        "strategy": "group",
        "group_size": options.group,
        "dynamic": False,
        "observer": "minmax",
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }


def _shards(items: list[_Item], most_bytes: int) -> list[list[_Item]]:
    shards: list[list[_Item]] = [[]]
    held = 0
    for item in items:
        if shards[-1] and held + item.nbytes > most_bytes:
            shards.append([])
            held = 0
        shards[-1].append(item)
        held += item.nbytes
    return shards


def _words(codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Codes 0..15 whose last axis is a multiple of eight, two a byte, the first in the low half."""
    pairs = codes.reshape(-1, 2)
    words: npt.NDArray[np.uint8] = pairs[:, 0] | (pairs[:, 1] << np.uint8(4))
    return words


def _scale_type(kind: str) -> ScaleType:
    assert kind in ("F32", "F16", "BF16")
    return cast(ScaleType, kind)


def _write_json(file: Path, value: dict[str, Any]) -> None:
    with file.open("w") as stream:
        json.dump(value, stream, indent=2)
        stream.flush()
        os.fsync(stream.fileno())


# --------------------------------------------------------------------------- the process


def main() -> int:
    """Exit status 0, or 2 with the reason on stderr."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    parser = argparse.ArgumentParser(prog="python -m engine.quantize")
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--group-size", type=int, choices=GROUPS, default=32)
    parser.add_argument("--symmetric", action="store_true")
    parser.add_argument("--force", action="store_true")
    parser.add_argument("--shard-bytes", type=int, default=SHARD_BYTES)
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, _end)
    options = Options(given.group_size, given.symmetric, given.force, given.shard_bytes)
    try:
        result = quantize(given.source, given.target, options, _tell)
    except EngineError as error:
        logging.error("%s: %s", error.code, error.message)
        return 2
    _say({"result": asdict(result)})
    return 0


def _tell(done: int, total: int, module: str) -> None:
    _say({"done": int(done), "total": int(total), "module": module})


def _say(line: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def _end(signum: int, frame: object) -> NoReturn:
    """SIGTERM unwinds, so that nothing unfinished stays behind."""
    raise SystemExit(128 + signum)


if __name__ == "__main__":
    sys.exit(main())
