"""Every page of the console."""

from fastapi import APIRouter

from app.console import access, adapters, keys, playground, tenants, uploads

router = APIRouter()
for pages in (access, adapters, uploads, playground, keys, tenants):
    router.include_router(pages.router)
