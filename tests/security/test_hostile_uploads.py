"""Hostile uploads through the public API: refused with a code, and the engine never sees them."""

import asyncio
import json
import pickle
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI
from sqlalchemy import select

from app.adapters.models import AdapterVersion
from app.audit.models import AuditEvent
from app.keys.service import NewKey
from app.platform import Platform
from app.settings import Settings
from tests.adapter_files import HOSTILE, AdapterFiles, HostileCase, good_adapter, tiny_description
from tests.factories import bearer, make_key, make_tenant
from tests.validation_bench import (
    CONFIG,
    CONTENT_TYPE,
    WEIGHTS,
    Bench,
    body,
    earns_a_report,
    make_bench,
    part,
    post_body,
    post_upload,
    upload_body,
)

BASE = tiny_description()
NAMED = {
    "cut inside the last tensor",
    "offsets beyond the file",
    "two tensors on the same bytes",
    "a header of 100 MB",
    "one NaN",
    "a factor too wide",
    "A without B",
    "DoRA",
    "trained biases",
    "modules_to_save",
    "a pickle archive under the right name",
    "a bare pickle",
    "a renamed prefix",
    "a path as name",
}
"""The kinds that run always; the wide matrix has the others that are refused as they arrive, and
`test_same_report` those that earn a report."""


@pytest.fixture
async def bench(app: FastAPI) -> Bench:
    return await make_bench(app)


@pytest.fixture
async def key(platform: Platform) -> NewKey:
    return await make_key(platform, await make_tenant(platform))


def _cases() -> list[object]:
    return [
        pytest.param(case, id=case.name, marks=[] if case.name in NAMED else [pytest.mark.wide])
        for case in HOSTILE
        if case.name in NAMED or not earns_a_report(case.build(BASE), BASE.max_rank)
    ]


def test_the_named_kinds_are_among_the_cases() -> None:
    assert {case.name for case in HOSTILE} >= NAMED


@pytest.mark.parametrize("case", _cases())
async def test_a_hostile_kind_is_refused_with_its_code_and_never_reaches_the_engine(
    case: HostileCase, client: httpx.AsyncClient, key: NewKey, bench: Bench
) -> None:
    response = await post_upload(client, key, case.build(BASE), "a")
    if response.status_code == 202:
        assert await bench.work() == ["rejected"]
        answer = await client.get("/v1/adapters/a/versions/1", headers=bearer(key))
        version = answer.json()
        assert version["state"] == "rejected"
        assert version["reason"]
        checks = {check["group"]: check for check in version["report"]["checks"]}
        codes = [finding["code"] for finding in checks[case.group]["findings"]]
        assert checks[case.group]["status"] == "fail"
        assert case.code in codes
        assert version["code"] in codes
    else:
        assert response.status_code in (400, 413)
        error = response.json()["error"]
        assert error["code"] in ("missing_part", "empty_part", "unknown_part", "pickle_file",
                                 "config_too_large", case.code)  # fmt: skip
        assert error["param"]
        assert list(bench.resources.store.refs()) == []
    assert bench.engine.requests == []


async def test_a_pickle_that_would_run_code_is_never_opened(
    client: httpx.AsyncClient, key: NewKey, bench: Bench, tmp_path: Path
) -> None:
    proof = tmp_path / "the pickle ran"

    class Bomb:
        def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
            return Path.touch, (proof,)

    bomb = pickle.dumps(Bomb())
    pickle.loads(bomb)  # it works as a bomb
    proof.unlink()
    config = good_adapter(BASE).config
    await post_upload(client, key, AdapterFiles(config, bomb), "a")
    assert await bench.work() == ["rejected"]
    refused = await post_body(
        client,
        key,
        body(
            part("name", b"a"),
            part(CONFIG, config or b""),
            part("adapter_model.bin", bomb, filename="adapter_model.bin"),
        ),
    )
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "pickle_file")
    assert not proof.exists()


