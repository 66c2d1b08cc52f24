"""Pattern keys match as PEFT's `(.*\\.)?(KEY)$` would, without running the client's regex."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from peft.utils.other import get_pattern_key

from engine.adapters.patterns import ModulePattern, PatternRefused, PatternTable

NAMES = [
    "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj",
    "model.layers.10.self_attn.q_proj", "model.layers.10.mlp.down_proj", "model.embed_tokens",
    "lm_head", "model.layers.2.self_attn.v_proj",
]  # fmt: skip
KEYS = [
    "q_proj", "self_attn.q_proj", "layers.1.self_attn.q_proj", "model.layers.10.mlp.down_proj",
    "proj", "_proj", "^lm_head", "^q_proj", "lm_head$", r"model\.layers\.0\..*", r".*\.0\..*",
    r"layers\.\d+\.self_attn\.(q|v)_proj", r"layers\.[0-1]\.self_attn\.[qv]_proj", ".*_proj",
    r"layers.1.*", r"(?:mlp|self_attn)\.\w+", "q_proj|lm_head", "(q|k)_pro?j+", "layers.\\d.mlp.*",
    r"[a-z_]+", "x*q_proj", ".", "(a|)lm_head", "((q))_proj",
]  # fmt: skip


@pytest.mark.parametrize("key", KEYS)
def test_matches_what_peft_matches(key: str) -> None:
    pattern = ModulePattern(key)
    for name in NAMES:
        assert pattern.matches(name) == (get_pattern_key([key], name) == key), name


@given(st.text("abq_.*+?|()[]\\d$^-0", max_size=12), st.text("abq_.0", min_size=1, max_size=12))
def test_whatever_is_accepted_matches_as_the_regex_does(key: str, name: str) -> None:
    try:
        pattern = ModulePattern(key)
    except PatternRefused:
        return
    assert pattern.matches(name) == bool(re.match(rf"(.*\.)?({key})$", name))


def test_a_pattern_that_would_hang_a_backtracking_engine_is_harmless() -> None:
    pattern = ModulePattern("(a*)*" * 8 + "b")
    assert not pattern.matches("a" * 400)
    assert pattern.matches("a" * 400 + "b")


@pytest.mark.parametrize(
    "key",
    ["", "^", "$", "a(", "a)", "[a", "[", "[a-", "[^a]", "[]", "[z-a]", "a**", "a{2}", r"\b", r"\1",
     "\\", "*a", "(?P<n>a)", "(?!a)", "a$b", "^a|b", "(" * 9 + "a" + ")" * 9, "é", "a" * 513],
)  # fmt: skip
def test_syntax_beyond_the_subset_is_refused(key: str) -> None:
    with pytest.raises(PatternRefused):
        ModulePattern(key)


def test_the_first_matching_key_of_a_table_wins() -> None:
    table = PatternTable([(ModulePattern("q_proj"), 1), (ModulePattern(".*proj"), 2)])
    assert [table.get(name, 0) for name in ("a.q_proj", "a.k_proj", "a.b")] == [1, 2, 0]
