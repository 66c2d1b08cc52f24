"""The text of keys."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.keys import token


def test_a_minted_key_parses_to_itself() -> None:
    key = token.mint()
    assert token.parse(key.text) == key
    assert key.text.startswith(f"lmx_{key.public_id}_")


def test_two_keys_are_never_the_same() -> None:
    assert len({token.mint().text for _ in range(100)}) == 100


def test_repr_does_not_show_the_secret() -> None:
    key = token.mint()
    assert key.text.rpartition("_")[2] not in repr(key)


@given(position=st.integers(4, 62), replacement=st.sampled_from("0aZ9"))
def test_any_mistyped_character_is_noticed_by_the_checksum(position: int, replacement: str) -> None:
    text = token.mint().text
    typed = text[:position] + replacement + text[position + 1 :]
    if typed == text:
        return
    with pytest.raises(token.MalformedKey):
        token.parse(typed)


@given(st.text(max_size=80))
def test_no_other_text_is_a_key(text: str) -> None:
    with pytest.raises(token.MalformedKey):
        token.parse(text)


def test_a_scanner_can_find_a_leaked_key_in_a_text() -> None:
    key = token.mint()
    match = token.KEY_PATTERN.search(f"export OPENAI_API_KEY={key.text}\n")
    assert match is not None
    assert match.group(0) == key.text
