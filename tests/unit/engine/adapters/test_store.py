"""The folder store: whole adapters or none, whatever is asked and whenever it is killed."""

import hashlib
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.adapters import folder_store as store_module
from engine.adapters.folder_store import FolderStore
from engine.adapters.store import StoredAdapter, adapter_digest, open_store
from engine.clock import SimulatedClock
from engine.errors import AdapterCorrupt, AdapterMissing, AdapterRefused, EngineError
from engine.types import AdapterRef

SALT, OTHER = "a" * 32, "b" * 32
CONFIG, WEIGHTS = b'{"r": 4}', b"w" * 3000


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    return FolderStore(tmp_path / "store")


def put(store: FolderStore, salt: str = SALT, weights: bytes = WEIGHTS) -> StoredAdapter:
    with store.stage() as staging:
        staging.write_config(CONFIG)
        staging.write_weights(weights[:1000])
        staging.write_weights(weights[1000:])
        return staging.commit(salt)


def staged(store: FolderStore) -> list[str]:
    return os.listdir(store.root / ".staging")


class TestWriting:
    def test_the_digest_is_the_sha256_of_both_sha256(self, store: FolderStore) -> None:
        expected = hashlib.sha256(
            b"loramux-adapter-v1\0"
            + hashlib.sha256(CONFIG).digest()
            + hashlib.sha256(WEIGHTS).digest()
        ).hexdigest()
        kept = put(store)
        assert kept == StoredAdapter(AdapterRef(SALT, expected), len(CONFIG), len(WEIGHTS))
        assert expected == adapter_digest(
            hashlib.sha256(CONFIG).digest(), hashlib.sha256(WEIGHTS).digest()
        )

    def test_what_was_written_is_read_back(self, store: FolderStore) -> None:
        files = store.open(put(store).ref)
        assert files.config == CONFIG
        assert files.weights_path.read_bytes() == WEIGHTS

    def test_moving_a_byte_between_the_files_changes_the_digest(self, store: FolderStore) -> None:
        one = put(store, weights=b"ab")
        with store.stage() as staging:
            staging.write_config(CONFIG + b"a")
            staging.write_weights(b"b")
            assert staging.commit(SALT).ref != one.ref

    def test_files_are_0600_and_folders_0700(self, store: FolderStore) -> None:
        old = os.umask(0)
        try:
            put(store)
        finally:
            os.umask(old)
        for folder, _, names in os.walk(store.root):
            assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
            for name in names:
                assert stat.S_IMODE(os.stat(Path(folder, name)).st_mode) == 0o600

    def test_the_same_bytes_twice_are_one_adapter(self, store: FolderStore) -> None:
        assert put(store) == put(store)
        assert len(list(store.refs())) == 1
        assert staged(store) == []

    def test_the_same_bytes_of_two_tenants_are_two(self, store: FolderStore) -> None:
        mine, theirs = put(store, SALT).ref, put(store, OTHER).ref
        assert mine.digest == theirs.digest
        assert store.delete(mine)
        store.verify(theirs)
        with pytest.raises(AdapterMissing):
            store.open(mine)

    def test_uploading_again_repairs_a_damaged_copy(self, store: FolderStore) -> None:
        ref = put(store).ref
        store.open(ref).weights_path.write_bytes(b"rot")
        put(store)
        store.verify(ref)
        assert staged(store) == []

    def test_leaving_without_commit_leaves_nothing(self, store: FolderStore) -> None:
        with store.stage() as staging:
            staging.write_weights(WEIGHTS)
        assert staged(store) == []
        assert list(store.refs()) == []

    @pytest.mark.parametrize("missing", ["config", "weights"])
    def test_half_an_adapter_is_not_committed(self, store: FolderStore, missing: str) -> None:
        with store.stage() as staging:
            if missing == "config":
                staging.write_weights(WEIGHTS)
            else:
                staging.write_config(CONFIG)
            with pytest.raises(AdapterRefused) as caught:
                staging.commit(SALT)
        assert caught.value.code == "missing_file"
        assert staged(store) == []

    def test_nothing_is_written_after_commit(self, store: FolderStore) -> None:
        with store.stage() as staging:
            staging.write_config(CONFIG)
            staging.write_weights(WEIGHTS)
            ref = staging.commit(SALT).ref
            with pytest.raises(ValueError, match="closed"):
                staging.write_weights(b"more")
        store.verify(ref)


