"""What the steps were made of, added up."""

from engine.types import STEP_BOUNDS_MS, PlanRow, StepPlan
from tests.engine_under_test import EngineUnderTest
from tests.fakes import VOCAB


def plan(*rows):
    return StepPlan(0, [], [], [], list(rows))


def row(tokens, slot=-1):
    return PlanRow(0, 0, [1] * tokens, [], slot, True)


def counted(*steps):
    from engine.step_counts import StepCounter

    counter = StepCounter()
    for step_plan, duration_ms in steps:
        counter.observe(step_plan, duration_ms)
    return counter.counts()


def test_decodes_prefills_and_adapters_are_told_apart():
    counts = counted((plan(row(1), row(1, slot=3), row(7, slot=3), row(9, slot=4)), 10.0))
    assert (counts.decode_rows, counts.prefill_rows, counts.prefill_tokens) == (2, 2, 16)
    assert (counts.adapter_rows, counts.adapters) == (3, 2)


def test_a_step_is_counted_in_the_bucket_whose_bound_it_does_not_exceed():
    counts = counted((plan(row(1)), STEP_BOUNDS_MS[0]), (plan(row(1)), STEP_BOUNDS_MS[-1] + 1))
    assert (counts.buckets[0], counts.buckets[-1], sum(counts.buckets)) == (1, 1, 2)
    assert counts.ms == STEP_BOUNDS_MS[0] + STEP_BOUNDS_MS[-1] + 1


def test_the_engine_counts_every_step_load_and_eviction():
    engine = EngineUnderTest(extents=16, step_ms=10.0)
    refs = [engine.loader.add(f"adapter-{i}", extents=5) for i in range(3)]
    for ref in refs:
        engine.submit(adapter=ref, max_tokens=3)
        engine.run()
    status = engine.core.status()
    assert sum(status.step_counts.buckets) == status.steps
    assert status.step_counts.ms == 10.0 * status.steps
    assert status.loads_total == 3
    assert status.evictions_total >= 1
    assert VOCAB
