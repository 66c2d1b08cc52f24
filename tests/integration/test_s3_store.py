"""The object store against a real server: the folder's promises, and a whole upload over it."""

import asyncio
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from app.adapters.tasks import clean
from app.keys.service import NewKey
from app.platform import Platform
from app.settings import Settings
from engine.adapters import s3_store
from engine.adapters.folder_store import FolderStore
from engine.adapters.loader import StoreLoader
from engine.adapters.loading import Loaded, LoadFailed, Measured
from engine.adapters.s3_store import COPY_PREFIX, S3Store, parse_address
from engine.adapters.store import AdapterStore, StoredAdapter, open_store
from engine.clock import SimulatedClock
from engine.errors import (
    AdapterCorrupt,
    AdapterMissing,
    AdapterRefused,
    EngineError,
    StoreUnavailable,
)
from engine.types import AdapterRef
from tests.adapter_files import AdapterFiles, good_adapter, tiny_description
from tests.factories import bearer, make_key, make_tenant
from tests.fakes import engine_config
from tests.s3_server import CREDENTIALS, S3Server
from tests.upload_parts import PartedUpload, error_of
from tests.validation_bench import Bench, make_bench, post_upload

BASE = tiny_description()
SALT, OTHER = "a" * 32, "b" * 32
CONFIG, WEIGHTS = b'{"r": 4}', b"w" * 3000
DAY_S = 86_400.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    running = S3Server(tmp_path_factory.mktemp("s3"))
    running.start()
    yield running
    running.stop()


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # local copies lie here


@pytest.fixture
def url(server: S3Server) -> str:
    return server.new_store_url()


