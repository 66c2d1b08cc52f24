"""Who may share KV blocks: a tenant with itself, per adapter and base; nobody with another."""

from dataclasses import replace

import pytest

from tests.engine_under_test import EngineUnderTest
from tests.fakes import describe, expected_tokens

PROMPT = [2 + i for i in range(70)]  # 4 full blocks and a part


def cached_tokens(engine: EngineUnderTest, **values: object) -> int:
    """How much of PROMPT a request found in the cache."""
    request_id = engine.submit(PROMPT, **values)  # type: ignore[arg-type]
    engine.run()
    usage = engine.last(request_id).usage
    assert usage is not None
    return usage.cached_tokens


class TestTheSameTenant:
    def test_finds_its_own_prefix(self) -> None:
        engine = EngineUnderTest()
        assert cached_tokens(engine) == 0
        assert cached_tokens(engine) == 64

    def test_finds_the_prefix_of_a_request_that_still_runs(self) -> None:
        engine = EngineUnderTest()
        first = engine.submit(PROMPT, max_tokens=50)
        engine.step(3)
        assert not engine.finished(first)
        assert cached_tokens(engine) == 64

    def test_finds_what_was_generated_too(self) -> None:
        engine = EngineUnderTest()
        engine.submit(PROMPT, max_tokens=30)
        engine.run()
        longer = PROMPT + expected_tokens(PROMPT, 30)
        request_id = engine.submit(longer)
        engine.run()
        usage = engine.last(request_id).usage
        assert usage is not None
        assert usage.cached_tokens == 96
        assert engine.tokens(request_id) == expected_tokens(longer, 4)

    def test_always_computes_the_last_prompt_token(self) -> None:
        engine = EngineUnderTest()
        for _ in range(2):
            request_id = engine.submit(PROMPT[:64])
            engine.run()
        usage = engine.last(request_id).usage
        assert usage is not None
        assert usage.cached_tokens == 48
        assert engine.tokens(request_id) == expected_tokens(PROMPT[:64], 4)

    def test_shares_only_up_to_the_first_difference(self) -> None:
        engine = EngineUnderTest()
        engine.submit(PROMPT)
        engine.run()
        changed = [*PROMPT[:20], 999, *PROMPT[21:]]
        request_id = engine.submit(changed)
        engine.run()
        usage = engine.last(request_id).usage
        assert usage is not None
        assert usage.cached_tokens == 16


class TestOthers:
    def test_adapter_a_then_b_then_base_share_nothing(self) -> None:
        engine = EngineUnderTest()
        a, b = engine.loader.add("a"), engine.loader.add("b")
        assert [cached_tokens(engine, adapter=ref) for ref in (a, b, None)] == [0, 0, 0]
        assert [cached_tokens(engine, adapter=ref) for ref in (a, b, None)] == [64, 64, 64]

    def test_while_they_all_run_no_block_is_in_two_tables(self) -> None:
        engine = EngineUnderTest()
        for ref in (engine.loader.add("a"), engine.loader.add("b"), None):
            engine.submit(PROMPT, adapter=ref, max_tokens=30)
        engine.step(8)
        tables = [live.blocks for live in engine.executor.live.values()]
        assert len(tables) == 3
        assert len({block for table in tables for block in table}) == sum(map(len, tables))

    def test_a_version_that_differs_in_one_byte_finds_nothing(self) -> None:
        engine = EngineUnderTest()
        old = engine.loader.add("weights 0")
        new = replace(old, digest=old.digest[:-1] + ("0" if old.digest[-1] != "0" else "1"))
        engine.loader.adapters[new] = engine.loader.adapters[old]
        assert cached_tokens(engine, adapter=old) == 0
        assert cached_tokens(engine, adapter=new) == 0

    def test_another_tenants_salt_finds_nothing(self) -> None:
        engine = EngineUnderTest()
        assert cached_tokens(engine, cache_salt="tenant one") == 0
        assert cached_tokens(engine, cache_salt="tenant two") == 0
        assert cached_tokens(engine, cache_salt="tenant one") == 64

    def test_another_base_model_would_find_nothing(self) -> None:
        seeds = set()
        for base in ("base one", "base two"):
            engine = EngineUnderTest(description=describe(base_digest=base))
            engine.submit(PROMPT)
            seeds |= {call.prefix_seed for call in engine.core._calls.values()}
        assert len(seeds) == 2


