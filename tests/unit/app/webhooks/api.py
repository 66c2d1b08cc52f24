"""A tenant's way to its webhooks, and a worker that delivers them."""

from typing import Any

import httpx

from app.keys.service import NewKey
from app.platform import Platform
from app.webhooks import delivery
from app.webhooks.sender import Sender
from tests.factories import bearer

EVENTS = [
    "version.ready",
    "version.rejected",
    "version.failed",
    "quota.threshold",
    "limits.decided",
]


class Hooks:
    """`send` answers whatever comes; the others expect that it works."""

    def __init__(
        self, client: httpx.AsyncClient, platform: Platform, key: NewKey, sender: Sender
    ) -> None:
        self.client = client
        self.platform = platform
        self.key = key
        self.sender = sender

    def of(self, key: NewKey) -> "Hooks":
        return Hooks(self.client, self.platform, key, self.sender)

    async def send(
        self, method: str, path: str = "", body: object = None, **headers: str
    ) -> httpx.Response:
        return await self.client.request(
            method, f"/v1/webhooks{path}", json=body, headers=bearer(self.key) | headers
        )

    async def register(self, url: str, **changes: Any) -> tuple[str, str]:
        """(id, secret) of a new endpoint that is told everything."""
        answer = await self.send("POST", "", {"url": url, "events": EVENTS} | changes)
        assert answer.status_code == 201, answer.text
        return answer.json()["webhook"]["id"], answer.json()["secret"]

    async def test(self, webhook: str) -> str:
        """The id of a test's delivery, not yet sent."""
        answer = await self.send("POST", f"/{webhook}/test")
        assert answer.status_code == 202, answer.text
        return str(answer.json()["id"])

    async def deliveries(self, webhook: str, query: str = "") -> list[dict[str, Any]]:
        answer = await self.send("GET", f"/{webhook}/deliveries{query}")
        assert answer.status_code == 200, answer.text
        return list(answer.json()["data"])

    async def shown(self, webhook: str) -> dict[str, Any]:
        return dict((await self.send("GET", f"/{webhook}")).json())

    async def sweep(self) -> int:
        return await delivery.sweep(self.platform, self.sender)

    async def sweep_until_dead(self, webhook: str) -> int:
        """Lets time pass and sweeps, for two days at most; how many attempts were made."""
        made = 0
        for _ in range(48 * 60):
            made += await self.sweep()
            if all(d["state"] != "pending" for d in await self.deliveries(webhook)):
                return made
            [pending] = await self.deliveries(webhook, "?state=pending")
            wait_s = pending["next_attempt_at"] + 1 - self.platform.clock.now().timestamp()
            self.platform.clock.advance(seconds=max(1.0, wait_s))  # type: ignore[attr-defined]
        raise AssertionError("it is tried for ever")
