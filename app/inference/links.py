"""The engines' clients as validation and erasure use them: those there are at each look."""

from collections.abc import AsyncIterator, Callable, Sequence
from typing import NoReturn, overload

from app.adapters.probes import Engine
from engine.errors import EngineUnavailable
from engine.types import AdapterRef, GenerateRequest, ModelDescription, RequestOutput


class Links(Sequence[Engine]):
    """While the registry cannot be read (`problem`), the engines that it may name are there too, as
    one that never answers: nothing is then taken for done by all of them."""

    def __init__(
        self, clients: Callable[[], Sequence[Engine]], problem: Callable[[], str | None]
    ) -> None:
        self._clients = clients
        self._problem = problem

    def _now(self) -> list[Engine]:
        problem = self._problem()
        return [*self._clients(), *([] if problem is None else [_Unnamed(problem)])]

    def __len__(self) -> int:
        return len(self._now())

    @overload
    def __getitem__(self, index: int) -> Engine: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Engine]: ...
    def __getitem__(self, index: int | slice) -> Engine | Sequence[Engine]:
        return self._now()[index]


class _Unnamed:
    """Engines of which nothing is known now."""

    def __init__(self, problem: str) -> None:
        self._problem = problem

    def _away(self) -> NoReturn:
        raise EngineUnavailable(self._problem)

    async def describe(self) -> ModelDescription:
        self._away()

    def generate(self, request: GenerateRequest) -> AsyncIterator[RequestOutput]:
        self._away()

    async def forget(self, ref: AdapterRef) -> bool:
        self._away()
