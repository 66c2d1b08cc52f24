"""Whole answers: their shape, their headers, their counts."""

import json

import pytest

from app.caller import KeyLimits
from app.usage import repository
from engine.types import LatencyBudget
from tests.factories import bearer, make_key, make_tenant
from tests.fake_engine import BASE_DIGEST, BASE_NAME, ByteCodec
from tests.serving import make_ready_adapter

HELLO = {"model": "support", "messages": [{"role": "user", "content": "hi"}]}


async def ledger_row(platform, request_id):
    await platform.ledger.drain()
    async with platform.db.reading() as session:
        return await repository.get(session, request_id)


class TestChat:
    async def test_the_adapter_answers_and_is_named_in_the_headers(self, api, engine):
        response = await api.post("/v1/chat/completions", json=HELLO)
        assert response.status_code == 200
        body = response.json()
        assert body["object"] == "chat.completion"
        choice = body["choices"][0]
        assert choice["message"] == {
            "role": "assistant",
            "content": "d1d1: Hello, world",
            "refusal": None,
        }
        assert choice["finish_reason"] == "stop"
        assert response.headers["x-loramux-adapter"].endswith(f"@v1; {'d1' * 32}")
        assert response.headers["x-request-id"] == engine.requests[0].request_id

    async def test_the_base_model_has_no_adapter(self, api, engine):
        response = await api.post("/v1/chat/completions", json={**HELLO, "model": BASE_NAME})
        assert response.json()["choices"][0]["message"]["content"] == "Hello, world"
        assert engine.requests[0].adapter is None
        assert response.headers["x-loramux-adapter"] == f"base; {BASE_DIGEST}"

    @pytest.mark.parametrize("kind", ["application/json", "Application/JSON; charset=utf-8", None])
    async def test_a_body_of_json_need_not_say_so(self, api, kind):
        headers = {} if kind is None else {"content-type": kind}
        sent = json.dumps(HELLO).encode()
        response = await api.post("/v1/chat/completions", content=sent, headers=headers)
        assert response.status_code == 200

    @pytest.mark.parametrize(
        "kind", ["text/plain", "application/x-www-form-urlencoded", "application/xml"]
    )
    async def test_another_content_type_is_refused_with_the_right_one(self, api, engine, kind):
        sent = json.dumps(HELLO).encode()
        response = await api.post(
            "/v1/chat/completions", content=sent, headers={"content-type": kind}
        )
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (415, "json_expected")
        assert error["param"] == "content-type"
        assert "application/json" in error["message"]
        assert not engine.requests

    async def test_usage_is_that_of_the_ledger(self, api, platform, engine):
        engine.cached_tokens = 3
        response = await api.post("/v1/chat/completions", json=HELLO)
        usage = response.json()["usage"]
        row = await ledger_row(platform, response.headers["x-request-id"])
        assert usage["completion_tokens"] == row.completion_tokens == 19  # text and end token
        assert usage["prompt_tokens"] == row.prompt_tokens == len("user:hi\n")
        assert usage["prompt_tokens_details"]["cached_tokens"] == row.cached_tokens == 3
        assert (row.status, row.finish_reasons, row.streamed) == ("completed", ["stop"], False)
        assert row.model == "support@v1"

    @pytest.mark.parametrize(
        ("model", "alias"), [("support", "live"), ("support@live", "live"), ("support@v1", None)]
    )
    async def test_the_ledger_knows_which_alias_led_to_the_version(
        self, api, platform, model, alias
    ):
        response = await api.post("/v1/chat/completions", json={**HELLO, "model": model})
        row = await ledger_row(platform, response.headers["x-request-id"])
        assert (row.model, row.alias) == ("support@v1", alias)

    async def test_choices_are_answered_side_by_side(self, api, platform):
        response = await api.post("/v1/chat/completions", json={**HELLO, "n": 3, "max_tokens": 4})
        choices = response.json()["choices"]
        assert [choice["index"] for choice in choices] == [0, 1, 2]
        assert {choice["message"]["content"] for choice in choices} == {"d1d1"}
        assert {choice["finish_reason"] for choice in choices} == {"length"}
        row = await ledger_row(platform, response.headers["x-request-id"])
        assert row.completion_tokens == 12
        assert row.reserved_tokens == len("user:hi\n") + 12

    async def test_logprobs_name_tokens_and_bytes(self, api):
        response = await api.post(
            "/v1/chat/completions",
            json={**HELLO, "max_tokens": 2, "logprobs": True, "top_logprobs": 1},
        )
        content = response.json()["choices"][0]["logprobs"]["content"]
        assert [entry["token"] for entry in content] == ["d", "1"]
        assert content[0]["bytes"] == [100]
        assert content[0]["top_logprobs"] == [{"token": "a", "logprob": -1.0, "bytes": [97]}]

    async def test_the_engine_gets_ids_and_no_names(self, api, engine, tenant):
        await api.post("/v1/chat/completions", json={**HELLO, "seed": 5})
        request = engine.requests[0]
        assert (request.tenant, request.cache_salt) == (tenant.id, tenant.salt)
        assert request.adapter.salt == tenant.salt
        assert request.sampling.seed == 5
        assert request.deadline_ms > 0

    async def test_without_a_seed_each_call_draws_its_own(self, api, engine):
        for _ in range(2):
            await api.post("/v1/chat/completions", json=HELLO)
        first, second = engine.requests
        assert first.sampling.seed != second.sampling.seed


