"""Follows the commands of docs/operations.md: a backup while people work, then everything back."""

import asyncio
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from sqlalchemy import func, select

from app import health
from app.auth import authenticate_key
from app.platform import Platform, open_platform
from app.settings import Settings
from app.tenants.models import Tenant
from engine.adapters.store import open_store
from engine.types import AdapterRef
from tests.factories import make_key, make_tenant

pytestmark = pytest.mark.wide
DOCUMENT = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()


def follow(name: str, **environment: object) -> None:
    """Runs the block of the document that begins with `# name`."""
    (block,) = re.findall(rf"```bash\n(# {re.escape(name)}\n.*?)```", DOCUMENT, re.DOTALL)
    clean = {k: v for k, v in os.environ.items() if not k.startswith("LORAMUX_")}
    clean["PATH"] = f"{Path(sys.executable).parent}:{clean['PATH']}"
    clean |= {key: str(value) for key, value in environment.items()}
    done = subprocess.run(
        ["bash", "-c", block], env=clean, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def store_files(settings: Settings, salt: str) -> AdapterRef:
    """An adapter's two files in the store."""
    with open_store(settings.adapter_store_url).stage() as staging:
        staging.write_config(b"{}")
        staging.write_weights(b"weights")
        staging.prepare()
        return staging.commit(salt).ref


async def count_tenants(platform: Platform) -> int:
    async with platform.db.reading() as session:
        return await session.scalar(select(func.count()).select_from(Tenant)) or 0


class Loss:
    """A platform with a tenant, a key and an adapter; what of it must come back."""

    def __init__(self, platform: Platform) -> None:
        self.platform = platform

    async def fill(self) -> None:
        self.tenant = await make_tenant(self.platform, "acme")
        self.key = (await make_key(self.platform, self.tenant)).secret.text
        self.ref = store_files(self.platform.settings, self.tenant.salt)

    async def check(self, settings: Settings) -> None:
        """Everything is there in what was restored."""
        restored = open_platform(settings, clock=self.platform.clock)
        try:
            caller = await authenticate_key(restored, self.key)
            assert caller.tenant_id == self.tenant.id
            open_store(settings.adapter_store_url).verify(self.ref)
            assert (await health.database_check(restored.db)()).ok
        finally:
            await restored.close()


@pytest.fixture
async def loss(platform: Platform) -> Loss:
    found = Loss(platform)
    await found.fill()
    return found


@pytest.fixture
def places(platform: Platform, tmp_path: Path) -> dict[str, Path]:
    """The folders that the document's commands name."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    shutil.copy(platform.settings.root_secret_file, elsewhere / "root.json")
    return {"BACKUP": tmp_path / "backup", "ELSEWHERE": elsewhere}


async def test_a_sqlite_platform_comes_back_from_a_backup_made_while_it_worked(
    platform: Platform, loss: Loss, places: dict[str, Path], tmp_path: Path
) -> None:
    stop = asyncio.Event()

    async def keep_working() -> None:
        while not stop.is_set():
            await make_tenant(platform)
            await asyncio.sleep(0)

    working = asyncio.create_task(keep_working())
    await asyncio.to_thread(follow, "backup: sqlite", DATA=platform.settings.data_dir, **places)
    stop.set()
    await working
    assert not list(places["BACKUP"].rglob("root.json"))
    later = await count_tenants(platform)

    data = tmp_path / "new"
    await asyncio.to_thread(follow, "restore: sqlite", DATA=data, **places)
    assert data.joinpath("secrets/root.json").stat().st_mode & 0o077 == 0
    settings = Settings(data_dir=data)
    await loss.check(settings)
    restored = open_platform(settings)
    assert 1 <= await count_tenants(restored) <= later
    await restored.close()


@pytest.mark.postgres
class TestPostgres:
    @pytest.fixture
    def database_url(self, postgres_url: str) -> str:
        return postgres_url

    async def test_a_postgresql_platform_comes_back_from_its_dump(
        self,
        platform: Platform,
        loss: Loss,
        places: dict[str, Path],
        empty_postgres_url: str,
        tmp_path: Path,
    ) -> None:
        places["BACKUP"].mkdir()
        source, target = (
            url.replace("+psycopg", "")
            for url in (platform.settings.database_url, empty_postgres_url)
        )
        await asyncio.to_thread(follow, "backup: postgresql", URL=source, **places)
        await asyncio.to_thread(follow, "restore: postgresql", URL=target, **places)
        settings = Settings(
            data_dir=tmp_path / "new",
            database_url=target,
            root_secret_file=places["ELSEWHERE"] / "root.json",
            adapter_store_url=platform.settings.adapter_store_url,
        )
        settings.root_secret_file.chmod(0o600)
        await loss.check(settings)
