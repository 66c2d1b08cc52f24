"""A body nested too deep is refused by the name of the field."""

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.json_depth import deepest_field
from app.platform import Platform
from tests.factories import bearer, make_key, make_tenant

DEEP = b"[" * 100_000


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b'{"a": 1, "messages": [{"content": "x"}, {"content": ' + DEEP, "messages[1].content[0]"),
        (b'{"a": {"b": [1, 2]}, "b": ' + b'{"k": ' * 9000, "b.k.k.k"),
        (b'{"a \\"[{": {"b": {"c": [', 'a \\"[{.b.c[0]'),
        (b'{"x": [1, [2], ' + DEEP, "x[2][0][0]"),
        (b'{"x": "[[[["}', ""),
        (DEEP, ""),
        (b"", ""),
    ],
)
def test_the_path_of_the_deepest_value_is_told_by_its_beginning(body: bytes, field: str) -> None:
    assert deepest_field(body).replace("\\", "") == field.replace("\\", "")


@given(st.binary(max_size=60) | st.text('{}[]",:a\\', max_size=60).map(str.encode))
def test_any_bytes_are_taken(body: bytes) -> None:
    assert len(deepest_field(body)) <= 120


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/v1/chat/completions", "messages"),
        ("/v1/completions", "prompt"),
        ("/v1/keys", "networks"),
        ("/v1/uploads", "name"),
        ("/admin/v1/tenants", "name"),
    ],
)
async def test_every_kind_of_route_names_the_field(
    client: httpx.AsyncClient, platform: Platform, path: str, field: str
) -> None:
    tenant = await make_tenant(platform)
    operators = path.startswith("/admin")
    key = await make_key(
        platform, None if operators else tenant, access="full" if operators else "manage"
    )
    body = b'{"' + field.encode() + b'": ' + DEEP
    answer = await client.post(
        path, content=body, headers={**bearer(key), "content-type": "application/json"}
    )
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "invalid_json")
    assert error["param"].startswith(field)
    assert "too deep" in error["message"]
