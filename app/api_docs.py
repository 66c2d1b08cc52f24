"""/docs: Swagger UI from vendored files, and the static files of all pages."""

import asyncio
from pathlib import Path

from fastapi import FastAPI
from fastapi.middleware.gzip import GZipMiddleware
from fastapi.responses import HTMLResponse, JSONResponse, RedirectResponse
from fastapi.staticfiles import StaticFiles

from app import openapi

WEB = Path(__file__).resolve().parent.parent / "web"
"""Templates and static files, beside the packages in a checkout and in an installation."""
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>loramux API</title>
<link rel="icon" href="/static/icon.svg">
<link rel="stylesheet" href="/static/vendor/swagger-ui/swagger-ui.css">
</head>
<body>
<div id="swagger-ui"></div>
<noscript>This page needs JavaScript; the document it shows is /docs/openapi.json.</noscript>
<script src="/static/vendor/swagger-ui/swagger-ui-bundle.js"></script>
<script src="/static/docs.js"></script>
</body>
</html>
"""


def install(app: FastAPI) -> None:
    files = StaticFiles(directory=WEB / "static")
    app.mount("/static", GZipMiddleware(files, minimum_size=1000), name="static")

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(_PAGE)

    @app.get("/openapi.json", include_in_schema=False)
    async def where_tools_look() -> RedirectResponse:
        return RedirectResponse("/docs/openapi.json")

    @app.get("/docs/openapi.json", include_in_schema=False)
    async def document() -> JSONResponse:
        # The first call takes most of a second; streams go on meanwhile.
        return JSONResponse(await asyncio.to_thread(openapi.document, app))
