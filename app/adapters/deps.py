"""Dependencies of routes that work with adapters; the console uses them too."""

from collections.abc import Sequence
from typing import Annotated

from fastapi import Depends, Request

from app.adapters.probes import Engine
from app.adapters.resources import Resources
from app.adapters.uploads import UploadGate
from app.platform import Platform
from app.task_queue import CeleryQueue, create_celery
from engine.adapters.store import open_store
from engine.errors import EngineUnavailable
from engine.types import ModelDescription


def open_resources(platform: Platform) -> Resources:
    """The api's side: it sends tasks, receives files and erases; it never probes."""
    return Resources(
        settings=platform.settings,
        db=platform.db,
        clock=platform.clock,
        store=open_store(platform.settings.adapter_store_url),
        queue=CeleryQueue(create_celery(platform.settings)),
        engines=_links(platform),
        encode=_no_probes,
    )


def _links(platform: Platform) -> Sequence[Engine]:
    links: Sequence[Engine] = [] if platform.engines is None else platform.engines.links
    return links


def _no_probes(_base: ModelDescription, _text: str) -> Sequence[int]:
    raise EngineUnavailable("probes run in a worker, not in the api")


async def get_resources(request: Request) -> Resources:
    """Made at the first request, when the engines are connected; one for the whole app."""
    state = request.app.state
    if not hasattr(state, "adapter_resources"):
        state.adapter_resources = open_resources(state.platform)
    resources: Resources = state.adapter_resources
    return resources


async def get_gate(request: Request) -> UploadGate:
    state = request.app.state
    if not hasattr(state, "upload_gate"):
        state.upload_gate = UploadGate()
    gate: UploadGate = state.upload_gate
    return gate


ResourcesDep = Annotated[Resources, Depends(get_resources)]
GateDep = Annotated[UploadGate, Depends(get_gate)]
