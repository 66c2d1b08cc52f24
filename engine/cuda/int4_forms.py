"""The 4-bit codes of a linear as the kernels read them, repacked once and kept on the disk."""

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from engine.kernels.int4 import PackedInt4, pack_rows
from engine.model.form_cache import Array, Arrays, FormCache
from engine.model.weights import Weight, stacked_int4

_VERSION = "cuda int4.1"
"""Of the layout that `engine.kernels.int4` defines; another one takes another name."""


def kept_int4(forms: FormCache, name: str, weights: Sequence[Weight]) -> PackedInt4:
    """Weights stacked by rows, all of which `has_int4`, on the host; scales are bf16."""
    rows, columns = sum(weight.shape[0] for weight in weights), weights[0].columns

    def make() -> Arrays:
        read = partial(stacked_int4, weights)
        return _arrays(pack_rows(read, rows, columns, torch.bfloat16))

    words, scale, zero, group = forms.arrays(f"{name} {_VERSION}", make)
    return PackedInt4(
        torch.from_numpy(words),
        _bf16(scale),
        _bf16(zero) if zero.size else None,
        rows,
        columns,
        int(group[0]),
    )


def _arrays(packed: PackedInt4) -> Arrays:
    zero = np.empty(0, np.int16) if packed.zero is None else _bits(packed.zero)
    return packed.words.numpy(), _bits(packed.scale), zero, np.array([packed.group])


def _bits(values: Tensor) -> Array:
    bits: Array = values.view(torch.int16).numpy()
    return bits


def _bf16(bits: Array) -> Tensor:
    return torch.from_numpy(bits).view(torch.bfloat16)
