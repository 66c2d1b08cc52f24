"""Reads the fields of a JSON object one by one, and refuses the rest by name.

Every refusal names the path of the field ("messages[0].content") and says what to send instead.
A null field is an absent field, as OpenAI's clients write it.
"""

from collections.abc import Collection
from typing import Any

from app.errors import InvalidRequest

CLIP = 40


class Fields:
    """One JSON object. `path` is "" at the top, else "messages[0]"."""

    def __init__(self, value: dict[str, Any], path: str = "") -> None:
        self._left = {name: field for name, field in value.items() if field is not None}
        self._path = path

    def param(self, name: str) -> str:
        return f"{self._path}.{name}" if self._path else name

    def take(self, name: str) -> Any:
        """The field's value, or None."""
        return self._left.pop(name, None)

    def number(self, name: str, low: float, high: float, default: float) -> float:
        value = self.take(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise refused(self.param(name), f"must be a number, not {kind(value)}")
        if not low <= value <= high:
            raise refused(self.param(name), f"must be from {low:g} to {high:g}, not {clip(value)}")
        return float(value)

    def integer(self, name: str, low: int, high: int, default: int | None = None) -> int | None:
        value = self.take(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            raise refused(self.param(name), f"must be a whole number, not {kind(value)}")
        if not low <= value <= high:
            raise refused(
                self.param(name), f"must be a whole number from {low} to {high}, not {clip(value)}"
            )
        return value

    def flag(self, name: str, *, default: bool = False) -> bool:
        value = self.take(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise refused(self.param(name), f"must be true or false, not {kind(value)}")
        return value

    def text(self, name: str) -> str | None:
        value = self.take(name)
        if value is not None and not isinstance(value, str):
            raise refused(self.param(name), f"must be a string, not {kind(value)}")
        return value

    def object(self, name: str) -> "Fields | None":
        value = self.take(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise refused(self.param(name), f"must be an object, not {kind(value)}")
        return Fields(value, self.param(name))

    def ignore(self, names: Collection[str]) -> None:
        """Drops fields that are documented to do nothing."""
        for name in names:
            self._left.pop(name, None)

    def items(self) -> list[tuple[str, Any]]:
        """All fields that are left; they count as read."""
        left = list(self._left.items())
        self._left = {}
        return left

    def refuse(self, remedies: dict[str, str]) -> None:
        """Refuses fields that exist elsewhere but not here, each with its remedy."""
        for name, remedy in remedies.items():
            if name in self._left:
                raise unsupported(self.param(name), remedy)

    def finish(self) -> None:
        """Refuses what nobody has read."""
        for name in self._left:
            raise InvalidRequest(
                f"{clip(self.param(name))} is not a parameter of this call; remove it",
                code="unknown_parameter",
                param=clip(self.param(name)),
            )


def refused(param: str, sentence: str, *, code: str = "invalid_value") -> InvalidRequest:
    return InvalidRequest(f"{param} {sentence}", code=code, param=param)


def unsupported(param: str, remedy: str, *, code: str = "unsupported_parameter") -> InvalidRequest:
    return InvalidRequest(f"{param} is not supported; {remedy}", code=code, param=param)


def clip(value: object) -> str:
    """A caller's value for a message: short, on one line."""
    text = str(value)
    return text if len(text) <= CLIP else text[:CLIP] + "…"


def kind(value: object) -> str:
    """The JSON name of a value's type."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, int | float):
        return "a number"
    if isinstance(value, str):
        return "a string"
    return "a list" if isinstance(value, list) else "an object"
