"""The calls that this process is answering now, by tenant: who is deleted is cut off at once."""

from collections.abc import Set as AbstractSet
from typing import Protocol

from app.errors import AppError, Forbidden


class Running(Protocol):
    """A call that can be ended from outside."""

    def abort(self, refusal: AppError) -> None: ...


class RunningCalls:
    """Calls enter when they begin to generate and leave when they have ended."""

    def __init__(self) -> None:
        self._calls: dict[str, set[Running]] = {}

    def add(self, tenant_id: str, call: Running) -> None:
        self._calls.setdefault(tenant_id, set()).add(call)

    def discard(self, tenant_id: str, call: Running) -> None:
        calls = self._calls.get(tenant_id)
        if calls is not None:
            calls.discard(call)
            if not calls:
                del self._calls[tenant_id]

    def tenants(self) -> AbstractSet[str]:
        """Tenants with a call under way."""
        return self._calls.keys()

    def abort_tenant(self, tenant_id: str) -> int:
        """Ends a deleted tenant's calls; how many were asked to end."""
        calls = list(self._calls.get(tenant_id, ()))
        for call in calls:
            call.abort(
                Forbidden("The tenant was deleted while this call ran.", code="tenant_deleted")
            )
        return len(calls)
