"""The streamed multipart reader: the same parts, however the network cuts them."""

import itertools
from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.adapters.multipart import PartBegin, PartData, boundary_of, read_parts
from app.errors import InvalidRequest
from tests.validation_bench import BOUNDARY, body, part


async def _chunks(content: bytes, cuts: list[int]) -> AsyncIterator[bytes]:
    edges = [0, *sorted(cut % (len(content) + 1) for cut in cuts), len(content)]
    for start, end in itertools.pairwise(edges):
        yield content[start:end]


async def read(content: bytes, cuts: list[int], boundary: str = BOUNDARY) -> dict[str, bytes]:
    parts: dict[str, bytes] = {}
    name = ""
    async for event in read_parts(_chunks(content, cuts), boundary):
        if isinstance(event, PartBegin):
            name = event.name
            parts[name] = b""
        elif isinstance(event, PartData):
            parts[name] += event.data
    return parts


DATA = st.binary(max_size=300) | st.just(b"\r\n--the-parts-of-this-tes") | st.just(b"\r\n" * 9)


@given(first=DATA, second=DATA, cuts=st.lists(st.integers(0, 2000), max_size=12))
async def test_parts_come_out_whole_wherever_the_body_is_cut(
    first: bytes, second: bytes, cuts: list[int]
) -> None:
    content = body(part("a", first), part("b", second, filename="../b"))
    assert await read(content, cuts) == {"a": first, "b": second}


@given(content=st.binary(max_size=400), cuts=st.lists(st.integers(0, 400), max_size=5))
async def test_noise_is_refused_and_never_another_error(content: bytes, cuts: list[int]) -> None:
    with pytest.raises(InvalidRequest):
        await read(content, cuts)


@given(keep=st.integers(0, 10_000))
async def test_a_body_cut_short_is_refused(keep: int) -> None:
    content = body(part("a", b"x" * 50))
    # the last line break belongs to what may follow, not to the parts
    with pytest.raises(InvalidRequest, match=r"ends before|boundary"):
        await read(content[: keep % (len(content) - 3)], [])


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"Content-Disposition: form-data\r\n",
        b'Content-Disposition: attachment; name="a"\r\n',
        b'X-Name: form-data; name="a"\r\n',
    ],
)
async def test_a_part_without_a_name_is_refused(head: bytes) -> None:
    content = f"--{BOUNDARY}\r\n".encode() + head + b"\r\ndata\r\n" + body()
    with pytest.raises(InvalidRequest, match=r"name|boundary"):
        await read(content, [])


@pytest.mark.parametrize(
    ("content_type", "boundary"),
    [
        ("multipart/form-data; boundary=abc", "abc"),
        ('multipart/form-data; charset=utf-8; boundary="a b"', "a b"),
        ("Multipart/Form-Data; BOUNDARY=abc", "abc"),
    ],
)
def test_the_boundary_is_read_as_the_standard_says(content_type: str, boundary: str) -> None:
    assert boundary_of(content_type) == boundary
