"""Identifiers: a prefix that tells the kind, then a ULID (26 characters that sort by time)."""

import secrets

from app.clock import SystemClock

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"  # Crockford base32
_CLOCK = SystemClock()


def new_id(prefix: str) -> str:
    """`ten_01hz…`: 48 bits of milliseconds, 80 random bits. Prefixes: ten usr key adp ver …"""
    milliseconds = int(_CLOCK.now().timestamp() * 1000)
    value = milliseconds << 80 | secrets.randbits(80)
    return f"{prefix}_" + "".join(_ALPHABET[(value >> shift) & 31] for shift in range(125, -1, -5))
