"""What goes wrong, as a client sees it: status, code, field, Retry-After, limits."""

import asyncio

import httpx
import pytest
from sqlalchemy import text

from app.caller import KeyLimits
from app.usage import repository
from engine.errors import (
    AdapterCorrupt,
    AdapterMissing,
    AdapterRefused,
    EngineError,
    EngineUnavailable,
    NotStarted,
    RequestRefused,
)
from tests.factories import bearer, make_key, make_tenant
from tests.fake_engine import BASE_NAME

HELLO = {"model": "support", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 10}
CALL_TOKENS = len("user:hi\n") + 10


async def post(api, body=HELLO, **options):
    return await api.post("/v1/chat/completions", json=body, **options)


class TestEngineRefusals:
    @pytest.mark.parametrize("streamed", [False, True])
    @pytest.mark.parametrize(
        ("refusal", "status", "code"),
        [
            (RequestRefused("full", code="queue_full"), 429, "queue_full"),
            (RequestRefused("late", code="deadline_exceeded"), 503, "deadline_exceeded"),
            (RequestRefused("late", code="budget_unattainable"), 503, "budget_unattainable"),
            (RequestRefused("bad", code="out_of_range", field="top_k"), 400, "out_of_range"),
            (EngineUnavailable("gone"), 503, "engine_unavailable"),
            (EngineUnavailable("bye", code="draining"), 503, "draining"),
            (NotStarted("bye", code="draining"), 503, "draining"),
            (AdapterMissing("no file"), 503, "adapter_missing"),
            (AdapterRefused("away", code="store_unavailable"), 503, "store_unavailable"),
            (AdapterCorrupt("bad hash"), 503, "adapter_corrupt"),
            (EngineError("odd", code="odd"), 500, "odd"),
        ],
    )
    async def test_each_has_its_status_and_code(
        self, api, engine, platform, refusal, status, code, streamed
    ):
        engine.refuse = refusal
        response = await post(api, {**HELLO, "stream": streamed})
        assert (response.status_code, response.json()["error"]["code"]) == (status, code)
        if status in (429, 503):
            assert int(response.headers["retry-after"]) >= 1
            assert int(response.headers["retry-after-ms"]) >= 1000
        else:
            assert response.headers["x-should-retry"] == "false"
        assert response.headers["x-ratelimit-limit-requests"] == "600"
        await platform.ledger.drain()
        async with platform.db.reading() as session:
            row = await repository.get(session, response.headers["x-request-id"])
        assert (row.status, row.prompt_tokens, row.completion_tokens) == ("failed", 0, 0)

    async def test_a_budget_that_cannot_be_kept_names_its_field_the_wait_and_the_time(
        self, api, engine
    ):
        engine.refuse = RequestRefused(
            "The first token would come in about 900 ms; the budget is 500 ms.",
            code="budget_unattainable",
            field="loramux.ttft_ms",
            retry_after_ms=4000.4,
        )
        response = await post(api)
        error = response.json()["error"]
        assert "900 ms" in error["message"]
        assert error["param"] == "loramux.ttft_ms"
        assert response.headers["retry-after-ms"] == "4001"
        assert response.headers["retry-after"] == "5"

    @pytest.mark.parametrize(
        ("model", "code", "status"),
        [
            ("support", "truncated_file", 503),  # the adapter's files: its loader's own code
            ("support", "engine_step_failed", 500),
            ("support", "invalid_schema", 400),  # of the call's grammar, not of the adapter
            (BASE_NAME, "schema_too_complex", 400),
            (BASE_NAME, "non_finite_logits", 500),
            (BASE_NAME, "deadline_exceeded", 503),
        ],
    )
    async def test_what_an_output_reports_is_about_the_adapter_or_the_engine(
        self, api, engine, model, code, status
    ):
        engine.fail_at = (0, code)
        response = await post(api, {**HELLO, "model": model})
        assert (response.status_code, response.json()["error"]["code"]) == (status, code)

    async def test_a_field_of_the_prompt_is_named_as_the_caller_knows_it(self, api, engine):
        engine.refuse = RequestRefused("too long", code="context_length_exceeded", field="prompt")
        assert (await post(api)).json()["error"]["param"] == "messages"

    async def test_without_any_engine_nothing_is_recorded(self, api, engine, platform):
        engine.alive = False
        response = await post(api)
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "engine_unavailable"
        async with platform.db.reading() as session:
            assert await repository.get(session, response.headers["x-request-id"]) is None
        engine.alive = True
        assert (await post(api)).status_code == 200


