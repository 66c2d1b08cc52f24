"""The header of a safetensors file from a stranger: read with bounds, never trusting a figure.

The format (github.com/huggingface/safetensors): u64 little-endian header length, a JSON object
{name: {dtype, shape, data_offsets}}, then the tensors' bytes. Refused unless every tensor's bytes
fit its shape and dtype and all of them together cover the rest of the file exactly once.
"""

import errno
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from engine.adapters.findings import clip
from engine.adapters.strict_json import JsonRefused, parse_object
from engine.errors import AdapterRefused

MAX_HEADER_BYTES = 1024 * 1024
MAX_DIMENSIONS = 8
LENGTH_BYTES = 8
_CUT = "it was cut on its way: save or copy it again, and send it whole"

Dtype = Literal["F32", "F16", "BF16"]
ITEM_BYTES: dict[str, int] = {"F32": 4, "F16": 2, "BF16": 2}

_MAGIC: tuple[tuple[bytes, str, str], ...] = (
    (b"PK\x03\x04", "pickle_file", "a pickle archive of PyTorch"),
    *((bytes((0x80, protocol)), "pickle_file", "a pickle") for protocol in range(2, 6)),
    (b"version https://git-lfs", "lfs_pointer", "a git-LFS pointer"),
    (b"\x00\x05\x16\x07", "not_safetensors", "macOS metadata (AppleDouble)"),
    (b"GGUF", "not_safetensors", "a GGUF file"),
    (b"\x1f\x8b", "not_safetensors", "a gzip file"),
    (b"\x93NUMPY", "not_safetensors", "a NumPy file"),
    (b"<", "not_safetensors", "a web page"),
    (b"{", "not_safetensors", "a JSON file"),
)


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor: `start` is its first byte counted from the beginning of the file."""

    name: str
    dtype: Dtype
    shape: tuple[int, ...]
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """All tensors in the order of their bytes, and the sizes in bytes."""

    tensors: tuple[TensorInfo, ...]
    header_bytes: int
    file_bytes: int


def read_header(path: Path) -> SafetensorsHeader:
    """Reads and checks the header of the file at `path` (links are not followed).

    Raises AdapterRefused with a code of the container group. Reads at most 1 MiB.
    """
    descriptor = open_regular(path)
    try:
        size = os.fstat(descriptor).st_size
        first = os.pread(descriptor, 32, 0)
        length = _header_length(first, size)
        data = os.pread(descriptor, length, LENGTH_BYTES)
    finally:
        os.close(descriptor)
    return parse_header(data, size)


def open_regular(path: Path) -> int:
    """A read-only descriptor of a regular file. Raises AdapterRefused for anything else."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise AdapterRefused(f"{path.name} is missing", code="missing_file") from None
    except OSError as error:
        reason = "it is a symbolic link" if error.errno == errno.ELOOP else error.strerror
        message = f"{path.name} cannot be opened: {reason}"
        raise AdapterRefused(message, code="not_a_regular_file") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise AdapterRefused(f"{path.name} is not a file", code="not_a_regular_file")
    return descriptor


def _header_length(first: bytes, size: int) -> int:
    if size == 0:
        raise AdapterRefused("the weights file is empty", code="empty_file")
    length = int.from_bytes(first[:LENGTH_BYTES], "little")
    for magic, code, what in _MAGIC:
        # A plausible length may begin with the same byte as a short magic; the brace decides.
        if first.startswith(magic) and first[LENGTH_BYTES : LENGTH_BYTES + 1] != b"{":
            message = f"the weights file is {what}; upload adapter_model.safetensors"
            raise AdapterRefused(message, code=code)
    if size < LENGTH_BYTES + 2:
        raise AdapterRefused(
            f"the weights file has {size} bytes only; {_CUT}", code="truncated_file"
        )
    if length > MAX_HEADER_BYTES:
        message = (
            f"the header claims {length} bytes; at most {MAX_HEADER_BYTES} are read. A file that "
            "is not safetensors looks like this: save it again with safe_serialization=True"
        )
        raise AdapterRefused(message, code="header_too_large")
    if length > size - LENGTH_BYTES:
        message = f"the header claims {length} bytes, but the file ends after {size}; {_CUT}"
        raise AdapterRefused(message, code="truncated_file")
    return length


def parse_header(data: bytes, file_bytes: int) -> SafetensorsHeader:
    """Checks the header's JSON against the size of the file. Raises AdapterRefused."""
    if not data.startswith(b"{"):
        raise _invalid("it does not begin with an object")
    try:
        entries = parse_object(data)
    except JsonRefused as refusal:
        raise _invalid(refusal.message) from None
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise _invalid("__metadata__ is not an object of strings")
    origin = LENGTH_BYTES + len(data)
    tensors = [_tensor(name, entry, origin) for name, entry in entries.items()]
    tensors.sort(key=lambda tensor: (tensor.start, tensor.nbytes))
    _require_cover(tensors, origin, file_bytes)
    return SafetensorsHeader(tuple(tensors), len(data), file_bytes)


def _invalid(reason: str) -> AdapterRefused:
    return AdapterRefused(f"the safetensors header is invalid: {reason}", code="header_invalid")


def _tensor(name: str, entry: Any, origin: int) -> TensorInfo:
    shown = clip(name, 100)
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise _invalid(f"{shown} needs dtype, shape and data_offsets, and nothing else")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if dtype not in ("F32", "F16", "BF16"):
        message = f"{shown} has dtype {clip(dtype)}; save it as F32, F16 or BF16"
        raise AdapterRefused(message, code="dtype_unsupported", field=shown)
    if not _naturals(shape) or len(shape) > MAX_DIMENSIONS:
        raise _invalid(f"{shown} has the shape {clip(shape)}")
    if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _invalid(f"{shown} has the data_offsets {clip(offsets)}")
    nbytes = ITEM_BYTES[dtype]
    for extent in shape:
        nbytes *= extent
    if nbytes != offsets[1] - offsets[0]:
        message = f"{shown} needs {nbytes} bytes, its offsets span {offsets[1] - offsets[0]}"
        raise AdapterRefused(message, code="offsets_mismatch", field=shown)
    return TensorInfo(name, dtype, tuple(shape), origin + offsets[0], nbytes)


def _naturals(value: object) -> bool:
    return isinstance(value, list) and all(type(v) is int and 0 <= v < 2**63 for v in value)


def _require_cover(tensors: list[TensorInfo], origin: int, file_bytes: int) -> None:
    """Every byte after the header belongs to exactly one tensor."""
    position = origin
    for tensor in tensors:
        shown = clip(tensor.name, 100)
        if tensor.start < position:
            message = f"{shown} begins {position - tensor.start} bytes inside another tensor"
            raise AdapterRefused(message, code="offsets_overlap", field=shown)
        if tensor.start > position:
            message = f"{tensor.start - position} bytes before {shown} belong to no tensor"
            raise AdapterRefused(message, code="offsets_gap", field=shown)
        position += tensor.nbytes
    if position > file_bytes:
        message = f"the header promises {position} bytes, the file has {file_bytes}; {_CUT}"
        raise AdapterRefused(message, code="truncated_file")
    if position < file_bytes:
        message = f"{file_bytes - position} bytes follow the last tensor"
        raise AdapterRefused(message, code="trailing_bytes")
