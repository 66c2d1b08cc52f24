"""/v1/usage and /admin/v1/usage as their callers meet them, and their CSV."""

import csv
import io
from datetime import UTC, datetime

import pytest
from sqlalchemy import event

from app.usage import csv_export
from tests.factories import bearer, make_key, make_tenant
from tests.unit.app.usage.conftest import opening


@pytest.fixture
async def tenant(platform):
    return await make_tenant(platform, "acme")


@pytest.fixture
async def key(platform, tenant):
    return await make_key(platform, tenant)


@pytest.fixture
async def operator(platform):
    return await make_key(platform, None)


@pytest.fixture
def database_url(sqlite_url):
    return sqlite_url


@pytest.fixture
async def used(ledger, platform, tenant, final):
    """Six requests of the tenant, one an hour, and one of another tenant."""
    for index in range(7):
        name = f"req_{index}"
        owner = "ten_other" if index == 6 else tenant.id
        models = ("support@v1", "=HYPERLINK(1)@v1")
        await ledger.open(
            opening(
                name,
                tenant_id=owner,
                key_id=f"key_{index % 2}",
                model=models[index % 2],
                monthly={owner: None},
            )
        )
        ledger.close_soon(final(name, prefill_us=1500, decode_us=2500, adapter_byte_s=9))
        platform.clock.advance(seconds=3600)
    await ledger.drain()


def rows_of(response):
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/csv")
    assert "attachment" in response.headers["content-disposition"]
    return list(csv.DictReader(io.StringIO(response.text)))


class TestReports:
    async def test_a_tenant_sees_its_own_by_any_combination(self, client, key, used):
        answer = await client.get(
            "/v1/usage", params={"group_by": "key,model", "bucket": "hour"}, headers=bearer(key)
        )
        body = answer.json()
        assert body["group_by"] == ["key", "model"]
        assert len(body["data"]) == 6
        assert {entry["key_id"] for entry in body["data"]} == {"key_0", "key_1"}
        first = body["data"][0]
        assert (first["prefill_ms"], first["decode_ms"]) == (1.5, 2.5)
        assert first["adapter_byte_seconds"] == 9
        assert first["start"] == "2026-03-14T12:00:00Z"
        assert answer.headers["x-ratelimit-limit-requests"] == "600"

    async def test_parameters_may_be_repeated(self, client, key, used):
        answer = await client.get(
            "/v1/usage?group_by=key&group_by=model&group_by=key", headers=bearer(key)
        )
        assert answer.json()["group_by"] == ["key", "model"]

    @pytest.mark.parametrize(
        ("query", "param"),
        [
            ("group_by=tenant", "group_by"),
            ("group_by=colour", "group_by"),
            ("bucket=week", "bucket"),
            ("limit=0", "limit"),
            ("start=yesterday", "start"),
            ("start=2026-03-14T00:00:00Z&end=2026-03-01T00:00:00Z", "start"),
            ("after=zzz", "after"),
            ("model=a%00b", "model"),
        ],
    )
    async def test_what_is_wrong_is_named(self, client, key, query, param):
        for path in ("/v1/usage", "/v1/usage/export"):
            if param in ("limit", "after") and "export" in path:
                continue
            answer = await client.get(f"{path}?{query}", headers=bearer(key))
            assert 400 <= answer.status_code < 500
            assert answer.json()["error"]["param"] == param

    async def test_operators_see_every_tenant(self, client, operator, tenant, used):
        answer = await client.get(
            "/admin/v1/usage", params={"group_by": "tenant"}, headers=bearer(operator)
        )
        counted = {entry["tenant_id"]: entry["requests"] for entry in answer.json()["data"]}
        assert counted == {tenant.id: 6, "ten_other": 1}
        one = await client.get(
            "/admin/v1/usage", params={"tenant_id": "ten_other"}, headers=bearer(operator)
        )
        assert [entry["requests"] for entry in one.json()["data"]] == [1]

    async def test_a_report_takes_at_most_five_statements(self, client, platform, key, used):
        statements = []

        def note(_connection, _cursor, statement, *_rest):
            if "engines" not in statement and "base_models" not in statement:  # the router's own
                statements.append(statement)

        engine = platform.db.engine.sync_engine
        event.listen(engine, "before_cursor_execute", note)
        try:
            answer = await client.get(
                "/v1/usage",
                params={"group_by": "key,adapter,model", "start": "2026-03-01T10:30:00Z"},
                headers=bearer(key),
            )
        finally:
            event.remove(engine, "before_cursor_execute", note)
        assert answer.status_code == 200
        assert len(statements) <= 5
        assert sum("usage_daily" in statement for statement in statements) == 1


class TestCsv:
    async def test_the_report_as_csv_has_its_lines_and_utc_times(self, client, key, used):
        query = {"group_by": "model", "bucket": "hour"}
        whole = (await client.get("/v1/usage", params=query, headers=bearer(key))).json()["data"]
        found = rows_of(await client.get("/v1/usage/export", params=query, headers=bearer(key)))
        assert len(found) == len(whole) == 6
        assert found[0]["start"] == "2026-03-14T12:00:00.000Z"
        assert found[0]["total_tokens"] == str(whole[0]["total_tokens"])
        assert datetime.fromisoformat(found[0]["start"]).tzinfo == UTC

    async def test_single_requests_are_exported_page_by_page(self, client, key, used, monkeypatch):
        monkeypatch.setattr(csv_export, "PAGE", 2)
        found = rows_of(
            await client.get("/v1/usage/export", params={"of": "requests"}, headers=bearer(key))
        )
        assert [row["request_id"] for row in found] == [f"req_{index}" for index in range(6)]
        assert {row["finish_reasons"] for row in found} == {"stop"}
        one = await client.get(
            "/v1/usage/export", params={"of": "requests", "key_id": "key_1"}, headers=bearer(key)
        )
        assert len(rows_of(one)) == 3

    async def test_names_that_a_spreadsheet_would_run_are_made_harmless(self, client, key, used):
        for of in ("requests", "buckets"):
            answer = await client.get(
                "/v1/usage/export", params={"of": of, "group_by": "model"}, headers=bearer(key)
            )
            models = {row["model"] for row in rows_of(answer)}
            assert models == {"support@v1", "'=HYPERLINK(1)@v1"}

    async def test_another_tenants_requests_are_in_no_export_but_the_operators(
        self, client, key, operator, used
    ):
        own = await client.get(
            "/v1/usage/export",
            params={"of": "requests", "tenant_id": "ten_other"},
            headers=bearer(key),
        )
        assert "req_6" not in own.text
        everyone = await client.get(
            "/admin/v1/usage/export", params={"of": "requests"}, headers=bearer(operator)
        )
        assert len(rows_of(everyone)) == 7
