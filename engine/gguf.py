"""Reads GGUF checkpoint files (llama.cpp's single-file format) without torch.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Tensor bytes are memory-mapped
and stay as they are in the file; engine/model/quantization.py decodes them.
"""

import hashlib
import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from engine.errors import EngineError
from engine.mapped_file import MappedFile

# type code -> (name, weights in a block, bytes of a block)
TENSOR_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    30: ("BF16", 1, 2),
}
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9
_MAX_ENTRIES = 1 << 20  # metadata entries or tensors; real files have hundreds
_MAX_DIMENSIONS = 4


class GgufError(EngineError):
    """The file is not a GGUF that this reader can use."""

    code = "base_model_unreadable"


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor as it lies in the file.

    `shape` is in row-major order, [out, in] for a linear (the file lists it reversed); `data` is
    the mapped bytes, uint8 [nbytes], in blocks of `type`.
    """

    name: str
    shape: tuple[int, ...]
    type: str
    data: np.ndarray


class GgufFile:
    """Metadata and tensors of one file. Raises GgufError when anything lies outside it."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        try:
            self._file = MappedFile(self.path)
        except (OSError, ValueError) as error:
            raise GgufError(f"cannot read {self.path.name}: {error}") from error
        self._bytes = self._file.bytes
        cursor = _Cursor(self._bytes, self.path.name)
        if cursor.take(4) != b"GGUF":
            raise GgufError(f"{self.path.name} does not begin with the GGUF magic")
        self.version: int = cursor.scalar("I")
        if self.version not in (2, 3):
            raise GgufError(f"{self.path.name} is GGUF version {self.version}; 2 and 3 are read")
        tensor_count = cursor.count("Q", "tensors")
        metadata_count = cursor.count("Q", "metadata entries")
        self.metadata: dict[str, Any] = {}
        for _ in range(metadata_count):
            key = cursor.string()
            self.metadata[key] = cursor.value(cursor.scalar("I"))
        self.tensors: dict[str, GgufTensor] = self._read_tensors(cursor, tensor_count)

    def release(self) -> None:
        """See MappedFile.release."""
        self._file.release()

    def _read_tensors(self, cursor: "_Cursor", count: int) -> dict[str, GgufTensor]:
        infos = [_read_tensor_info(cursor) for _ in range(count)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0 or alignment % 8:
            raise GgufError(f"{self.path.name} has alignment {alignment!r}; a multiple of 8 is due")
        base = -(-cursor.at // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, shape, type_code, offset in infos:
            if type_code not in TENSOR_TYPES:
                raise GgufError(f"tensor {name} has type {type_code}, which is not supported")
            type_name, block, block_bytes = TENSOR_TYPES[type_code]
            if shape[-1] % block:
                raise GgufError(f"tensor {name}: rows of {shape[-1]} do not fit {type_name} blocks")
            nbytes = math.prod(shape) // block * block_bytes
            start = base + offset
            if start + nbytes > self._bytes.size:
                raise GgufError(f"tensor {name} ends after the end of {self.path.name}")
            if name in tensors:
                raise GgufError(f"tensor {name} is listed twice in {self.path.name}")
            tensors[name] = GgufTensor(name, shape, type_name, self._bytes[start : start + nbytes])
        return tensors


def _read_tensor_info(cursor: "_Cursor") -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.string()
    dimensions = cursor.scalar("I")
    if not 1 <= dimensions <= _MAX_DIMENSIONS:
        raise GgufError(f"tensor {name} has {dimensions} dimensions")
    shape = tuple(reversed([cursor.scalar("Q") for _ in range(dimensions)]))
    return name, shape, cursor.scalar("I"), cursor.scalar("Q")


class _Cursor:
    """Reads little-endian values from the front of the mapped file, never past its end."""

    def __init__(self, data: np.ndarray, name: str) -> None:
        self.data = data.data
        self.name = name
        self.at = 0

    def take(self, nbytes: int) -> bytes:
        if nbytes > self.data.nbytes - self.at:
            raise GgufError(f"{self.name} is truncated at byte {self.at}")
        piece = bytes(self.data[self.at : self.at + nbytes])
        self.at += nbytes
        return piece

    def scalar(self, code: str) -> Any:
        layout = "<" + code
        return struct.unpack(layout, self.take(struct.calcsize(layout)))[0]

    def count(self, code: str, what: str) -> int:
        value: int = self.scalar(code)
        if value > _MAX_ENTRIES:
            raise GgufError(f"{self.name} claims {value} {what}")
        return value

    def string(self) -> str:
        return self.take(self.scalar("Q")).decode("utf-8", errors="replace")

    def value(self, type_code: int) -> Any:
        if type_code == _STRING:
            return self.string()
        if type_code == _ARRAY:
            return self.array()
        if type_code not in _SCALARS:
            raise GgufError(f"{self.name} has metadata of unknown type {type_code}")
        return self.scalar(_SCALARS[type_code])

    def _strings(self, length: int) -> list[str]:
        """`length` strings in a row: what `string` does, for vocabularies."""
        data, at, end = self.data, self.at, self.data.nbytes
        lengths = struct.Struct("<Q")
        values: list[str] = []
        for _ in range(length):
            start = at + 8
            if start > end or lengths.unpack_from(data, at)[0] > end - start:
                raise GgufError(f"{self.name} is truncated at byte {at}")
            at = start + lengths.unpack_from(data, at)[0]
            values.append(str(data[start:at], "utf-8", "replace"))
        self.at = at
        return values

    def array(self) -> list[Any]:
        type_code = self.scalar("I")
        length: int = self.scalar("Q")
        if type_code == _STRING:
            if length > (self.data.nbytes - self.at) // 8:  # each string has an 8-byte length
                raise GgufError(f"{self.name} claims an array of {length} strings")
            return self._strings(length)
        if type_code not in _SCALARS:
            raise GgufError(f"{self.name} has an array of unknown type {type_code}")
        dtype = np.dtype("<" + _SCALARS[type_code]) if type_code != 7 else np.dtype(bool)
        values: list[Any] = np.frombuffer(self.take(length * dtype.itemsize), dtype).tolist()
        return values


def tokenizer_digest(path: Path | str) -> str:
    """sha256 hex of what turns text into this checkpoint's token ids, and messages into text.

    A GGUF file: its `tokenizer.*` metadata. A Hugging Face folder: the bytes of tokenizer.json.
    The api (engine/text.py) and the engine both call this, so that equal digests mean equal ids.
    """
    path = Path(path)
    if path.is_dir():
        file = path / "tokenizer.json"
        if not file.is_file():
            raise GgufError(f"{path.name} has no tokenizer.json")
        return hashlib.sha256(file.read_bytes()).hexdigest()
    return metadata_tokenizer_digest(GgufFile(path).metadata)


def metadata_tokenizer_digest(metadata: dict[str, Any]) -> str:
    """`tokenizer_digest` of an open GGUF file's metadata."""
    digest = hashlib.sha256(b"loramux-gguf-tokenizer-v1\0")
    for key in sorted(metadata):
        if key.startswith("tokenizer."):
            digest.update(json.dumps([key, metadata[key]], ensure_ascii=True).encode())
    return digest.hexdigest()
