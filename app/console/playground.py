"""The playground: one prompt to one of the tenant's models, counted like any other call."""

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse

from app.adapters.resolution import list_models
from app.auth import SessionUser, TenantAdmin
from app.caller import Caller
from app.console.adapters import tenant_only
from app.console.forms import Form, read_form
from app.console.render import render
from app.deps import PlatformDep
from app.errors import AppError
from app.inference.handling import answer, request_id_of
from app.inference.schemas import chat_call
from app.inference.service import admit
from app.inference.stream import collect
from app.platform import Platform

router = APIRouter(prefix="/console/playground", include_in_schema=False)

DEFAULT_TOKENS = 200
PROMPT_CHARACTERS = 20_000


@router.get("")
async def playground_page(
    request: Request,
    caller: SessionUser,
    platform: PlatformDep,
    model: Annotated[str, Query(max_length=200)] = "",
) -> Response:
    tenant_only(caller)
    return await _page(request, platform, caller, Form({"model": model}))


@router.post("")
async def ask(request: Request, caller: TenantAdmin, platform: PlatformDep) -> Response:
    """Without JavaScript: the whole answer on a new page."""
    tenant_only(caller)
    form = await read_form(request)
    try:
        call = chat_call(_body(form), platform.settings)
        admitted = await admit(platform, caller, call, request_id_of(request))
        choices = await collect(admitted.generation, request.receive)
    except AppError as error:
        return await _page(request, platform, caller, form, error=error)
    return await _page(request, platform, caller, form, reply="".join(choices[0].text))


@router.post("/stream")
async def stream(request: Request, caller: TenantAdmin, platform: PlatformDep) -> Response:
    """With JavaScript: the body and the answer of POST /v1/chat/completions."""
    try:
        tenant_only(caller)
        return await answer(request, platform, caller, chat_call)
    except AppError as error:
        headers = error.headers()
        return JSONResponse(error.body(), status_code=error.status, headers=headers)


def _body(form: Form) -> dict[str, Any]:
    return {
        "model": form.text("model"),
        "messages": [{"role": "user", "content": form.text("prompt", most=PROMPT_CHARACTERS)}],
        "temperature": form.number("temperature", 1.0),
        "max_tokens": form.integer("max_tokens", DEFAULT_TOKENS),
    }


async def _page(
    request: Request,
    platform: Platform,
    caller: Caller,
    form: Form,
    *,
    reply: str | None = None,
    error: AppError | None = None,
) -> Response:
    served = {
        engine.description.base_digest
        for engine in platform.engines.all
        if engine.description is not None
    }
    async with platform.db.reading() as session:
        models = [entry.id for entry in await list_models(session, caller, served=served)]
    model = form.text("model")
    if model and model not in models:
        models.append(model)
    return render(
        request,
        "playground.html",
        status=200 if error is None else error.status,
        models=models,
        model=model,
        prompt=form.fields.get("prompt", ""),
        temperature=form.fields.get("temperature", "0.7"),
        max_tokens=form.fields.get("max_tokens", str(DEFAULT_TOKENS)),
        token_limit=caller.limits.max_tokens or 4096,
        prompt_limit=PROMPT_CHARACTERS,
        answer=reply,
        status_text="" if models else "The engine is not connected; no model can answer now.",
        error="" if error is None else error.message,
    )
