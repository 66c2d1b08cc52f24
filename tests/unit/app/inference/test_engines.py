"""Which engine gets a call, and what the router knows of each."""

import asyncio

import pytest

from app.engines import service
from app.errors import Overloaded
from engine.errors import EngineUnavailable
from engine.types import AdapterRef, Residency
from tests.fake_engine import BASE_DIGEST, FakeEngine, describe
from tests.serving import install_engines

REF = AdapterRef("5a" * 16, "d1" * 32)


@pytest.fixture
def engines() -> dict[str, FakeEngine]:
    return {"ipc://one": FakeEngine(), "ipc://two": FakeEngine()}


@pytest.fixture
async def router(platform, engines):
    opened = install_engines(platform, engines)
    await opened.refresh()
    return opened


class TestChoose:
    async def test_the_less_loaded_engine_is_chosen(self, router, engines):
        engines["ipc://one"].running = 3
        await router.refresh()
        assert router.choose(None).address == "ipc://two"

    async def test_requests_of_this_process_count_before_the_next_poll(self, router):
        for name in ("a", "b"):
            router.choose(None, key=name).in_flight.add(name)
        assert sorted(len(engine.in_flight) for engine in router.all) == [1, 1]

    async def test_an_adapter_stays_where_it_is_resident(self, router, engines):
        engines["ipc://two"].adapters = [Residency(REF, "device", 1000, 0)]
        engines["ipc://two"].running = 2
        await router.refresh()
        assert router.choose(REF).address == "ipc://two"
        assert router.choose(None).address == "ipc://one"

    async def test_a_resident_adapter_moves_when_its_engine_is_overloaded(self, router, engines):
        engines["ipc://two"].adapters = [Residency(REF, "device", 1000, 0)]
        engines["ipc://two"].running = 9
        await router.refresh()
        assert router.choose(REF).address == "ipc://one"

    async def test_a_dead_engine_gets_nothing(self, router, engines):
        engines["ipc://one"].alive = False
        assert router.choose(None).address == "ipc://two"
        engines["ipc://two"].alive = False
        with pytest.raises(Overloaded) as refusal:
            router.choose(None)
        assert refusal.value.code == "engine_unavailable"

    async def test_an_engine_of_another_base_model_gets_nothing(self, router):
        assert router.choose(None, BASE_DIGEST).address in ("ipc://one", "ipc://two")
        with pytest.raises(Overloaded):
            router.choose(None, "another")


class TestTwoBaseModels:
    OTHER = "c" * 64

    @pytest.fixture
    def engines(self):
        other = describe(name="other-base", base_digest=self.OTHER)
        return {"ipc://one": FakeEngine(), "ipc://two": FakeEngine(description=other)}

    async def test_each_engine_gets_its_own_base_alone(self, router, engines):
        engines["ipc://one"].running = 50
        await router.refresh()
        assert router.choose(None, BASE_DIGEST).address == "ipc://one"
        assert router.choose(REF, self.OTHER).address == "ipc://two"
        assert set(router.served()) == {BASE_DIGEST, self.OTHER}

    async def test_the_loss_of_one_leaves_its_base_without_an_engine(self, router, engines):
        engines["ipc://one"].alive = False
        with pytest.raises(Overloaded):
            router.choose(None, BASE_DIGEST)
        assert router.choose(None, self.OTHER).address == "ipc://two"


class TestDrain:
    @staticmethod
    async def wish(platform, router, *, drained):
        await router.refresh()
        async with platform.db.transaction() as session:
            await service.set_drained(session, "ipc://one", drained=drained, actor="tests")
        await router.refresh()

    async def test_a_drained_engine_gets_nothing_and_a_resumed_one_does(
        self, router, engines, platform
    ):
        await self.wish(platform, router, drained=True)
        assert engines["ipc://one"].held
        assert {router.choose(None, key=str(i)).address for i in range(9)} == {"ipc://two"}
        await self.wish(platform, router, drained=False)
        assert not engines["ipc://one"].held
        assert {router.choose(None, key=str(i)).address for i in range(9)} == set(engines)

    async def test_an_engine_that_ends_gets_nothing(self, router, engines):
        engines["ipc://one"].ending = True
        await router.refresh()
        assert {router.choose(None, key=str(i)).address for i in range(9)} == {"ipc://two"}

    async def test_when_all_are_drained_the_refusal_says_so(self, router, engines):
        for engine in engines.values():
            engine.ending = True
        await router.refresh()
        with pytest.raises(Overloaded) as refusal:
            router.choose(None)
        assert refusal.value.code == "draining"
        assert refusal.value.retry_after_ms >= 1000


class TestStart:
    async def test_the_first_call_finds_the_engines_that_are_there(self, platform):
        router = install_engines(platform, {"tcp://one:1": FakeEngine()})
        await router.start(wait_s=60)
        assert router.choose(None, BASE_DIGEST).address == "tcp://one:1"
        await router.close()

    async def test_an_engine_without_a_word_holds_nothing_up_for_long(self, platform):
        class Silent(FakeEngine):
            async def status(self):
                await asyncio.Event().wait()

        silent = Silent()
        router = install_engines(platform, {"tcp://one:1": silent, "tcp://two:1": FakeEngine()})
        async with asyncio.timeout(60):
            await router.start(wait_s=0.2)
        assert router.choose(None, BASE_DIGEST).address == "tcp://two:1"
        await router.close()

    async def test_without_an_engine_it_starts_all_the_same(self, platform):
        router = install_engines(platform, {})
        await router.start(wait_s=60)
        with pytest.raises(Overloaded):
            router.choose(None)
        await router.close()


class TestReadiness:
    async def test_an_engine_with_another_tokenizer_is_never_used(self, platform):
        other = FakeEngine(description=describe(tokenizer_digest="0" * 64))
        router = install_engines(platform, {"ipc://one": other})
        await router.refresh()
        assert "tokenizer" in router.problem()
        with pytest.raises(Overloaded):
            router.choose(None)

    async def test_ready_once_an_engine_answers_and_not_after_it_died(self, platform):
        engine = FakeEngine(alive=False)
        router = install_engines(platform, {"ipc://one": engine})
        await router.refresh()
        assert "ipc://one" in router.problem()
        engine.alive = True
        await router.refresh()
        assert router.problem() is None
        engine.alive = False
        assert router.problem()

    async def test_a_restarted_engine_is_described_anew(self, router, engines):
        engine = engines["ipc://one"]
        engine.engine_id = "engine-2"
        engine.description = describe(base_digest="c" * 64)
        await router.refresh()
        assert router.choose(None, "c" * 64).address == "ipc://one"

    async def test_what_an_engine_described_is_remembered(self, router, platform):
        from app.adapters.base_models import last_seen

        assert (await last_seen(platform.db)).base_digest == BASE_DIGEST


class TestJournals:
    async def test_an_engine_that_is_not_configured_is_unavailable(self, router):
        with pytest.raises(EngineUnavailable):
            await router.journal("ipc://gone", ["req_1"])

    async def test_acknowledging_an_engine_that_is_away_is_harmless(self, router, engines):
        engines["ipc://one"].alive = False
        await router.acknowledge("ipc://one", ["req_1"])
        await router.acknowledge("ipc://two", ["req_2"])
        assert engines["ipc://two"].acknowledged == ["req_2"]
