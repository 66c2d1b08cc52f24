"""Limits shared by every process, in Redis: one script, one round trip, the server's clock."""

from importlib.resources import files
from typing import Any

from redis.asyncio import Redis

from app.limits.store import Claim, Decision, Level

PREFIX = "loramux:limits"
CONNECT_SECONDS = 2.0
OPERATION_SECONDS = 2.0


class RedisLimitStore:
    """`url` is redis://… Losing Redis raises redis.RedisError: the service refuses with 503."""

    def __init__(self, url: str, *, prefix: str = PREFIX) -> None:
        self._redis: Redis = Redis.from_url(
            url,
            socket_connect_timeout=CONNECT_SECONDS,
            socket_timeout=OPERATION_SECONDS,
        )
        self._prefix = prefix
        scripts = files("app.limits")
        self._reserve = self._redis.register_script((scripts / "reserve.lua").read_text())
        self._settle = self._redis.register_script((scripts / "settle.lua").read_text())
        self._renew = self._redis.register_script((scripts / "renew.lua").read_text())

    async def reserve(self, claim: Claim, lease_ms: int) -> Decision:
        return await self._decide(claim, lease_ms, take=True)

    async def peek(self, claim: Claim) -> Decision:
        return await self._decide(claim, 0, take=False)

    async def settle(self, claim: Claim, slot: int, unused: tuple[int, ...]) -> None:
        await self._settle(
            keys=self._keys(claim),
            args=[
                len(claim.windows),
                claim.request_id,
                slot,
                *unused,
            ],
        )

    async def renew(self, seats: list[tuple[str, str]], lease_ms: int) -> None:
        by_group: dict[str, list[tuple[str, str]]] = {}
        for key, request_id in seats:
            by_group.setdefault(key.split(":", 1)[0], []).append((key, request_id))
        for group, held in by_group.items():
            await self._renew(
                keys=[self._key(group, key) for key, _ in held],
                args=[lease_ms, *(request_id for _, request_id in held)],
            )

    async def seats_taken(self, key: str) -> int:
        seconds, micros = await self._redis.time()
        now_ms = seconds * 1000 + micros // 1000
        group = key.split(":", 1)[0]
        return await self._redis.zcount(self._key(group, key), f"({now_ms}", "+inf")

    async def close(self) -> None:
        await self._redis.aclose()

    def _key(self, group: str, key: str) -> str:
        return f"{self._prefix}:{{{group}}}:{key}"

    def _keys(self, claim: Claim) -> list[str]:
        keys = [self._key(claim.group, taken.key) for taken in claim.windows]
        keys += [self._key(claim.group, seat.key) for seat in claim.seats]
        return keys

    async def _decide(self, claim: Claim, lease_ms: int, *, take: bool) -> Decision:
        args: list[str | int] = [
            len(claim.windows),
            int(take),
            claim.request_id,
            lease_ms,
        ]
        for taken in claim.windows:
            args += [taken.limit, taken.amount]
        args += [seat.limit for seat in claim.seats]
        reply: Any = await self._reserve(keys=self._keys(claim), args=args)
        second, refused, wait_ms, *figures = (int(value) for value in reply)
        levels = tuple(
            Level(taken.name, taken.limit, used=figures[2 * i], reset_ms=figures[2 * i + 1])
            for i, taken in enumerate(claim.windows)
        )
        if refused == 0:
            return Decision(second, levels)
        name = "concurrency" if refused < 0 else claim.windows[refused - 1].name
        return Decision(second, levels, refused_by=name, wait_ms=wait_ms)
