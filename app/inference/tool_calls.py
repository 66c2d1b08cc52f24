"""Tool calls in a model's text, by the family that writes them, found while the text arrives.

Text goes out as content at once, except what may be the beginning of a call. A call goes out when
it is whole. What looks like one and is none (no JSON, no such function) goes out as the text it is.
The families are told in `engine/tool_format.py`.
"""

import json
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Protocol

from app.ids import new_id
from engine.tool_format import MISTRAL_MARK, ToolFormat

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
_FIRST_KEYS = ('"name"', '"type"')
_STRING_OR_CLOSE = re.compile(rf'"(?:[^"\\]|\\.)*(?:"|\\?$)|{CLOSE}', re.DOTALL)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call; `arguments` is JSON text, as OpenAI writes it. `index` counts within its choice."""

    index: int
    id: str
    name: str
    arguments: str


@dataclass(slots=True)
class Found:
    """What some text brought: content, and calls after it."""

    text: str = ""
    calls: list[ToolCall] = field(default_factory=list)


class CallText(Protocol):
    """The text of one choice."""

    @property
    def calls(self) -> int:
        """How many were found."""
        ...

    def push(self, text: str) -> Found: ...

    def finish(self) -> Found:
        """What is left when the text has ended."""
        ...


def call_text(family: ToolFormat | None, names: Collection[str]) -> CallText:
    """A reader of the calls of these functions."""
    if family == "mistral":
        return MistralCallText(names)
    return LlamaCallText(names) if family == "llama" else HermesCallText(names)


class HermesCallText:
    """Calls between marks, anywhere in the text."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._held = ""
        self.calls = 0

    def push(self, text: str) -> Found:
        self._held += text
        found = Found()
        while (start := self._held.find(OPEN)) >= 0:
            end = _close(self._held, start)
            before = self._held[:start]
            if end < 0:
                if before.strip():
                    found.text += before
                    self._held = self._held[start:]
                return found
            self._take(found, before, self._held[start : end + len(CLOSE)])
            self._held = self._held[end + len(CLOSE) :]
        keep = _kept(self._held, OPEN)
        found.text += self._held[: len(self._held) - keep]
        self._held = self._held[len(self._held) - keep :]
        return found

    def finish(self) -> Found:
        """What is left; a call may lack its closing mark, as where the end came for it."""
        found, held = Found(), self._held
        self._held = ""
        start = held.find(OPEN)
        if start >= 0:
            self._take(found, held[:start], held[start:])
        elif held.strip() or not self.calls:
            found.text = held
        return found

    def _take(self, found: Found, before: str, marked: str) -> None:
        written = marked.removeprefix(OPEN).removesuffix(CLOSE)
        call = read_call(written, self._names, ("arguments",))
        if call is None:
            found.text += before + marked
            return
        if before.strip():  # space around a call belongs to the format
            found.text += before
        name, arguments = call
        found.calls.append(ToolCall(self.calls, new_id("call"), name, arguments))
        self.calls += 1


def _close(text: str, start: int) -> int:
    """Where the mark stands that closes the call at `start`, or -1. One inside a JSON string, or
    inside one that has not ended yet, closes nothing."""
    for match in _STRING_OR_CLOSE.finditer(text, start):
        if match[0] == CLOSE:
            return match.start()
    return -1


