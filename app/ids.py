"""Identifiers: a prefix that tells the kind, then a ULID (26 characters that sort by time)."""

import secrets
import time

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"  # Crockford base32


def new_id(prefix: str) -> str:
    """`ten_01hz…`: 48 bits of milliseconds, 80 random bits. Prefixes: ten usr key adp ver …"""
    value = (time.time_ns() // 1_000_000) << 80 | secrets.randbits(80)
    return f"{prefix}_" + "".join(_ALPHABET[(value >> shift) & 31] for shift in range(125, -1, -5))
