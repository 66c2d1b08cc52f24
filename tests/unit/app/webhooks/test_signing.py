"""Signatures, checked with the specification's own verifier."""

import base64
from datetime import UTC, datetime

import pytest
from standardwebhooks.webhooks import Webhook, WebhookVerificationError

from app.webhooks.signing import message, new_secret, signed_headers

NOON = datetime(2026, 3, 14, 12, 0, tzinfo=UTC)
BODY = message("version.ready", NOON, {"adapter": "bot", "version": 3})


def signed(*secrets: str) -> dict[str, str]:
    """The headers of BODY, signed now: the verifier refuses what is minutes old."""
    return signed_headers(secrets, "evt_1", datetime.now(UTC), BODY)


def test_the_verifier_takes_what_we_sign() -> None:
    secret = new_secret()
    headers = signed(secret)
    found = Webhook(secret).verify(BODY, headers)
    assert found == {
        "type": "version.ready",
        "timestamp": NOON.isoformat(),
        "data": {"adapter": "bot", "version": 3},
    }


def test_while_secrets_rotate_either_verifies() -> None:
    old, new = new_secret(), new_secret()
    headers = signed(new, old)
    for secret in (old, new):
        assert Webhook(secret).verify(BODY, headers)


@pytest.mark.parametrize("changed", ["body", "id", "timestamp", "secret"])
def test_the_verifier_refuses_what_was_changed(changed: str) -> None:
    secret = new_secret()
    headers = signed(secret)
    body = BODY.replace(b"3", b"4") if changed == "body" else BODY
    if changed == "id":
        headers["webhook-id"] = "evt_2"
    if changed == "timestamp":
        headers["webhook-timestamp"] = str(int(headers["webhook-timestamp"]) - 1)
    verifier = Webhook(new_secret() if changed == "secret" else secret)
    with pytest.raises(WebhookVerificationError):
        verifier.verify(body, headers)


def test_a_secret_has_the_specifications_form_and_never_repeats() -> None:
    secrets = {new_secret() for _ in range(20)}
    assert len(secrets) == 20
    for secret in secrets:
        assert len(base64.b64decode(secret.removeprefix("whsec_"))) == 32