class TestNames:
    @pytest.mark.parametrize(
        "name",
        [
            "../../etc/passwd",
            "..",
            ".hidden",
            "a..b",
            "/etc/passwd",
            "a/b",
            "a\\b",
            "a\0b",
            "a@v1",
            "a:b",
            "A",
            "",
            "a" * 64,
            "é",
            "a b",
            "a\n",
            "\uff0e\uff0e",
            "adp_01hzzzzzzzzzzzzzzzzzzzzzzz",
            "ver_1",
        ],
    )
    async def test_a_name_that_could_be_a_path_or_a_reference_is_refused(
        self, name: str, client: httpx.AsyncClient, key: NewKey, bench: Bench, settings: Settings
    ) -> None:
        before = _files_below(settings.data_dir.parent)
        response = await post_upload(client, key, good_adapter(BASE), name)
        assert response.status_code == 400
        error = response.json()["error"]
        assert (error["code"], error["param"]) == ("invalid_adapter_name", "name")
        assert _files_below(settings.data_dir.parent) == before

    async def test_the_base_models_name_is_taken(
        self, client: httpx.AsyncClient, key: NewKey, bench: Bench
    ) -> None:
        response = await post_upload(client, key, good_adapter(BASE), BASE.name)
        assert (response.status_code, response.json()["error"]["code"]) == (
            409,
            "name_of_base_model",
        )

    async def test_a_part_s_file_name_is_never_a_path(
        self, client: httpx.AsyncClient, key: NewKey, bench: Bench, settings: Settings
    ) -> None:
        files = good_adapter(BASE)
        outside = settings.data_dir.parent / "outside"
        content = body(
            part("name", b"a"),
            part(CONFIG, files.config or b"", filename="../../../../../../outside"),
            part(WEIGHTS, files.weights or b"", filename=str(outside)),
        )
        assert (await post_body(client, key, content)).status_code == 202
        assert not outside.exists()
        assert await bench.work() == ["ready"]

    @pytest.mark.parametrize("name", ["..%2f..%2fetc", "%2e%2e", "a%00", "%ef%bc%8e"])
    async def test_a_route_finds_nothing_under_such_names(
        self, name: str, client: httpx.AsyncClient, key: NewKey, bench: Bench
    ) -> None:
        response = await client.get(f"/v1/adapters/{name}", headers=bearer(key))
        assert response.status_code == 404


def _files_below(folder: Path) -> set[Path]:
    """All but the database's own files, which may come and go."""
    return {p for p in folder.rglob("*") if p.is_file() and "loramux.db" not in p.name}


