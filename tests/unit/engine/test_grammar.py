"""Grammars: compiled beside the steps, bounded, and followed by every row that has one."""

import json
import subprocess
import sys
import textwrap
import time

import jsonschema
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.errors import RequestRefused
from engine.grammar import Compiled, Grammars, json_grammar
from engine.sampler import Sampler
from engine.types import Grammar, SamplingParams, SequenceStart
from tests.grammars import BYTES, END, SCHEMAS, byte_grammars, text_of

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return byte_grammars()


def verdict(grammars: Grammars, within_s: float = 10.0) -> Compiled:
    """The next decision."""
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        for compiled in grammars.poll():
            return compiled
        time.sleep(0.001)
    raise AssertionError("no grammar was decided")


def compiled(grammars: Grammars, schema: object, request_id: str = "r") -> None:
    grammars.drop(request_id)
    grammars.compile(request_id, "tenant", json_grammar(schema))
    result = verdict(grammars)
    assert result == Compiled(request_id), result.refused and result.refused.message


def sampler_of(grammars: Grammars, *starts: SequenceStart) -> Sampler:
    sampler = Sampler(BYTES, [END], grammars)
    for start in starts:
        sampler.start(start)
    return sampler


def start(seq: int = 0, *, grammar: str | None = "r", generated=(), **params) -> SequenceStart:
    return SequenceStart(
        seq, [1], list(generated), SamplingParams(**{"max_tokens": 500, **params}), 0, grammar
    )


def logits(rows: int, seed: int) -> torch.Tensor:
    """Random, and fond of what ends things: an answer of a random model is long otherwise."""
    values = torch.randn(rows, BYTES, generator=torch.Generator().manual_seed(seed))
    values[:, [END, *b'"}],']] += 4
    return values


def answer(sampler: Sampler, seq: int, seed: int, most: int = 500) -> list[int]:
    tokens: list[int] = []
    while len(tokens) < most:
        token = sampler.sample(logits(1, seed + len(tokens)), [seq])[0].token_id
        tokens.append(token)
        if token == END:
            break
    return tokens


class TestAnswers:
    @settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
    @given(schema=SCHEMAS, seed=st.integers(0, 1 << 20))
    def test_what_ends_by_itself_validates(self, grammars, schema, seed) -> None:
        compiled(grammars, schema)
        tokens = answer(sampler_of(grammars, start(seed=seed)), 0, seed)
        assert tokens[-1] == END
        jsonschema.validate(json.loads(text_of(tokens)), schema)

    @pytest.mark.wide
    @settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
    @given(schema=SCHEMAS, seed=st.integers(0, 1 << 20))
    def test_many_schemas(self, grammars, schema, seed) -> None:
        compiled(grammars, schema)
        tokens = answer(sampler_of(grammars, start(seed=seed)), 0, seed)
        assert tokens[-1] == END
        jsonschema.validate(json.loads(text_of(tokens)), schema)

    def test_a_recursive_schema_nests(self, grammars) -> None:
        tree = {
            "$defs": {"t": {"type": "array", "items": {"$ref": "#/$defs/t"}, "maxItems": 2}},
            "$ref": "#/$defs/t",
        }
        compiled(grammars, tree)
        tokens = answer(sampler_of(grammars, start()), 0, 5)
        jsonschema.validate(json.loads(text_of(tokens)), tree)

    def test_any_object_is_json_object(self, grammars) -> None:
        compiled(grammars, {"type": "object"})
        tokens = answer(sampler_of(grammars, start()), 0, 3)
        assert isinstance(json.loads(text_of(tokens)), dict)

    def test_the_end_comes_only_where_the_answer_is_whole(self, grammars) -> None:
        compiled(grammars, {"const": "ab"})
        wants_to_end = {"logit_bias": {END: 100.0}}
        tokens = answer(sampler_of(grammars, start(**wants_to_end)), 0, 0)
        assert text_of(tokens) == '"ab"'

    def test_space_between_tokens_is_bounded(self, grammars) -> None:
        compiled(grammars, PERSON)
        sampler = sampler_of(grammars, start(logit_bias={ord(" "): 100.0, ord("\n"): 100.0}))
        tokens = answer(sampler, 0, 1, most=2000)
        assert tokens[-1] == END

    @pytest.mark.parametrize(
        "params",
        [
            {"temperature": 0.0},
            {"top_k": 1},
            {"top_k": 5, "top_p": 0.3},
            {"top_p": 0.01},
            {"min_p": 0.9},
            {"repetition_penalty": 2.0, "presence_penalty": 2.0, "frequency_penalty": 2.0},
        ],
        ids=str,
    )
    def test_every_way_to_draw_stays_inside(self, grammars, params) -> None:
        compiled(grammars, PERSON)
        tokens = answer(sampler_of(grammars, start(**params)), 0, 9)
        jsonschema.validate(json.loads(text_of(tokens)), PERSON)


