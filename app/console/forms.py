"""Reading plain forms: text fields alone, each once, each bounded."""

import math
from dataclasses import dataclass

from fastapi import Request

from app.errors import InvalidRequest

MAX_FIELDS = 20


@dataclass(frozen=True, slots=True)
class Form:
    fields: dict[str, str]

    def text(self, name: str, *, most: int = 500) -> str:
        """The field without surrounding space, "" when it is not there. Raises InvalidRequest."""
        value = self.fields.get(name, "").strip()
        if len(value) > most:
            raise InvalidRequest(
                f"{name} has {len(value)} characters; at most {most} are taken.", param=name
            )
        return value

    def secret(self, name: str) -> str:
        """A password as it was typed."""
        return self.fields.get(name, "")

    def number(self, name: str, default: float) -> float:
        """Raises InvalidRequest unless the field is empty or a number."""
        value = self.text(name, most=30)
        try:
            number = float(value) if value else default
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise InvalidRequest(f"{name} must be a number.", param=name)
        return number

    def integer(self, name: str, default: int) -> int:
        """Raises InvalidRequest unless the field is empty or a whole number."""
        number = self.number(name, default)
        if number != int(number):
            raise InvalidRequest(f"{name} must be a whole number.", param=name)
        return int(number)


async def read_form(request: Request) -> Form:
    """The form's text fields; the body's size is bounded before it gets here."""
    async with request.form(max_files=0, max_fields=MAX_FIELDS) as data:
        return Form({name: value for name, value in data.items() if isinstance(value, str)})