class MistralCallText:
    """A list of calls after the mark; each goes out as soon as it is whole."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._held = ""
        self._list: _CallList | None = None  # while what is held begins with the mark
        self.calls = 0

    def push(self, text: str) -> Found:
        self._held += text
        found = Found()
        while True:
            if self._list is None:
                start = self._held.find(MISTRAL_MARK)
                if start < 0:
                    keep = _kept(self._held, MISTRAL_MARK)
                    found.text += self._held[: len(self._held) - keep]
                    self._held = self._held[len(self._held) - keep :]
                    return found
                before, self._held = self._held[:start], self._held[start:]
                found.text += before if before.strip() else ""
                self._list = _CallList(len(MISTRAL_MARK))
            self._list.read(self._held, self._names)
            self._take(found)
            if not self._list.over:
                return found
            rest = self._held[self._list.at if self._list.whole else self._list.told :]
            if not self._list.told:  # none of it was a call: the mark is text
                found.text += MISTRAL_MARK
                rest = self._held[len(MISTRAL_MARK) :]
            self._list, self._held = None, rest

    def finish(self) -> Found:
        """What is left: text, but for the rest of a list whose calls have gone out."""
        held, self._held = self._held, ""
        told = 0 if self._list is None else self._list.told
        self._list = None
        rest = held[told:]
        return Found(rest if rest.strip(" \n,") or not self.calls else "")

    def _take(self, found: Found) -> None:
        assert self._list is not None
        for name, arguments in self._list.new:
            found.calls.append(ToolCall(self.calls, new_id("call"), name, arguments))
            self.calls += 1
        self._list.new.clear()


class _CallList:
    """A growing JSON list of calls, read from a place in a growing text; each character once.

    `told`: where the last whole call ended, 0 before the first. `at`: where reading stands.
    """

    def __init__(self, at: int) -> None:
        self.at = at
        self.told = 0
        self.over = self.whole = False
        self.new: list[tuple[str, str]] = []
        self._inside = False
        self._object: tuple[int, _ObjectEnd] | None = None

    def read(self, text: str, names: Collection[str]) -> None:
        while not self.over and self.at < len(text):
            if self._object is not None or (self._inside and text[self.at] == "{"):
                self._read_object(text, names)
                if self._object is not None:
                    return
            elif not self._inside and text[self.at] == "[":
                self._inside, self.at = True, self.at + 1
            elif self._inside and text[self.at] == "]":
                self.at += 1
                self.over = self.whole = True
            elif text[self.at] in (" \n\t," if self._inside else " \n\t"):
                self.at += 1
            else:
                self.over = True

    def _read_object(self, text: str, names: Collection[str]) -> None:
        begins, end = self._object or (self.at, _ObjectEnd(self.at))
        ended = end.find(text)
        if ended is None:
            self._object, self.at = (begins, end), len(text)
            return
        call = read_call(text[begins:ended], names, ("arguments",))
        self._object = None
        if call is None:
            self.over = True
            return
        self.new.append(call)
        self.at = self.told = ended


class LlamaCallText:
    """The text begins with a call, or has none. What follows a call is content."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._held = ""
        self._scan: _ObjectEnd | None = None  # while the text may be a call
        self._decided = False
        self.calls = 0

    def push(self, text: str) -> Found:
        self._held += text
        if self._decided:
            return self._content()
        if self._scan is None:
            match = _begins_a_call(self._held)
            if match is None:
                return Found()
            if not match:
                return self._content()
            self._scan = _ObjectEnd()
        end = self._scan.find(self._held)
        return Found() if end is None else self._whole(end)

    def finish(self) -> Found:
        held, self._held = self._held, ""
        return Found(held if held.strip() or not self.calls else "")

    def _content(self) -> Found:
        """What is held, but for space after a call, which belongs to the format."""
        self._decided = True
        if self.calls and not self._held.strip():
            return Found()
        found, self._held = Found(self._held), ""
        return found

    def _whole(self, end: int) -> Found:
        """The object that the text begins with has ended there."""
        call = read_call(self._held[:end], self._names, ("parameters", "arguments"))
        if call is None:
            return self._content()
        self._held = self._held[end:]
        self.calls = 1
        found = self._content()
        found.calls.append(ToolCall(0, new_id("call"), *call))
        return found


class _ObjectEnd:
    """Where the JSON object that begins at a place of a growing text ends; each character is read
    once."""

    def __init__(self, at: int = 0) -> None:
        self._at, self._depth = at, 0
        self._quoted = self._escaped = False

    def find(self, text: str) -> int | None:
        """The index after its last brace, or None while it is open."""
        while self._at < len(text):
            character = text[self._at]
            self._at += 1
            if self._quoted:
                if self._escaped:
                    self._escaped = False
                elif character == "\\":
                    self._escaped = True
                elif character == '"':
                    self._quoted = False
            elif character == '"':
                self._quoted = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return self._at
        return None


def _begins_a_call(text: str) -> bool | None:
    """Whether it is an object whose first key is the name, or the type that smaller models write
    before it; None while more text must tell."""
    inside = text.lstrip()
    if inside and not inside.startswith("{"):
        return False
    key = inside[1:].lstrip()
    if key.startswith(_FIRST_KEYS):
        return True
    return None if any(first.startswith(key) for first in _FIRST_KEYS) else False


def read_call(text: str, names: Collection[str], keys: tuple[str, ...]) -> tuple[str, str] | None:
    """Name and arguments as JSON, which stand under one of the keys; None for what is no call of
    these functions."""
    try:
        value: Any = json.loads(text, parse_constant=_no_json)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    name = value.get("name")
    arguments: Any = next((value[key] for key in keys if key in value), {})
    if isinstance(arguments, str):  # some models write it as OpenAI does
        try:
            arguments = json.loads(arguments, parse_constant=_no_json)
        except (ValueError, RecursionError):
            return None
    if not isinstance(name, str) or name not in names or not isinstance(arguments, dict):
        return None
    return name, json.dumps(arguments, ensure_ascii=False)


def _no_json(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def _kept(text: str, mark: str) -> int:
    """How much of the end may belong to a call: the beginning of its mark, and space before it."""
    for length in range(min(len(mark) - 1, len(text)), -1, -1):
        if mark.startswith(text[len(text) - length :]):
            rest = text[: len(text) - length]
            return length + len(rest) - len(rest.rstrip())
    return 0