class TestRows:
    def test_a_row_does_not_change_with_its_batch_mates(self, grammars) -> None:
        compiled(grammars, PERSON)
        alone = answer(sampler_of(grammars, start(seed=4)), 0, 70)
        sampler = sampler_of(
            grammars, start(0, seed=4), start(1, grammar=None, seed=4), start(2, seed=8)
        )
        together: list[int] = []
        while not together or together[-1] != END:
            batch = logits(1, 70 + len(together)).repeat(3, 1)
            together.append(sampler.sample(batch, [0, 1, 2])[0].token_id)
            if len(together) > 500:
                break
        assert together == alone

    def test_rows_without_a_grammar_draw_as_before(self, grammars) -> None:
        compiled(grammars, PERSON)
        plain = sampler_of(grammars, start(0, grammar=None, seed=3))
        mixed = sampler_of(grammars, start(0, grammar=None, seed=3), start(1, seed=3))
        for step in range(20):
            batch = logits(2, step)
            assert plain.sample(batch[:1].clone(), [0])[0] == mixed.sample(batch.clone(), [0, 1])[0]

    def test_a_preempted_row_goes_on_where_it_was(self, grammars) -> None:
        compiled(grammars, PERSON)
        whole = answer(sampler_of(grammars, start(seed=6)), 0, 40)
        for cut in (1, len(whole) // 2, len(whole) - 1):
            again = sampler_of(grammars, start(seed=6, generated=whole[:cut]))
            rest = answer(again, 0, 40 + cut)
            assert whole[:cut] + rest == whole

    def test_choices_do_not_share_a_place_in_the_grammar(self, grammars) -> None:
        compiled(grammars, {"enum": ["aaaa", "bbbb"]})
        first = start(0, logit_bias={ord("a"): 90.0})
        second = start(1, logit_bias={ord("b"): 90.0})
        sampler = sampler_of(grammars, first, second)
        texts: dict[int, list[int]] = {0: [], 1: []}
        for step in range(7):
            for seq, drawn in enumerate(sampler.sample(logits(2, step), [0, 1])):
                texts[seq].append(drawn.token_id)
        assert [text_of(tokens) for tokens in texts.values()] == ['"aaaa"', '"bbbb"']

    def test_logprobs_are_the_models_own_and_finite(self, grammars) -> None:
        compiled(grammars, {"const": 7})
        batch = logits(1, 1)
        want = torch.log_softmax(batch, dim=-1)[0]
        drawn = sampler_of(grammars, start(logprobs=3)).sample(batch, [0])[0]
        assert drawn.logprobs is not None
        assert drawn.token_id in b"7 \n"
        assert drawn.logprobs.logprob == pytest.approx(want[drawn.token_id].item(), abs=1e-5)
        assert [token for token, _ in drawn.logprobs.top] == want.topk(3).indices.tolist()

    def test_a_grammar_that_outgrows_its_bounds_stops_its_row_alone(self) -> None:
        tight = byte_grammars(lexer_states=300)
        compiled(tight, {"type": "string", "pattern": "(.*a.{60}).*"})
        sampler = sampler_of(tight, start(0), start(1, grammar=None, seed=3))
        plain = sampler_of(tight, start(1, grammar=None, seed=3))
        stuck = False
        for step in range(200):
            batch = logits(2, step)
            drawn = sampler.sample(batch.clone(), [0, 1])
            assert drawn[1] == plain.sample(batch[1:].clone(), [1])[0]
            if drawn[0].stuck:
                assert drawn[0].token_id == -1
                stuck = True
                break
        assert stuck


class TestRefusals:
    @pytest.mark.parametrize(
        ("schema", "code", "says"),
        [
            ({"not": {}}, "invalid_schema", "not"),
            ({"type": "strin"}, "invalid_schema", "strin"),
            ({"type": "string", "pattern": "(("}, "invalid_schema", "regex"),
            ({"type": "integer", "minimum": 5, "maximum": 4}, "invalid_schema", ""),
            (
                {"allOf": [{"anyOf": [{"type": "object", "required": [f"k{i}{j}"]}
                                      for j in range(4)]} for i in range(10)]},
                "schema_too_complex", "",
            ),
            ({"enum": [f"value {i}" for i in range(20_000)]}, "schema_too_complex", "bytes"),
        ],
    )  # fmt: skip
    def test_say_what_is_wrong(self, grammars, schema, code, says) -> None:
        grammars.drop("bad")
        try:
            grammars.compile("bad", "tenant", json_grammar(schema))
            refused = verdict(grammars).refused
        except RequestRefused as error:
            refused = error
        assert refused is not None
        assert (refused.code, refused.field) == (code, "response_format")
        assert says in refused.message
        assert "<non-verbose" not in refused.message

    def test_without_llguidance_the_remedy_is_named(self, monkeypatch) -> None:
        monkeypatch.setitem(sys.modules, "llguidance", None)
        with pytest.raises(RequestRefused, match=r"install loramux\[engine\]") as caught:
            byte_grammars().compile("r", "tenant", json_grammar({}))
        assert caught.value.code == "grammar_unavailable"

    def test_a_vocabulary_that_cannot_be_read_ends_the_request(self) -> None:
        def broken():
            raise OSError("no such file")

        grammars = Grammars(broken)
        grammars.compile("r", "tenant", json_grammar({}))
        refused = verdict(grammars).refused
        assert refused is not None
        assert refused.code == "grammar_unavailable"


class TestThreads:
    def test_a_tenant_that_floods_delays_no_other(self, grammars) -> None:
        slow = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(500)}}
        for number in range(30):
            grammars.compile(f"flood{number}", "flooder", json_grammar(slow))
        grammars.compile("other", "other", json_grammar(PERSON))
        order = []
        while "other" not in order:
            order.append(verdict(grammars).request_id)
        assert len(order) < 10
        for number in range(30):
            grammars.drop(f"flood{number}")

    def test_what_takes_too_long_is_given_up(self) -> None:
        grammars = byte_grammars(compile_ms=0.0)
        wide = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(900)}}
        grammars.compile("r", "tenant", json_grammar(wide))
        refused = verdict(grammars).refused
        assert refused is not None
        assert refused.code == "schema_too_complex"

    def test_a_dropped_request_is_not_reported(self, grammars) -> None:
        grammars.compile("gone", "tenant", json_grammar(PERSON))
        grammars.drop("gone")
        grammars.compile("here", "tenant", json_grammar(PERSON))
        assert verdict(grammars).request_id == "here"

    def test_lark_grammars_compile_too(self, grammars) -> None:
        grammars.drop("lark")
        grammars.compile("lark", "tenant", Grammar("lark", 'start: "yes" | "no"'))
        assert verdict(grammars) == Compiled("lark")
        tokens = answer(sampler_of(grammars, start(grammar="lark")), 0, 0)
        assert text_of(tokens) in ("yes", "no")


@pytest.mark.wide
def test_the_longest_chain_of_references_does_not_overflow_a_stack() -> None:
    """In a process of its own: an overflow would end it."""
    code = """
        from tests.grammars import byte_grammars
        from engine.grammar import json_grammar
        import time
        grammars = byte_grammars()
        size = 2800
        defs = {str(i): {"items": {"$ref": f"#/$defs/{i + 1}"}} for i in range(size)}
        defs[str(size)] = {}
        grammars.compile("r", "t", json_grammar({"$defs": defs, "$ref": "#/$defs/0"}))
        while not (done := grammars.poll()):
            time.sleep(0.01)
        print("decided")
    """
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60
    )
    assert ran.stdout.strip() == "decided", ran.stderr[-500:]
