"""If-Match and If-None-Match."""

import pytest

from app.errors import InvalidRequest
from app.preconditions import Precondition, PreconditionFailed, etag, parse_precondition


@pytest.mark.parametrize(
    ("if_match", "if_none_match", "current"),
    [
        (None, None, None),
        (None, None, 7),
        ('"7"', None, 7),
        ('"6", "7"', None, 7),
        ("*", None, 7),
        (None, "*", None),
    ],
)
def test_what_is_as_the_caller_saw_it_passes(
    if_match: str | None, if_none_match: str | None, current: int | None
) -> None:
    parse_precondition(if_match, if_none_match).check(current)


@pytest.mark.parametrize(
    ("if_match", "if_none_match", "current"),
    [
        ('"6"', None, 7),
        ('"7"', None, None),
        ('W/"7"', None, 7),
        ('"seven"', None, 7),
        ("*", None, None),
        (None, "*", 7),
    ],
)
def test_what_has_changed_is_412(
    if_match: str | None, if_none_match: str | None, current: int | None
) -> None:
    with pytest.raises(PreconditionFailed) as refused:
        parse_precondition(if_match, if_none_match).check(current)
    assert refused.value.status == 412


@pytest.mark.parametrize(
    ("if_match", "if_none_match", "param"),
    [
        ("7", None, "If-Match"),
        ('"7', None, "If-Match"),
        ("", None, "If-Match"),
        (None, '"7"', "If-None-Match"),
        ('"7"', "*", "If-None-Match"),
    ],
)
def test_what_is_no_etag_names_the_header(
    if_match: str | None, if_none_match: str | None, param: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse_precondition(if_match, if_none_match)
    assert refused.value.param == param


def test_an_etag_is_read_back_as_the_revision() -> None:
    assert parse_precondition(etag(12), None) == Precondition(revisions=frozenset({12}))
