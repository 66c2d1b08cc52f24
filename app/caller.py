"""Who makes a request, and what they may use."""

from dataclasses import dataclass, field
from typing import Literal

Role = Literal["operator", "tenant_admin", "tenant_viewer", "api_key"]
KeyAccess = Literal["full", "inference", "manage", "read"]
"""What a key may do: see app.keys.access."""


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """The limits in force: the tenant's own where it has one, else the platform's default.

    None means no limit. Sizes are bytes; months are calendar months in UTC.
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent: int | None = None
    monthly_tokens: int | None = None
    max_adapters: int | None = None
    max_stored_bytes: int | None = None
    max_resident_bytes: int | None = None  # of its adapters in an engine, in each tier
    reserved_resident_bytes: int = 0  # of those, kept from other tenants
    max_rank: int = 256
    max_tokens: int | None = None
    weight: float = 1.0
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    budget_percentile: float = 0.95  # the share of requests that keep the budget


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """Limits of one key, inside its tenant's. None means no limit of its own."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent: int | None = None
    monthly_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class KeyBudget:
    """The latency budget of one key, looser than its tenant's. None means the tenant's own."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    budget_percentile: float | None = None


@dataclass(frozen=True, slots=True)
class Caller:
    """An authenticated caller. Operators have no tenant (empty strings) and never reach /v1."""

    tenant_id: str
    tenant_name: str
    tenant_salt: str
    role: Role
    key_id: str | None = None
    user_id: str | None = None
    label: str = ""  # what the audit log shows: a user's email, a key's public id
    adapter_scope: frozenset[str] | None = None  # adapter names; None: all of the tenant's
    limits: TenantLimits = field(default_factory=TenantLimits)
    key_limits: KeyLimits = field(default_factory=KeyLimits)
    key_budget: KeyBudget = field(default_factory=KeyBudget)
    access: KeyAccess = "full"

    @property
    def ttft_ms(self) -> float | None:
        """The promise in force; a key only loosens what its tenant was promised."""
        return _looser(self.limits.ttft_ms, self.key_budget.ttft_ms)

    @property
    def tpot_ms(self) -> float | None:
        return _looser(self.limits.tpot_ms, self.key_budget.tpot_ms)

    @property
    def budget_percentile(self) -> float:
        own = self.limits.budget_percentile
        return min(own, self.key_budget.budget_percentile or own)

    def may_call(self, adapter_name: str) -> bool:
        """Whether the key's scope covers this adapter."""
        return self.adapter_scope is None or adapter_name in self.adapter_scope


def _looser(tenant: float | None, key: float | None) -> float | None:
    """Without the tenant's promise there is none to loosen."""
    return tenant if tenant is None or key is None else max(tenant, key)
