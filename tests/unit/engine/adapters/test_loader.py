"""The loader over a real folder: exact sizes, verified bytes, hostile files fail by name."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from engine.adapters.folder_store import FolderStore
from engine.adapters.loader import StoreLoader
from engine.adapters.loading import Loaded, LoadEvent, LoadFailed, Measured
from engine.adapters.manifest import check_adapter_folder
from engine.adapters.store import WEIGHTS_NAME
from engine.types import AdapterRef
from tests.adapter_files import HOSTILE, AdapterFiles, HostileCase, good_adapter, tiny_description
from tests.fakes import engine_config

SALT = "ab" * 16
BASE = tiny_description()


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    return FolderStore(tmp_path / "adapters")


@pytest.fixture
def loader(store: FolderStore) -> Iterator[StoreLoader]:
    opened = StoreLoader(engine_config(), store, BASE)
    yield opened
    opened.close()


def put(store: FolderStore, files: AdapterFiles) -> AdapterRef:
    with store.stage() as staging:
        staging.write_config(files.config or b"")
        staging.write_weights(files.weights or b"")
        return staging.commit(SALT).ref


def wait(loader: StoreLoader) -> LoadEvent:
    """The next event; a load of a few kilobytes takes milliseconds."""
    return loader._events.get(timeout=30)


def test_a_good_adapter_is_measured_then_built_to_exactly_that_size(
    store: FolderStore, loader: StoreLoader
) -> None:
    ref = put(store, good_adapter(BASE, rank=4))
    loader.measure(ref)
    measured = wait(loader)
    assert isinstance(measured, Measured)
    loader.build(ref)
    loaded = wait(loader)
    assert isinstance(loaded, Loaded)
    assert measured.max_rank == loaded.blob.layout.max_rank == 4
    assert measured.nbytes == loaded.blob.layout.nbytes == loaded.blob.data.nbytes
    assert loaded.blob.data.dtype == np.uint8
    assert loader._planned == {}


def test_an_abandoned_adapter_leaves_no_plan_behind(
    store: FolderStore, loader: StoreLoader
) -> None:
    ref = put(store, good_adapter(BASE))
    loader.measure(ref)
    wait(loader)
    loader.abandon(ref)
    assert loader._planned == {}


@pytest.mark.parametrize(
    "case",
    [
        case
        for case in HOSTILE
        if case.group != "numbers"
        and case.code not in ("missing_file", "empty_file", "pickle_file")  # no store holds these
    ],
    ids=lambda case: case.name,
)
def test_what_validation_refuses_the_engine_refuses_by_name(
    store: FolderStore, loader: StoreLoader, case: HostileCase, tmp_path: Path
) -> None:
    files = case.build(BASE)
    loader.measure(put(store, files))
    failed = wait(loader)
    assert isinstance(failed, LoadFailed)
    assert failed.code in check_adapter_folder(files.write(tmp_path / "upload"), BASE, 64).codes
    assert not failed.transient


def test_a_missing_adapter_may_be_tried_again(loader: StoreLoader) -> None:
    loader.measure(AdapterRef(SALT, "0" * 64))
    failed = wait(loader)
    assert isinstance(failed, LoadFailed)
    assert (failed.code, failed.transient) == ("adapter_missing", True)


@pytest.mark.parametrize("name", ["../../etc", "/etc/passwd", "a\0b", "", "\u2024\u2024/x"])
def test_a_name_that_is_no_digest_opens_nothing(loader: StoreLoader, name: str) -> None:
    loader.measure(AdapterRef(SALT, name))
    failed = wait(loader)
    assert isinstance(failed, LoadFailed)
    assert failed.code == "adapter_missing"


def test_bytes_that_changed_on_disk_are_not_served(store: FolderStore, loader: StoreLoader) -> None:
    ref = put(store, good_adapter(BASE))
    weights = store.root / ref.salt / ref.digest / WEIGHTS_NAME
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    loader.measure(ref)
    failed = wait(loader)
    assert isinstance(failed, LoadFailed)
    assert failed.code == "adapter_corrupt"


def test_a_file_that_goes_away_between_the_phases_may_be_tried_again(
    store: FolderStore, loader: StoreLoader
) -> None:
    ref = put(store, good_adapter(BASE))
    loader.measure(ref)
    wait(loader)
    store.delete(ref)
    loader.build(ref)
    failed = wait(loader)
    assert isinstance(failed, LoadFailed)
    assert (failed.code, failed.transient) == ("adapter_missing", True)
