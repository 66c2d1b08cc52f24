"""Memory that a part of the model was made of, given back before the next part is made."""

import ctypes

from engine.model.form_cache import FormCache
from engine.model.loader import Checkpoint

_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's


def give_back(checkpoint: Checkpoint, forms: FormCache) -> None:
    """Takes the pages of both files out of this process, and freed pieces of its heap.

    glibc keeps what was freed between two pieces that are still held; pieces of a few MiB, each a
    little larger than the hole it could have had, add up to another model.
    """
    checkpoint.release()
    forms.release()
    if _trim is not None:
        _trim(0)
