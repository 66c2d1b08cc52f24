"""Which state of a version may follow which. Rows change state only through `repository.move`.

uploaded ──> validating ──> ready ──> archived ──> erased
                 │ ├──────> rejected(code)
                 │ └──────> failed(code)      after the last attempt; may be tried again
                 │                              a rejected one only on another base model
                 └<──── uploaded               an attempt ended without a verdict
ready | archived ──> uploaded                  the base model was changed
archived ──> ready                             brought back
every state but erased may go to erased
"""

from typing import Final

UPLOADED: Final = "uploaded"
VALIDATING: Final = "validating"
READY: Final = "ready"
REJECTED: Final = "rejected"
FAILED: Final = "failed"
ARCHIVED: Final = "archived"
ERASED: Final = "erased"

NEXT: Final[dict[str, frozenset[str]]] = {
    UPLOADED: frozenset({VALIDATING, FAILED, ERASED}),
    VALIDATING: frozenset({UPLOADED, READY, REJECTED, FAILED, ERASED}),
    READY: frozenset({ARCHIVED, UPLOADED, ERASED}),
    REJECTED: frozenset({UPLOADED, ERASED}),
    FAILED: frozenset({UPLOADED, ERASED}),
    ARCHIVED: frozenset({READY, UPLOADED, ERASED}),
    ERASED: frozenset(),
}
TERMINAL: Final = frozenset({READY, REJECTED, FAILED, ARCHIVED, ERASED})
"""States in which validation has nothing more to say."""


def sources(target: str) -> frozenset[str]:
    """The states from which `target` may be reached; the guard of the compare-and-set."""
    return frozenset(state for state, following in NEXT.items() if target in following)
