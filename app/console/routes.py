"""Every page of the console."""

from fastapi import APIRouter

from app.console import access, adapters, keys, playground, tenants

router = APIRouter()
for pages in (access, adapters, playground, keys, tenants):
    router.include_router(pages.router)
