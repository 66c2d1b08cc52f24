"""Workloads name adapters, tenants and lengths as they say."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from app.bench.workloads import (
    POPULARITIES,
    RANKS,
    Budget,
    Jam,
    Lengths,
    TimedRequest,
    Workload,
    generate,
)


def traffic(workload: Workload, seed: int = 3, seconds: float = 60.0) -> list[TimedRequest]:
    return generate(workload, rate_per_s=100.0, duration_ms=1000.0 * seconds, seed=seed)


class TestPopularity:
    def test_identical_names_one_adapter(self) -> None:
        assert {r.adapter for r in traffic(Workload("identical"))} == {0}

    def test_distinct_takes_every_adapter_in_turn(self) -> None:
        first = [r.adapter for r in traffic(Workload("distinct", adapters=8))[:16]]
        assert first == [*range(8), *range(8)]

    def test_uniform_names_all_alike(self) -> None:
        counts = Counter(r.adapter for r in traffic(Workload("uniform", adapters=10)))
        assert len(counts) == 10
        assert max(counts.values()) < 1.3 * min(counts.values())

    def test_zipf_follows_its_exponent(self) -> None:
        counts = Counter(r.adapter for r in traffic(Workload("zipf", adapters=100)))
        assert counts[0] / counts[1] == pytest.approx(2**1.5, rel=0.15)
        assert counts[0] / counts[3] == pytest.approx(4**1.5, rel=0.25)

    def test_no_adapters_is_the_base_model(self) -> None:
        found = traffic(Workload("zipf", adapters=0))
        assert {(r.adapter, r.rank) for r in found} == {(-1, 0)}
        assert len({r.tenant for r in found}) == 20


def test_an_adapter_has_one_owner_and_one_rank() -> None:
    found = traffic(Workload("uniform", adapters=30, tenants=7, ranks=RANKS["mix"]))
    assert len({(r.adapter, r.tenant, r.rank) for r in found}) == 30
    assert {r.rank for r in found} == {8, 16, 64}


@pytest.mark.parametrize("popularity", POPULARITIES[1:])
def test_a_flooding_tenant_sends_so_many_times_what_another_sends(popularity: str) -> None:
    workload = Workload(popularity, adapters=40, tenants=4, flood=10.0)  # type: ignore[arg-type]
    counts = Counter(r.tenant for r in traffic(workload))
    others = sum(counts[tenant] for tenant in (1, 2, 3)) / 3
    assert counts[0] / others == pytest.approx(10.0, rel=0.15)


def test_lengths_are_lognormal_between_their_bounds() -> None:
    drawn = Lengths(200, 0.5, 1, 10_000).draw(np.random.default_rng(0), 50_000)
    assert np.median(drawn) == pytest.approx(200, rel=0.02)
    assert np.log(drawn).std() == pytest.approx(0.5, rel=0.03)
    cut = Lengths(200, 2.0, 16, 400).draw(np.random.default_rng(0), 1000)
    assert (min(cut), max(cut)) == (16, 400)


def test_an_answer_is_never_longer_than_what_is_asked_for() -> None:
    workload = Workload(max_tokens=20)
    assert max(r.output_tokens for r in traffic(workload)) == 20


def test_tenants_take_turns_with_the_budgets() -> None:
    tight, loose = Budget(100.0, 10.0), Budget(None, 50.0)
    for request in traffic(Workload(budgets=(tight, loose))):
        assert request.budget == (loose if request.tenant % 2 else tight)


def test_a_jam_lands_together_from_a_tenant_of_its_own() -> None:
    jam = Jam(prompts=10, first_ms=5000.0, every_ms=20_000.0)
    found = traffic(Workload(tenants=5, adapters=5, jam=jam), seconds=30.0)
    long = [r for r in found if r.tenant == 5]
    assert Counter(r.at_ms for r in long) == {5000.0: 10, 25_000.0: 10}
    assert {r.prompt_tokens for r in long} == {4096}
    assert [r.at_ms for r in found] == sorted(r.at_ms for r in found)


def test_equal_seeds_give_equal_requests() -> None:
    workload = Workload(cv=4.0)
    assert traffic(workload, 5, 5.0) == traffic(workload, 5, 5.0)
    assert traffic(workload, 5, 5.0) != traffic(workload, 6, 5.0)
    assert traffic(workload, 5, 5.0) != traffic(replace(workload, cv=1.0), 5, 5.0)
