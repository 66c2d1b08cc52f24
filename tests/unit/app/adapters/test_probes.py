"""The behaviour check against an engine that misbehaves in every way it can."""

import pytest

from app.adapters.outcome import CheckOutcome
from app.adapters.probes import ProbeInterrupted, Thresholds, probe
from engine.errors import AdapterRefused, EngineError, EngineUnavailable, RequestRefused
from engine.types import AdapterRef, ResidentBytes
from tests.validation_bench import ProbedEngine

REF = AdapterRef("a" * 32, "d" * 64)
PATIENT = Thresholds(divergence_nats=50.0, cost_ratio=50.0)


async def run(
    engine: ProbedEngine,
    thresholds: Thresholds = PATIENT,
    resident: ResidentBytes = ResidentBytes(),
) -> CheckOutcome:
    async def alive() -> None: ...

    return await probe(
        engine,
        lambda text: [5, 6, 7],
        REF,
        thresholds,
        resident=resident,
        timeout_s=5.0,
        alive=alive,
    )


async def test_an_adapter_that_behaves_passes_with_figures() -> None:
    outcome = await run(ProbedEngine())
    assert (outcome.status, outcome.findings) == ("pass", [])
    assert outcome.figures["divergence_nats"] > 0
    assert outcome.figures["adapter_token_ms"] == pytest.approx(
        2 * outcome.figures["base_token_ms"], rel=0.1
    )


@pytest.mark.parametrize(
    ("thresholds", "code"),
    [
        (Thresholds(divergence_nats=0.001, cost_ratio=50.0), "behaviour_far_from_base"),
        (Thresholds(divergence_nats=50.0, cost_ratio=1.5), "behaviour_costly"),
    ],
)
async def test_a_figure_above_its_threshold_warns(thresholds: Thresholds, code: str) -> None:
    outcome = await run(ProbedEngine(), thresholds)
    assert outcome.status == "warn"
    assert [finding["code"] for finding in outcome.findings] == [code]


async def test_every_probe_runs_inside_its_tenants_resident_bytes() -> None:
    engine = ProbedEngine()
    await run(engine, resident=ResidentBytes(1000))
    assert {request.resident for request in engine.requests} == {ResidentBytes(1000)}


@pytest.mark.parametrize(
    "fault", ["non_finite_logits", "shape_mismatch", "rank_out_of_range", "adapter_too_large"]
)
async def test_what_the_engine_says_of_the_adapter_is_a_verdict(fault: str) -> None:
    for fail_with in (fault, AdapterRefused("the engine says so", code=fault)):
        outcome = await run(ProbedEngine(fail_with=fail_with))
        assert outcome.status == "fail"
        assert [finding["code"] for finding in outcome.findings] == [fault]


@pytest.mark.parametrize(
    "fault",
    [
        "engine_step_failed",
        "adapter_missing",
        "adapter_corrupt",
        "deadline_exceeded",
        EngineUnavailable("the engine's process has ended"),
        EngineError("something else", code="adapter_corrupt"),
    ],
)
async def test_the_engines_own_fault_with_the_adapter_in_it_counts(
    fault: str | EngineError,
) -> None:
    with pytest.raises(ProbeInterrupted) as interrupted:
        await run(ProbedEngine(fail_with=fault))
    assert interrupted.value.adapter_ran


@pytest.mark.parametrize(
    "fault",
    [
        "adapter_deleted",
        AdapterRefused("The adapter was deleted.", code="adapter_deleted"),
        RequestRefused("many wait", code="queue_full"),
    ],
)
async def test_a_bad_moment_does_not_count(fault: str | EngineError) -> None:
    with pytest.raises(ProbeInterrupted) as interrupted:
        await run(ProbedEngine(fail_with=fault))
    assert not interrupted.value.adapter_ran


async def test_an_engine_that_is_away_before_the_adapter_ran_does_not_count() -> None:
    with pytest.raises(ProbeInterrupted) as interrupted:
        await run(ProbedEngine(away=True))
    assert not interrupted.value.adapter_ran


async def test_numbers_that_are_not_finite_fail_even_without_an_error_code() -> None:
    outcome = await run(ProbedEngine(poison=True))
    assert outcome.status == "fail"
