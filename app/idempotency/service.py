"""Creates at most once for each `Idempotency-Key` of a caller, within a day.

The answer is kept in the transaction that creates, so there is never one without the other.
"""

import hashlib
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from typing import TypeVar

from pydantic import BaseModel
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from app.crypto import Secrets
from app.errors import Conflict, InvalidRequest
from app.idempotency import repository
from app.idempotency.models import KeptAnswer

KEEP = timedelta(days=1)
MAX_KEY_CHARACTERS = 255
Answer = TypeVar("Answer", bound=BaseModel)


async def create_once(
    session: AsyncSession,
    create: Callable[[], Awaitable[Answer]],
    answer_type: type[Answer],
    *,
    key: str | None,
    caller_id: str,
    route: str,
    body: BaseModel | None,
    secrets: Secrets,
    now: datetime,
) -> Answer:
    """What `create` answers, or what it answered the first time this key was sent.

    Without a key it simply creates. Raises Conflict when the first request is still running, and
    InvalidRequest when the key was used for something else.
    """
    if key is None:
        return await create()
    if not 1 <= len(key) <= MAX_KEY_CHARACTERS:
        raise InvalidRequest(
            f"Idempotency-Key must have 1 to {MAX_KEY_CHARACTERS} characters.",
            param="Idempotency-Key",
        )
    key_hash = hashlib.sha256(key.encode()).hexdigest()
    asked = route + "\n" + ("" if body is None else body.model_dump_json())
    fingerprint = hashlib.sha256(asked.encode()).hexdigest()
    kept = await repository.get(session, caller_id, key_hash)
    if kept is not None and kept.created_at + KEEP > now:
        if kept.fingerprint != fingerprint:
            raise InvalidRequest(
                "This Idempotency-Key was sent with another request; use a new one.",
                code="idempotency_key_reused",
                param="Idempotency-Key",
                status=422,
            )
        return answer_type.model_validate_json(secrets.open_sealed("idempotency", kept.sealed))
    answer = await create()
    if kept is None:
        kept = KeptAnswer(caller_id=caller_id, key_hash=key_hash)
        repository.add(session, kept)
    kept.fingerprint = fingerprint
    kept.sealed = secrets.seal("idempotency", answer.model_dump_json().encode())
    kept.created_at = now
    try:
        await session.flush()
    except IntegrityError:
        raise Conflict(
            "A request with this Idempotency-Key was answered a moment ago; send it again to get "
            "its answer.",
            code="idempotency_key_in_use",
            param="Idempotency-Key",
        ) from None
    return answer


async def sweep(session: AsyncSession, now: datetime) -> None:
    """Deletes answers that are kept no longer."""
    await repository.delete_before(session, now - KEEP)