class TestReading:
    def test_every_changed_byte_is_noticed(self, store: FolderStore) -> None:
        ref = put(store).ref
        store.verify(ref)
        folder = store.open(ref).weights_path.parent
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            good = (folder / name).read_bytes()
            for bad in (bytes([good[0] ^ 1]) + good[1:], good[:-1], good + b"\0"):
                (folder / name).write_bytes(bad)
                with pytest.raises(AdapterCorrupt):
                    store.verify(ref)
            (folder / name).write_bytes(good)
        store.verify(ref)

    @pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
    def test_a_missing_file_is_a_missing_adapter(self, store: FolderStore, name: str) -> None:
        ref = put(store).ref
        (store.open(ref).weights_path.parent / name).unlink()
        for read in (store.open, store.verify):
            with pytest.raises(AdapterMissing):
                read(ref)

    def test_deleting_twice_tells_the_second_time(self, store: FolderStore) -> None:
        ref = put(store).ref
        assert store.delete(ref)
        assert not store.delete(ref)
        assert staged(store) == []
        assert sorted(os.listdir(store.root)) == [".staging"]

    def test_an_open_reader_keeps_its_bytes_through_a_delete(self, store: FolderStore) -> None:
        ref = put(store).ref
        with store.open(ref).weights_path.open("rb") as reader:
            store.delete(ref)
            assert reader.read() == WEIGHTS


EVIL = [
    "..", ".", "", "/", "/etc", "../..", "../" * 8 + "etc", "a" * 32 + "/..", ".staging",
    "a" * 32 + "\0", "\0", "a" * 15, "a" * 65, "A" * 32, "g" * 32, "a" * 31 + "\n", "a" * 32 + "\n",
    "\u2024\u2024/" + "a" * 29, "\uff0e\uff0e", "a" * 31 + "\u0661", "%2e%2e", "~root",
]  # fmt: skip