class TestLedger:
    async def test_without_the_database_row_the_engine_sees_nothing(self, api, engine, platform):
        async with platform.db.transaction() as session:
            await session.execute(text("ALTER TABLE usage_records RENAME TO away"))
        response = await post(api)
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "ledger_unavailable"
        assert int(response.headers["retry-after"]) >= 1
        assert engine.requests == []
        assert response.headers["x-ratelimit-limit-requests"] == "600"
        async with platform.db.transaction() as session:
            await session.execute(text("ALTER TABLE away RENAME TO usage_records"))
        assert (await post(api)).status_code == 200
        used = [w["used"] for w in (await api.get("/v1/limits")).json()["per_minute"]]
        assert used[0] == 1  # the refused call gave its request back

    async def test_each_request_has_one_row_whatever_id_the_client_sends(self, api, platform):
        responses = [await post(api, headers={"x-request-id": "mine"}) for _ in range(2)]
        await platform.ledger.drain()
        async with platform.db.reading() as session:
            for response in responses:
                assert await repository.get(session, response.headers["x-request-id"])
            assert await repository.get(session, "mine") is None


class TestLimits:
    async def test_obeying_retry_after_succeeds(self, api, platform, clock):
        tenant = await make_tenant(platform, "tight", requests_per_minute=2)
        headers = bearer(await make_key(platform, tenant))
        body = {**HELLO, "model": BASE_NAME}
        for remaining in ("1", "0"):
            response = await post(api, body, headers=headers)
            assert response.headers["x-ratelimit-remaining-requests"] == remaining
        refused = await post(api, body, headers=headers)
        assert refused.status_code == 429
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        clock.advance(seconds=int(refused.headers["retry-after"]))
        assert (await post(api, body, headers=headers)).status_code == 200

    async def test_fifty_at_once_stay_within_the_tokens_per_minute(self, api, engine, platform):
        tenant = await make_tenant(platform, "tight", tokens_per_minute=5 * CALL_TOKENS - 1)
        headers = bearer(await make_key(platform, tenant))
        engine.hold()
        body = {**HELLO, "model": BASE_NAME}
        calls = [asyncio.create_task(post(api, body, headers=headers)) for _ in range(50)]
        done, running = await wait_for(calls, lambda done: len(done) == 46)
        assert {task.result().status_code for task in done} == {429}
        assert len(running) == 4
        engine.let(1000)
        for task in running:
            assert (await task).status_code == 200

    async def test_a_keys_cap_refuses_the_call_that_would_cross_it(self, api, platform, tenant):
        key = await make_key(platform, tenant, limits=KeyLimits(tokens_per_minute=100))
        statuses = []
        for _ in range(8):
            response = await post(api, headers=bearer(key))
            statuses.append(response.status_code)
        row_tokens = (await api.get("/v1/limits", headers=bearer(key))).json()["per_minute"]
        used = next(w for w in row_tokens if w["scope"] == "key" and w["name"] == "tokens")
        assert used["used"] <= 100
        assert statuses == sorted(statuses)
        assert 429 in statuses

    async def test_a_changed_limit_applies_to_a_remembered_key(self, api, platform, clock):
        from app.tenants.service import update_tenant

        tenant = await make_tenant(platform, "changing")
        headers = bearer(await make_key(platform, tenant))
        body = {**HELLO, "model": BASE_NAME}
        assert (await post(api, body, headers=headers)).status_code == 200
        async with platform.db.transaction() as session:
            await update_tenant(
                session,
                tenant.id,
                changes={"requests_per_minute": 1},
                now=clock.now(),
                actor="tests",
            )
        clock.advance(seconds=platform.settings.auth_cache_s + 0.1)
        assert (await post(api, body, headers=headers)).status_code == 429

    async def test_a_call_that_never_fits_is_not_told_to_wait(self, api, platform):
        tenant = await make_tenant(platform, "tiny", tokens_per_minute=CALL_TOKENS - 1)
        headers = bearer(await make_key(platform, tenant))
        response = await post(api, {**HELLO, "model": BASE_NAME}, headers=headers)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "max_tokens"

    async def test_the_month_is_refused_until_it_ends(self, api, platform, clock):
        tenant = await make_tenant(platform, "monthly", monthly_tokens=CALL_TOKENS)
        headers = bearer(await make_key(platform, tenant))
        body = {**HELLO, "model": BASE_NAME}
        assert (await post(api, body, headers=headers)).status_code == 200
        await platform.ledger.drain()
        refused = await post(api, body, headers=headers)
        assert (refused.status_code, refused.json()["error"]["code"]) == (
            429,
            "monthly_tokens_exceeded",
        )
        clock.advance(seconds=int(refused.headers["retry-after"]))
        assert (await post(api, body, headers=headers)).status_code == 200

    async def test_more_running_than_allowed_is_refused_until_one_ends(self, api, engine, platform):
        tenant = await make_tenant(platform, "narrow", max_concurrent=1)
        headers = bearer(await make_key(platform, tenant))
        engine.hold()
        body = {**HELLO, "model": BASE_NAME}
        first = asyncio.create_task(post(api, body, headers=headers))
        for _ in range(4000):
            if engine.running:
                break
            await asyncio.sleep(0.005)
        refused = await post(api, body, headers=headers)
        assert refused.json()["error"]["code"] == "concurrency_limit_exceeded"
        engine.let(100)
        assert (await first).status_code == 200
        assert (await post(api, body, headers=headers)).status_code == 200