class TestCompletions:
    async def test_a_text_is_continued(self, api):
        response = await api.post(
            "/v1/completions", json={"model": "support", "prompt": "say", "logprobs": 2}
        )
        body = response.json()
        assert body["object"] == "text_completion"
        choice = body["choices"][0]
        assert choice["text"] == "d1d1: Hello, world"
        logprobs = choice["logprobs"]
        assert logprobs["tokens"][:3] == ["d", "1", "d"]
        assert logprobs["text_offset"] == list(range(18))
        assert logprobs["top_logprobs"][0] == {"a": -1.0, "b": -2.0}

    async def test_token_ids_go_in_as_they_are(self, api, engine):
        await api.post("/v1/completions", json={"model": "support", "prompt": [104, 105]})
        assert engine.requests[0].prompt == [104, 105]

    async def test_a_token_beyond_the_vocabulary_is_refused_by_its_place(self, api):
        response = await api.post("/v1/completions", json={"model": "support", "prompt": [1, 257]})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "prompt[1]"


class TestStopStrings:
    async def test_the_answer_ends_before_the_stop_and_so_does_the_bill(
        self, api, engine, platform
    ):
        engine.hold()
        engine.let(100)
        engine.overshoot = 2
        response = await api.post("/v1/chat/completions", json={**HELLO, "stop": ["lo, w"]})
        choice = response.json()["choices"][0]
        assert choice["message"]["content"] == "d1d1: Hel"
        assert choice["finish_reason"] == "stop"
        row = await ledger_row(platform, response.headers["x-request-id"])
        assert row.completion_tokens == len("d1d1: Hello, w")
        assert row.overshoot_tokens >= 2
        assert response.json()["usage"]["completion_tokens"] == row.completion_tokens
        assert engine.cancelled == [row.request_id]
        assert engine.running == 0

    @pytest.mark.parametrize("streamed", [False, True])
    async def test_a_choice_that_stops_first_does_not_run_on_beside_the_others(
        self, api, engine, platform, streamed
    ):
        engine.texts = ("one END and much more", "the other choice stops nowhere at all")
        body = {**HELLO, "model": BASE_NAME, "n": 2, "stop": ["END"], "stream": streamed}
        response = await api.post("/v1/chat/completions", json=body)
        row = await ledger_row(platform, response.headers["x-request-id"])
        assert engine.cancelled_choices == [(row.request_id, 0)]
        assert row.completion_tokens == len("one END") + len(engine.texts[1]) + 1
        assert row.finish_reasons == ["stop", "stop"]
        assert row.overshoot_tokens <= 1
        assert engine.running == 0


class TestMaxTokens:
    async def test_the_default_fits_context_tenant_and_minute(self, api, engine, platform):
        await api.post("/v1/chat/completions", json=HELLO)
        assert engine.requests[-1].sampling.max_tokens == 256 - len("user:hi\n")
        small = await make_tenant(platform, "small", max_tokens=20)
        key = await make_key(platform, small)
        body = {**HELLO, "model": BASE_NAME}
        await api.post("/v1/chat/completions", json=body, headers=bearer(key))
        assert engine.requests[-1].sampling.max_tokens == 20
        tight = await make_key(platform, small, limits=KeyLimits(tokens_per_minute=18))
        await api.post("/v1/chat/completions", json={**body, "n": 2}, headers=bearer(tight))
        assert engine.requests[-1].sampling.max_tokens == 5

    async def test_more_than_the_tenant_may_is_refused_by_name(self, api, platform):
        small = await make_tenant(platform, "small", max_tokens=20)
        key = await make_key(platform, small)
        body = {**HELLO, "model": BASE_NAME, "max_completion_tokens": 21}
        response = await api.post("/v1/chat/completions", json=body, headers=bearer(key))
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["param"]) == (
            400,
            "max_tokens_exceeds_limit",
            "max_completion_tokens",
        )

    @pytest.mark.parametrize(
        ("content", "max_tokens", "param", "figures"),
        [("x" * 300, None, "messages", ("256", "306")), ("hi", 250, "max_tokens", ("256", "250"))],
    )
    async def test_what_exceeds_the_context_is_refused_with_figures(
        self, api, content, max_tokens, param, figures
    ):
        body = {**HELLO, "messages": [{"role": "user", "content": content}]}
        response = await api.post("/v1/chat/completions", json={**body, "max_tokens": max_tokens})
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
        assert error["param"] == param
        assert all(figure in error["message"] for figure in figures)


