"""Every page of the console."""

from fastapi import APIRouter

from app.console import (
    access,
    adapters,
    audit,
    engines,
    jobs,
    keys,
    limits,
    overview,
    playground,
    system,
    tenants,
    uploads,
    usage,
)

router = APIRouter()
for pages in (
    access,
    overview,
    adapters,
    uploads,
    playground,
    keys,
    usage,
    limits,
    audit,
    tenants,
    engines,
    jobs,
    system,
):
    router.include_router(pages.router)
