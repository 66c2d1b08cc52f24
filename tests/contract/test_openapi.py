"""Both APIs called by their own OpenAPI document: nothing undocumented, no fault of the server."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from app import openapi
from app.clock import SystemClock
from app.crypto import Passwords
from app.limit_requests import service as limit_requests
from app.main import create_app
from app.platform import open_platform
from app.settings import Settings
from tests.conftest import CHEAP_HASHER
from tests.factories import make_caller, make_key, make_tenant, make_user
from tests.fake_engine import BASE_NAME, FakeEngine
from tests.serving import install_engines, make_ready_adapter, serve

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
EXAMPLES = 8
NO_LIMITS = {"requests_per_minute": 1_000_000, "tokens_per_minute": 1_000_000_000}


class Served:
    """The api on a socket, in a thread of its own: schemathesis is synchronous."""

    def __init__(self, data_dir: Path, database_url: str) -> None:
        self.settings = Settings(data_dir=data_dir, database_url=database_url)
        self.address = ""
        self.keys: dict[str, str] = {}
        self.existing: dict[str, str] = {}  # by the names of parameters and fields
        self._ready, self._stop = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)

    def __enter__(self) -> "Served":
        self._thread.start()
        assert self._ready.wait(60)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(60)

    async def _run(self) -> None:
        platform = open_platform(
            self.settings, clock=SystemClock(), passwords=Passwords(CHEAP_HASHER)
        )
        install_engines(platform, {"ipc://fake": FakeEngine()})
        app = create_app(platform=platform)
        self.document = openapi.document(app)
        tenant = await make_tenant(platform, "acme", **NO_LIMITS)
        version = await make_ready_adapter(platform, tenant, "support")
        own = await make_key(platform, tenant, access="manage")
        self.keys["/v1/"] = own.secret.text
        self.keys["/admin/v1/"] = (await make_key(platform, None)).secret.text
        other = await make_tenant(platform, "other")
        spare = await make_key(platform, other)
        user = await make_user(platform, other)
        async with platform.db.transaction() as session:
            asked = await limit_requests.ask(
                session, make_caller(platform, tenant), limit_name="max_rank", wanted=64.0,
                reason="", settings=platform.settings, now=platform.clock.now(),
            )  # fmt: skip
        self.existing = {
            "model": BASE_NAME, "name": "support", "alias": "live", "number": "1",
            "version_id": version.id, "tenant_id": other.id, "key_id": spare.row.id,
            "user_id": user.id, "request_id": asked.id,
        }  # fmt: skip
        async with serve(app) as self.address:
            await platform.engines.refresh()
            self._ready.set()
            await asyncio.to_thread(self._stop.wait)


@pytest.fixture(scope="module")
def served(migrated_sqlite: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("openapi")
    file = folder / "loramux.db"
    file.write_bytes(migrated_sqlite.read_bytes())
    with Served(folder / "data", f"sqlite+aiosqlite:///{file}") as opened:
        yield opened


def name_what_exists(case: schemathesis.Case, existing: dict[str, str]) -> None:
    """Random names are all unknown: half of the calls reach what lies behind the look-up."""
    for name in case.path_parameters:
        if name in existing and case.method != "DELETE":
            case.path_parameters[name] = existing[name]
    if isinstance(case.body, dict):
        for name in case.body:
            if name in existing:
                case.body[name] = existing[name]


def failures_of(operation: Any, key: str, existing: dict[str, str]) -> str | None:
    """Calls one operation with what its document allows, and with what it does not."""

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(
        case=operation.as_strategy() | operation.as_strategy(GenerationMode.NEGATIVE),
        known=st.booleans(),
    )
    def call(case: schemathesis.Case, known: bool) -> None:
        headers = {"authorization": f"Bearer {key}"}
        if known:
            name_what_exists(case, existing)
        case.call_and_validate(headers=headers, checks=CHECKS, timeout=30)

    try:
        call()
    except Exception as error:  # noqa: BLE001 - all are reported together
        return f"{operation.label}: {error!r} {error}"
    return None


@pytest.mark.wide
@pytest.mark.timeout(900)
@pytest.mark.parametrize("prefix", openapi.API_PREFIXES)
def test_every_answer_is_one_that_the_document_names(served: Served, prefix: str) -> None:
    schema = schemathesis.openapi.from_dict(served.document)
    schema.config.update(base_url=served.address)
    operations = [found.ok() for found in schema.get_all_operations()]
    mine = [operation for operation in operations if operation.path.startswith(prefix)]
    assert len(mine) > 10
    problems = [failures_of(operation, served.keys[prefix], served.existing) for operation in mine]
    found = [problem for problem in problems if problem]
    assert not found, "\n\n".join(found)
