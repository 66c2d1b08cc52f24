"""Every page of the console."""

from fastapi import APIRouter

from app.console import (
    access,
    adapters,
    aliases,
    audit,
    keys,
    limits,
    overview,
    playground,
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
):
    router.include_router(pages.router)
