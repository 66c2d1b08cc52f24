"""Secrets and signatures by the Standard Webhooks specification (standardwebhooks.com).

webhook-id         the event's id, the same in every attempt: receivers drop what they have seen
webhook-timestamp  seconds, of the attempt
webhook-signature  `v1,…` for each secret that is valid, the newest first
"""

import base64
import json
import secrets as random
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from standardwebhooks.webhooks import Webhook

SECRET_BYTES = 32
PREFIX = "whsec_"


def new_secret() -> str:
    return PREFIX + base64.b64encode(random.token_bytes(SECRET_BYTES)).decode()


def message(type_: str, at: datetime, data: dict[str, Any]) -> bytes:
    """The body; the same bytes in every attempt. `at` is when it happened."""
    body = {"type": type_, "timestamp": at.isoformat(), "data": data}
    return json.dumps(body, separators=(",", ":"), sort_keys=True).encode()


def signed_headers(
    secrets: Sequence[str], message_id: str, at: datetime, body: bytes
) -> dict[str, str]:
    """`at` is the attempt's time; receivers refuse messages that are minutes old."""
    text = body.decode()
    signatures = [Webhook(secret).sign(message_id, at, text) for secret in secrets]
    return {
        "webhook-id": message_id,
        "webhook-timestamp": str(int(at.timestamp())),
        "webhook-signature": " ".join(signatures),
    }
