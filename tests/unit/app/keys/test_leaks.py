"""The leaked-key check: what a text holds, whose it is, whether it works."""

import json

import httpx
import pytest
from structlog.testing import capture_logs

from app.keys import leaks, token
from app.platform import Platform
from tests.factories import bearer, make_key, make_tenant


def mistyped(text: str) -> str:
    return text[:20] + ("0" if text[20] != "0" else "1") + text[21:]


class TestOffline:
    def test_a_key_is_found_inside_whatever_was_published(self) -> None:
        key = token.mint()
        (found,) = leaks.find_keys(f"curl -H 'Authorization: Bearer {key.text}' …\n{key.text}")
        assert found.key == key
        assert found.shown == f"lmx_{key.public_id}_…{key.last4}"

    def test_a_wrong_checksum_is_told_apart_from_a_key(self) -> None:
        (found,) = leaks.find_keys(mistyped(token.mint().text))
        assert found.key is None

    @pytest.mark.parametrize("text", ["", "sk-abc", "lmx_", "lmx_short_secret", "x" * 300_000])
    def test_anything_else_is_no_key(self, text: str) -> None:
        assert leaks.find_keys(text) == []


class TestOperatorApi:
    @pytest.fixture
    async def operator(self, client: httpx.AsyncClient, platform: Platform) -> httpx.AsyncClient:
        client.headers.update(bearer(await make_key(platform, None)))
        return client

    async def check(self, operator: httpx.AsyncClient, text: str) -> list[dict[str, object]]:
        answer = await operator.post("/admin/v1/keys/check", json={"text": text})
        assert answer.status_code == 200
        data: list[dict[str, object]] = answer.json()["data"]
        return data

    async def test_tells_whose_a_live_key_is_without_repeating_it(
        self, operator: httpx.AsyncClient, platform: Platform
    ) -> None:
        tenant = await make_tenant(platform)
        key = await make_key(platform, tenant, name="ci")
        (found,) = await self.check(operator, f"KEY={key.secret.text}")
        assert found["live"] is True
        assert (found["tenant"], found["key_id"], found["name"]) == (tenant.name, key.row.id, "ci")
        assert key.secret.text.rpartition("_")[2] not in json.dumps(found)

    @pytest.mark.parametrize("why", ["revoked", "suspended", "never made", "another secret"])
    async def test_a_key_that_does_not_work_is_not_live(
        self, operator: httpx.AsyncClient, platform: Platform, why: str
    ) -> None:
        tenant = await make_tenant(platform, suspended=why == "suspended")
        key = await make_key(platform, tenant)
        text = key.secret.text
        if why == "revoked":
            await operator.post(f"/admin/v1/keys/{key.row.id}/revoke")
        elif why == "never made":
            text = token.mint().text
        elif why == "another secret":
            forged = f"lmx_{key.secret.public_id}_" + "A" * token.SECRET_CHARACTERS
            text = forged + token.checksum(forged)
        (found,) = await self.check(operator, text)
        assert found["live"] is False
        assert found["known"] is (why in ("revoked", "suspended"))
        assert found["checksum"] is True

    async def test_no_log_line_and_no_audit_event_has_the_text(
        self, operator: httpx.AsyncClient, platform: Platform
    ) -> None:
        key = await make_key(platform, await make_tenant(platform))
        secret = key.secret.text.rpartition("_")[2]
        with capture_logs() as lines:
            await self.check(operator, key.secret.text)
            refused = await operator.post(
                "/admin/v1/keys/check", json={"text": key.secret.text * 5000}
            )
        assert refused.status_code == 400
        audit = await operator.get("/admin/v1/audit")
        assert secret not in json.dumps(lines) + refused.text + audit.text

    async def test_is_for_operators(self, client: httpx.AsyncClient, platform: Platform) -> None:
        key = await make_key(platform, await make_tenant(platform))
        answer = await client.post(
            "/admin/v1/keys/check", headers=bearer(key), json={"text": key.secret.text}
        )
        assert answer.status_code == 403
