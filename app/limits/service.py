"""Requests and tokens per minute and concurrent requests, of a tenant and of each of its keys.

A call reserves its prompt and all that it may generate before anything runs; what it did not use
is given back when it ends, and all of it when it failed before it generated anything.
"""

from dataclasses import dataclass

from app.caller import Caller, KeyLimits, TenantLimits
from app.errors import InvalidRequest, Overloaded, RateLimited
from app.limits.store import (
    SEAT_LEASE_MS,
    Claim,
    Decision,
    LimitStore,
    Seat,
    SeatLevel,
    StoreAway,
    Window,
)


@dataclass(frozen=True, slots=True)
class Reservation:
    """What one admitted call holds."""

    claim: Claim
    slot: int
    tokens: int


class Limits:
    """Keeps the limits that the caller carries; `store` decides who shares them."""

    def __init__(self, store: LimitStore) -> None:
        self._store = store
        self._seats: dict[str, tuple[str, ...]] = {}  # request id -> keys of the seats held

    async def start(self) -> None:
        await self._store.start()

    async def reserve(
        self, caller: Caller, request_id: str, tokens: int
    ) -> tuple[Reservation, Decision]:
        """Raises RateLimited with the wait that is enough, or InvalidRequest if none ever is."""
        refuse_what_never_fits(caller, tokens)
        claim = claim_of(caller, request_id, requests=1, tokens=tokens)
        try:
            decision = await self._store.reserve(claim, SEAT_LEASE_MS)
        except StoreAway as error:
            raise _unavailable(error) from error
        if not decision.admitted:
            raise _refusal(claim, decision)
        self._seats[request_id] = tuple(seat.key for seat in claim.seats)
        return Reservation(claim, decision.slot, tokens), decision

    async def settle(self, held: Reservation, *, tokens: int, refund_request: bool) -> None:
        """Gives back all but `tokens`, and the seat. Never raises."""
        self._seats.pop(held.claim.request_id, None)
        unused = tuple(
            (1 if refund_request else 0) if taken.name == "requests" else held.tokens - tokens
            for taken in held.claim.windows
        )
        await self._store.settle(held.claim, held.slot, unused)

    async def peek(self, caller: Caller) -> Decision:
        """Where the caller's limits stand; raises Overloaded while that cannot be had."""
        try:
            return await self._store.peek(claim_of(caller, "peek", requests=0, tokens=0))
        except StoreAway as error:
            raise _unavailable(error) from error

    async def standing(self, caller: Caller) -> dict[str, str]:
        """The headers of an answer that takes nothing; none while they cannot be had."""
        try:
            return limit_headers(await self.peek(caller))
        except Overloaded:
            return {}

    def problem(self) -> str | None:
        """Why no call can be admitted now, for /readyz; None when they can."""
        return self._store.problem()

    async def renew_seats(self) -> None:
        """Called every few seconds: keeps the seats of this process's running calls."""
        held = [(key, request_id) for request_id, keys in self._seats.items() for key in keys]
        if held:
            try:
                await self._store.renew(held, SEAT_LEASE_MS)
            except StoreAway as error:
                raise _unavailable(error) from error

    async def close(self) -> None:
        await self._store.close()


def claim_of(caller: Caller, request_id: str, *, requests: int, tokens: int) -> Claim:
    """The tenant's windows and seat, then the key's own."""
    tenant = caller.tenant_id
    owners: list[tuple[str, TenantLimits | KeyLimits]] = [(tenant, caller.limits)]
    if caller.key_id is not None:
        owners.append((f"{tenant}:{caller.key_id}", caller.key_limits))
    windows: list[Window] = []
    seats: list[Seat] = []
    for owner, limits in owners:
        if limits.requests_per_minute is not None:
            windows.append(
                Window("requests", f"{owner}:requests", limits.requests_per_minute, requests)
            )
        if limits.tokens_per_minute is not None:
            windows.append(Window("tokens", f"{owner}:tokens", limits.tokens_per_minute, tokens))
        if limits.max_concurrent is not None:
            seats.append(Seat(_seat_key(owner), limits.max_concurrent))
    return Claim(tenant, request_id, tuple(windows), tuple(seats))


