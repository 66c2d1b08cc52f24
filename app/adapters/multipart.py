"""A streamed multipart/form-data reader: parts come out as they arrive, nothing is spooled.

RFC 7578. File names that the client sends are ignored: a part is known by its field name alone.
"""

from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from email.message import Message

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser

from app.errors import InvalidRequest

MAX_PARTS = 16
MAX_HEADERS = 8
MAX_HEADER_BYTES = 1024


@dataclass(frozen=True, slots=True)
class PartBegin:
    name: str


@dataclass(frozen=True, slots=True)
class PartData:
    data: bytes


@dataclass(frozen=True, slots=True)
class PartEnd:
    pass


Event = PartBegin | PartData | PartEnd


def boundary_of(content_type: str) -> str:
    """The boundary of a multipart/form-data content type, or the refusal that says what to send."""
    message = Message()
    message["content-type"] = content_type
    boundary = message.get_param("boundary")
    if message.get_content_type() != "multipart/form-data" or not isinstance(boundary, str):
        raise InvalidRequest(
            "send multipart/form-data with the parts name, adapter_config.json and "
            "adapter_model.safetensors",
            code="multipart_expected",
            param="content-type",
            status=415,
        )
    return boundary


class _Collector:
    """Turns the parser's callbacks into events; holds at most one chunk of them."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.finished = False
        self._parts = 0
        self._field = b""
        self._value = b""
        self._disposition = ""

    def callbacks(self) -> dict[str, object]:
        return {
            "on_part_begin": self._begin,
            "on_header_field": self._header_field,
            "on_header_value": self._header_value,
            "on_header_end": self._header_end,
            "on_headers_finished": self._headers_finished,
            "on_part_data": self._data,
            "on_part_end": self._end,
            "on_end": self._finish,
        }

    def _begin(self) -> None:
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise malformed(f"it has more than {MAX_PARTS} parts")
        self._disposition = ""

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._field += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _header_end(self) -> None:
        if self._field.lower() == b"content-disposition":
            self._disposition = self._value.decode("utf-8", "replace")
        self._field = self._value = b""

    def _headers_finished(self) -> None:
        message = Message()
        message["content-disposition"] = self._disposition
        name = message.get_param("name", header="content-disposition")
        if message.get_content_disposition() != "form-data" or not isinstance(name, str):
            raise malformed("a part has no name")
        self.events.append(PartBegin(name))

    def _data(self, data: bytes, start: int, end: int) -> None:
        self.events.append(PartData(bytes(data[start:end])))

    def _end(self) -> None:
        self.events.append(PartEnd())

    def _finish(self) -> None:
        self.finished = True


def malformed(why: str) -> InvalidRequest:
    return InvalidRequest(
        f"the multipart body cannot be read: {why}", code="malformed_multipart", param="body"
    )


async def read_parts(stream: AsyncIterator[bytes], boundary: str) -> AsyncGenerator[Event]:
    """The events of the body in order; raises InvalidRequest when it is malformed or cut short."""
    collector = _Collector()
    try:
        parser = MultipartParser(
            boundary.encode("latin-1"),
            collector.callbacks(),  # type: ignore[arg-type]
            max_header_count=MAX_HEADERS,
            max_header_size=MAX_HEADER_BYTES,
        )
        async for chunk in stream:
            if chunk:
                parser.write(chunk)
            for event in collector.events:
                yield event
            collector.events.clear()
        parser.finalize()
    except (FormParserError, UnicodeEncodeError) as error:
        raise malformed("it does not follow its boundary") from error
    if not collector.finished:
        raise malformed("it ends before its closing boundary")
