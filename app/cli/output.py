"""How commands speak: a table for people, one JSON document with --json, errors on stderr."""

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape

console = Console()
stderr = Console(stderr=True)

JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON document instead.")]


SearchOption = Annotated[str, typer.Option("--search", help="Only rows that have this text.")]
SortOption = Annotated[
    str, typer.Option("--sort", help="A column; - before it for the other way round.")
]
ALL_ROWS = 10_000
"""More than a person reads; who has more gives --search."""


def print_json(document: object) -> None:
    """One line, so that it pipes well; datetimes become ISO 8601."""
    console.print(json.dumps(document, default=str), soft_wrap=True, markup=False, highlight=False)


def say(sentence: str, document: object, *, as_json: bool) -> None:
    """What was done: a sentence for people, or the document with --json."""
    if as_json:
        print_json(document)
    else:
        console.print(sentence, soft_wrap=True, highlight=False, markup=False)


def print_rows(
    rows: Iterable[Mapping[str, Any]], columns: Sequence[str], *, as_json: bool, empty: str
) -> None:
    """Rows as a table of `columns`, or all of each row as JSON; `empty` says what to do first."""
    rows = list(rows)
    if as_json:
        print_json(rows)
        return
    if not rows:
        console.print(empty)
        return
    lines = [[column.replace("_", " ") for column in columns]]
    lines += [[_cell(row.get(column)) for column in columns] for row in rows]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    for number, line in enumerate(lines):
        padded = "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        # never cut: a narrow terminal breaks the line, and an id stays whole
        style = "bold" if number == 0 else None
        console.print(escape(padded.rstrip()), style=style, soft_wrap=True, highlight=False)


def fail(message: str, *, exit_code: int = 1) -> NoReturn:
    """Says what went wrong and what to do, on stderr, and leaves."""
    stderr.print("[bold red]error:[/]", escape(message), highlight=False, soft_wrap=True)
    raise typer.Exit(exit_code)


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, datetime):
        return value.strftime("%Y-%m-%d %H:%M")
    if isinstance(value, list):
        return ", ".join(str(item) for item in value)
    return str(value)
