"""Requests with a grammar wait for it in the queue, and nobody waits with them."""

import pytest

from engine.errors import RequestRefused
from engine.grammar import Compiled
from engine.types import Grammar
from tests.engine_under_test import EngineUnderTest
from tests.fakes import expected_tokens

JSON = Grammar("json_schema", "{}")


class FakeGrammars:
    """Compiles when a test says so."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []
        self.held: set[str] = set()
        self._decided: list[Compiled] = []

    def compile(self, request_id: str, tenant: str, grammar: Grammar) -> None:
        if grammar.text == "too long":
            raise RequestRefused("too long", code="schema_too_complex", field="response_format")
        self.asked.append((request_id, tenant))
        self.held.add(request_id)

    def poll(self) -> list[Compiled]:
        decided, self._decided = self._decided, []
        return decided

    def drop(self, request_id: str) -> None:
        self.held.discard(request_id)

    def finish(self, request_id: str, refused: RequestRefused | None = None) -> None:
        self._decided.append(Compiled(request_id, refused))


@pytest.fixture
def grammars() -> FakeGrammars:
    return FakeGrammars()


@pytest.fixture
def engine(grammars: FakeGrammars) -> EngineUnderTest:
    return EngineUnderTest(grammars=grammars)


def test_a_request_waits_for_its_grammar_while_others_run(engine, grammars) -> None:
    waits = engine.submit(grammar=JSON)
    other = engine.submit(tenant="b")
    engine.step(10)
    assert engine.finished(other)
    assert engine.core.status().waiting == 1
    grammars.finish(waits)
    engine.run()
    assert engine.last(waits).finish == "length"
    engine.assert_stream_is_whole(waits)
    engine.assert_all_returned()
    assert grammars.held == set()


def test_the_same_tenants_later_requests_do_not_wait_behind_it(engine, grammars) -> None:
    engine.submit(grammar=JSON)
    later = engine.submit()
    engine.step(10)
    assert engine.finished(later)


def test_the_executor_is_told_whose_grammar_every_choice_follows(engine, grammars) -> None:
    request = engine.submit(grammar=JSON, choices=3)
    plain = engine.submit()
    grammars.finish(request)
    engine.run()
    told = [start.grammar for plan in engine.executor.plans for start in plan.started]
    assert sorted(told, key=str) == [None, request, request, request]
    assert engine.finished(plain)


def test_a_refused_grammar_ends_its_request_alone(engine, grammars) -> None:
    bad, other = engine.submit(grammar=JSON), engine.submit()
    refused = RequestRefused("not is no keyword", code="invalid_schema", field="response_format")
    grammars.finish(bad, refused)
    engine.run()
    last = engine.last(bad)
    assert (last.finish, last.error_code, last.error_message) == (
        "error",
        "invalid_schema",
        "not is no keyword",
    )
    assert last.usage is not None
    assert last.usage.completion_tokens == 0
    assert engine.last(other).finish == "length"
    engine.assert_all_returned()
    assert grammars.held == set()


@pytest.mark.parametrize("adapter_first", [True, False])
def test_grammar_and_adapter_may_come_in_either_order(engine, grammars, adapter_first) -> None:
    ref = engine.loader.add("tuned", load_ms=100.0)
    request = engine.submit(adapter=ref, grammar=JSON, prompt=[5, 6, 7])
    if not adapter_first:
        grammars.finish(request)
    engine.step(150)
    if adapter_first:
        assert not engine.outputs.get(request)
        grammars.finish(request)
        engine.step(10)
    engine.run()
    assert engine.tokens(request) == expected_tokens([5, 6, 7], 4, blob=engine.loader.blob(ref))
    engine.assert_all_returned()


def test_cancelling_and_deadlines_end_what_waits_for_a_grammar(engine, grammars) -> None:
    cancelled, late = engine.submit(grammar=JSON), engine.submit(grammar=JSON, deadline_ms=50.0)
    engine.core.cancel(cancelled)
    engine.step(100)
    assert engine.last(cancelled).finish == "cancelled"
    assert engine.last(late).error_code == "deadline_exceeded"
    for request in (cancelled, late):
        grammars.finish(request)  # too late: it changes nothing
    engine.step(5)
    engine.assert_all_returned()
    assert grammars.held == set()


def test_a_stuck_row_ends_its_request_alone(engine, grammars) -> None:
    request, other = engine.submit(grammar=JSON, max_tokens=20), engine.submit(max_tokens=20)
    engine.executor.stuck = lambda start, position: (
        start.grammar is not None and position > len(start.prompt) + 3
    )
    grammars.finish(request)
    engine.run()
    assert engine.last(request).error_code == "schema_too_complex"
    assert len(engine.tokens(request)) == 4
    assert engine.last(other).finish == "length"
    engine.assert_all_returned()


class TestRefusals:
    def test_at_submission_keep_nothing(self, engine, grammars) -> None:
        with pytest.raises(RequestRefused):
            engine.submit(grammar=Grammar("json_schema", "too long"))
        assert not engine.core.has_work

    @pytest.mark.parametrize(
        ("sampling", "field"),
        [
            ({"min_tokens": 2}, "min_tokens"),
            ({"ignore_eos": True}, "ignore_eos"),
            ({"logit_bias": {3: float("-inf")}}, "logit_bias"),
        ],
    )
    def test_what_would_forbid_every_token(self, engine, sampling, field) -> None:
        with pytest.raises(RequestRefused) as caught:
            engine.submit(grammar=JSON, sampling=sampling)
        assert caught.value.field == field
        assert not engine.core.has_work

    def test_an_engine_without_grammars_says_so(self) -> None:
        with pytest.raises(RequestRefused) as caught:
            EngineUnderTest().submit(grammar=JSON)
        assert caught.value.code == "grammar_unavailable"

    def test_an_adapter_that_is_refused_keeps_no_grammar(self, engine, grammars) -> None:
        broken = engine.loader.add("broken")
        engine.loader.adapters.pop(broken)
        first = engine.submit(adapter=broken)
        engine.run()
        assert engine.last(first).error_code == "adapter_missing"
        with pytest.raises(Exception, match="adapter"):
            engine.submit(adapter=broken, grammar=JSON)
        assert grammars.held == set()