async def wait_for(tasks, condition):
    """Waits until the finished tasks satisfy the condition; (finished, running)."""
    for _ in range(4000):
        done = [task for task in tasks if task.done()]
        if condition(done):
            return done, [task for task in tasks if not task.done()]
        await asyncio.sleep(0.005)
    pytest.fail(f"{len(done)} finished")


class TestEveryRefusalIsOpenAIs:
    @pytest.mark.parametrize(
        ("method", "path", "body", "status"),
        [
            ("POST", "/v1/chat/completions", b"{", 400),
            ("POST", "/v1/chat/completions", b"", 400),
            ("POST", "/v1/chat/completions", b'{"model": "support"}', 400),
            ("POST", "/v1/completions", b'{"model": "nobody", "prompt": "x"}', 404),
            ("GET", "/v1/models/nobody", None, 404),
            ("GET", "/v1/nothing-here", None, 404),
            ("GET", "/v1/chat/completions", None, 405),
            ("GET", "/v1/usage?bucket=year", None, 400),
            ("GET", "/v1/usage?start=2026-03-14&end=2026-03-01", None, 400),
        ],
    )
    async def test_shape(self, api, method, path, body, status):
        response = await api.request(method, path, content=body)
        assert response.status_code == status
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
        assert error["code"]

    async def test_a_wrong_key_is_a_401(self, api: httpx.AsyncClient):
        response = await post(api, headers={"authorization": "Bearer lmx_wrong_key"})
        assert response.status_code == 401
        assert response.json()["error"]["type"] == "authentication_error"

    async def test_an_operators_key_bypasses_no_limit(self, api, platform):
        operator = await make_key(platform, None)
        response = await post(api, headers=bearer(operator))
        assert response.status_code == 403
