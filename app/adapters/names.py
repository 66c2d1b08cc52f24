"""What a tenant may call an adapter or an alias, and how a `model` string is taken apart."""

import re
from dataclasses import dataclass

from app.errors import InvalidRequest

NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}", re.ASCII)
VERSION_WORD = re.compile(r"v[0-9]+", re.ASCII)
RESERVED_PREFIX = re.compile(r"(?:adp|ver)_", re.ASCII)
LIVE = "live"
MAX_MODEL_CHARS = 200


@dataclass(frozen=True, slots=True)
class ModelName:
    """`name`, `name@alias`, `name@v3` or `adp_…`, syntactically."""

    adapter_id: str | None = None
    name: str | None = None
    alias: str | None = None
    number: int | None = None


def adapter_name(value: str) -> str:
    """`value` if an adapter may have that name; it can never be read as a path or a reference."""
    if not NAME.fullmatch(value) or ".." in value or RESERVED_PREFIX.match(value):
        raise InvalidRequest(
            f"the adapter name {clip(value)!r} is not allowed: use 1 to 63 of a-z, 0-9, '.', '_' "
            "and '-', beginning with a letter or digit, without '..'",
            code="invalid_adapter_name",
            param="name",
        )
    return value


def alias_name(value: str) -> str:
    """`value` if an alias may have that name; `v3` stays a version."""
    if not NAME.fullmatch(value) or ".." in value or VERSION_WORD.fullmatch(value):
        raise InvalidRequest(
            f"the alias {clip(value)!r} is not allowed: use 1 to 63 of a-z, 0-9, '.', '_' and '-', "
            "beginning with a letter or digit, and not the form v1, v2, …",
            code="invalid_alias_name",
            param="alias",
        )
    return value


def parse_model(model: str) -> ModelName | None:
    """The parts of a `model` string; None when no adapter can be called that."""
    if len(model) > MAX_MODEL_CHARS:
        return None
    if model.startswith("adp_"):
        return ModelName(adapter_id=model) if re.fullmatch(r"adp_[0-9a-z]{26}", model) else None
    name, at, rest = model.partition("@")
    if not NAME.fullmatch(name):
        return None
    if not at:
        return ModelName(name=name, alias=LIVE)
    if VERSION_WORD.fullmatch(rest):
        number = int(rest[1:12])
        return ModelName(name=name, number=number) if rest == f"v{number}" else None
    return ModelName(name=name, alias=rest) if NAME.fullmatch(rest) else None


def clip(value: str, limit: int = 80) -> str:
    """A caller's value short enough for a message."""
    return value if len(value) <= limit else value[: limit - 1] + "…"
