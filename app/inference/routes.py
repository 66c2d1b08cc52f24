"""/v1/models, /v1/chat/completions and /v1/completions, as OpenAI's clients call them."""

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.routing import APIRoute

from app.adapters.resolution import ListedModel, list_models
from app.auth import ApiCaller, api_caller
from app.caller import Caller
from app.deps import PlatformDep, get_platform
from app.inference.answers import model_object
from app.inference.documentation import CHAT_BODY, COMPLETION_BODY
from app.inference.handling import (
    answer,
    json_response,
    request_id_of,
    standing,
    with_limit_headers,
)
from app.inference.schemas import chat_call, completion_call
from app.platform import Platform
from app.query import refuse_unknown_parameters

router = APIRouter(prefix="/v1", tags=["inference"])


class CallRoute(APIRoute):
    """A route whose endpoint needs the caller and the platform alone, as every call's does.

    FastAPI documents its parameters as others'; resolving them costs as much as the admission.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        async def handle(request: Request) -> Response:
            await refuse_unknown_parameters(request)
            platform = await get_platform(request)
            caller = await api_caller(request, platform)
            response: Response = await self.endpoint(request, caller, platform)
            return response

        return handle


async def chat_completions(request: Request, caller: ApiCaller, platform: PlatformDep) -> Response:
    """Answers a conversation, streamed or whole."""
    return await answer(request, platform, caller, chat_call)


async def completions(request: Request, caller: ApiCaller, platform: PlatformDep) -> Response:
    """Continues a text, streamed or whole."""
    return await answer(request, platform, caller, completion_call)


for path, endpoint, body in (
    ("/chat/completions", chat_completions, CHAT_BODY),
    ("/completions", completions, COMPLETION_BODY),
):
    router.add_api_route(
        path, endpoint, methods=["POST"], openapi_extra=body, route_class_override=CallRoute
    )


@router.get("/models")
async def models(caller: ApiCaller, platform: PlatformDep) -> Response:
    """Exactly what this key may call."""
    listed = await _listed(platform, caller)
    body = {"object": "list", "data": [model_object(model) for model in listed]}
    return json_response(body, await standing(platform, caller))


@router.get("/models/{name:path}")
async def model(name: str, request: Request, caller: ApiCaller, platform: PlatformDep) -> Response:
    """One model, under any name that a call may use."""
    async with with_limit_headers(platform, caller):
        found = await platform.names.for_call(caller, name, request_id=request_id_of(request))
    listed = await _listed(platform, caller)
    known = next(
        (entry for entry in listed if entry.id == name),
        next((entry for entry in listed if entry.adapter_id == found.adapter_id), None),
    )
    numbers = () if found.version_number is None else (found.version_number,)
    entry = ListedModel(
        id=name,
        created=known.created if known else 0,
        kind=known.kind if known else "version",
        adapter_id=found.adapter_id,
        versions=known.versions if known and known.id == name else numbers,
    )
    return json_response(model_object(entry), await standing(platform, caller))


async def _listed(platform: Platform, caller: Caller) -> list[ListedModel]:
    served = {
        engine.description.base_digest
        for engine in platform.engines.all
        if engine.description is not None
    }
    async with platform.db.reading() as session:
        return await list_models(session, caller, served=served)
