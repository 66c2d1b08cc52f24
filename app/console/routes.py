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
)

router = APIRouter()
for pages in (access, overview, adapters, uploads, playground, keys, limits, audit, tenants):
    router.include_router(pages.router)