class TestLatencyBudget:
    async def test_a_call_may_loosen_and_never_tighten(self, api, engine, platform):
        quick = await make_tenant(platform, "quick", ttft_ms=500, tpot_ms=50)
        headers = bearer(await make_key(platform, quick))
        body = {**HELLO, "model": BASE_NAME}
        loose = {**body, "loramux": {"ttft_ms": 900}}
        await api.post("/v1/chat/completions", json=loose, headers=headers)
        assert (engine.requests[-1].budget.ttft_ms, engine.requests[-1].budget.tpot_ms) == (900, 50)
        tight = {**body, "loramux": {"tpot_ms": 10}}
        response = await api.post("/v1/chat/completions", json=tight, headers=headers)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "loramux.tpot_ms"

    async def test_the_percentile_and_the_time_already_gone_travel_with_the_call(
        self, api, engine, platform, monkeypatch
    ):
        def tokenize_slowly(self: ByteCodec, messages: object, tools: object) -> list[int]:
            platform.clock.advance(seconds=0.25)
            return [104, 105]

        monkeypatch.setattr(ByteCodec, "encode_chat", tokenize_slowly)
        tenant = await make_tenant(platform, "quick", ttft_ms=500, budget_percentile=0.9)
        headers = bearer(await make_key(platform, tenant))
        await api.post("/v1/chat/completions", json={**HELLO, "model": BASE_NAME}, headers=headers)
        assert engine.requests[-1].budget == LatencyBudget(500, None, 0.9)
        assert engine.requests[-1].waited_ms == pytest.approx(250.0)
        limits = (await api.get("/v1/limits", headers=headers)).json()
        assert (limits["ttft_ms"], limits["tpot_ms"]) == (500, None)
        assert (limits["budget_percentile"], limits["weight"]) == (0.9, 1.0)

    async def test_without_a_promise_there_is_nothing_to_loosen(self, api):
        response = await api.post(
            "/v1/chat/completions", json={**HELLO, "loramux": {"ttft_ms": 900}}
        )
        assert response.json()["error"]["code"] == "budget_tightened"


class TestModels:
    async def test_every_listed_model_answers_and_no_other(self, api, platform):
        other = await make_tenant(platform, "other")
        await make_ready_adapter(platform, other, "theirs", digest="e2" * 32)
        listed = [model["id"] for model in (await api.get("/v1/models")).json()["data"]]
        assert set(listed) == {BASE_NAME, "support", "support@v1"}
        for name in [*listed, "theirs", "nothing", "support@v2", "../support", "a" * 500]:
            body = {**HELLO, "model": name, "max_tokens": 1}
            response = await api.post("/v1/chat/completions", json=body)
            assert response.status_code == (200 if name in listed else 404), name
            one = await api.get(f"/v1/models/{name.replace('/', '%2F')}")
            assert one.status_code == response.status_code

    async def test_a_foreign_model_is_told_like_none(self, api, platform):
        other = await make_tenant(platform, "other")
        foreign = await make_ready_adapter(platform, other, "theirs", digest="e2" * 32)
        answers = []
        for name in ("theirs", "nobody", foreign.adapter_id, "adp_" + "0" * 26):
            response = await api.post("/v1/chat/completions", json={**HELLO, "model": name})
            answers.append(json.dumps(response.json()).replace(name, "NAME"))
            assert response.status_code == 404
        assert len(set(answers)) == 1

    async def test_the_id_of_an_adapter_is_a_model_too(self, api, tenant):
        listed = (await api.get("/v1/models/support")).json()
        adapter_id = listed["loramux"]["adapter"]
        one = (await api.get(f"/v1/models/{adapter_id}")).json()
        assert (one["id"], one["object"]) == (adapter_id, "model")
        assert one["created"] > 0

    async def test_a_key_lists_only_what_its_scope_covers(self, api, platform, tenant):
        await make_ready_adapter(platform, tenant, "second", digest="c3" * 32)
        key = await make_key(platform, tenant, adapters=["second"])
        response = await api.get("/v1/models", headers=bearer(key))
        assert {model["id"] for model in response.json()["data"]} == {"second", "second@v1"}
