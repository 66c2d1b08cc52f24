"""Names of adapters and aliases, and how a `model` string is taken apart."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.adapters.names import ModelName, adapter_name, alias_name, parse_model
from app.errors import InvalidRequest


@pytest.mark.parametrize("name", ["a", "0", "support-bot", "a.b_c-d", "x" * 63, "v3", "live"])
def test_a_plain_word_may_name_an_adapter(name: str) -> None:
    assert adapter_name(name) == name


@given(st.text(max_size=80))
def test_an_accepted_name_is_one_path_segment_and_no_reference(name: str) -> None:
    try:
        adapter_name(name)
    except InvalidRequest:
        return
    assert not set(name) & set("/\\@:%\0 \n")
    assert ".." not in name
    assert parse_model(name) == ModelName(name=name, alias="live")


@pytest.mark.parametrize("alias", ["v1", "v0", "v123", "", "a@b", "A", "a..b", "/"])
def test_an_alias_is_never_a_version_or_a_path(alias: str) -> None:
    with pytest.raises(InvalidRequest):
        alias_name(alias)


@pytest.mark.parametrize(
    ("model", "parts"),
    [
        ("bot", ModelName(name="bot", alias="live")),
        ("bot@canary", ModelName(name="bot", alias="canary")),
        ("bot@v3", ModelName(name="bot", number=3)),
        ("adp_" + "0" * 26, ModelName(adapter_id="adp_" + "0" * 26)),
        ("bot@v03", None),
        ("bot@", None),
        ("bot@@v1", None),
        ("@v1", None),
        ("bot@V1", None),
        ("adp_1", None),
        ("../bot", None),
        ("", None),
        ("bot@v" + "9" * 60, None),
        ("b" * 5000, None),
    ],
)
def test_a_model_string_has_one_meaning_or_none(model: str, parts: ModelName | None) -> None:
    assert parse_model(model) == parts
