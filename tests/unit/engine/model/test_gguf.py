"""The GGUF reader: what it returns for good files, and that bad ones are refused, never misread."""

import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.gguf import GgufError, GgufFile, tokenizer_digest
from tests.model_factories import write_gguf_file

WEIGHT = np.arange(12, dtype="<f4").reshape(3, 4)
METADATA = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.rope.freq_base": 5000.0,
    "tokenizer.ggml.tokens": ["a", "ß", "<|end|>"],
    "tokenizer.ggml.add_bos_token": False,
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "base.gguf"
    write_gguf_file(path, METADATA, [("w", (3, 4), 0, WEIGHT.tobytes()), ("b", (2,), 1, b"1234")])
    return path


class TestAGoodFile:
    def test_metadata_keeps_types_and_text(self, file: Path) -> None:
        assert GgufFile(file).metadata == METADATA

    def test_tensors_have_row_major_shapes_and_their_bytes(self, file: Path) -> None:
        tensors = GgufFile(file).tensors
        assert (tensors["w"].shape, tensors["w"].type) == ((3, 4), "F32")
        assert tensors["w"].data.tobytes() == WEIGHT.tobytes()
        assert (tensors["b"].type, tensors["b"].data.tobytes()) == ("F16", b"1234")

    def test_another_alignment_is_followed(self, tmp_path: Path) -> None:
        path = tmp_path / "wide.gguf"
        tensors = [("w", (3, 4), 0, WEIGHT.tobytes()), ("v", (3, 4), 0, (WEIGHT + 1).tobytes())]
        write_gguf_file(path, {"general.alignment": 256}, tensors, alignment=256)
        assert GgufFile(path).tensors["v"].data.tobytes() == (WEIGHT + 1).tobytes()


class TestABadFile:
    def refused(self, path: Path, data: bytes, match: str) -> None:
        path.write_bytes(data)
        with pytest.raises(GgufError, match=match):
            GgufFile(path)

    def test_missing(self, tmp_path: Path) -> None:
        with pytest.raises(GgufError, match=r"cannot read none\.gguf"):
            GgufFile(tmp_path / "none.gguf")

    def test_empty(self, file: Path) -> None:
        self.refused(file, b"", "cannot read")

    def test_another_format(self, file: Path) -> None:
        self.refused(file, b"PK\x03\x04" * 20, "magic")

    def test_an_old_version(self, file: Path) -> None:
        self.refused(file, b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1")

    def test_a_tensor_past_the_end(self, file: Path) -> None:
        self.refused(file, file.read_bytes()[:-4], "ends after the end")

    def test_a_billion_tensors(self, file: Path) -> None:
        self.refused(file, b"GGUF" + struct.pack("<IQQ", 3, 10**9, 0), "claims 1000000000 tensors")

    def test_a_string_longer_than_the_file(self, file: Path) -> None:
        header = b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**63)
        self.refused(file, header + b"x" * 50, "truncated")

    def test_an_array_longer_than_the_file(self, file: Path) -> None:
        header = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q1sI", 1, b"k", 9)
        self.refused(file, header + struct.pack("<IQ", 8, 2**40), "array of 1099511627776 strings")

    def test_an_unknown_tensor_type(self, tmp_path: Path) -> None:
        path = tmp_path / "odd.gguf"
        write_gguf_file(path, {}, [("w", (3, 4), 99, WEIGHT.tobytes())])
        self.refused(path, path.read_bytes(), "tensor w has type 99")

    def test_a_row_that_is_no_whole_number_of_blocks(self, tmp_path: Path) -> None:
        path = tmp_path / "odd.gguf"
        write_gguf_file(path, {}, [("w", (2, 33), 3, bytes(100))])
        self.refused(path, path.read_bytes(), "rows of 33 do not fit Q4_1 blocks")

    @settings(
        max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
    )
    @given(at=st.integers(0, 400), byte=st.integers(0, 255), cut=st.integers(0, 500))
    def test_any_damage_is_read_within_the_file_or_refused(
        self, file: Path, tmp_path: Path, at: int, byte: int, cut: int
    ) -> None:
        data = bytearray(file.read_bytes())
        data[at % len(data)] = byte
        damaged = tmp_path / "damaged.gguf"
        damaged.write_bytes(bytes(data[: max(1, len(data) - cut % 40)]))
        try:
            opened = GgufFile(damaged)
        except GgufError:
            return
        assert sum(tensor.data.size for tensor in opened.tensors.values()) <= len(data)


class TestTheTokenizerDigest:
    def test_changes_with_tokenizer_metadata_alone(self, file: Path, tmp_path: Path) -> None:
        other = tmp_path / "other.gguf"
        write_gguf_file(other, {**METADATA, "general.name": "x"}, [])
        assert tokenizer_digest(other) == tokenizer_digest(file)
        write_gguf_file(other, {**METADATA, "tokenizer.ggml.tokens": ["a", "b", "<|end|>"]}, [])
        assert tokenizer_digest(other) != tokenizer_digest(file)

    def test_of_a_folder_is_that_of_its_tokenizer_json(self, tmp_path: Path) -> None:
        with pytest.raises(GgufError, match=r"no tokenizer\.json"):
            tokenizer_digest(tmp_path)
        (tmp_path / "tokenizer.json").write_text("{}")
        before = tokenizer_digest(tmp_path)
        (tmp_path / "tokenizer.json").write_text("[]")
        assert tokenizer_digest(tmp_path) != before
