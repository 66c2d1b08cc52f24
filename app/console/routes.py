"""Every page of the console."""

from fastapi import APIRouter

from app.console import (
    access,
    adapters,
    aliases,
    audit,
    engines,
    jobs,
    keys,
    limits,
    overview,
    playground,
    requests,
    system,
    tenants,
    uploads,
    usage,
    versions,
    webhooks,
)

router = APIRouter()
for pages in (
    access,
    overview,
    adapters,
    aliases,
    versions,
    uploads,
    playground,
    keys,
    webhooks,
    usage,
    limits,
    audit,
    tenants,
    requests,
    engines,
    jobs,
    system,
):
    router.include_router(pages.router)
