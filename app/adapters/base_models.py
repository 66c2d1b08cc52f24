"""Which base models there are: what engines described, kept so that it outlives them."""

import contextlib
from dataclasses import asdict
from datetime import datetime, timedelta

import msgspec
from sqlalchemy.exc import IntegrityError

from app.adapters import repository
from app.adapters.models import BaseModel
from app.db import Database
from engine.types import ModelDescription

SEEN_GRAIN = timedelta(seconds=30)
"""`last_seen_at` is not written more often than this."""


async def remember(db: Database, description: ModelDescription, now: datetime) -> None:
    """Stores a description under its digest, or notes that it was seen again."""
    async with db.reading() as session:
        row = await repository.base_model(session, description.base_digest)
        if row is not None and now - row.last_seen_at < SEEN_GRAIN:
            return
    with contextlib.suppress(IntegrityError):  # another process was first
        async with db.transaction() as session:
            row = await repository.base_model(session, description.base_digest)
            if row is None:
                row = BaseModel(base_digest=description.base_digest, first_seen_at=now)
                session.add(row)
            row.name = description.name
            row.tokenizer_digest = description.tokenizer_digest
            row.description = msgspec.to_builtins(asdict(description))
            row.last_seen_at = now


async def last_seen(db: Database) -> ModelDescription | None:
    """The base model that an engine described last."""
    async with db.reading() as session:
        rows = await repository.base_models(session)
    return parse(rows[0]) if rows else None


def parse(row: BaseModel) -> ModelDescription:
    """The description as an engine gave it."""
    return msgspec.convert(row.description, ModelDescription)
