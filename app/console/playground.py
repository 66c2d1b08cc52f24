"""The playground: one prompt to one or two of the tenant's models, counted like any other call."""

from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse

from app.adapters.listing import matching_names
from app.auth import SessionUser, TenantAdmin
from app.caller import Caller
from app.console.adapters import base_model_name, may_write, newest_model, tenant_only
from app.console.examples import Example, examples
from app.console.forms import Form, read_form
from app.console.refusals import Refusal, explain
from app.console.render import render
from app.console.tables import Search
from app.deps import PlatformDep
from app.errors import AppError
from app.ids import new_id
from app.inference.handling import answer
from app.inference.schemas import chat_call, read_json
from app.inference.service import admit
from app.inference.stream import collect
from app.platform import Platform

router = APIRouter(prefix="/console/playground", include_in_schema=False)

DEFAULT_TOKENS = 200
PROMPT_CHARACTERS = 20_000
MOST_SUGGESTED = 50
ModelQuery = Annotated[str, Query(max_length=200, pattern=r"^[^\x00]*$")]


@dataclass(frozen=True, slots=True)
class Reply:
    """What one of the two models said, or why it did not."""

    model: str
    text: str = ""
    tokens: int = 0
    refusal: Refusal | None = None


@router.get("")
async def playground_page(
    request: Request,
    caller: SessionUser,
    platform: PlatformDep,
    model: ModelQuery = "",
    model_b: ModelQuery = "",
) -> Response:
    tenant_only(caller)
    return await _page(request, platform, caller, Form({"model": model, "model_b": model_b}))


@router.post("")
async def ask(request: Request, caller: TenantAdmin, platform: PlatformDep) -> Response:
    """Without JavaScript: the whole answers on a new page, one after the other."""
    tenant_only(caller)
    form = await read_form(request)
    replies: list[Reply] = []
    try:
        body = _body(form)
        for model in _models(form):
            replies.append(await _reply(request, platform, caller, body | {"model": model}))
    except AppError as error:
        return await _page(request, platform, caller, form, error=error)
    return await _page(request, platform, caller, form, replies=replies)


@router.post("/stream")
async def stream(request: Request, caller: TenantAdmin, platform: PlatformDep) -> Response:
    """With JavaScript: the body and the answer of POST /v1/chat/completions; a refusal is in words
    for people, with `page`: {"href", "label"} or null."""
    try:
        tenant_only(caller)
        return await answer(request, platform, caller, chat_call)
    except AppError as error:
        asked = read_json(await request.body()).get("model") if error.param == "model" else None
        refusal = await explain(platform, caller, asked, error)
        headers = error.headers()
        return JSONResponse(refusal.body(error), status_code=error.status, headers=headers)


@router.post("/code")
async def code(request: Request, caller: TenantAdmin, platform: PlatformDep) -> Response:
    """The page again, with the form as a call in three languages."""
    tenant_only(caller)
    form = await read_form(request)
    try:
        body = _body(form)
        written = examples(platform.settings.public_url, _models(form)[0], **body)
    except AppError as error:
        return await _page(request, platform, caller, form, error=error)
    return await _page(request, platform, caller, form, written=written)


@router.get("/models")
async def suggestions(
    request: Request,
    caller: SessionUser,
    platform: PlatformDep,
    model: Search = "",
    model_b: Search = "",
) -> Response:
    """Options to choose from while somebody types."""
    tenant_only(caller)
    typed = (model or model_b).strip().partition("@")[0]
    return render(request, "_models.html", models=await _suggested(platform, caller, typed))


async def _suggested(platform: Platform, caller: Caller, typed: str) -> list[str]:
    base = base_model_name(platform)
    async with platform.db.reading() as session:
        names = await matching_names(session, caller, typed, MOST_SUGGESTED)
    return [base, *names] if typed.lower() in base.lower() else names


async def _reply(
    request: Request, platform: Platform, caller: Caller, body: dict[str, Any]
) -> Reply:
    try:
        call = chat_call(body, platform.settings)
        admitted = await admit(platform, caller, call, new_id("req"))
        choices = await collect(admitted.generation, request.receive)
    except AppError as error:
        refusal = await explain(platform, caller, body["model"], error)
        return Reply(body["model"], refusal=refusal)
    counts = admitted.generation.counts
    return Reply(body["model"], "".join(choices[0].text), counts.completion_tokens)


def _models(form: Form) -> list[str]:
    """The first model, and the second where one is named."""
    second = form.text("model_b", most=200)
    return [form.text("model", most=200), *([second] if second else [])]


def _body(form: Form) -> dict[str, Any]:
    """What the form asks of each model. Raises InvalidRequest for what is no number."""
    messages = [{"role": "user", "content": form.text("prompt", most=PROMPT_CHARACTERS)}]
    system = form.text("system", most=PROMPT_CHARACTERS)
    if system:
        messages.insert(0, {"role": "system", "content": system})
    body: dict[str, Any] = {
        "messages": messages,
        "temperature": form.number("temperature", 1.0),
        "max_tokens": form.integer("max_tokens", DEFAULT_TOKENS),
    }
    for name in ("top_p", "presence_penalty", "frequency_penalty"):
        if form.text(name):
            body[name] = form.number(name, 0)
    if form.text("seed"):
        body["seed"] = form.integer("seed", 0)
    stops = [line for line in form.text("stop").splitlines() if line]
    if stops:
        body["stop"] = stops
    return body


async def _page(
    request: Request,
    platform: Platform,
    caller: Caller,
    form: Form,
    *,
    replies: list[Reply] | None = None,
    written: list[Example] | None = None,
    error: AppError | None = None,
) -> Response:
    served = any(engine.description is not None for engine in platform.engines.all)
    return render(
        request,
        "playground.html",
        models=await _suggested(platform, caller, ""),
        model=form.text("model") or await newest_model(platform, caller),
        model_b=form.text("model_b"),
        typed=form.fields,
        temperature=form.fields.get("temperature", "0.7"),
        max_tokens=form.fields.get("max_tokens", str(DEFAULT_TOKENS)),
        token_limit=caller.limits.max_tokens or 4096,
        prompt_limit=PROMPT_CHARACTERS,
        replies=replies or [],
        examples=written or [],
        may_write=may_write(caller),
        status_text="" if served else "The engine is not connected; no model can answer now.",
        error=error,
    )