class TestParts:
    GOOD = good_adapter(BASE)

    def parts(self) -> dict[str, bytes]:
        return {
            "name": part("name", b"a"),
            CONFIG: part(CONFIG, self.GOOD.config or b""),
            WEIGHTS: part(WEIGHTS, self.GOOD.weights or b""),
        }

    @pytest.mark.parametrize("missing", ["name", CONFIG, WEIGHTS])
    async def test_a_missing_part_is_named(
        self, missing: str, client: httpx.AsyncClient, key: NewKey, bench: Bench
    ) -> None:
        parts = self.parts()
        del parts[missing]
        response = await post_body(client, key, body(*parts.values()))
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["param"]) == (
            400,
            "missing_part",
            missing,
        )

    @pytest.mark.parametrize(
        ("name", "content", "code", "remedy"),
        [
            (CONFIG, b"", "empty_part", "send the file"),
            (WEIGHTS, b"", "empty_part", "send the file"),
            (CONFIG, b" " * 300_000, "config_too_large", "send the file"),
            ("name", b"n" * 300, "name_too_long", "at most 63 characters"),
        ],
    )
    async def test_an_unusable_part_is_named_with_the_remedy(
        self,
        name: str,
        content: bytes,
        code: str,
        remedy: str,
        client: httpx.AsyncClient,
        key: NewKey,
        bench: Bench,
    ) -> None:
        parts = self.parts() | {name: part(name, content)}
        error = (await post_body(client, key, body(*parts.values()))).json()["error"]
        assert (error["code"], error["param"]) == (code, name)
        assert remedy in error["message"]

    @pytest.mark.parametrize("double", ["name", CONFIG, WEIGHTS])
    async def test_a_part_that_comes_twice_is_named(
        self, double: str, client: httpx.AsyncClient, key: NewKey, bench: Bench
    ) -> None:
        parts = self.parts()
        response = await post_body(client, key, body(*parts.values(), parts[double]))
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["param"]) == (
            400,
            "duplicate_part",
            double,
        )

    async def test_an_unknown_part_is_named(
        self, client: httpx.AsyncClient, key: NewKey, bench: Bench
    ) -> None:
        content = body(*self.parts().values(), part("tokenizer.json", b"{}"))
        error = (await post_body(client, key, content)).json()["error"]
        assert (error["code"], error["param"]) == ("unknown_part", "tokenizer.json")

    async def test_parts_come_in_any_order(
        self, client: httpx.AsyncClient, key: NewKey, bench: Bench
    ) -> None:
        content = body(*reversed(self.parts().values()))
        assert (await post_body(client, key, content)).status_code == 202
        assert await bench.work() == ["ready"]

    @pytest.mark.parametrize(
        ("content_type", "status"),
        [
            ("application/json", 415),
            ("multipart/form-data", 415),
            ("multipart/form-data; boundary=another", 400),
            ("multipart/form-data; boundary=" + "x" * 300, 400),
            ("", 415),
        ],
    )
    async def test_another_content_type_is_refused(
        self,
        content_type: str,
        status: int,
        client: httpx.AsyncClient,
        key: NewKey,
        bench: Bench,
    ) -> None:
        content = body(*self.parts().values())
        response = await post_body(client, key, content, **{"content-type": content_type})
        assert response.status_code == status
        assert list(bench.resources.store.refs()) == []

    @pytest.mark.parametrize("keep", [0, 10, 200, -3])
    async def test_a_body_that_is_cut_short_is_refused_and_leaves_nothing(
        self, keep: int, client: httpx.AsyncClient, key: NewKey, bench: Bench, settings: Settings
    ) -> None:
        content = body(*self.parts().values())[:keep]
        response = await post_body(client, key, content)
        assert (response.status_code, response.json()["error"]["code"]) == (
            400,
            "malformed_multipart",
        )
        assert _stored(settings) == []

    async def test_a_thousand_parts_are_refused(
        self, client: httpx.AsyncClient, key: NewKey, bench: Bench
    ) -> None:
        content = body(*(part(f"p{i}", b"") for i in range(1000)))
        assert (await post_body(client, key, content)).status_code == 400

    async def test_part_headers_are_bounded(
        self, client: httpx.AsyncClient, key: NewKey, bench: Bench
    ) -> None:
        response = await post_body(client, key, body(part("n" * 100_000, b"")))
        assert (response.status_code, response.json()["error"]["code"]) == (
            400,
            "malformed_multipart",
        )


class TestSizes:
    @pytest.fixture
    def settings(self, settings: Settings) -> Settings:
        return settings.model_copy(update={"max_adapter_bytes": 20_000})

    async def test_more_than_the_limit_is_refused_before_it_is_read(
        self, client: httpx.AsyncClient, key: NewKey, bench: Bench, settings: Settings
    ) -> None:
        good = good_adapter(BASE)
        content = upload_body(AdapterFiles(good.config, b"x" * 40_000), "a")
        response = await post_body(client, key, content)
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (413, "adapter_too_large")
        assert response.headers["x-should-retry"] == "false"
        assert _stored(settings) == []

    async def test_a_body_that_hides_its_length_is_stopped_at_the_limit(
        self, client: httpx.AsyncClient, key: NewKey, bench: Bench, settings: Settings
    ) -> None:
        sent = 0

        async def endless() -> AsyncIterator[bytes]:
            nonlocal sent
            yield part("name", b"a")
            yield part(WEIGHTS, b"")[:-2]
            while sent < 1_000_000:
                sent += 4096
                yield b"x" * 4096

        response = await client.post(
            "/v1/adapters",
            content=endless(),
            headers={"content-type": CONTENT_TYPE, **bearer(key)},
        )
        assert (response.status_code, response.json()["error"]["code"]) == (
            413,
            "adapter_too_large",
        )
        assert sent < 40_000
        assert _stored(settings) == []


