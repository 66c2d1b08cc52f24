"""The named comparisons on a simulated H200 with an 8B model in int4.

Every experiment runs its arms in turn, seed by seed, on the same requests. Times are milliseconds.
Capacity is the closed form's of capacity.py: a saturated engine reaches 0.9 to 1.01 of it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from app.bench.outcomes import Outcome
from app.bench.workloads import NO_BUDGET, Budget, Lengths, TimedRequest, Workload, generate
from benchmarks.simulation.capacity import estimated_capacity, finished_per_s
from benchmarks.simulation.experiment import Experiment, Figures, Finding, Setting
from benchmarks.simulation.run import engine_config
from benchmarks.simulation.step_models import GB, Roofline, StepContents, h200
from benchmarks.simulation.trial import Trial, run_trial
from engine.policy import PolicyName

INTERACTIVE, RELAXED = Budget(500.0, 30.0), Budget(2000.0, 60.0)
WARM_UP_MS = 3_000.0  # every adapter is asked for once, beside traffic that fills the batch
FIRST_OTHER_ADAPTER = 10_000  # numbers of adapters that are not a workload's own


# --------------------------------------------------------------------------- 1


def twice_what_fits(setting: Setting) -> list[Finding]:
    """Rank-64 adapters, uniform popularity, load 0.8: as many as fit, and twice as many.

    A third arm says what the twice as many cost while their copies take no time: what is left then
    is the wait for a place.
    """
    figures = Figures()
    for fits in (40, 160):
        device = h200()
        share = fits * 64 * device.rank_bytes / device.arena_bytes * 1.02
        base = Workload("uniform", adapters=fits, ranks=(64,), budgets=(INTERACTIVE,))
        config = engine_config(device, adapter_share=share)
        rate = 0.8 * estimated_capacity(device, config, base)
        instant = replace(device, steps=Roofline(bus_bytes_per_ms=math.inf))
        load = rate / estimated_capacity(device, config, replace(base, adapters=2 * fits))
        arms = ((device, fits), (device, 2 * fits), (instant, 2 * fits))
        for seed in setting.seeds:
            for policy in setting.policies:
                once, twice, uncopied = (
                    run_trial(
                        on,
                        _warmed(
                            replace(base, adapters=count), rate, setting.duration_ms(8.0), seed
                        ),
                        from_ms=WARM_UP_MS,
                        config=replace(config, policy=policy),
                        seed=seed,
                    )
                    for on, count in arms
                )
                ratio = _p(twice, "ttft_ms", "p50") / _p(once, "ttft_ms", "p50")
                tail = _p(twice, "tpot_ms", "p99") / _p(twice, "tpot_ms", "p50")
                label = f"{fits} fit"
                figures.note(policy, f"{label}: TTFT p50, as many", _p(once, "ttft_ms", "p50"))
                figures.note(policy, f"{label}: TTFT p50, twice", _p(twice, "ttft_ms", "p50"))
                figures.at_most(policy, f"{label}: TTFT p50, twice / as many", ratio, 1.5)
                floor = _p(uncopied, "ttft_ms", "p50") / _p(once, "ttft_ms", "p50")
                figures.note(policy, f"{label}: the same, copies in no time", floor)
                figures.note(policy, f"{label}: load of what can be served, twice", load)
                figures.at_most(policy, f"{label}: TPOT p99 / p50, twice", tail, 3.0)
                figures.note(policy, f"{label}: TTFT p99, twice", _p(twice, "ttft_ms", "p99"))
                figures.note(policy, f"{label}: goodput, as many", once.report.goodput)
                figures.note(policy, f"{label}: goodput, twice", twice.report.goodput)
                figures.note(
                    policy, f"{label}: GB/s over the bus, twice",
                    twice.result.copied_bytes / GB / (twice.result.end_ms / 1000),
                )  # fmt: skip
    return figures.findings()


def _warmed(workload: Workload, rate: float, measured_ms: float, seed: int) -> list[TimedRequest]:
    traffic = generate(workload, rate_per_s=rate, duration_ms=WARM_UP_MS + measured_ms, seed=seed)
    count = workload.adapters
    visits = [
        TimedRequest(
            WARM_UP_MS * a / count, workload.tenant_of(a), a, workload.rank_of(a), 16, 1, 1
        )
        for a in range(count)
    ]
    return _merge(traffic, visits)


# --------------------------------------------------------------------------- 2


def polite_beside_flood(setting: Setting) -> list[Finding]:
    """A tenant at a tenth of capacity, alone and beside one that sends ten times as much."""
    device, figures = h200(), Figures()
    base = Workload("uniform", adapters=4, tenants=1, ranks=(16,), budgets=(INTERACTIVE,))
    share = 0.1 * estimated_capacity(device, engine_config(device), base)
    for seed in setting.seeds:
        duration_ms = setting.duration_ms(15.0)
        polite = generate(base, rate_per_s=share, duration_ms=duration_ms, seed=seed)
        flood = generate(base, rate_per_s=10 * share, duration_ms=duration_ms, seed=1000 + seed)
        both = _merge(polite, [replace(r, tenant=1, adapter=r.adapter + 4) for r in flood])
        for policy in setting.policies:
            alone = run_trial(device, polite, policy=policy, seed=seed)
            beside = run_trial(device, both, policy=policy, seed=seed)
            theirs = beside.of("t000")
            attained = theirs.tenants[0].attainment or 0.0
            step_p99 = float(np.percentile(beside.result.step_times_ms, 99))
            solo_p99, loaded_p99 = _p(alone, "ttft_ms", "p99"), theirs.ttft_ms.p99 or 0.0
            figures.at_least(policy, "polite: attainment", attained, INTERACTIVE.percentile)
            met = [o.answered and o.good_at_end for o in _of(beside, lambda o: o.tenant == "t000")]
            figures.note(policy, "polite: attainment, last token alone", float(np.mean(met)))
            figures.note(policy, "polite: refused", float(theirs.tenants[0].refused))
            figures.note(policy, "polite: TTFT p99 alone", solo_p99)
            figures.note(policy, "polite: TTFT p99 beside", loaded_p99)
            figures.note(policy, "loaded step p99", step_p99)
            figures.at_most(
                policy, "(TTFT p99 beside - alone) / loaded step p99",
                (loaded_p99 - solo_p99) / step_p99, 2.0,
            )  # fmt: skip
            figures.note(policy, "flood: goodput", beside.of("t001").goodput)
    return figures.findings()


# --------------------------------------------------------------------------- 3


def overload(setting: Setting) -> list[Finding]:
    """Load 1.2, budgets mixed, the same bounded queue for every policy."""
    device, figures = h200(), Figures()
    workload = Workload(
        "zipf", adapters=100, tenants=12, ranks=(16,), budgets=(INTERACTIVE, RELAXED, NO_BUDGET)
    )
    capacity = estimated_capacity(device, engine_config(device), workload)
    for seed in setting.seeds:
        requests = generate(
            workload,
            rate_per_s=1.2 * capacity,
            duration_ms=setting.duration_ms(15.0),
            seed=seed,
        )
        tokens_per_s: dict[str, float] = {}
        others: list[PolicyName] = [name for name in setting.policies if name != "fcfs"]
        policies: list[PolicyName] = ["fcfs", *others]
        for policy in policies:
            trial = run_trial(device, requests, policy=policy, seed=seed, max_waiting=128)
            tokens_per_s[policy] = trial.report.total_tokens_per_s
            figures.at_least(policy, "goodput", trial.report.goodput, 0.9 / 1.2)
            figures.at_least(
                policy, "tenants that attain their percentile", trial.report.tenants_attaining, 1.0
            )
            at_end = [o.good_at_end for o in trial.result.outcomes]
            figures.note(policy, "goodput, last token alone", float(np.mean(at_end)))
            figures.note(policy, "refused", float(sum(trial.report.refused.values())))
            figures.note(policy, "TTFT p99", _p(trial, "ttft_ms", "p99"))
            figures.at_least(
                policy, "tokens/s against fcfs", tokens_per_s[policy] / tokens_per_s["fcfs"], 0.95
            )
    return figures.findings()


# --------------------------------------------------------------------------- 4


def cold_stream(setting: Setting) -> list[Finding]:
    """Warm tenants at load 0.5, while requests for ever new rank-64 adapters stream in."""
    device, figures = h200(), Figures()
    warm = Workload("uniform", adapters=8, tenants=8, ranks=(16,), budgets=(INTERACTIVE,))
    capacity = estimated_capacity(device, engine_config(device), warm)
    for seed in setting.seeds:
        duration_ms = setting.duration_ms(10.0)
        rate = 0.5 * capacity
        mine = generate(warm, rate_per_s=rate, duration_ms=duration_ms, seed=seed)
        visits = generate(
            replace(warm, output=Lengths(16, 0.3, 4, 32), prompt=Lengths(64, 0.3, 16, 128)),
            rate_per_s=20.0,
            duration_ms=duration_ms,
            seed=1000 + seed,
        )
        visitor = warm.tenants
        cold = [
            replace(r, tenant=visitor, adapter=FIRST_OTHER_ADAPTER + i, rank=64, budget=NO_BUDGET)
            for i, r in enumerate(visits)
        ]
        known = [replace(r, adapter=FIRST_OTHER_ADAPTER + i % 2) for i, r in enumerate(cold)]
        for policy in setting.policies:
            gaps = {
                name: _gap_p99(run_trial(device, requests, policy=policy, seed=seed), visitor)
                for name, requests in (
                    ("none", mine),
                    ("resident", _merge(mine, known)),
                    ("cold", _merge(mine, cold)),
                )
            }
            figures.note(policy, "warm: gap p99, nobody else", gaps["none"])
            figures.note(policy, "warm: gap p99, same visitors, resident", gaps["resident"])
            figures.note(policy, "warm: gap p99, cold visitors", gaps["cold"])
            figures.at_most(
                policy, "cold / same visitors, resident", gaps["cold"] / gaps["resident"], 1.05
            )
            figures.note(policy, "cold / nobody else", gaps["cold"] / gaps["none"])
    return figures.findings()


# --------------------------------------------------------------------------- 5


def thousands_of_adapters(setting: Setting) -> list[Finding]:
    """Saturated throughput with 5 adapters, with 2000 that take turns by five, and by any.

    Five give way to the next five as fast as 40 % of the bus allows, at most through all of them.
    """
    figures = Figures()
    turns = int(2000 / 5)
    for rank in (8, 64):
        device = h200()
        config = engine_config(device)
        five = Workload("uniform", adapters=5, tenants=5, ranks=(rank,))
        allowed = estimated_capacity(device, config, replace(five, adapters=2000))
        push = 1.5 * estimated_capacity(device, config, five)
        end_ms = setting.duration_ms(10.0)
        bus_turns = 0.4 * end_ms * device.steps.bus_bytes_per_ms / (5 * rank * device.rank_bytes)
        pace = min(turns, bus_turns) / end_ms
        for seed in setting.seeds:
            requests = generate(five, rate_per_s=push, duration_ms=end_ms, seed=seed)
            arms = {
                "5": requests,
                "by fives": [
                    replace(r, adapter=r.adapter + 5 * int(pace * r.at_ms)) for r in requests
                ],
                "at random": [
                    replace(r, adapter=5 * (i * 7919 % turns) + r.adapter)
                    for i, r in enumerate(requests)
                ],
            }
            for policy in setting.policies:
                done = {
                    name: finished_per_s(
                        device, config, arm, from_ms=0.4 * end_ms, to_ms=end_ms, policy=policy
                    )
                    for name, arm in arms.items()
                }
                of = f"rank {rank}"
                figures.note(policy, f"{of}: requests/s with 5 adapters", done["5"])
                ratio = done["by fives"] / done["5"]
                figures.at_least(policy, f"{of}: 2000 by fives / 5", ratio, 0.97)
                figures.note(policy, f"{of}: 2000 at random / 5", done["at random"] / done["5"])
                ratio = done["at random"] / allowed
                figures.at_least(policy, f"{of}: 2000 at random / roofline", ratio, 0.9)
                figures.note(policy, f"{of}: host GB", 2000 * rank * device.rank_bytes / GB)
    return figures.findings()


# --------------------------------------------------------------------------- 7


def prompt_jam(setting: Setting) -> list[Finding]:
    """Ten 4k prompts land while 20 chats stream whose budget is twice their decode step."""
    device, figures = h200(), Figures()
    context = 600
    step = StepContents(
        decode_rows=20, sampled_rows=20, kv_tokens=20 * context, attention_pairs=20 * context,
        adapter_bytes=20 * 16 * device.rank_bytes, token_ranks=20 * 16,
    )  # fmt: skip
    decode_ms = device.steps.step_ms(step, copying=False)
    budget = Budget(None, 2 * decode_ms)
    for seed in setting.seeds:
        rng = np.random.default_rng(seed)
        chats = [
            TimedRequest(float(at_ms), tenant, tenant, 16, 256, 700, 1024, budget)
            for tenant, at_ms in enumerate(rng.uniform(0, 50, size=20))
        ]
        land_ms = 700.0 + float(rng.uniform(0, 100))
        jam = [TimedRequest(land_ms, 20, -1, 0, 4096, 16, 16) for _ in range(10)]
        for policy in setting.policies:
            trial = run_trial(device, _merge(chats, jam), policy=policy, seed=seed)
            worst = [_gap_p99_of([o]) for o in _of(trial, lambda o: o.budget == budget)]
            waits = [o.ttft_ms or 0.0 for o in _of(trial, lambda o: o.budget != budget)]
            most = float(budget.tpot_ms or 0.0)
            figures.note(policy, "20-row decode step", decode_ms)
            figures.at_most(policy, "worst chat's gap p99 / budget", max(worst) / most, 1.0)
            figures.note(policy, "chats over the budget", float(sum(w > most for w in worst)))
            figures.note(policy, "longest gap / budget", _longest_gap(trial, budget) / most)
            figures.note(policy, "jam: last first token after", max(waits))
    return figures.findings()


# --------------------------------------------------------------------------- figures of trials


def _merge(*lists: Sequence[TimedRequest]) -> list[TimedRequest]:
    return sorted((r for requests in lists for r in requests), key=lambda r: r.at_ms)


def _p(trial: Trial, figure: str, percentile: str) -> float:
    return float(getattr(getattr(trial.report, figure), percentile))


def _of(trial: Trial, chosen: Callable[[Outcome], bool]) -> list[Outcome]:
    return [outcome for outcome in trial.result.outcomes if chosen(outcome)]


def _gap_p99(trial: Trial, visitor: int) -> float:
    return _gap_p99_of(_of(trial, lambda o: o.tenant != f"t{visitor:03}"))


def _gap_p99_of(outcomes: Sequence[Outcome]) -> float:
    return float(np.percentile(np.concatenate([np.array(o.gaps_ms) for o in outcomes]), 99))


def _longest_gap(trial: Trial, budget: Budget) -> float:
    return max(max(o.gaps_ms) for o in _of(trial, lambda o: o.budget == budget))


EXPERIMENTS: dict[str, Experiment] = {
    "adapters-twice-what-fits": Experiment(
        "does latency survive twice as many adapters as fit on the device?", twice_what_fits
    ),
    "polite-beside-flood": Experiment(
        "does a tenant notice another one at ten times its share?", polite_beside_flood
    ),
    "overload": Experiment("what is kept of the promises at load 1.2?", overload),
    "cold-stream": Experiment(
        "do warm tenants notice cold rank-64 adapters streaming in?", cold_stream
    ),
    "thousands-of-adapters": Experiment(
        "what do 2000 adapters cost in throughput against 5?", thousands_of_adapters
    ),
    "prompt-jam": Experiment("do 20 chats notice ten 4k prompts that land together?", prompt_jam),
}
"""By the names that `python -m benchmarks.simulate --experiment` takes."""
