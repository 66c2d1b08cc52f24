"""Root-mean-square layer norm (https://arxiv.org/abs/1910.07467)."""

import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis. x: [T, hidden], weight: [hidden]."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)