async def test_a_client_that_goes_away_leaves_nothing_behind(
    app: FastAPI, client: httpx.AsyncClient, key: NewKey, bench: Bench, settings: Settings
) -> None:
    """The connection breaks in the middle of the weights, as the server sees it."""
    good = upload_body(good_adapter(BASE), "a")
    messages = [{"type": "http.request", "body": good[:4000], "more_body": True}]

    async def receive() -> dict[str, object]:
        await asyncio.sleep(0)
        return dict(messages.pop()) if messages else {"type": "http.disconnect"}

    async def send(_message: object) -> None: ...

    headers = {"content-type": CONTENT_TYPE, **bearer(key)}
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "path": "/v1/adapters",
        "raw_path": b"/v1/adapters",
        "query_string": b"",
        "scheme": "http",
        "server": ("127.0.0.1", 8000),
        "client": ("127.0.0.1", 50000),
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
    }
    await app(scope, receive, send)
    assert _stored(settings) == []
    assert bench.queue.messages == []
    answer = await client.get("/v1/adapters", headers=bearer(key))
    assert answer.json()["data"] == []


def _stored(settings: Settings) -> list[Path]:
    return [p for p in (settings.data_dir / "adapters").rglob("*") if p.is_file()]


# --------------------------------------------------------------------------- between tenants

ROUTES: list[tuple[str, str, dict[str, object] | None]] = [
    ("GET", "/v1/adapters/{name}", None),
    ("GET", "/v1/adapters/{name}/versions/1", None),
    ("GET", "/v1/adapters/{name}/versions/1/events", None),
    ("GET", "/v1/adapters/{name}/aliases", None),
    ("GET", "/v1/adapters/{name}/aliases/live", None),
    ("POST", "/v1/adapters/{name}/versions/1/archive", None),
    ("POST", "/v1/adapters/{name}/versions/1/unarchive", None),
    ("PUT", "/v1/adapters/{name}/aliases/live", {"targets": [{"version": 1, "weight": 100}]}),
    ("DELETE", "/v1/adapters/{name}/aliases/live", None),
    ("POST", "/v1/adapters/{name}/aliases/live/promote", {"version": 1}),
    ("POST", "/v1/adapters/{name}/aliases/live/rollback", {"to_revision": 1}),
    ("GET", "/v1/adapters/{name}/aliases/live/history", None),
    ("GET", "/v1/adapters/{name}/aliases/live/comparison", None),
    ("DELETE", "/v1/adapters/{name}", None),
    ("DELETE", "/v1/adapters/{name}/versions/1", None),
]


