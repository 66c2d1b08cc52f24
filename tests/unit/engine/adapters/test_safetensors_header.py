"""The safetensors header: honest files are read as the reference does, lying ones are refused."""

import contextlib
import json
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save

from engine.adapters.findings import CODES
from engine.adapters.safetensors_header import MAX_HEADER_BYTES, parse_header, read_header
from engine.errors import AdapterRefused
from tests.adapter_files import lora_tensors, pack, tensor, tiny_description, with_header

GOOD = pack(lora_tensors(tiny_description()))


def refusal_of(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    with pytest.raises(AdapterRefused) as caught:
        read_header(path)
    assert CODES[caught.value.code][0] == "container"
    return caught.value.code


class TestHonestFiles:
    def test_reads_what_the_reference_writer_wrote(self, tmp_path: Path) -> None:
        path = tmp_path / "w.safetensors"
        arrays = {"a": np.ones((2, 3), np.float32), "b": np.ones((4,), np.float16)}
        path.write_bytes(save(arrays, {"format": "pt"}))
        header = read_header(path)
        assert {t.name: (t.dtype, t.shape) for t in header.tensors} == {
            "a": ("F32", (2, 3)), "b": ("F16", (4,)),
        }  # fmt: skip
        data = path.read_bytes()
        for found in header.tensors:
            assert data[found.start : found.start + found.nbytes] == arrays[found.name].tobytes()

    def test_the_order_in_the_header_does_not_matter(self, tmp_path: Path) -> None:
        path = tmp_path / "w"
        tensors = lora_tensors(tiny_description())

        def backwards(header: dict[str, Any]) -> None:
            entries = list(header.items())
            header.clear()
            header.update(reversed(entries))

        path.write_bytes(pack(tensors, edit=backwards))
        assert [t.name for t in read_header(path).tensors] == list(tensors)

    def test_no_metadata_and_trailing_spaces_are_allowed(self, tmp_path: Path) -> None:
        path = tmp_path / "w"
        entry = {"x": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}}
        path.write_bytes(with_header(json.dumps(entry).encode() + b"   ", b"\0" * 4))
        assert read_header(path).tensors[0].nbytes == 4

    def test_a_scalar_and_an_empty_tensor_have_their_sizes(self, tmp_path: Path) -> None:
        path = tmp_path / "w"
        path.write_bytes(pack({"s": tensor(np.float32(1.0)), "e": tensor(np.ones((0, 5)))}))
        assert [t.nbytes for t in read_header(path).tensors] == [4, 0]

    @pytest.mark.parametrize("low_byte", [0x80, ord("{"), ord("<"), 0x1F])
    def test_a_length_that_looks_like_a_magic_number_is_still_a_length(
        self, tmp_path: Path, low_byte: int
    ) -> None:
        path = tmp_path / "w"
        length = 0x200 + low_byte
        path.write_bytes(with_header(b"{}".ljust(length)))
        assert read_header(path).header_bytes == length


class TestLyingFiles:
    def test_a_claim_of_100_mb_is_refused_without_reading_it(self, tmp_path: Path) -> None:
        path = tmp_path / "w"
        with path.open("wb") as file:
            file.write(struct.pack("<Q", 100 * 1024 * 1024))
            file.truncate(200 * 1024 * 1024)  # sparse: the bytes are really there
        with pytest.raises(AdapterRefused) as caught:
            read_header(path)
        assert caught.value.code == "header_too_large"

    def test_the_limit_is_one_mebibyte_exactly(self, tmp_path: Path) -> None:
        path = tmp_path / "w"
        path.write_bytes(with_header(b"{}".ljust(MAX_HEADER_BYTES)))
        assert read_header(path).header_bytes == MAX_HEADER_BYTES
        assert refusal_of(path, with_header(b"{}".ljust(MAX_HEADER_BYTES + 1))) == (
            "header_too_large"
        )

    @pytest.mark.parametrize("size", [1, 7, 8, 9])
    def test_a_file_that_ends_before_its_header_is_truncated(
        self, tmp_path: Path, size: int
    ) -> None:
        assert refusal_of(tmp_path / "w", GOOD[:size]) == "truncated_file"
        with pytest.raises(AdapterRefused, match="send it whole"):
            read_header(tmp_path / "w")

    def test_every_cut_is_refused(self, tmp_path: Path) -> None:
        for size in range(0, len(GOOD), 97):
            refusal_of(tmp_path / "w", GOOD[:size])

    def test_a_link_is_not_followed(self, tmp_path: Path) -> None:
        (tmp_path / "real").write_bytes(GOOD)
        (tmp_path / "link").symlink_to(tmp_path / "real")
        with pytest.raises(AdapterRefused) as caught:
            read_header(tmp_path / "link")
        assert caught.value.code == "not_a_regular_file"

    @pytest.mark.parametrize("kind", ["folder", "pipe"])
    def test_what_is_no_file_is_refused_without_waiting(self, tmp_path: Path, kind: str) -> None:
        path = tmp_path / "w"
        if kind == "folder":
            path.mkdir()
        else:
            os.mkfifo(path)
        with pytest.raises(AdapterRefused) as caught:
            read_header(path)
        assert caught.value.code == "not_a_regular_file"

    def test_a_missing_file_says_so(self, tmp_path: Path) -> None:
        with pytest.raises(AdapterRefused) as caught:
            read_header(tmp_path / "nothing")
        assert caught.value.code == "missing_file"


class TestFuzz:
    @given(st.binary(max_size=400), st.integers(0, 2**40))
    def test_no_header_raises_anything_but_a_refusal(self, data: bytes, size: int) -> None:
        for header in (data, b"{" + data):
            try:
                parse_header(header, size)
            except AdapterRefused as refusal:
                assert refusal.code in CODES  # noqa: PT017

    @given(
        st.dictionaries(
            st.text(max_size=5),
            st.fixed_dictionaries(
                {
                    "dtype": st.sampled_from(["F32", "F16", "BF16", "I64", 3, None]),
                    "shape": st.lists(st.integers(-1, 4), max_size=3) | st.text(max_size=2),
                    "data_offsets": st.lists(st.integers(-1, 64), max_size=3),
                }
            ),
            max_size=4,
        ),
        st.integers(0, 300),
    )
    def test_what_is_accepted_covers_the_file_exactly(
        self, entries: dict[str, Any], extra: int
    ) -> None:
        header = json.dumps(entries).encode()
        size = 8 + len(header) + extra
        try:
            parsed = parse_header(header, size)
        except AdapterRefused:
            return
        at = 8 + len(header)
        for found in parsed.tensors:
            assert found.start == at
            at += found.nbytes
        assert at == size

    @given(st.integers(0, len(GOOD) - 1), st.integers(0, 255))
    def test_a_changed_byte_never_raises_anything_else(self, at: int, value: int) -> None:
        length = int.from_bytes(GOOD[:8], "little")
        changed = bytearray(GOOD)
        changed[at] = value
        with contextlib.suppress(AdapterRefused):
            parse_header(bytes(changed[8 : 8 + length]), len(GOOD))
