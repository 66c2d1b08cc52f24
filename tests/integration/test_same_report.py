"""`loramux adapters check` and the server say the same of the same files."""

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from app.adapters import file_checks
from app.keys.service import NewKey
from app.platform import Platform
from app.settings import Settings
from engine.adapters.manifest import check_adapter_folder
from tests.adapter_files import HOSTILE, AdapterFiles, good_adapter, tiny_description
from tests.factories import bearer, make_key, make_tenant
from tests.validation_bench import Bench, earns_a_report, make_bench, post_upload

BASE = tiny_description(max_rank=256)
CONFIGS = Path(__file__).parents[1] / "data" / "adapter_configs"
ALWAYS = {"067-peft-dora-target-null", "cut inside the last tensor", "one NaN"}
"""Looked at in every run; the others are part of the wide matrix."""
HOSTILE_CODES = {case.name: case.code for case in HOSTILE}


def _files() -> Iterator[tuple[str, AdapterFiles]]:
    good = good_adapter(BASE)
    yield "a good adapter", good
    for path in sorted(CONFIGS.glob("*.json")):
        files = replace(good, config=path.read_bytes())
        if earns_a_report(files, BASE.max_rank):
            yield path.stem, files
    for case in HOSTILE:
        files = case.build(BASE)
        if earns_a_report(files, BASE.max_rank):
            yield case.name, files


@cache
def all_files() -> dict[str, AdapterFiles]:
    return dict(_files())


@pytest.fixture
async def key(platform: Platform) -> NewKey:
    return await make_key(platform, await make_tenant(platform))


@pytest.fixture
async def bench(app: FastAPI) -> Bench:
    return await make_bench(app)


async def offline(folder: Path, settings: Settings) -> list[dict[str, Any]]:
    """What the command prints with --json."""
    report = await file_checks.report(folder, BASE, max_rank=settings.max_rank, settings=settings)
    return list(report["groups"])


def judged_here(folder: Path, settings: Settings) -> list[dict[str, Any]]:
    """The same without a process of its own, which the wide matrix can afford."""
    report = check_adapter_folder(
        folder, BASE, settings.max_rank, max_bytes=settings.max_adapter_bytes
    )
    return list(json.loads(json.dumps(report.as_json()["groups"])))


async def online(
    client: httpx.AsyncClient, key: NewKey, bench: Bench, files: AdapterFiles
) -> list[dict[str, Any]] | None:
    """The groups that look at files, as the version shows them; None: refused as it came."""
    response = await post_upload(client, key, files, "a")
    if response.status_code == 413:
        return None
    assert response.status_code == 202, response.text
    await bench.work()
    version = response.json()["version"]
    answer = await client.get(f"/v1/adapters/a/versions/{version}", headers=bearer(key))
    checks = answer.json()["report"]["checks"]
    return [
        {
            "name": check["group"],
            "status": check["status"],
            "findings": check["findings"],
            "figures": check["figures"],
        }
        for check in checks
        if check["group"] != "behaviour"
    ]


async def compare(
    names: list[str],
    client: httpx.AsyncClient,
    key: NewKey,
    bench: Bench,
    settings: Settings,
    folder: Path,
    *,
    by_command: bool,
) -> None:
    bench.engine.description = BASE
    for number, name in enumerate(names):
        bench.engine.requests.clear()
        shown = await online(client, key, bench, all_files()[name])
        written = all_files()[name].write(folder / str(number))
        said = await offline(written, settings) if by_command else judged_here(written, settings)
        if shown is None:
            assert "config_too_large" in {f["code"] for g in said for f in g["findings"]}, name
        else:
            assert shown == said, name
            if name in HOSTILE_CODES:
                found = {f["code"] for g in shown if g["status"] == "fail" for f in g["findings"]}
                assert HOSTILE_CODES[name] in found, name
                assert bench.engine.requests == [], f"{name} reached the engine"


async def test_of_some_files_in_every_run(
    client: httpx.AsyncClient, key: NewKey, bench: Bench, settings: Settings, tmp_path: Path
) -> None:
    assert all_files().keys() >= ALWAYS
    names = ["a good adapter", *sorted(ALWAYS)]
    await compare(names, client, key, bench, settings, tmp_path / "adapters", by_command=True)


@pytest.mark.wide
@pytest.mark.timeout(900)
async def test_of_every_config_and_of_every_hostile_kind(
    client: httpx.AsyncClient, key: NewKey, bench: Bench, settings: Settings, tmp_path: Path
) -> None:
    names = sorted(all_files().keys() - ALWAYS)
    assert len(names) > 200
    await compare(names, client, key, bench, settings, tmp_path / "adapters", by_command=False)
