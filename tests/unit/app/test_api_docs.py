"""/docs: served from our own files, and complete."""

import re

import httpx


async def test_the_page_fetches_nothing_from_elsewhere(client: httpx.AsyncClient) -> None:
    page = await client.get("/docs")
    links = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert links
    for link in links:
        assert link.startswith("/static/")
        assert (await client.get(link)).status_code == 200, link


async def test_the_document_has_the_operator_api_and_no_internals(
    client: httpx.AsyncClient,
) -> None:
    document = (await client.get("/docs/openapi.json")).json()
    for path in ("tenants", "keys", "users", "audit"):
        assert f"/admin/v1/{path}" in document["paths"]
    assert "/healthz" not in document["paths"]


async def test_the_document_is_found_where_tools_look_for_it(client: httpx.AsyncClient) -> None:
    answer = await client.get("/openapi.json", follow_redirects=True)
    assert answer.status_code == 200
    assert answer.json() == (await client.get("/docs/openapi.json")).json()
