"""`If-Match` and `If-None-Match` (RFC 9110, 13.1): nobody overwrites what they have not seen.

An object's revision is a whole number; its ETag is that number in quotes.
"""

import re
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Header

from app.errors import AppError, InvalidRequest

_TAGS = re.compile(r'\s*(?:W/)?"[^"]{0,40}"\s*(?:,\s*(?:W/)?"[^"]{0,40}"\s*){0,19}')
_TAG = re.compile(r'(W/)?"([^"]*)"')


class PreconditionFailed(AppError):
    """The object is not what the caller saw last."""

    status = 412
    type = "conflict_error"
    code = "changed_meanwhile"


@dataclass(frozen=True, slots=True)
class Precondition:
    """`revisions`: one of these must be current; `exists`: whether the object must be there.

    None asks nothing.
    """

    revisions: frozenset[int] | None = None
    exists: bool | None = None

    def check(self, current: int | None) -> None:
        """`current` is the object's revision, None when there is none.

        Raises PreconditionFailed, which says what is current.
        """
        if self.exists is False and current is not None:
            raise PreconditionFailed(
                f"It exists already, at revision {current}; read it, or leave If-None-Match out.",
                param="If-None-Match",
            )
        if self.exists and current is None:
            raise PreconditionFailed("There is none to change.", param="If-Match")
        if self.revisions is not None and current not in self.revisions:
            now = "it is gone" if current is None else f"it is at revision {current} now"
            raise PreconditionFailed(
                f"Somebody changed it since you read it: {now}; read it again, then decide.",
                param="If-Match",
            )


def parse_precondition(if_match: str | None, if_none_match: str | None) -> Precondition:
    """The two headers. Raises InvalidRequest for what is no list of ETags."""
    if if_none_match is not None:
        if if_none_match.strip() != "*":
            raise InvalidRequest(
                "If-None-Match takes `*` here: write only if there is none yet.",
                param="If-None-Match",
            )
        if if_match is not None:
            raise InvalidRequest(
                "If-Match and If-None-Match exclude each other; send one.", param="If-None-Match"
            )
        return Precondition(exists=False)
    if if_match is None:
        return Precondition()
    if if_match.strip() == "*":
        return Precondition(exists=True)
    if not _TAGS.fullmatch(if_match):
        raise InvalidRequest(
            'If-Match takes the ETag of what you read, in its quotes: `If-Match: "3"`.',
            param="If-Match",
        )
    # A weak tag never matches (RFC 9110, 13.1.1), nor does one that is no revision of ours.
    tags = [(weak, tag) for weak, tag in _TAG.findall(if_match)]
    numbers = {int(tag) for weak, tag in tags if not weak and re.fullmatch(r"[0-9]{1,9}", tag)}
    return Precondition(revisions=frozenset(numbers))


def etag(revision: int) -> str:
    return f'"{revision}"'


async def _precondition(
    if_match: Annotated[
        str | None,
        Header(max_length=1000, description="the ETag last read; 412 when it is not current"),
    ] = None,
    if_none_match: Annotated[
        str | None, Header(max_length=1000, description="`*`: only if there is none yet")
    ] = None,
) -> Precondition:
    return parse_precondition(if_match, if_none_match)


PreconditionDep = Annotated[Precondition, Depends(_precondition)]