class TestNames:
    @pytest.mark.parametrize("name", EVIL)
    def test_no_name_leads_outside_or_touches_the_disk(
        self, store: FolderStore, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        good = put(store).ref

        def touched(*_: object, **__: object) -> None:
            raise AssertionError("the disk was touched")

        monkeypatch.setattr(os, "open", touched)
        monkeypatch.setattr(Path, "rename", touched)
        for ref in (AdapterRef(name, good.digest), AdapterRef(good.salt, name)):
            for act in (store.open, store.verify, store.delete):
                with pytest.raises(AdapterMissing):
                    act(ref)

    @pytest.mark.parametrize("name", EVIL)
    def test_no_salt_leads_outside_when_writing(self, store: FolderStore, name: str) -> None:
        with store.stage() as staging:
            staging.write_config(CONFIG)
            staging.write_weights(WEIGHTS)
            with pytest.raises(AdapterMissing):
                staging.commit(name)
        assert os.listdir(store.root) == [".staging"]
        assert os.listdir(store.root.parent) == ["store"]

    @pytest.mark.parametrize("what", ["salt", "digest", "adapter_config.json", "weights"])
    def test_no_link_is_followed(self, store: FolderStore, tmp_path: Path, what: str) -> None:
        ref = put(store).ref
        folder = store.root / ref.salt / ref.digest
        path = {
            "salt": folder.parent,
            "digest": folder,
            "weights": folder / "adapter_model.safetensors",
        }.get(what, folder / what)
        outside = tmp_path / "outside"
        shutil.move(path, outside)
        path.symlink_to(outside)
        for read in (store.open, store.verify):
            with pytest.raises(AdapterMissing):
                read(ref)
        if what in ("salt", "digest"):
            assert list(store.refs()) == []

    def test_a_link_in_staging_is_removed_and_its_target_kept(
        self, store: FolderStore, tmp_path: Path
    ) -> None:
        keep = tmp_path / "keep"
        keep.mkdir()
        (store.root / ".staging" / "x").symlink_to(keep)
        assert store.sweep(0) == 1
        assert keep.is_dir()

    @pytest.mark.parametrize(
        "url", ["gs://bucket", "/tmp/x", "file://host/x", "file:x", "http://x"]
    )
    def test_only_a_url_that_is_understood_opens_a_store(self, url: str) -> None:
        with pytest.raises(EngineError) as caught:
            open_store(url)
        assert caught.value.code == "unsupported_store"

    def test_a_file_url_may_hold_spaces(self, tmp_path: Path) -> None:
        store = open_store((tmp_path / "my store").as_uri())
        assert isinstance(store, FolderStore)
        assert (tmp_path / "my store").is_dir()


STEPS: list[tuple[object, str]] = [
    (store_module, "_fsync_folder"),
    (store_module, "_remove"),
    (store_module, "_remove_if_empty"),
    (os, "fsync"),
    (os, "open"),
    (os, "close"),
    (os, "write"),
    (Path, "rename"),
    (Path, "mkdir"),
]


def run_and_die(action: Callable[[], object], at_call: int) -> bool:
    """Runs `action` in a child that dies before its n-th step on the disk; True if it died."""
    child = os.fork()
    if child == 0:
        remaining = [at_call]

        def dying(function: Callable[..., object]) -> Callable[..., object]:
            def step(*args: object, **named: object) -> object:
                if remaining[0] == 0:
                    os._exit(9)
                remaining[0] -= 1
                return function(*args, **named)

            return step

        for owner, name in STEPS:
            setattr(owner, name, dying(getattr(owner, name)))
        try:
            action()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


class TestCrashes:
    def test_killed_between_any_two_steps_of_a_commit(self, tmp_path: Path) -> None:
        step, died = 0, True
        while died:
            store = FolderStore(tmp_path / str(step))
            died = run_and_die(lambda store=store: put(store), step)  # type: ignore[misc]
            self.check_whole_or_absent(store, final=not died)
            step += 1
        assert step > 12

    def test_killed_between_any_two_steps_of_a_delete(self, tmp_path: Path) -> None:
        step, died = 0, True
        while died:
            store = FolderStore(tmp_path / str(step))
            ref = put(store).ref
            died = run_and_die(
                lambda store=store, ref=ref: store.delete(ref),  # type: ignore[misc]
                step,
            )
            self.check_whole_or_absent(store, final=False)
            step += 1
        assert step > 4

    def check_whole_or_absent(self, store: FolderStore, *, final: bool) -> None:
        refs = list(store.refs())
        for ref in refs:
            store.verify(ref)
        if final:
            assert len(refs) == 1
        store.sweep(0)
        assert staged(store) == []
        assert list(store.refs()) == refs
        assert put(store).ref in list(store.refs())


class TestSweep:
    def test_only_what_nobody_wrote_to_for_long_is_swept(self, tmp_path: Path) -> None:
        clock = SimulatedClock(10_000_000.0)
        store = FolderStore(tmp_path / "s", clock)
        old, busy = store.stage(), store.stage()
        for staging, written_s in ((old, 5_000), (busy, 9_990)):
            staging.write_weights(b"x")
            os.utime(staging.path, (1_000, 1_000))
            for file in staging.path.iterdir():
                os.utime(file, (written_s, written_s))
        assert store.list_staging_older_than(3_600) == [old.path.name]
        assert store.sweep(3_600) == 1
        assert staged(store) == [busy.path.name]
        old.abort()
        busy.abort()
        assert staged(store) == []
