"""Engines that register: which are trusted, and how the router takes them on and lets them go."""

from dataclasses import dataclass, field

import pytest
from redis.asyncio import Redis
from sqlalchemy.exc import OperationalError

from app.engines import service
from app.engines.registry import LINE_BYTES, EngineRegistry, Registered, Roll, screen
from app.inference.engines import Engine, EngineRouter
from app.settings import Settings
from engine.errors import EngineUnavailable
from engine.registration import MEMBERS, Registration, encode, key_of
from engine.types import AdapterRef
from tests.fake_engine import ByteCodec, FakeEngine

KNOWN, FOREIGN = "k" * 40, "f" * 40


def line(address, engine_id="e1", **changes):
    return Registration(engine_id, address, "tiny", "b" * 64, **changes)


class TestTrust:
    @pytest.fixture
    def settings(self, tmp_path):
        return Settings(
            data_dir=tmp_path,
            engine_registry_url="redis://127.0.0.1:6379/12",
            engine_public_keys=[KNOWN],
        )

    @staticmethod
    def screened(settings, *lines):
        texts = [(encode(item), 1000 + number) for number, item in enumerate(lines)]
        return screen(settings, texts)

    def test_an_engine_on_tcp_needs_a_key_that_the_settings_have(self, settings):
        roll = self.screened(
            settings,
            line("tcp://gpu-1:5555", public_key=KNOWN),
            line("tcp://gpu-2:5555", public_key=FOREIGN),
            line("tcp://gpu-3:5555"),
        )
        assert set(roll.engines) == {"tcp://gpu-1:5555"}
        assert set(roll.refused) == {"tcp://gpu-2:5555", "tcp://gpu-3:5555"}
        assert all("LORAMUX_ENGINE_PUBLIC_KEYS" in why for why in roll.refused.values())

    def test_a_socket_must_lie_where_the_settings_have_engines(self, settings):
        ours = settings.own_engine.rpartition("/")[0] + "/engine-two.sock"
        roll = self.screened(settings, line(ours), line("ipc:///tmp/elsewhere/e.sock"))
        assert set(roll.engines) == {ours}
        assert "folders" in roll.refused["ipc:///tmp/elsewhere/e.sock"]

    def test_of_two_at_one_address_the_longer_lease_counts(self, settings):
        lines = [line(settings.own_engine, "old"), line(settings.own_engine, "new")]
        roll = self.screened(settings, *lines)
        assert roll.engines[settings.own_engine].line.engine_id == "new"

    @pytest.mark.parametrize(
        "text",
        [
            b"",
            b"[]",
            b'{"engine_id": 3}',
            b"null",
            b"\xff\xfe",
            b'{"engine_id": "\xff"}',
            b'{"unknown": ' + b"[" * 50_000,
            encode(line("tcp://gpu-1:5555\0x")),
        ],
    )
    def test_a_malformed_line_is_passed_over(self, settings, text):
        good = encode(line(settings.own_engine))
        assert set(screen(settings, [(text, 1), (good, 1)]).engines) == {settings.own_engine}


class TestSettings:
    URL = "redis://127.0.0.1:6379/12"

    def test_without_names_there_are_only_those_that_register(self, tmp_path):
        settings = Settings(data_dir=tmp_path, engine_registry_url=self.URL)
        assert settings.engines == []
        assert settings.own_engine.startswith("ipc://")

    def test_further_keys_and_models_are_for_engines_that_register(self, tmp_path):
        settings = Settings(
            data_dir=tmp_path,
            engine_registry_url=self.URL,
            engines=["tcp://gpu-1:5555"],
            engine_public_keys=[KNOWN, FOREIGN],
            engine_base_models=["/models/red", "/models/blue"],
        )
        assert [path.name for path in settings.base_models] == ["red", "blue"]
        with pytest.raises(ValueError, match="ENGINE_PUBLIC_KEYS"):
            Settings(
                data_dir=tmp_path,
                engines=["tcp://gpu-1:5555"],
                engine_public_keys=[KNOWN, FOREIGN],
            )

    def test_another_kind_of_url_is_refused(self, tmp_path):
        with pytest.raises(ValueError, match="redis://"):
            Settings(data_dir=tmp_path, engine_registry_url="http://127.0.0.1")


@pytest.mark.redis
async def test_whatever_others_write_there_the_good_line_is_read(tmp_path):
    url = "redis://127.0.0.1:6379/13"
    settings = Settings(data_dir=tmp_path, engine_registry_url=url)
    store = Redis.from_url(url)
    registry = EngineRegistry(settings)
    try:
        await store.delete(MEMBERS)
        await store.sadd(MEMBERS, "good", "binary", "huge", "list", "gone", b"\xff\xfe")
        await store.set(key_of("good"), encode(line(settings.own_engine)), px=60_000)
        await store.set(key_of("binary"), b"\xff\xfe", px=60_000)
        await store.set(key_of("huge"), b" " * (LINE_BYTES + 1), px=60_000)
        await store.delete(key_of("list"))
        await store.rpush(key_of("list"), "a")
        assert await registry.read()
        assert set(registry.roll.engines) == {settings.own_engine}
        assert await store.smembers(MEMBERS) == {b"good", b"binary", b"huge", b"list"}
    finally:
        await store.delete(MEMBERS, *map(key_of, ("good", "binary", "huge", "list")))
        await registry.close()
        await store.aclose()


