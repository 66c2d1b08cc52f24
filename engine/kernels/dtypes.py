"""In which type a kernel multiplies."""

from typing import Any

import torch
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

_TRITON = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def compute_dtype(kernel: Any, dtype: torch.dtype) -> Any:
    """Triton's type for the dots of `kernel` over rows of `dtype`.

    fp32 where the kernel is interpreted: numpy knows no bf16 and would multiply its bits.
    """
    return tl.float32 if isinstance(kernel, InterpretedFunction) else _TRITON[dtype]
