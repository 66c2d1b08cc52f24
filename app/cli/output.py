"""How commands speak: a table for people, one JSON document with --json, errors on stderr."""

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

console = Console()
stderr = Console(stderr=True)

JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON document instead.")]


def print_json(document: object) -> None:
    """One line, so that it pipes well; datetimes become ISO 8601."""
    console.print(json.dumps(document, default=str), soft_wrap=True, markup=False, highlight=False)


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
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in columns:
        table.add_column(column.replace("_", " "), no_wrap=True)
    for row in rows:
        table.add_row(*(escape(_cell(row.get(column))) for column in columns))
    wide = console.options.update(width=1000)
    wanted = Measurement.get(console, wide, table).maximum
    # a narrow terminal breaks whole lines, not ids in the middle of a cell
    console.print(table, width=max(wanted, console.width), soft_wrap=True, crop=False)


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
