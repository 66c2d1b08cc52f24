"""Every page of the console."""

from fastapi import APIRouter

from app.console import (
    access,
    adapters,
    audit,
    keys,
    limits,
    overview,
    playground,
    tenants,
    uploads,
    usage,
)

router = APIRouter()
for pages in (access, overview, adapters, uploads, playground, keys, usage, limits, audit, tenants):
    router.include_router(pages.router)
