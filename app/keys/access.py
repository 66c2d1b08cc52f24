"""What a key may do at all, whatever its adapters: decided by method and path.

manage      everything of its tenant: also its keys, the users of its console, asking for limits
full        the same, but those it may only look at
inference   call models, list them, and see its limits; neither adapters nor usage
read        look at everything; neither generate nor change anything
"""

import re

from app.caller import Caller
from app.errors import Forbidden

READING = frozenset({"GET", "HEAD"})
_INFERENCE = re.compile(r"/v1/(models(/.*)?|chat/completions|completions|limits)")
_WHOLE_TENANT = ("/v1/keys", "/v1/users", "/v1/limit-requests", "/v1/audit")
"""What is told of the whole tenant, and changed by managing keys alone."""


def check_access(caller: Caller, method: str, path: str) -> None:
    """Raises Forbidden for a route beyond the access of the caller's key."""
    if caller.access == "read" and method not in READING:
        raise Forbidden(
            "This key may only read; use a key with full access to generate or to change anything.",
            code="read_only_key",
        )
    if caller.access == "inference" and _INFERENCE.fullmatch(path) is None:
        raise Forbidden(
            "This key may only call models and list them; use a key with read or full access "
            "for adapters and usage.",
            code="inference_only_key",
        )
    if f"{path}/".startswith(tuple(f"{part}/" for part in _WHOLE_TENANT)):
        _check_whole_tenant(caller, method)


def _check_whole_tenant(caller: Caller, method: str) -> None:
    if caller.adapter_scope is not None:
        raise Forbidden(
            "This key is limited to some adapters, and keys, users, requests for limits and the "
            "audit log are those of the whole tenant; use a key without that limit.",
            code="key_scope",
        )
    if method not in READING and caller.access != "manage":
        raise Forbidden(
            "Only a key with manage access may change keys and users and ask for limits; make one "
            "in the console, or with `loramux keys create --access manage`.",
            code="manage_key_needed",
        )
