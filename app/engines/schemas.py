"""What the operator API answers for engines."""

from datetime import datetime
from typing import Literal

from pydantic import BaseModel

from app.engines.models import EngineRecord
from app.engines.registry import Registered
from app.inference.engines import Engine
from engine.types import EngineStatus

State = Literal["ready", "draining", "drained", "unreachable", "unusable", "gone"]


class RefusedEngine(BaseModel):
    """One that registered and is not used."""

    address: str
    reason: str


class EngineOut(BaseModel):
    """One engine. Figures are of the moment and null while it does not answer.

    `drained`: it takes no new requests and none is left. `unusable`: it answers, and `problem`
    says why it gets no requests. `gone`: it was seen once; the settings do not name it and it has
    no registration. `lease_ms`: how long its registration holds without a new sign of it.
    """

    object: Literal["engine"] = "engine"
    id: str
    name: str
    address: str
    state: State
    problem: str | None = None
    drain_wanted: bool
    base_model: str | None = None
    base_digest: str | None = None
    running: int | None = None
    waiting: int | None = None
    adapters_on_device: int | None = None
    device_adapter_bytes: int | None = None
    host_adapter_bytes: int | None = None
    kv_blocks_used: int | None = None
    step_ms_p50: float | None = None
    uptime_ms: float | None = None
    lease_ms: int | None = None
    first_seen_at: datetime
    last_seen_at: datetime | None

    @classmethod
    def of(
        cls, row: EngineRecord, engine: Engine | None, registered: Registered | None = None
    ) -> "EngineOut":
        """`engine`: what this process knows of it now; None for one that it does not know."""
        out = cls(
            id=row.id,
            name=row.name,
            address=row.address,
            state="gone" if engine is None else _state(engine, drained=row.drained),
            problem=None,
            drain_wanted=row.drained,
            base_digest=row.base_digest,
            first_seen_at=row.first_seen_at,
            last_seen_at=row.last_seen_at,
            lease_ms=None if registered is None else registered.lease_ms,
        )
        if engine is None:
            return out
        if engine.description is not None:
            out.base_model = engine.description.name
            out.base_digest = engine.description.base_digest
        if out.state in ("unreachable", "unusable"):
            out.problem = engine.problem
        elif engine.status is not None:
            out.tell(engine.status)
        return out

    def tell(self, status: EngineStatus) -> None:
        """Takes over the figures of the moment."""
        self.running, self.waiting = status.running, status.waiting
        self.adapters_on_device = sum(item.tier == "device" for item in status.adapters)
        self.device_adapter_bytes = status.device_adapter_bytes
        self.host_adapter_bytes = status.host_adapter_bytes
        self.kv_blocks_used = status.kv_blocks_used
        self.step_ms_p50 = status.step_ms_p50
        self.uptime_ms = status.uptime_ms


def _state(engine: Engine, *, drained: bool) -> State:
    if not engine.answers:
        return "unreachable"
    if engine.description is None:
        return "unusable"
    status = engine.status
    draining = drained or engine.client.draining or (status is not None and status.draining)
    if not draining:
        return "ready"
    left = 0 if status is None else status.running + status.waiting
    return "draining" if left or engine.in_flight else "drained"