def test_a_request_for_prompt_logprobs_computes_its_whole_prompt() -> None:
    engine = EngineUnderTest()
    engine.submit(PROMPT)
    engine.run()
    request_id = engine.submit(PROMPT, prompt_logprobs=1)
    engine.run()
    events = engine.outputs[request_id]
    assert events[-1].usage is not None
    assert events[-1].usage.cached_tokens == 0
    found = [event.prompt_logprobs for event in events if event.prompt_logprobs is not None]
    assert len(found) == 1
    assert found[0][0] is None
    assert [entry.token_id for entry in found[0][1:] if entry is not None] == PROMPT[1:]


def test_with_the_cache_switched_off_nothing_is_found() -> None:
    engine = EngineUnderTest(prefix_caching=False)
    assert [cached_tokens(engine), cached_tokens(engine)] == [0, 0]


def test_what_gave_a_number_that_was_not_finite_is_not_shared() -> None:
    engine = EngineUnderTest(max_batch_tokens=32, max_running=8)  # only the last chunk shows it
    engine.executor.not_finite = lambda start: True
    request_id = engine.submit(PROMPT)
    engine.run()
    assert engine.last(request_id).error_code == "non_finite_logits"
    engine.executor.not_finite = lambda start: False
    assert cached_tokens(engine) == 0


class TestChoices:
    def test_share_the_blocks_of_their_prompt(self) -> None:
        engine = EngineUnderTest()
        engine.submit(PROMPT, choices=3, max_tokens=8)
        engine.step(2)
        tables = [live.blocks for live in engine.executor.live.values()]
        assert len(tables) == 3
        assert tables[0][:4] == tables[1][:4] == tables[2][:4]
        assert len({table[4] for table in tables}) == 3

    @pytest.mark.parametrize("length", [1, 15, 16, 17, 32, 33])
    def test_answer_as_if_each_had_been_alone(self, length: int) -> None:
        engine = EngineUnderTest()
        request_id = engine.submit(PROMPT[:length], choices=3, max_tokens=20)
        engine.run()
        for choice in range(3):
            expected = expected_tokens(PROMPT[:length], 20, choice=choice)
            assert engine.tokens(request_id, choice) == expected
        engine.assert_stream_is_whole(request_id)
        engine.assert_all_returned()

    def test_a_partly_filled_block_is_copied_before_it_is_written(self) -> None:
        engine = EngineUnderTest()
        engine.submit(PROMPT, choices=2)
        engine.run()
        copies = [copy for plan in engine.executor.plans for copy in plan.copies]
        assert len(copies) == 1

    def test_are_made_even_when_the_first_ends_with_its_first_token(self) -> None:
        engine = EngineUnderTest()
        request_id = engine.submit(PROMPT, choices=3, max_tokens=1)
        engine.run()
        assert {e.choice: e.finish for e in engine.outputs[request_id]} == dict.fromkeys(
            range(3), "length"
        )
        engine.assert_all_returned()

    def test_without_a_free_block_they_wait_and_answer_the_same(self) -> None:
        engine = EngineUnderTest(extents=8, description=describe(context_length=64))
        request_id = engine.submit(PROMPT[:33], choices=6, max_tokens=30)
        engine.run()
        for choice in range(6):
            expected = expected_tokens(PROMPT[:33], 30, choice=choice)
            assert engine.tokens(request_id, choice) == expected
        assert engine.core.status().preemptions_total > 0
        engine.assert_all_returned()
