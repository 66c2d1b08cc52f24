"""What arrives while work is under way is done together next: one transaction, many requests."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


class Grouped(Generic[Item, Result]):
    """`work` gets up to `most` items, and answers each, in order, with a result or its own error.

    One group is under way at a time, so work on an item begins after the item was handed in. What
    `work` raises itself is raised to everyone in the group.
    """

    def __init__(
        self, work: Callable[[list[Item]], Awaitable[Sequence[Result | Exception]]], most: int
    ) -> None:
        self._work = work
        self._most = most
        self._waiting: list[tuple[Item, asyncio.Future[Result]]] = []
        self._running: asyncio.Task[None] | None = None

    async def do(self, item: Item) -> Result:
        """The item's result. Who is cancelled before the item's group begins is left out."""
        answer: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, answer))
        if self._running is None:
            self._running = asyncio.create_task(self._run(), name="grouped work")
        return await answer

    async def _run(self) -> None:
        try:
            while self._waiting:
                group, self._waiting = self._waiting[: self._most], self._waiting[self._most :]
                await self._answer([entry for entry in group if not entry[1].done()])
        finally:
            self._running = None
            for _, answer in self._waiting:
                answer.cancel()
            self._waiting.clear()

    async def _answer(self, group: list[tuple[Item, asyncio.Future[Result]]]) -> None:
        try:
            results = await self._work([item for item, _ in group]) if group else []
        except Exception as error:  # noqa: BLE001 - raised to those who wait for it
            results = [error] * len(group)
        except BaseException:
            for _, answer in group:
                answer.cancel()
            raise
        for (_, answer), result in zip(group, results, strict=True):
            if answer.done():
                continue
            if isinstance(result, Exception):
                answer.set_exception(result)
            else:
                answer.set_result(result)
