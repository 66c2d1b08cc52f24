"""Work that many wait for at once."""

import asyncio

from app.grouping import Grouped


class Work:
    """Doubles numbers; refuses odd ones. The first group waits for `go`."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.groups: list[list[int]] = []

    async def __call__(self, numbers: list[int]) -> list[int | Exception]:
        self.groups.append(numbers)
        await self.go.wait()
        return [ValueError(number) if number % 2 else number * 2 for number in numbers]


async def test_what_comes_meanwhile_is_the_next_group_and_each_has_its_own_answer() -> None:
    work = Work()
    grouped = Grouped(work, 3)
    first = asyncio.create_task(grouped.do(2))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    others = [asyncio.create_task(grouped.do(number)) for number in (4, 5, 6, 8)]
    await asyncio.sleep(0)
    others.pop().cancel()
    work.go.set()
    answers = await asyncio.gather(first, *others, return_exceptions=True)
    assert work.groups == [[2], [4, 5, 6]]
    assert answers[:2] == [4, 8]
    assert isinstance(answers[2], ValueError)
    assert answers[3] == 12


async def test_a_failure_of_the_whole_group_reaches_all_and_does_not_outlive_it() -> None:
    fails = [True, False]

    async def work(items: list[int]) -> list[int]:
        if fails.pop(0):
            raise OSError("away")
        return items

    grouped: Grouped[int, int] = Grouped(work, 10)
    answers = await asyncio.gather(grouped.do(1), grouped.do(2), return_exceptions=True)
    assert [type(answer) for answer in answers] == [OSError, OSError]
    assert await grouped.do(3) == 3
