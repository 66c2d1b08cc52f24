"""Every refusal on /v1 and /admin/v1 is OpenAI's error object; in the console it is a page."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import httpx
import openai
import pytest
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict, Field
from structlog.testing import capture_logs

from app import errors
from app.auth import ApiCaller, SessionUser
from app.clock import FrozenClock
from app.error_handlers import field_name
from app.keys import token
from app.main import create_app
from app.platform import Platform, open_platform
from app.settings import Settings
from tests.factories import bearer, make_key, make_tenant, make_user, sign_in

CANARY = "canary-7f3a"
OURS = "http://127.0.0.1:8000"


class Message(BaseModel):
    model_config = ConfigDict(extra="forbid")
    role: Literal["user", "system"]
    content: str


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid")
    messages: list[Message] = Field(min_length=1)
    n: Annotated[int, Field(ge=1, le=8)] = 1
    mode: Literal["fast", "slow"] = "fast"


def refusals() -> list[type[errors.AppError]]:
    """Every class of the tree in app.errors; the others are theirs with codes of their own."""
    kinds = errors.AppError.__subclasses__()
    return [kind for kind in kinds if kind.__module__ == errors.__name__]


@pytest.fixture
def app(platform: Platform) -> FastAPI:
    """The app with routes that fail in every way."""
    app = create_app(platform=platform)

    @app.post("/v1/echo")
    async def echo(body: Body, caller: ApiCaller) -> dict[str, int]:
        return {"n": body.n}

    @app.get("/v1/broken")
    async def broken() -> None:
        raise RuntimeError(f"a prompt: {CANARY}")

    @app.get("/v1/stream-broken")
    async def stream_broken() -> StreamingResponse:
        async def chunks() -> Any:
            yield b"data: 1\n\n"
            raise RuntimeError(f"a prompt: {CANARY}")

        return StreamingResponse(chunks())

    @app.get("/v1/refused/{name}")
    async def refused(name: str) -> None:
        raise next(kind for kind in refusals() if kind.__name__ == name)("a sentence that helps")

    @app.get("/console/broken")
    async def console_broken() -> None:
        raise RuntimeError(CANARY)

    @app.get("/console/mine")
    async def mine(caller: SessionUser) -> dict[str, str]:
        return {"user": caller.label}

    return app


def check_shape(answer: httpx.Response) -> Mapping[str, Any]:
    """Asserts OpenAI's object and returns what is in it."""
    assert answer.headers["content-type"] == "application/json"
    assert list(answer.json()) == ["error"]
    error: Mapping[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert len(error["message"]) > 10
    assert error["code"]
    assert error["type"].endswith("_error")
    retryable = answer.status_code in (429, 503)
    assert ("retry-after" in answer.headers) == retryable
    assert answer.headers.get("x-should-retry") == (None if retryable else "false")
    return error


BAD: list[tuple[dict[str, Any], int, str, str | None]] = [
    ({"content": b"{"}, 400, "invalid_json", None),
    ({"content": b""}, 400, "malformed_body", None),
    ({"content": b"null"}, 400, "malformed_body", None),
    ({"content": b"[]"}, 400, "malformed_body", None),
    ({"content": b'"x"'}, 400, "malformed_body", None),
    ({"content": b"\xff\xfe{}"}, 400, "invalid_json", None),
    ({"content": b"[" * 100_000}, 400, "invalid_json", None),
    ({"json": {}}, 400, "missing_field", "messages"),
    ({"json": {"messages": []}}, 400, "invalid_value", "messages"),
    ({"json": {"messages": [{"role": "user"}]}}, 400, "missing_field", "messages[0].content"),
    (
        {"json": {"messages": [{"role": "user", "content": "x"}], "nn": 1}},
        400,
        "unknown_field",
        "nn",
    ),
    ({"json": {"messages": [{"role": "user", "content": "x"}], "n": 9}}, 400, "invalid_value", "n"),
    (
        {"json": {"messages": [{"role": "user", "content": "x"}], "mode": "warp"}},
        400,
        "invalid_value",
        "mode",
    ),
    (
        {"json": {"messages": [{"role": CANARY, "content": "x"}]}},
        400,
        "invalid_value",
        "messages[0].role",
    ),
]


class TestBodies:
    @pytest.mark.parametrize(("request_", "status", "code", "param"), BAD)
    async def test_bad_ones_name_the_field_and_never_quote_content(
        self,
        client: httpx.AsyncClient,
        platform: Platform,
        request_: dict[str, Any],
        status: int,
        code: str,
        param: str | None,
    ) -> None:
        key = await make_key(platform, await make_tenant(platform))
        headers = {**bearer(key), "content-type": "application/json"}
        answer = await client.post("/v1/echo", headers=headers, **request_)
        error = check_shape(answer)
        assert (answer.status_code, error["code"], error["param"]) == (status, code, param)
        assert CANARY not in answer.text

    async def test_a_wrong_number_or_word_is_named(
        self, client: httpx.AsyncClient, platform: Platform
    ) -> None:
        key = await make_key(platform, await make_tenant(platform))
        messages = [{"role": "user", "content": "x"}]
        for field, value in (("n", 9), ("mode", "warp")):
            answer = await client.post(
                "/v1/echo", headers=bearer(key), json={"messages": messages, field: value}
            )
            message = answer.json()["error"]["message"]
            assert repr(value) in message
            assert f"`{field}` must be" in message
            assert "Input" not in message

    @pytest.mark.parametrize(
        ("content", "words"),
        [
            (b'{"n": 1', "ends in the middle"),
            (b"<a/>", "XML"),
            (b'{"n": "\xff"}', "not UTF-8"),
            (b'{"n": ' + b"9" * 5000 + b"}", "the number 999"),
        ],
    )
    async def test_what_cannot_be_read_is_told_in_plain_words(
        self, client: httpx.AsyncClient, platform: Platform, content: bytes, words: str
    ) -> None:
        key = await make_key(platform, await make_tenant(platform))
        headers = {**bearer(key), "content-type": "application/json"}
        answer = await client.post("/v1/echo", headers=headers, content=content)
        assert answer.status_code == 400
        assert words in check_shape(answer)["message"]


class TestRoutes:
    @pytest.mark.parametrize(
        ("method", "path", "status"),
        [
            ("GET", "/v1/none", 404),
            ("GET", "/v1/%2e%2e/x", 404),
            ("GET", "/admin/v1/none", 404),
            ("DELETE", "/v1/echo", 405),
            ("GET", "/v1/echo", 405),
            ("BREW", "/v1/echo", 405),
            ("GET", "/v1/broken", 500),
        ],
    )
    async def test_those_that_fail_answer_in_openais_shape(
        self, client: httpx.AsyncClient, method: str, path: str, status: int
    ) -> None:
        answer = await client.request(method, path)
        assert answer.status_code == status
        check_shape(answer)

    async def test_405_says_what_is_allowed(self, client: httpx.AsyncClient) -> None:
        assert (await client.get("/v1/echo")).headers["allow"] == "POST"


class TestUnexpectedErrors:
    async def test_tell_the_caller_a_request_id_and_nothing_else(
        self, client: httpx.AsyncClient
    ) -> None:
        answer = await client.get("/v1/broken")
        error = check_shape(answer)
        assert answer.headers["x-request-id"] in error["message"]
        assert CANARY not in answer.text
        assert "RuntimeError" not in answer.text

    async def test_are_logged_with_their_place_and_without_their_message(
        self, client: httpx.AsyncClient
    ) -> None:
        with capture_logs() as lines:
            await client.get("/v1/broken")
        (line,) = [line for line in lines if line["event"] == "unexpected"]
        assert line["error"] == "RuntimeError"
        assert any("test_error_shapes.py" in place for place in line["where"])
        assert CANARY not in str(lines)

    async def test_in_the_middle_of_a_stream_cut_it_off(self, client: httpx.AsyncClient) -> None:
        with capture_logs() as lines:
            answer = await client.get("/v1/stream-broken")
        assert answer.status_code == 200
        assert CANARY not in str(lines)
        assert CANARY not in answer.text


class TestTheDatabase:
    async def test_being_away_is_a_503_that_may_be_retried(
        self, settings: Settings, clock: FrozenClock
    ) -> None:
        away = settings.model_copy(
            update={"database_url": "postgresql+psycopg://nobody@127.0.0.1:9/none"}
        )
        platform = open_platform(away, clock=clock)
        transport = httpx.ASGITransport(create_app(platform=platform), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url=OURS) as client:
            answer = await client.get(
                "/admin/v1/tenants", headers={"authorization": f"Bearer {token.mint().text}"}
            )
            ready = await client.get("/readyz")
        await platform.close()
        assert answer.status_code == 503
        assert check_shape(answer)["code"] == "database_unavailable"
        assert "nobody" not in answer.text
        assert ready.status_code == 503


class TestTheOpenaiPackage:
    @pytest.mark.parametrize(
        ("path", "kind"),
        [
            ("/v1/none", openai.NotFoundError),
            ("/v1/broken", openai.InternalServerError),
            ("/v1/models/none", openai.AuthenticationError),
        ],
    )
    async def test_raises_its_own_classes(
        self, client: httpx.AsyncClient, path: str, kind: type[openai.APIStatusError]
    ) -> None:
        sdk = openai.AsyncOpenAI(
            api_key="lmx_wrong", base_url="http://127.0.0.1:8000/v1", http_client=client
        )
        with pytest.raises(kind) as caught:
            await sdk.get(path.removeprefix("/v1"), cast_to=httpx.Response)
        assert caught.value.code

    async def test_raises_the_class_of_each_refusals_status(
        self, client: httpx.AsyncClient
    ) -> None:
        """With the refusal's code and type in it."""
        sdk = openai.AsyncOpenAI(api_key="lmx_x", base_url=f"{OURS}/v1", http_client=client)
        sdk.max_retries = 0
        kinds = {
            400: openai.BadRequestError,
            401: openai.AuthenticationError,
            403: openai.PermissionDeniedError,
            404: openai.NotFoundError,
            409: openai.ConflictError,
            422: openai.UnprocessableEntityError,
            429: openai.RateLimitError,
        }
        for refusal in refusals():
            with pytest.raises(openai.APIStatusError) as caught:
                await sdk.get(f"/refused/{refusal.__name__}", cast_to=httpx.Response)
            error, status = caught.value, refusal.status
            assert error.status_code == status
            if status in kinds or status >= 500:
                assert type(error) is kinds.get(status, openai.InternalServerError), refusal
            assert (error.code, error.type) == (refusal.code, refusal.type)


class TestTheConsole:
    async def test_shows_a_page_without_the_error(self, client: httpx.AsyncClient) -> None:
        answer = await client.get("/console/broken")
        assert answer.status_code == 500
        assert answer.headers["content-type"].startswith("text/html")
        assert CANARY not in answer.text

    async def test_leads_to_its_sign_in(self, client: httpx.AsyncClient) -> None:
        answer = await client.get("/console/mine")
        assert answer.status_code == 303
        assert answer.headers["location"].startswith("/console/sign-in")

    async def test_leads_htmx_there_too(self, client: httpx.AsyncClient) -> None:
        answer = await client.get("/console/mine", headers={"hx-request": "true"})
        assert answer.headers["hx-redirect"].startswith("/console/sign-in")

    async def test_lets_a_signed_in_user_through_but_not_with_a_one_time_password(
        self, client: httpx.AsyncClient, platform: Platform
    ) -> None:
        tenant = await make_tenant(platform)
        user = await make_user(platform, tenant)
        client.cookies.update(await sign_in(platform, user))
        assert (await client.get("/console/mine")).json() == {"user": user.email}
        client.cookies.clear()
        client.cookies.update(
            await sign_in(platform, await make_user(platform, tenant, must_change=True))
        )
        answer = await client.get("/console/mine")
        assert (answer.status_code, answer.headers["location"]) == (303, "/console/password")


@pytest.mark.parametrize(
    ("location", "name"),
    [
        (("body", "messages", 0, "content"), "messages[0].content"),
        (("query", "limit"), "limit"),
        (("body",), ""),
        (("body", "response_format", "function-after[x(), y]", "type"), "response_format.type"),
        (("body", "logit_bias", "50256"), "logit_bias"),
    ],
)
def test_fields_are_named_as_openai_names_them(location: tuple[Any, ...], name: str) -> None:
    assert field_name(location) == name


class TestNul:
    """PostgreSQL stores no text with a NUL, and SQLite does: neither is a fault of ours."""

    @pytest.fixture
    def database_url(self, any_database_url: str) -> str:
        return any_database_url

    @pytest.mark.parametrize(
        "path",
        [
            "/v1/models/a%00b", "/v1/adapters?after=%00", "/v1/usage?model=%00",
            "/v1/webhooks/%00", "/v1/uploads/%00", "/v1/adapters/a/aliases/%00",
            "/v1/keys/%00", "/v1/users/%00", "/v1/keys?after=%00",
        ],
    )  # fmt: skip
    async def test_in_an_address_of_the_tenant_api(
        self, client: httpx.AsyncClient, platform: Platform, path: str
    ) -> None:
        key = await make_key(platform, await make_tenant(platform))
        refused = await client.get(path, headers=bearer(key))
        assert refused.status_code in (200, 400, 404), refused.text

    @pytest.mark.parametrize(
        "path",
        ["tenants/%00", "keys/%00", "users/%00", "engines/%00", "adapters/versions/%00",
         "adapters?tenant=%00", "audit?action=%00", "audit?tenant_id=%00"],
    )  # fmt: skip
    async def test_in_an_address_of_the_operators_api(
        self, client: httpx.AsyncClient, platform: Platform, path: str
    ) -> None:
        headers = bearer(await make_key(platform, None))
        refused = await client.get(f"/admin/v1/{path}", headers=headers)
        assert refused.status_code in (200, 400, 404, 405), refused.text

    async def test_in_a_body(self, client: httpx.AsyncClient, platform: Platform) -> None:
        headers = bearer(await make_key(platform, None))
        tenant = await make_tenant(platform)
        body = {"tenant_id": tenant.id, "name": "a\0b"}
        refused = await client.post("/admin/v1/keys", json=body, headers=headers)
        assert refused.status_code in (201, 400), refused.text
        own = bearer(await make_key(platform, tenant, access="manage"))
        for path, body in (
            ("users", {"email": "a\0b@example.com", "role": "tenant_viewer"}),
            ("keys", {"name": "a\0b"}),
            ("keys", {"adapters": ["a\0b"]}),
        ):
            refused = await client.post(f"/v1/{path}", json=body, headers=own)
            assert refused.status_code in (201, 400), refused.text

    async def test_on_a_page(self, client: httpx.AsyncClient, platform: Platform) -> None:
        user = await make_user(platform, await make_tenant(platform))
        client.cookies.update(await sign_in(platform, user))
        for name in ("after", "action", "target"):
            page = await client.get(f"/console/audit?{name}=%00")
            assert page.status_code in (200, 400)
            assert page.status_code == 200 or f"`{name}` has a NUL" in page.text