@dataclass
class PaperRegistry:
    """A registry whose roll the test writes."""

    roll: Roll = field(default_factory=Roll)
    problem: str | None = None

    def write(self, *lines):
        self.roll = Roll({item.address: Registered(item, 5000) for item in lines})

    async def read(self):
        return self.problem is None

    def public_key(self, address):
        found = self.roll.engines.get(address)
        return found.line.public_key if found else None

    async def close(self): ...


class TestFollowing:
    @pytest.fixture
    def engines(self):
        return {f"ipc://{name}": FakeEngine() for name in ("named", "one", "two")}

    @pytest.fixture
    def registry(self):
        return PaperRegistry()

    @pytest.fixture
    def router(self, engines, registry):
        async def remember(_):
            return None

        return EngineRouter(
            ["ipc://named"], [ByteCodec], lambda a: engines[a], remember, registry=registry
        )

    @staticmethod
    async def addresses(router):
        await router.refresh()
        return {engine.address.removeprefix("ipc://") for engine in router.all}

    async def test_they_join_and_leave_beside_the_named_ones(self, router, registry, engines):
        assert await self.addresses(router) == {"named"}
        registry.write(line("ipc://one"), line("ipc://two"))
        assert await self.addresses(router) == {"named", "one", "two"}
        assert router.choose(None, besides=["ipc://named", "ipc://two"]).address == "ipc://one"
        registry.write(line("ipc://two"))
        engines["ipc://one"].alive = engines["ipc://named"].alive = False
        assert await self.addresses(router) == {"named", "two"}

    async def test_a_database_that_is_away_ends_no_watch(self, engines):
        away = True

        async def remember(_):
            if away:
                raise OperationalError("insert", {}, Exception("database is locked"))

        router = EngineRouter(["ipc://named"], [ByteCodec], lambda a: engines[a], remember)
        await router.refresh()
        assert "could not be noted" in router.problem()
        away = False
        await router.refresh()
        assert router.problem() is None

    async def test_one_that_answers_is_kept_whatever_the_registry_says(
        self, router, registry, engines
    ):
        registry.write(line("ipc://one"))
        await router.refresh()
        registry.write()
        assert await self.addresses(router) == {"named", "one"}
        registry.problem = "away"
        engines["ipc://one"].alive = False
        assert await self.addresses(router) == {"named", "one"}

    async def test_one_with_requests_is_kept_until_they_have_ended(self, router, registry, engines):
        registry.write(line("ipc://one"))
        await router.refresh()
        engine = router.choose(None, besides=["ipc://named"])
        engine.in_flight.add("req")
        engines["ipc://one"].alive = False
        registry.write()
        assert "one" in await self.addresses(router)
        engine.in_flight.clear()
        assert "one" not in await self.addresses(router)

    async def test_a_new_key_makes_a_new_connection(self, router, registry, engines):
        registry.write(line("ipc://one", public_key=KNOWN))
        await router.refresh()
        before = router.choose(None, besides=["ipc://named"])
        registry.write(line("ipc://one", public_key=FOREIGN))
        engines["ipc://one"].alive = False
        await router.refresh()
        after = next(engine for engine in router.all if engine.address == "ipc://one")
        assert after is not before
        assert after.public_key == FOREIGN

    async def test_the_refused_and_an_unreadable_registry_are_told(self, router, registry, engines):
        engines["ipc://named"].alive = False
        registry.roll = Roll(refused={"tcp://gpu-9:1": "its key is unknown"})
        registry.problem = "the engine registry does not answer"
        await router.refresh()
        assert "its key is unknown" in router.problem()
        assert "the engine registry does not answer" in router.problem()

    async def test_no_erasure_is_complete_while_the_registry_cannot_be_read(self, router, registry):
        await router.refresh()
        assert len(router.links) == 1
        registry.problem = "away"
        assert len(router.links) == 2
        with pytest.raises(EngineUnavailable):
            await router.links[1].forget(AdapterRef("5a" * 16, "d1" * 32))


async def test_rows_of_engines_that_are_long_gone_are_forgotten(platform, clock):
    async def noted(*addresses):
        known = [Engine(address, FakeEngine()) for address in addresses]
        await service.wishes(platform.db, known, clock.now())
        async with platform.db.reading() as session:
            return {row.address: row.name for row in await service.list_engines(session)}

    await noted("ipc://a", "ipc://b", "ipc://c")
    async with platform.db.transaction() as session:
        await service.set_drained(session, "ipc://b", drained=True, actor="tests")
    clock.advance(seconds=8 * 86_400)
    assert await noted("ipc://d") == {"ipc://b": "engine-1", "ipc://d": "engine-3"}
