"""The text of an API key: `lmx_<public id>_<secret><checksum>`.

The prefix and the checksum (CRC-32, six base-62 digits over all that precedes it) let a scanner
recognise a leaked key and let the api refuse a mistyped one without asking the database.
"""

import re
import secrets
import zlib
from dataclasses import dataclass

PREFIX = "lmx"
PUBLIC_CHARACTERS = 12
SECRET_CHARACTERS = 40  # base 62: 238 bits
CHECKSUM_CHARACTERS = 6
_BASE32 = "0123456789abcdefghjkmnpqrstvwxyz"
_BASE62 = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"

KEY_PATTERN = re.compile(
    rf"{PREFIX}_([{_BASE32}]{{{PUBLIC_CHARACTERS}}})"
    rf"_([{_BASE62}]{{{SECRET_CHARACTERS + CHECKSUM_CHARACTERS}}})"
)


class MalformedKey(ValueError):
    """The text is no key of this platform, or was mistyped."""


@dataclass(frozen=True, slots=True)
class KeyText:
    """A key in the clear. `repr` does not show it."""

    text: str
    public_id: str

    @property
    def last4(self) -> str:
        return self.text[-4:]

    def __repr__(self) -> str:
        return f"KeyText(public_id={self.public_id!r})"


def checksum(text: str) -> str:
    """Six base-62 digits of the CRC-32."""
    value = zlib.crc32(text.encode())
    digits = ""
    for _ in range(CHECKSUM_CHARACTERS):
        value, digit = divmod(value, 62)
        digits = _BASE62[digit] + digits
    return digits


def mint() -> KeyText:
    """A new random key."""
    public_id = "".join(secrets.choice(_BASE32) for _ in range(PUBLIC_CHARACTERS))
    secret = "".join(secrets.choice(_BASE62) for _ in range(SECRET_CHARACTERS))
    body = f"{PREFIX}_{public_id}_{secret}"
    return KeyText(body + checksum(body), public_id)


def parse(text: str) -> KeyText:
    """Raises MalformedKey for anything that `mint` cannot have made."""
    match = KEY_PATTERN.fullmatch(text)
    if match is None:
        raise MalformedKey("not a key of the form lmx_…")
    if checksum(text[:-CHECKSUM_CHARACTERS]) != text[-CHECKSUM_CHARACTERS:]:
        raise MalformedKey("its checksum is wrong")
    return KeyText(text, match.group(1))