class TestTenants:
    async def test_every_route_about_an_adapter_is_in_the_matrix(self, app: FastAPI) -> None:
        spec = app.openapi()["paths"]
        known = {
            (method.upper(), path)
            for path, methods in spec.items()
            if path.startswith("/v1/adapters/")
            for method in methods
        }
        tested = {
            (method, path.replace("/1", "/{number}").replace("/live", "/{alias}"))
            for method, path, _ in ROUTES
        }
        assert known == tested

    @pytest.mark.parametrize(("method", "path", "content"), ROUTES)
    async def test_a_foreign_adapter_cannot_be_told_from_none(
        self,
        method: str,
        path: str,
        content: dict[str, object] | None,
        client: httpx.AsyncClient,
        key: NewKey,
        bench: Bench,
        platform: Platform,
    ) -> None:
        await post_upload(client, key, good_adapter(BASE), "secret")
        await bench.work()
        other = await make_key(platform, await make_tenant(platform))
        erased = await make_key(platform, await make_tenant(platform))
        await post_upload(client, erased, good_adapter(BASE), "secret")
        await client.delete("/v1/adapters/secret", headers=bearer(erased))
        scoped = await make_key(
            platform, await self._tenant_of(platform, key), adapters=["another"]
        )
        nobody = await make_key(platform, await make_tenant(platform))

        async def ask(who: NewKey) -> tuple[int, str]:
            response = await client.request(
                method, path.format(name="secret"), json=content, headers=bearer(who)
            )
            return response.status_code, response.text

        answers = {await ask(who) for who in (other, erased, scoped, nobody)}
        assert len(answers) == 1
        status, text = answers.pop()
        assert status == 404
        assert json.loads(text)["error"]["code"] == "adapter_not_found"
        own = await client.get("/v1/adapters/secret/versions/1", headers=bearer(key))
        assert own.json()["state"] == "ready"

    async def test_a_list_has_the_tenants_own_adapters_alone(
        self, client: httpx.AsyncClient, key: NewKey, bench: Bench, platform: Platform
    ) -> None:
        await post_upload(client, key, good_adapter(BASE), "secret")
        other = await make_key(platform, await make_tenant(platform))
        answer = await client.get("/v1/adapters", headers=bearer(other))
        assert answer.json() == {
            "object": "list",
            "data": [],
            "first_id": None,
            "last_id": None,
            "has_more": False,
        }

    async def test_the_same_content_of_two_tenants_is_stored_and_named_apart(
        self, client: httpx.AsyncClient, key: NewKey, bench: Bench, platform: Platform
    ) -> None:
        other = await make_key(platform, await make_tenant(platform))
        for who in (key, other):
            response = await post_upload(client, who, good_adapter(BASE), "a")
            assert response.status_code == 202  # and not 200, which would tell of the other
        refs = list(bench.resources.store.refs())
        assert len({ref.digest for ref in refs}) == 1
        assert len({ref.salt for ref in refs}) == 2
        await client.delete("/v1/adapters/a", headers=bearer(other))
        assert await bench.work() == ["ready", "nothing to do"]

    async def test_a_key_beyond_its_scope_leaves_an_audit_event(
        self, client: httpx.AsyncClient, key: NewKey, bench: Bench, platform: Platform
    ) -> None:
        await post_upload(client, key, good_adapter(BASE), "secret")
        tenant = await self._tenant_of(platform, key)
        scoped = await make_key(platform, tenant, adapters=["another"])
        await client.get("/v1/adapters/secret", headers=bearer(scoped))
        async with platform.db.reading() as session:
            events = (
                await session.scalars(select(AuditEvent).where(AuditEvent.action == "authz_fail"))
            ).all()
        assert [(event.actor_id, event.tenant_id) for event in events] == [
            (scoped.row.id, tenant.id)
        ]

    async def test_a_scoped_key_uploads_within_its_scope_alone(
        self, client: httpx.AsyncClient, key: NewKey, bench: Bench, platform: Platform
    ) -> None:
        scoped = await make_key(platform, await self._tenant_of(platform, key), adapters=["mine"])
        good = good_adapter(BASE)
        assert (await post_upload(client, scoped, good, "mine")).status_code == 202
        refused = await post_upload(client, scoped, good, "another")
        assert (refused.status_code, refused.json()["error"]["code"]) == (
            403,
            "adapter_out_of_scope",
        )

    async def _tenant_of(self, platform: Platform, key: NewKey):  # type: ignore[no-untyped-def]
        from app.tenants.service import find_tenant

        async with platform.db.reading() as session:
            return await find_tenant(session, key.row.tenant_id or "")


async def test_no_state_but_ready_is_ever_given_to_a_refused_version(
    client: httpx.AsyncClient, key: NewKey, bench: Bench, platform: Platform
) -> None:
    """A refused version stays refused however often its task is delivered."""
    await post_upload(client, key, HOSTILE[-1].build(BASE), "a")
    messages = list(bench.queue.messages)
    await bench.work()
    bench.queue.messages = messages * 3
    assert await bench.work() == ["nothing to do"] * 3
    async with platform.db.reading() as session:
        assert (await session.scalars(select(AdapterVersion.state))).all() == ["rejected"]
