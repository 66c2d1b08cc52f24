"""How many requests a second a device can serve of a workload: what "load 0.8" is a share of.

Measured, not guessed: the engine runs saturated, first come first served, and what it finishes once
it has filled up is its capacity. A closed form from the step model says how hard to push.
"""

from dataclasses import replace

import numpy as np

from app.bench.workloads import Lengths, TimedRequest, Workload, generate
from benchmarks.simulation.run import Simulation
from benchmarks.simulation.step_models import Device, StepContents
from engine.config import EngineConfig
from engine.policy import PolicyName

LEAST_FILL_MS, LEAST_MEASURE_MS = 8_000.0, 12_000.0
LEAST_REQUESTS = 300  # to be finished in the measurement, on slow devices too
PUSH = 1.5  # times the estimate: enough that something always waits


def mean_tokens(lengths: Lengths) -> float:
    """Of a large fixed sample of the clipped lognormal."""
    return float(np.mean(lengths.draw(np.random.default_rng(0), 20_000)))


def estimated_capacity(device: Device, config: EngineConfig, workload: Workload) -> float:
    """Requests per second of a full batch in balance: as many start as end in every step.

    The batch is as large as places, KV cache and the adapters that fit allow; what has to come over
    the bus comes no faster than the bus.
    """
    prompt, output = mean_tokens(workload.prompt), mean_tokens(workload.output)
    context = prompt + output / 2
    room = device.extents * 16 * (1 - config.adapter_share) / (prompt + output)
    rows = max(1, int(min(config.max_running, room)))
    rank = float(np.mean(workload.ranks)) if workload.adapters else 0.0
    fits = config.adapter_share * device.arena_bytes / max(1.0, rank * device.rank_bytes)
    while rows > 1 and _expected_distinct(workload, rows) > fits:
        rows -= 1
    starting = rows / (output + 1)
    distinct = _expected_distinct(workload, rows)
    step = StepContents(
        prefill_tokens=int(starting * prompt),
        decode_rows=rows,
        sampled_rows=rows,
        kv_tokens=int(rows * context),
        attention_pairs=int(starting * prompt * prompt / 2 + rows * context),
        adapter_bytes=int(distinct * rank * device.rank_bytes),
        token_ranks=int((rows + starting * prompt) * rank),
    )
    per_s = 1000.0 * starting / device.steps.step_ms(step, copying=False)
    missing = max(0.0, 1.0 - fits / workload.adapters) if workload.popularity == "uniform" else 0.0
    if missing:
        bus_bytes_per_s = 1000.0 * device.steps.bus_bytes_per_ms
        per_s = min(per_s, bus_bytes_per_s / (rank * device.rank_bytes * missing))
    return per_s


def measured_capacity(
    device: Device, config: EngineConfig, workload: Workload, *, seed: int = 0
) -> float:
    """Requests per second that the saturated engine finishes."""
    estimate = estimated_capacity(device, config, workload)
    measure_ms = max(LEAST_MEASURE_MS, 1000.0 * LEAST_REQUESTS / estimate)
    fill_ms = max(LEAST_FILL_MS, measure_ms / 2)
    end_ms = fill_ms + measure_ms
    steady = replace(workload, cv=1.0, jam=None)
    requests = generate(steady, rate_per_s=PUSH * estimate, duration_ms=end_ms, seed=seed)
    return finished_per_s(device, config, requests, from_ms=fill_ms, to_ms=end_ms)


def finished_per_s(
    device: Device,
    config: EngineConfig,
    requests: list[TimedRequest],
    *,
    from_ms: float,
    to_ms: float,
    policy: PolicyName = "fcfs",
) -> float:
    """Requests that end in [from_ms, to_ms), a second, with queues as long as it takes."""
    unbounded = replace(config, policy=policy, max_waiting=10**6, max_waiting_per_tenant=10**6)
    result = Simulation(device, unbounded, requests).run(limit_ms=to_ms)
    ended = sum(o.answered and from_ms <= (o.last_ms or 0.0) < to_ms for o in result.outcomes)
    return 1000.0 * ended / (to_ms - from_ms)


def _expected_distinct(workload: Workload, rows: int) -> float:
    if workload.adapters == 0:
        return 0.0
    if workload.popularity == "distinct":
        return min(rows, workload.adapters)
    return float(np.sum(1.0 - (1.0 - workload.adapter_shares()) ** rows))
