"""Why an adapter cannot be had, and for how long others of its key are refused."""

from dataclasses import dataclass

from engine.adapters.entry import Entry

TOO_LARGE_FOR_TENANT = "adapter_exceeds_resident_bytes"


@dataclass(frozen=True, slots=True)
class Failed:
    """`nbytes`: of one that is too large for its tenant, which a higher limit lifts at once."""

    entry: Entry
    code: str
    message: str
    retry_ms: float
    nbytes: int | None = None


def over_limit(entry: Entry, most: int, retry_ms: float) -> Failed:
    """The adapter alone is more than its tenant may hold."""
    message = too_large(entry.nbytes, most)
    return Failed(entry, TOO_LARGE_FOR_TENANT, message, retry_ms, entry.nbytes)


def too_large(nbytes: int, most: int) -> str:
    return (
        f"The adapter takes {nbytes} bytes in the engine and the tenant's adapters may hold {most} "
        "together; use a lower rank or fewer modules, or have max_resident_bytes raised."
    )
