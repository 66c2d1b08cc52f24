"""The simulator: the real engine core on simulated time gives all back and repeats itself."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from app.bench.workloads import (
    POPULARITIES,
    RANKS,
    Budget,
    Jam,
    Lengths,
    Popularity,
    TimedRequest,
    Workload,
    generate,
)
from benchmarks.simulation.adapters import StoreSpeed
from benchmarks.simulation.capacity import estimated_capacity, measured_capacity
from benchmarks.simulation.run import RunResult, Simulation, engine_config
from benchmarks.simulation.step_models import (
    GB,
    Device,
    Roofline,
    StepContents,
    h200,
    llama_8b,
    measured_device,
    measured_steps,
    rank_bytes,
)
from engine.step_time import StepShape, StepTimes

SHORT = Workload(
    "uniform",
    adapters=30,
    tenants=6,
    prompt=Lengths(64, 0.8, 4, 400),
    output=Lengths(12, 0.6, 1, 40),
    max_tokens=64,
    budgets=(Budget(200.0, 20.0), Budget()),
)
SMALL = h200(arena_bytes=6 * GB)
"""Adapters of rank 64 take a tenth of its half."""


def traffic(
    workload: Workload = SHORT, *, rate: float = 60.0, ms: float = 1500.0
) -> list[TimedRequest]:
    return generate(workload, rate_per_s=rate, duration_ms=ms, seed=1)


def simulate(
    requests: list[TimedRequest],
    device: Device = SMALL,
    *,
    policy: str = "vtc",
    speed: StoreSpeed | None = None,
    seed: int = 0,
    limit_ms: float = float("inf"),
    **settings: object,
) -> RunResult:
    config = engine_config(device, policy=policy, **settings)
    simulation = Simulation(device, config, requests, seed=seed, speed=speed or StoreSpeed())
    return simulation.run(limit_ms)


class TestConservation:
    @pytest.mark.parametrize("policy", ["slo", "vtc", "fcfs"])
    @pytest.mark.parametrize("cv", [1.0, 4.0])
    def test_every_request_ends_and_everything_is_given_back(self, policy: str, cv: float) -> None:
        requests = traffic(replace(SHORT, cv=cv, jam=Jam(4, 1500, 4, 200.0, 600.0)))
        result = simulate(requests, policy=policy)
        assert result.leftovers == []
        assert len(result.outcomes) == len(requests)
        refusable = {"budget_unattainable"} if policy == "slo" else set()
        assert {outcome.refused for outcome in result.outcomes} <= {""} | refusable

    def test_answers_have_the_length_that_the_workload_says(self) -> None:
        requests = traffic(replace(SHORT, budgets=(Budget(),)))
        result = simulate(requests)
        assert [o.tokens for o in result.outcomes] == [r.output_tokens for r in requests]

    def test_a_full_queue_refuses_and_loses_nothing(self) -> None:
        result = simulate(traffic(rate=400.0), max_waiting=4, max_running=4)
        causes = {outcome.refused for outcome in result.outcomes}
        assert causes == {"", "queue_full"}
        assert result.leftovers == []

    def test_a_memory_too_small_preempts_and_still_ends(self) -> None:
        wide = replace(SHORT, adapters=0, prompt=Lengths(300, 0.2, 200, 400), max_tokens=300,
                       output=Lengths(200, 0.3, 100, 300))  # fmt: skip
        result = simulate(traffic(wide), h200(arena_bytes=0.25 * GB))
        assert result.preemptions > 0
        assert result.leftovers == []
        assert all(outcome.answered for outcome in result.outcomes)

    def test_what_runs_at_the_limit_is_cancelled_and_given_back(self) -> None:
        result = simulate(traffic(), limit_ms=700.0)
        assert {o.refused for o in result.outcomes} == {"", "cancelled"}
        assert result.leftovers == []


@pytest.mark.wide
@pytest.mark.parametrize("policy", ["slo", "fcfs"])
@pytest.mark.parametrize("adapters", [1, 100, 2000])
@pytest.mark.parametrize("ranks", ["8", "64", "mix"])
@pytest.mark.parametrize("popularity", POPULARITIES)
def test_nothing_is_lost_in_any_cell_of_the_matrix(
    popularity: Popularity, ranks: str, adapters: int, policy: str
) -> None:
    workload = replace(
        SHORT, popularity=popularity, ranks=RANKS[ranks], adapters=adapters, cv=4.0, flood=3.0
    )
    result = simulate(traffic(workload, rate=100.0), policy=policy)
    assert result.leftovers == []
    causes = {outcome.refused for outcome in result.outcomes}
    assert causes <= ({"", "budget_unattainable"} if policy == "slo" else {""})


class TestDeterminism:
    @pytest.mark.parametrize("policy", ["slo", "vtc"])
    def test_equal_seeds_give_equal_runs_to_the_last_gap(self, policy: str) -> None:
        first, again = (simulate(traffic(), policy=policy) for _ in range(2))
        assert first.end_ms == again.end_ms
        assert first.step_times_ms == again.step_times_ms
        assert [list(o.gaps_ms) for o in first.outcomes] == [
            list(o.gaps_ms) for o in again.outcomes
        ]

    def test_another_seed_gives_other_step_times(self) -> None:
        assert (
            simulate(traffic(), seed=1).step_times_ms != simulate(traffic(), seed=2).step_times_ms
        )


class TestAdapters:
    def test_adapters_that_do_not_fit_are_copied_again(self) -> None:
        everywhere = simulate(traffic(), h200())
        crowded = simulate(traffic(replace(SHORT, ranks=(64,))), h200(arena_bytes=4 * GB))
        assert everywhere.loads == len({o.adapter for o in everywhere.outcomes})
        assert crowded.copied_bytes > 64 * SMALL.rank_bytes * 30

    def test_a_first_token_waits_for_store_and_bus(self) -> None:
        alone = TimedRequest(0.0, 0, 0, 64, 16, 2, 2)
        speed = StoreSpeed(open_ms=5.0, verify_bytes_per_ms=1e6, build_bytes_per_ms=2e6)
        ttft_ms = simulate([alone], h200(), speed=speed).outcomes[0].ttft_ms
        nbytes = 64 * SMALL.rank_bytes
        least_ms = 5.0 + nbytes / 1e6 + nbytes / 2e6 + nbytes / h200().steps.bus_bytes_per_ms
        assert ttft_ms == pytest.approx(least_ms, abs=12.0)

    def test_residency_is_sampled_over_time(self) -> None:
        samples = simulate(traffic(), h200()).samples
        assert samples[0].adapters_on_device == 0
        assert samples[-1].adapters_on_device > 15
        assert samples[-1].device_adapter_bytes > 0


class TestStepModels:
    def test_the_roofline_gives_the_published_decode_steps(self) -> None:
        def step_ms(rows: int, adapters: int, rank_sum: int) -> float:
            step = StepContents(
                decode_rows=rows, sampled_rows=rows, kv_tokens=1024 * rows,
                attention_pairs=1024 * rows, adapter_bytes=adapters * rank_sum,
            )  # fmt: skip
            return Roofline(fixed_ms=0.0).step_ms(step, copying=False)

        for rows, published_ms in ((1, 1.14), (32, 2.16), (128, 5.34), (256, 9.57)):
            assert step_ms(rows, 0, 0) == pytest.approx(published_ms, abs=0.02)
        mean_rank_bytes = int(5.243e6 * (8 + 16 + 64) / 3)
        assert step_ms(32, 32, mean_rank_bytes) == pytest.approx(3.31, abs=0.05)

    def test_a_rank_of_the_8b_model_weighs_what_its_shapes_say(self) -> None:
        assert rank_bytes(llama_8b()) == 5_242_880

    def test_copies_take_a_part_of_the_memory(self) -> None:
        step = StepContents(decode_rows=8, kv_tokens=8000)
        quiet, copying = (Roofline().step_ms(step, copying=c) for c in (False, True))
        assert 1.005 < copying / quiet < 1.02

    def test_measured_steps_come_from_a_file_and_copies_go_between_them(
        self, tmp_path: Path
    ) -> None:
        path = tmp_path / "steps.json"
        path.write_text('{"fixed_ms": 20, "prefill_token_ms": 0.5, "decode_row_ms": 2}')
        device = measured_device(path)
        step = StepContents(prefill_tokens=10, decode_rows=3)
        assert device.steps.step_ms(step, copying=False) == 31.0
        few = replace(SHORT, adapters=4, ranks=(8,))
        result = simulate(traffic(few, rate=4.0), device)
        assert result.leftovers == []
        assert min(result.step_times_ms) > 15.0

    @pytest.mark.parametrize(
        ("text", "named"), [('{"fixed_ms": 1}', "prefill_token_ms"), ('{"speed": 1}', "must be")]
    )
    def test_a_file_that_is_no_measurement_is_refused(
        self, text: str, named: str, tmp_path: Path
    ) -> None:
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(ValueError, match=named):
            measured_steps(tmp_path / "bad.json")

    def test_the_file_that_an_engine_keeps_is_a_measurement(self, tmp_path: Path) -> None:
        times = StepTimes()
        for rows in range(1, 40):
            times.observe(StepShape(0, rows, 100 * rows), 20.0 + 2.0 * rows)
        (tmp_path / "engine.json").write_text(times.to_json())
        steps = measured_device(tmp_path / "engine.json").steps
        step = StepContents(decode_rows=10, sampled_rows=10, kv_tokens=1000, attention_pairs=1000)
        assert steps.step_ms(step, copying=False) == pytest.approx(40.0, rel=0.05)


class TestCapacity:
    def test_what_a_saturated_engine_finishes_is_near_the_estimate(self) -> None:
        slow = replace(h200(), steps=Roofline(fixed_ms=150.0), settings={"max_running": 16})
        workload = replace(SHORT, adapters=2, tenants=2)
        config = engine_config(slow)
        estimate = estimated_capacity(slow, config, workload)
        assert measured_capacity(slow, config, workload) == pytest.approx(estimate, rel=0.25)

    def test_more_load_than_capacity_grows_the_queue_and_less_does_not(self) -> None:
        slow = replace(SMALL, steps=Roofline(fixed_ms=60.0), settings={"max_running": 8})
        rate = estimated_capacity(slow, engine_config(slow), SHORT)
        waits = []
        for load in (0.5, 3.0):
            result = simulate(traffic(rate=load * rate, ms=8000.0), slow)
            waits.append(np.median([o.ttft_ms for o in result.outcomes if o.ttft_ms is not None]))
        assert waits[1] > 3 * waits[0]