@pytest.fixture(params=["folder", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> AdapterStore:
    if request.param == "folder":
        return FolderStore(tmp_path / "store")
    return open_store(str(request.getfixturevalue("url")))


def put(store: AdapterStore, salt: str = SALT, weights: bytes = WEIGHTS) -> StoredAdapter:
    with store.stage() as staging:
        staging.write_config(CONFIG)
        staging.write_weights(weights[:1000])
        staging.write_weights(weights[1000:])
        return staging.commit(salt)


def copies() -> list[str]:
    return [name for name in os.listdir(tempfile.gettempdir()) if name.startswith(COPY_PREFIX)]


class TestWhatBothStoresPromise:
    def test_what_was_written_is_read_back(self, store: AdapterStore) -> None:
        files = store.open_checked(put(store).ref)
        assert files.config == CONFIG
        assert files.weights_path.read_bytes() == WEIGHTS
        names = sorted(os.listdir(files.weights_path.parent))
        assert names == ["adapter_config.json", "adapter_model.safetensors"]
        store.release(files)

    def test_the_digest_does_not_depend_on_the_store(
        self, store: AdapterStore, tmp_path: Path
    ) -> None:
        assert put(store) == put(FolderStore(tmp_path / "another"))

    def test_the_same_bytes_twice_are_one_adapter(self, store: AdapterStore) -> None:
        assert put(store) == put(store)
        assert len(list(store.refs())) == 1
        assert store.list_staging_older_than(-DAY_S) == []

    def test_the_same_bytes_of_two_tenants_are_two(self, store: AdapterStore) -> None:
        mine, theirs = put(store, SALT).ref, put(store, OTHER).ref
        assert store.delete(mine)
        assert not store.delete(mine)
        store.verify(theirs)
        assert list(store.refs()) == [theirs]
        with pytest.raises(AdapterMissing):
            store.open(mine)

    def test_leaving_without_commit_leaves_nothing(self, store: AdapterStore) -> None:
        for prepared in (False, True):
            with store.stage() as staging:
                staging.write_config(CONFIG)
                staging.write_weights(WEIGHTS)
                if prepared:
                    staging.prepare()
        assert list(store.refs()) == []
        assert store.list_staging_older_than(-DAY_S) == []

    @pytest.mark.parametrize("missing", ["config", "weights"])
    def test_half_an_adapter_is_not_committed(self, store: AdapterStore, missing: str) -> None:
        with store.stage() as staging:
            if missing == "config":
                staging.write_weights(WEIGHTS)
            else:
                staging.write_config(CONFIG)
            with pytest.raises(AdapterRefused) as caught:
                staging.commit(SALT)
        assert caught.value.code == "missing_file"
        assert list(store.refs()) == []

    @pytest.mark.parametrize("salt", ["", "..", "a/b", "A" * 32, "a" * 32 + "\n", ".parts"])
    def test_no_name_leads_elsewhere(self, store: AdapterStore, salt: str) -> None:
        with pytest.raises(AdapterMissing):
            put(store, salt)
        for ref in (AdapterRef(salt, "c" * 64), AdapterRef(SALT, salt)):
            for use in (store.open, store.verify, store.delete):
                with pytest.raises(AdapterMissing):
                    use(ref)
        assert list(store.refs()) == []

    def test_parts_are_read_back_by_every_process(self, store: AdapterStore) -> None:
        writer = store.new_part("upl_1")
        writer.write(b"one ")
        writer.write(b"part")
        name = writer.finish()
        writer.abort()
        assert b"".join(store.read_part("upl_1", name)) == b"one part"
        assert store.uploads_with_parts() == ["upl_1"]
        given_up = store.new_part("upl_2")
        given_up.write(b"x")
        given_up.abort()
        store.drop_part("upl_1", name)
        store.drop_part("upl_1", name)
        with pytest.raises(AdapterMissing):
            list(store.read_part("upl_1", name))
        store.drop_parts("upl_1")
        store.drop_parts("upl_2")
        assert store.uploads_with_parts() == []
        assert list(store.refs()) == []

    @pytest.mark.parametrize("name", ["..", "a/b", "", "UPL", "x" * 65])
    def test_no_upload_leads_elsewhere(self, store: AdapterStore, name: str) -> None:
        with pytest.raises(AdapterMissing):
            store.new_part(name)
        with pytest.raises(AdapterMissing):
            list(store.read_part("upl_1", name))
        with pytest.raises(AdapterMissing):
            store.drop_parts(name)


class TestObjects:
    def test_weights_without_a_name_are_swept_when_they_are_old(self, url: str) -> None:
        store = open_store(url)
        kept = put(store).ref
        crashed = store.stage()
        crashed.write_config(b"{}")
        crashed.write_weights(b"left behind")
        crashed.prepare()  # then its process dies
        clock = SimulatedClock()
        later = S3Store(parse_address(url), clock)
        assert store.sweep(3600) == 0
        clock.wall_ms = lambda: 4e12  # type: ignore[method-assign] # long after now
        assert len(later.list_staging_older_than(3600)) == 1
        assert later.sweep(3600) == 1
        later.verify(kept)

    def test_a_changed_object_is_found_out(self, url: str) -> None:
        store = S3Store.at(url)
        ref = put(store).ref
        (name,) = store._names(ref)
        store.client.put_object(
            Bucket=store.address.bucket, Key=store.weights_key(name), Body=b"rot"
        )
        with pytest.raises(AdapterCorrupt):
            store.open(ref)
        assert copies() == []
        put(store)  # sent again, it is whole again
        store.verify(ref)

    def test_lost_weights_are_an_adapter_that_is_missing(self, url: str) -> None:
        store = S3Store.at(url)
        ref = put(store).ref
        store.delete_object(store.weights_key(store._names(ref)[0]))
        with pytest.raises(AdapterMissing):
            store.open(ref)
        assert copies() == []

    def test_large_files_go_in_several_pieces(
        self, url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        small = s3_store.TransferConfig(multipart_threshold=1, multipart_chunksize=5 << 20)
        monkeypatch.setattr(s3_store, "TRANSFER", small)
        weights = os.urandom(6 << 20)
        store = open_store(url)
        files = store.open(put(store, weights=weights).ref)
        assert files.weights_path.read_bytes() == weights
        store.release(files)

    def test_copies_are_private_and_go_when_they_are_released(self, url: str) -> None:
        store = open_store(url)
        files = store.open(put(store).ref)
        assert files.weights_path.stat().st_mode & 0o777 == 0o600
        assert files.weights_path.parent.stat().st_mode & 0o777 == 0o700
        assert len(copies()) == 1
        store.release(files)
        assert copies() == []

    def test_two_stores_in_one_bucket_do_not_see_each_other(self, url: str) -> None:
        put(open_store(url))
        assert list(open_store(url.replace("/some/where", "/some")).refs()) == []
        assert list(open_store(url.replace("/some/where", "")).refs()) == []

    def test_many_threads_may_use_one_store(self, url: str) -> None:
        store = open_store(url)
        problems: list[BaseException] = []

        def use(number: int) -> None:
            try:
                ref = put(store, weights=bytes([number]) * 2000).ref
                store.release(store.open(ref))
            except Exception as error:  # noqa: BLE001 - shown by the assertion below
                problems.append(error)

        threads = [threading.Thread(target=use, args=(n,)) for n in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert problems == []
        assert len(list(store.refs())) == 6


class TestWhenTheServerIsAway:
    def test_every_use_ends_soon_and_says_that_the_store_is_away(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(s3_store, "ATTEMPTS", 1)
        store = S3Store.at("s3://bucket/p?endpoint=http://127.0.0.1:9")
        for use in (
            lambda: store.open(AdapterRef(SALT, "c" * 64)),
            lambda: store.delete(AdapterRef(SALT, "c" * 64)),
            lambda: list(store.refs()),
            lambda: store.uploads_with_parts(),
            lambda: put(store),
        ):
            with pytest.raises(StoreUnavailable) as caught:
                use()
            assert "127.0.0.1" not in caught.value.message
        assert copies() == []

    def test_a_bucket_that_is_not_there_is_no_missing_adapter(self, server: S3Server) -> None:
        store = open_store(f"s3://no-such-bucket/p?endpoint={server.endpoint}")
        with pytest.raises(StoreUnavailable, match="NoSuchBucket"):
            store.open(AdapterRef(SALT, "c" * 64))

    async def test_an_upload_meanwhile_is_a_503_and_leaves_nothing(
        self,
        app: FastAPI,
        client: httpx.AsyncClient,
        platform: Platform,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(s3_store, "ATTEMPTS", 1)
        away = open_store("s3://bucket/p?endpoint=http://127.0.0.1:9")
        bench = await make_bench(app, store=away)
        key = await make_key(platform, await make_tenant(platform))
        refused = await post_upload(client, key, good_adapter(BASE), "a")
        assert error_of(refused)[:2] == (503, "store_unavailable")
        assert bench.queue.messages == []
        listed = await client.get("/v1/adapters", headers=bearer(key))
        assert listed.json()["data"] == []


class TestAddresses:
    @pytest.mark.parametrize(
        "url",
        [
            "s3://",
            "s3://UPPER/p",
            "s3://bucket/../p",
            "s3://bucket/a//b",
            "s3://key:secret@bucket/p",
            "s3://bucket/p?endpont=http://x",
            "s3://bucket/p?endpoint=ftp://x",
            "s3://bucket/p?endpoint=http://user@x",
            "s3://bucket/p#x",
        ],
    )
    def test_one_that_cannot_be_meant_is_refused_in_a_sentence(self, url: str) -> None:
        with pytest.raises(EngineError) as caught:
            open_store(url)
        assert caught.value.code == "unsupported_store"
        assert "secret" not in caught.value.message

    def test_the_parts_of_one(self) -> None:
        address = parse_address("s3://bucket/a/b/?endpoint=https://h:9000&region=eu-central-1")
        assert (address.bucket, address.prefix) == ("bucket", "a/b/")
        assert (address.endpoint, address.region) == ("https://h:9000", "eu-central-1")

    def test_settings_refuse_credentials_in_it(self) -> None:
        with pytest.raises(ValueError, match="AWS_ACCESS_KEY_ID"):
            Settings(adapter_store_url="s3://key:secret@bucket/p")

    def test_nothing_imports_the_library_for_a_folder(self) -> None:
        code = (
            "import sys, engine.adapters.store, engine.adapters.loader, app.adapters.deps; "
            "from engine.adapters.store import open_store; open_store('file:///tmp'); "
            "sys.exit('boto3' in sys.modules)"
        )
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


class TestAWholeUpload:
    """Upload, validation in a real child process, and the engine's own loader, over the server."""

    @pytest.fixture
    def settings(self, settings: Settings, url: str) -> Settings:
        return settings.model_copy(update={"adapter_store_url": url, "upload_part_bytes": 4096})

    @pytest.fixture
    async def bench(self, app: FastAPI) -> Bench:
        return await make_bench(app)

    @pytest.fixture
    async def key(self, platform: Platform) -> NewKey:
        return await make_key(platform, await make_tenant(platform))

    async def test_becomes_ready_and_is_loaded_by_the_engine(
        self, client: httpx.AsyncClient, key: NewKey, bench: Bench, url: str
    ) -> None:
        assert isinstance(bench.resources.store, S3Store)
        upload = PartedUpload(client, key, good_adapter(BASE))
        await upload.begin()
        await upload.put_all()
        assert len(bench.resources.store.uploads_with_parts()) == 1
        assert (await upload.complete()).status_code == 202
        assert await bench.work() == ["ready"]
        assert bench.resources.store.uploads_with_parts() == []
        (ref,) = bench.resources.store.refs()
        assert copies() == []
        loader = StoreLoader(engine_config(), open_store(url), BASE)
        try:
            loader.measure(ref)
            (measured,) = await events(loader)
            assert isinstance(measured, Measured)
            loader.build(ref)
            (loaded,) = await events(loader)
            assert isinstance(loaded, Loaded)
            assert copies() == []
            loader.measure(ref)
            await events(loader)
            loader.abandon(ref)
        finally:
            loader.close()
        assert copies() == []

    async def test_a_rejected_file_leaves_no_copy_either(
        self, client: httpx.AsyncClient, key: NewKey, bench: Bench
    ) -> None:
        good = good_adapter(BASE)
        await post_upload(client, key, AdapterFiles(good.config, (good.weights or b"")[:-1]), "a")
        assert await bench.work() == ["rejected"]
        assert copies() == []

    async def test_an_erased_adapter_leaves_nothing_in_the_bucket(
        self, client: httpx.AsyncClient, key: NewKey, bench: Bench
    ) -> None:
        await post_upload(client, key, good_adapter(BASE), "a")
        await bench.work()
        receipt = await client.delete("/v1/adapters/a", headers=bearer(key))
        assert [item["disk"] for item in receipt.json()["items"]] == ["erased"]
        store = bench.resources.store
        assert isinstance(store, S3Store)
        assert list(store._keys("")) == []
        await clean(bench.resources)

    async def test_a_cold_adapter_whose_file_is_gone_is_worth_another_try(
        self, client: httpx.AsyncClient, key: NewKey, bench: Bench, url: str
    ) -> None:
        await post_upload(client, key, good_adapter(BASE), "a")
        (ref,) = bench.resources.store.refs()
        bench.resources.store.delete(ref)
        loader = StoreLoader(engine_config(), open_store(url), BASE)
        try:
            loader.measure(ref)
            (failed,) = await events(loader)
        finally:
            loader.close()
        assert isinstance(failed, LoadFailed)
        assert (failed.code, failed.transient) == ("adapter_missing", True)


async def events(loader: StoreLoader) -> list[object]:
    async with asyncio.timeout(20):
        while True:
            if found := loader.poll():
                return list(found)
            await asyncio.sleep(0.01)
