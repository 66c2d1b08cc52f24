"""Random lives of an engine: whatever happens to it, answers, accounts and budgets stay right."""

import hashlib

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.adapters.loading import LoadFailed
from engine.errors import EngineError
from engine.types import AdapterRef, LatencyBudget
from tests.engine_under_test import EngineUnderTest
from tests.fakes import EXTENT_BYTES, describe, expected_tokens

HOST_BYTES = 6 * EXTENT_BYTES

ADAPTERS = {  # name: what the store holds
    "small": {"extents": 1},
    "middle": {"extents": 2, "load_ms": 30.0},
    "large": {"extents": 4, "load_ms": 5.0},
    "slow": {"extents": 1, "load_ms": 400.0},
    "other": {"extents": 3},
    "broken": {"extents": 1, "load_ms": 10.0},
    "huge": {"extents": 50},
}

BUDGETS = [
    LatencyBudget(),
    LatencyBudget(),
    LatencyBudget(ttft_ms=60.0),
    LatencyBudget(ttft_ms=400.0, tpot_ms=12.0),
    LatencyBudget(tpot_ms=25.0, percentile=0.5),
]

submissions = st.tuples(
    st.just("submit"),
    st.sampled_from([None, *ADAPTERS]),
    st.integers(1, 70),  # prompt tokens
    st.integers(1, 40),  # max_tokens
    st.integers(1, 3),  # choices
    st.sampled_from(["a", "b", "c"]),
    st.booleans(),  # the shared prompt or one of its own
    st.sampled_from(BUDGETS),
)
actions = st.one_of(
    submissions,
    submissions,
    st.tuples(st.just("step"), st.integers(1, 12)),
    st.tuples(st.just("cancel"), st.integers(0, 30)),
    st.tuples(st.just("forget"), st.sampled_from(list(ADAPTERS))),
    st.tuples(st.just("fail"), st.just(0)),
)


class Trace:
    """One engine, every request that it took, and what must hold after every step."""

    def __init__(self, *, extents: int, max_slots: int, policy: str, prefix_caching: bool) -> None:
        self.engine = EngineUnderTest(
            extents,
            description=describe(context_length=256),
            max_slots=max_slots,
            max_running=6,
            max_batch_tokens=32,
            prefill_chunk=24,
            host_cache_bytes=HOST_BYTES,
            copy_bytes_per_step=EXTENT_BYTES,
            adapter_aging_ms=50.0,
            policy=policy,
            queue_aging_ms=300.0,
            step_ms=lambda plan: 5.0 + 0.3 * sum(len(row.tokens) for row in plan.rows),
            prefix_caching=prefix_caching,
        )
        self.refs: dict[str, AdapterRef] = {}
        for name, values in ADAPTERS.items():
            self.refs[name] = self.engine.loader.add(name, **values)
        broken = self.refs["broken"]
        self.engine.loader.add("broken", fails=LoadFailed(broken, "non_finite", "NaN"))
        self.requests: dict[str, tuple[list[int], str | None, int]] = {}
        self.ended: set[str] = set()  # cancelled, failed or erased on purpose
        self.failing = False
        self.engine.executor.fail_on = lambda plan: self.failing and bool(plan.rows)

    def act(self, action: tuple[object, ...]) -> None:
        match action:
            case (
                "submit",
                str() | None as name,
                int(length),
                int(most),
                int(choices),
                str(t),
                shared,
                LatencyBudget() as budget,
            ):
                self.submit(name, length, most, choices, t, budget, shared=bool(shared))
            case ("step", int(times)):
                for _ in range(times):
                    self.step()
            case ("cancel", int(index)) if self.requests:
                request_id = list(self.requests)[index % len(self.requests)]
                self.ended.add(request_id)
                self.engine.core.cancel(request_id)
            case ("forget", str(name)):
                for request_id, (_, adapter, _) in self.requests.items():
                    if adapter == name:
                        self.ended.add(request_id)
                self.engine.core.forget(self.refs[name])
            case ("fail", _):
                self.failing = True
                self.ended |= set(self.requests)
                self.step()
                self.failing = False

    def submit(
        self,
        name: str | None,
        length: int,
        most: int,
        choices: int,
        tenant: str,
        budget: LatencyBudget,
        *,
        shared: bool,
    ) -> None:
        salt = f"{0 if shared else len(self.requests)}"
        prompt = [2 + hashlib.sha256(f"{salt}.{i}".encode()).digest()[0] for i in range(length)]
        ref = None if name is None else self.refs[name]
        try:
            request_id = self.engine.submit(
                prompt,
                adapter=ref,
                max_tokens=most,
                choices=choices,
                tenant=tenant,
                budget=budget,
            )
        except EngineError:
            return  # quarantined, erased, full, or no budget that can be kept
        self.requests[request_id] = (prompt, name, most)

    def step(self) -> None:
        self.engine.step()
        status = self.engine.core.status()
        spans = self.engine.executor.spans()
        on_device = sum(span.count for span in spans)
        assert status.kv_blocks_used + status.kv_blocks_cached + on_device <= status.extents_total
        assert on_device <= status.extents_total // 2
        assert len(spans) <= self.engine.config.max_slots
        assert status.host_adapter_bytes <= HOST_BYTES
        assert len(self.engine.executor.live) <= self.engine.config.max_running + 6

    def finish(self) -> None:
        for _ in range(20_000):
            if not self.engine.core.has_work:
                break
            self.step()
        for request_id, (prompt, name, most) in self.requests.items():
            self.engine.assert_stream_is_whole(request_id)
            last = self.engine.last(request_id)
            if name in ("broken", "huge"):
                assert last.finish == "error" or request_id in self.ended
            elif request_id not in self.ended:
                assert last.finish == "length", last
                self.check_answer(request_id, prompt, name, most)
        self.engine.assert_all_returned()

    def check_answer(self, request_id: str, prompt: list[int], name: str | None, most: int) -> None:
        blob = None if name is None else self.engine.loader.blob(self.refs[name])
        for choice in {event.choice for event in self.engine.outputs[request_id]}:
            expected = expected_tokens(prompt, most, blob=blob, choice=choice)
            assert self.engine.tokens(request_id, choice) == expected

    def empty(self) -> None:
        """Erases every adapter and the base model's prefixes go with what evicts them."""
        for ref in self.refs.values():
            assert self.engine.core.forget(ref)
        status = self.engine.core.status()
        assert (status.device_adapter_bytes, status.host_adapter_bytes) == (0, 0)
        assert self.engine.executor.spans() == []


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    trace=st.lists(actions, min_size=1, max_size=40),
    extents=st.sampled_from([20, 26, 60]),
    max_slots=st.integers(1, 4),
    policy=st.sampled_from(["slo", "slo", "vtc", "fcfs"]),
    prefix_caching=st.booleans(),
)
@pytest.mark.timeout(600)
def test_any_life_of_the_engine_ends_with_every_answer_right_and_nothing_held(
    trace: list[tuple[object, ...]],
    extents: int,
    max_slots: int,
    policy: str,
    prefix_caching: bool,
) -> None:
    life = Trace(extents=extents, max_slots=max_slots, policy=policy, prefix_caching=prefix_caching)
    for action in trace:
        life.act(action)
    life.finish()
    life.empty()
