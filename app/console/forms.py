"""Reading plain forms: text fields alone, each once, each bounded."""

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from fastapi import Request, Response
from sqlalchemy.ext.asyncio import AsyncSession

from app.db import Database
from app.errors import AppError, InvalidRequest

MAX_FIELDS = 20
T = TypeVar("T")


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


Work = Callable[[AsyncSession, Form], Awaitable[T]]
"""What a form asks for, in the transaction that it is given."""


async def submit(
    request: Request,
    db: Database,
    work: Work[T],
    *,
    done: Callable[[T], Awaitable[Response]],
    again: Callable[[Form, AppError], Awaitable[Response]],
    find: Callable[[AsyncSession], Awaitable[object]] | None = None,
) -> Response:
    """Reads the form, does its work in one transaction, and answers with `done`, or with the page
    `again` on a refusal.

    `find` is asked first and its refusals are passed on: nobody learns of a thing that is not
    theirs by what is wrong with a form about it.
    """
    form = await read_form(request)
    if find is not None:
        async with db.reading() as session:
            await find(session)
    try:
        async with db.transaction() as session:
            outcome = await work(session, form)
    except AppError as error:
        return await again(form, error)
    return await done(outcome)
