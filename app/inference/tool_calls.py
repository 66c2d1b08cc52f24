"""Tool calls in a model's text, as Hermes writes them, found while the text arrives.

Text goes out as content at once, except what may be the beginning of a call. A call goes out when
it is whole. What looks like one and is none (no JSON, no such function) goes out as the text it is.
"""

import json
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from app.ids import new_id

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
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


class ToolCallText:
    """The text of one choice."""

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
        keep = _kept(self._held)
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
        call = read_call(marked.removeprefix(OPEN).removesuffix(CLOSE), self._names)
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


def read_call(text: str, names: Collection[str]) -> tuple[str, str] | None:
    """Name and arguments as JSON; None for what is no call of these functions."""
    try:
        value: Any = json.loads(text, parse_constant=_no_json)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    name, arguments = value.get("name"), value.get("arguments", {})
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


def _kept(text: str) -> int:
    """How much of the end may belong to a call: the beginning of its mark, and space before it."""
    for length in range(min(len(OPEN) - 1, len(text)), -1, -1):
        if OPEN.startswith(text[len(text) - length :]):
            rest = text[: len(text) - length]
            return length + len(rest) - len(rest.rstrip())
    return 0
