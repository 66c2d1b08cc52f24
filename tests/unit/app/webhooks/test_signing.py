"""Signatures, checked with the specification's own verifier."""

import base64
from datetime import UTC, datetime

import pytest
from standardwebhooks.webhooks import Webhook, WebhookVerificationError

from app.webhooks.signing import message, new_secret, signed_headers

NOW = datetime.now(UTC)
BODY = message("version.ready", NOW, {"adapter": "bot", "version": 3})


def test_the_verifier_takes_what_we_sign() -> None:
    secret = new_secret()
    headers = signed_headers([secret], "evt_1", NOW, BODY)
    found = Webhook(secret).verify(BODY, headers)
    assert found == {
        "type": "version.ready",
        "timestamp": NOW.isoformat(),
        "data": {"adapter": "bot", "version": 3},
    }


def test_while_secrets_rotate_either_verifies() -> None:
    old, new = new_secret(), new_secret()
    headers = signed_headers([new, old], "evt_1", NOW, BODY)
    for secret in (old, new):
        assert Webhook(secret).verify(BODY, headers)


@pytest.mark.parametrize("changed", ["body", "id", "timestamp", "secret"])
def test_the_verifier_refuses_what_was_changed(changed: str) -> None:
    secret = new_secret()
    headers = signed_headers([secret], "evt_1", NOW, BODY)
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