def token_ceiling(caller: Caller) -> int | None:
    """The most tokens (prompt and answer) that one call can ever reserve."""
    ceilings = [
        limit
        for limit in (caller.limits.tokens_per_minute, caller.key_limits.tokens_per_minute)
        if limit is not None
    ]
    return min(ceilings, default=None)


def refuse_what_never_fits(caller: Caller, tokens: int) -> None:
    """A reservation above the whole limit would wait for ever, so it is refused for good."""
    ceiling = token_ceiling(caller)
    if ceiling is not None and tokens > ceiling:
        raise InvalidRequest(
            f"this call may use {tokens} tokens (prompt and max_tokens), and the limit is "
            f"{ceiling} tokens per minute; lower max_tokens or shorten the prompt",
            code="exceeds_tokens_per_minute",
            param="max_tokens",
        )


def limit_headers(decision: Decision) -> dict[str, str]:
    """x-ratelimit-{limit,remaining,reset}-{requests,tokens}, -{limit,remaining}-concurrent.

    Of the tightest of the tenant's and the key's.
    """
    headers: dict[str, str] = {}
    for name in ("requests", "tokens"):
        levels = [level for level in decision.levels if level.name == name]
        if levels:
            tightest = min(levels, key=lambda level: level.remaining)
            headers[f"x-ratelimit-limit-{name}"] = str(tightest.limit)
            headers[f"x-ratelimit-remaining-{name}"] = str(tightest.remaining)
            headers[f"x-ratelimit-reset-{name}"] = f"{-(-tightest.reset_ms // 1000)}s"
    if decision.seats:
        seat = min(decision.seats, key=lambda seat: seat.remaining)
        headers["x-ratelimit-limit-concurrent"] = str(seat.limit)
        headers["x-ratelimit-remaining-concurrent"] = str(seat.remaining)
    return headers


def scope_of(seat: SeatLevel, caller: Caller) -> str:
    """Whose limit a seat belongs to: "tenant" or "key"."""
    return "tenant" if seat.key == _seat_key(caller.tenant_id) else "key"


def _seat_key(owner: str) -> str:
    return f"{owner}:seats"


def _refusal(claim: Claim, decision: Decision) -> RateLimited:
    if decision.refused_by == "concurrency":
        full = [seat for seat in decision.seats if not seat.remaining]
        tightest = min(full, key=lambda seat: seat.limit)
        whose = "your tenant" if tightest.key == _seat_key(claim.group) else "this key"
        error = RateLimited(
            f"{tightest.limit} requests are already running, which is the limit of {whose}; wait "
            "for one to end before you send the next, or ask for a higher limit",
            code="concurrency_limit_exceeded",
            retry_after_ms=decision.wait_ms,
        )
    else:
        taken = min(
            (level for level in decision.levels if level.name == decision.refused_by),
            key=lambda level: level.remaining,
        )
        amount = next(w.amount for w in claim.windows if w.name == decision.refused_by)
        error = RateLimited(
            f"the limit is {taken.limit} {taken.name} per minute, {taken.used} are used and this "
            f"call needs {amount}; retry after {-(-decision.wait_ms // 1000)} s",
            code=f"{taken.name}_per_minute_exceeded",
            retry_after_ms=decision.wait_ms,
        )
    error.limit_headers = limit_headers(decision)
    return error


def _unavailable(away: StoreAway) -> Overloaded:
    return Overloaded(
        "the limits cannot be read now, so no call is admitted; retry in a few seconds",
        code="limits_unavailable",
        retry_after_ms=int(away.retry_after_ms) + 1,
    )
