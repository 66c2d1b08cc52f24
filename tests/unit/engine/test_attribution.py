"""Every millisecond of a step is somebody's, and every pinned byte too."""

import pytest

from engine.attribution import is_prefill, row_cost
from engine.types import PlanRow
from tests.engine_under_test import EngineUnderTest
from tests.fakes import EXTENT_BYTES


def row(tokens: int, *, start: int = 0, sample: bool = True) -> PlanRow:
    return PlanRow(1, start, list(range(tokens)), [], -1, sample)


def costs(engine: EngineUnderTest, request_ids: list[str]) -> list[tuple[float, float, float]]:
    usages = [engine.last(request_id).usage for request_id in request_ids]
    return [(u.prefill_ms, u.decode_ms, u.adapter_byte_seconds) for u in usages if u is not None]


class TestRows:
    def test_what_computes_the_prompt_or_recomputes_is_prefill(self) -> None:
        assert is_prefill(row(5), 5)
        assert is_prefill(row(1, start=4), 5)
        assert is_prefill(row(3, start=6), 5)
        assert not is_prefill(row(1, start=5), 5)

    def test_a_long_chunk_weighs_more_than_a_decode_and_a_rank_adds(self) -> None:
        decode, chunk = row(1, start=9), row(64, sample=False)
        assert row_cost(chunk, 100, 0) > 10 * row_cost(decode, 9, 0) > 0
        assert row_cost(decode, 9, 64) > row_cost(decode, 9, 0)


class TestTime:
    def test_the_parts_of_all_requests_are_the_time_of_all_steps(self) -> None:
        engine = EngineUnderTest(extents=16, step_ms=7.0)
        adapter = engine.loader.add("one")
        requests = [
            engine.submit(
                10 + n,
                tenant="ab"[n % 2],
                adapter=adapter if n % 3 == 0 else None,
                choices=1 + (n == 4),
                max_tokens=40,
            )
            for n in range(8)
        ]
        engine.step(3)
        engine.core.cancel(requests[1])  # in the middle of its life
        engine.run()
        measured_ms = 7.0 * sum(bool(plan.rows) for plan in engine.executor.plans)
        attributed = costs(engine, requests)
        assert sum(prefill + decode for prefill, decode, _ in attributed) == pytest.approx(
            measured_ms
        )
        assert engine.core.status().preemptions_total > 0, "recomputed tokens were in it too"

    def test_a_request_that_runs_alone_pays_for_all_its_steps(self) -> None:
        engine = EngineUnderTest(step_ms=10.0)
        request_id = engine.submit(20, max_tokens=4)
        engine.run()
        assert costs(engine, [request_id]) == [(10.0, 30.0, 0.0)]

    def test_batch_mates_that_do_the_same_pay_the_same(self) -> None:
        engine = EngineUnderTest(step_ms=10.0)
        first, second = engine.submit(20, tenant="a"), engine.submit(20, tenant="b")
        engine.run()
        ours, theirs = costs(engine, [first, second])
        assert ours == theirs
        assert sum(ours) == pytest.approx(20.0)

    def test_a_step_that_failed_is_charged_to_nobody(self) -> None:
        engine = EngineUnderTest()
        engine.executor.fail_on = lambda plan: True
        request_id = engine.submit()
        engine.step()
        assert costs(engine, [request_id]) == [(0.0, 0.0, 0.0)]


class TestMemory:
    def test_an_adapter_is_charged_while_it_is_pinned_and_shared_by_those_that_pin_it(self) -> None:
        engine = EngineUnderTest(step_ms=1000.0)
        adapter = engine.loader.add("big", extents=4)
        engine.run_until_resident(adapter)
        nbytes = 4 * EXTENT_BYTES
        alone = engine.submit(20, adapter=adapter, max_tokens=4)
        engine.step(2)
        late = engine.submit(20, adapter=adapter, max_tokens=2)
        engine.run()
        # two steps alone, then two steps side by side
        expected = [nbytes * 2 + nbytes / 2 * 2, nbytes / 2 * 2]
        assert [cost[2] for cost in costs(engine, [alone, late])] == pytest.approx(expected)

    def test_the_base_model_costs_no_adapter_memory(self) -> None:
        engine = EngineUnderTest()
        request_id = engine.submit()
        engine.run()
        assert costs(engine, [request_id])[0][2] == 0.0

    def test_an_idle_engine_charges_nobody(self) -> None:
        engine = EngineUnderTest(step_ms=1000.0)
        adapter = engine.loader.add("idle")
        engine.run_until_resident(adapter)
        engine.clock.advance(1e6)
        request_id = engine.submit(4, adapter=adapter, max_tokens=1)
        engine.run()
        assert costs(engine, [request_id])[0][2] == pytest.approx(EXTENT_BYTES)
