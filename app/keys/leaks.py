"""Is this text one of our keys? For a key found in a repository, a chat or a log.

Shape and checksum are told without any database; whose key it is and whether it still works, with
one. The text itself is never stored, logged or answered.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy.ext.asyncio import AsyncSession

from app.crypto import KeyedHash, Secrets
from app.keys import repository, token
from app.keys.models import ApiKey
from app.keys.service import KeyState, state
from app.tenants.models import Tenant

MAX_TEXT = 200_000
MAX_FOUND = 100


@dataclass(frozen=True, slots=True)
class Candidate:
    """Something of our shape. Only what has a right checksum can be a key."""

    key: token.KeyText | None
    shown: str  # prefix and last four characters, as lists show keys


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose key it is. `live`: whoever holds the text can use it now."""

    row: ApiKey
    tenant: Tenant | None
    state: KeyState
    live: bool


def find_keys(text: str) -> list[Candidate]:
    """Every text of our shape in the first MAX_TEXT characters, each once, in order."""
    found: dict[str, Candidate] = {}
    for match in token.KEY_PATTERN.finditer(text[:MAX_TEXT]):
        whole = match.group(0)
        shown = f"{token.PREFIX}_{match.group(1)}_…{whole[-4:]}"
        try:
            found.setdefault(whole, Candidate(token.parse(whole), shown))
        except token.MalformedKey:
            found.setdefault(whole, Candidate(None, shown))
        if len(found) == MAX_FOUND:
            break
    return list(found.values())


async def owner_of(
    session: AsyncSession, key: token.KeyText, *, secrets: Secrets, now: datetime
) -> Owner | None:
    """None for a key that was never made here, also when only its public id is one of ours."""
    found = await repository.by_public_id(session, key.public_id)
    if found is None:
        return None
    row, tenant = found
    if not secrets.matches("api-key", key.text, KeyedHash(row.secret_hash, row.hash_version)):
        return None
    now_state = state(row, now)
    active = tenant is None or tenant.status == "active"
    return Owner(row, tenant, now_state, live=now_state == "active" and active)


async def look_up(
    session: AsyncSession, candidates: Sequence[Candidate], *, secrets: Secrets, now: datetime
) -> list[tuple[Candidate, Owner | None]]:
    """Each candidate with its owner."""
    found = []
    for candidate in candidates:
        owner = None
        if candidate.key is not None:
            owner = await owner_of(session, candidate.key, secrets=secrets, now=now)
        found.append((candidate, owner))
    return found
