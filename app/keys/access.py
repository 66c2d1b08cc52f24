"""What a key may do at all, whatever its adapters: decided by method and path, closed by default.

full        everything of its tenant
inference   call models, list them, and see its limits; neither adapters nor usage
read        look at everything; neither generate nor change anything
"""

import re

from app.caller import KeyAccess
from app.errors import Forbidden

READING = frozenset({"GET", "HEAD"})
_INFERENCE = re.compile(r"/v1/(models(/.*)?|chat/completions|completions|limits)")


def check_access(access: KeyAccess, method: str, path: str) -> None:
    """Raises Forbidden for a route beyond the key's access; a new route is beyond it."""
    if access == "read" and method not in READING:
        raise Forbidden(
            "This key may only read; use a key with full access to generate or to change anything.",
            code="read_only_key",
        )
    if access == "inference" and _INFERENCE.fullmatch(path) is None:
        raise Forbidden(
            "This key may only call models and list them; use a key with read or full access "
            "for adapters and usage.",
            code="inference_only_key",
        )
