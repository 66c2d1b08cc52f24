"""Engines in /metrics."""

from dataclasses import replace

from prometheus_client import CollectorRegistry

from app.engines.metrics import EngineCollector
from app.inference.engines import Engine
from engine.types import AdapterRef, Residency, StepCounts, TenantAttainment, TenantResidency
from tests.fake_engine import FakeEngine


def values(engines):
    registry = CollectorRegistry()
    registry.register(EngineCollector(lambda: engines))
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in registry.collect()
        for sample in family.samples
    }


async def engine(fake=None, **status):
    fake = fake or FakeEngine()
    known = replace(await fake.status(), **status)
    return Engine("ipc://e", fake, description=fake.description, status=known)


E = ("engine", "ipc://e")


async def test_adapters_and_their_bytes_are_told_by_tier():
    held = [Residency(AdapterRef("s", str(i)), "device", 100, 0) for i in range(3)]
    found = values([await engine(adapters=held, device_adapter_bytes=300, evictions_total=7)])
    assert found["loramux_engine_adapters", (E, ("tier", "device"))] == 3
    assert found["loramux_engine_adapters", (E, ("tier", "host"))] == 0
    assert found["loramux_engine_adapter_bytes", (E, ("tier", "device"))] == 300
    assert found["loramux_engine_adapter_evictions_total", (E,)] == 7


async def test_step_times_are_a_cumulative_histogram():
    counts = StepCounts(buckets=[1, 2, *[0] * 10, 4], ms=1500.0)
    found = values([await engine(step_counts=counts)])
    name = "loramux_engine_step_seconds"
    assert found[f"{name}_bucket", (E, ("le", "0.002"))] == 1
    assert found[f"{name}_bucket", (E, ("le", "0.005"))] == 3
    assert found[f"{name}_bucket", (E, ("le", "+Inf"))] == 7
    assert found[f"{name}_count", (E,)] == 7
    assert found[f"{name}_sum", (E,)] == 1.5


async def test_an_engine_that_is_away_is_down_and_has_no_stale_figures():
    fake = FakeEngine()
    gone = await engine(fake)
    fake.alive = False
    found = values([gone])
    assert found == {("loramux_engine_up", (E,)): 0.0}


async def test_the_apis_metrics_show_its_engines(client, platform):
    text = (await client.get("/metrics")).text
    assert "loramux_engine_up{" in text


async def test_resident_bytes_are_told_by_tenant_within_a_bound_and_add_up():
    resident = {f"t{n}": TenantResidency(n, 10 * n, None, 0) for n in range(5)}
    registry = CollectorRegistry()
    collector = EngineCollector(lambda: engines, tenants=2)
    engines = [await engine(resident=resident)]
    registry.register(collector)
    found = {
        (s.labels["tenant"], s.labels["tier"]): s.value
        for family in registry.collect()
        for s in family.samples
        if s.name == "loramux_engine_tenant_adapter_bytes"
    }
    assert {tenant for tenant, _ in found} == {"t0", "t1", "other"}
    assert (found["t1", "device"], found["other", "device"]) == (1, 2 + 3 + 4)
    assert found["other", "host"] == 90


async def test_budgets_kept_and_missed_are_told_by_tenant_within_a_bound():
    kept = {f"t{n}": TenantAttainment(n, 1, 0, 0, 2, 1.0) for n in range(5)}
    registry = CollectorRegistry()
    collector = EngineCollector(lambda: engines, tenants=2)
    engines = [await engine(attainment=kept)]
    registry.register(collector)
    found = {
        (s.labels["tenant"], s.labels["outcome"]): s.value
        for family in registry.collect()
        for s in family.samples
        if s.name == "loramux_engine_budgets_total"
    }
    assert {tenant for tenant, _ in found} == {"t0", "t1", "other"}
    assert found["t1", "ttft_met"] == 1
    assert found["other", "ttft_met"] == 2 + 3 + 4
    assert found["other", "refused"] == 6
