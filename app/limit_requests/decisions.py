"""An operator's answer to a request, by the API or the console: committed, then told at once."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from sqlalchemy.ext.asyncio import AsyncSession

from app.adapters.resources import TaskQueue
from app.caller import Caller
from app.limit_requests import service
from app.limit_requests.models import LimitRequest
from app.platform import Platform
from app.webhooks.outbox import deliver_soon


@dataclass(frozen=True, slots=True)
class Decisions:
    """Of one operator. Both raise what app.limit_requests.service does."""

    platform: Platform
    queue: TaskQueue
    caller: Caller

    async def approve(self, request_id: str, *, value: float | None, answer: str) -> LimitRequest:
        """The new limit holds at once here, within seconds in other api processes."""

        async def work(session: AsyncSession) -> LimitRequest:
            return await service.approve(
                session,
                request_id,
                actor=self.caller,
                value=value,
                answer=answer,
                settings=self.platform.settings,
                now=self.platform.clock.now(),
            )

        row = await self._decide(work)
        self.platform.forget_keys()
        return row

    async def decline(self, request_id: str, *, answer: str) -> LimitRequest:
        async def work(session: AsyncSession) -> LimitRequest:
            return await service.decline(
                session,
                request_id,
                actor=self.caller,
                answer=answer,
                settings=self.platform.settings,
                now=self.platform.clock.now(),
            )

        return await self._decide(work)

    async def _decide(
        self, work: Callable[[AsyncSession], Awaitable[LimitRequest]]
    ) -> LimitRequest:
        async with self.platform.db.transaction() as session:
            row = await work(session)
        now = self.platform.clock.now()
        await deliver_soon(self.platform.db, self.queue, row.tenant_id, now)
        return row
