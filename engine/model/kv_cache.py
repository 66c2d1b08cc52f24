"""The paged KV cache as views of the one byte arena: block b is extent b, with all its layers.

A block is [layers, 2, BLOCK_TOKENS, kv_heads, head_dim]. A *token row* is one token's keys (or
values) of one layer, [kv_heads * head_dim]; its number within a layer's view is
`block * rows_per_block + offset in the block`, the same for every layer, and for keys and values.
"""

from typing import Literal

import torch
from torch import Tensor

from engine.model.config import ModelConfig
from engine.types import BLOCK_TOKENS

KvDtype = Literal["bf16", "fp32"]
TORCH_DTYPE: dict[KvDtype, torch.dtype] = {"bf16": torch.bfloat16, "fp32": torch.float32}


def block_bytes(config: ModelConfig, dtype: KvDtype) -> int:
    """Bytes of one block, all layers, keys and values."""
    elements = config.layers * 2 * BLOCK_TOKENS * config.kv_width
    return elements * TORCH_DTYPE[dtype].itemsize


class KvCache:
    """Reads and writes blocks. Owns no memory."""

    def __init__(self, arena: Tensor, config: ModelConfig, dtype: KvDtype) -> None:
        """`arena`: uint8, a whole number of blocks."""
        self.config = config
        self.dtype = TORCH_DTYPE[dtype]
        self.block_bytes = block_bytes(config, dtype)
        self.block_count = arena.numel() // self.block_bytes
        self.rows_per_block = config.layers * 2 * BLOCK_TOKENS
        self._arena = arena
        self._elements = arena.view(self.dtype)
        rows = self._elements.numel() // config.kv_width
        last = (config.layers * 2 - 1) * BLOCK_TOKENS  # where the last layer's values begin
        self._views = [
            self._elements.as_strided(
                (rows - last, config.kv_width),
                (config.kv_width, 1),
                part * BLOCK_TOKENS * config.kv_width,
            )
            for part in range(config.layers * 2)
        ]

    def keys(self, layer: int) -> Tensor:
        """[token rows, kv_heads * head_dim] of one layer, a view."""
        return self._views[2 * layer]

    def values(self, layer: int) -> Tensor:
        """[token rows, kv_heads * head_dim] of one layer, a view."""
        return self._views[2 * layer + 1]

    def write(self, layer: int, token_rows: Tensor, keys: Tensor, values: Tensor) -> None:
        """token_rows: [T] int64; keys and values: [T, kv_heads * head_dim] fp32."""
        self.keys(layer).index_copy_(0, token_rows, keys.to(self.dtype))
        self.values(layer).index_copy_(0, token_rows, values.to(self.dtype))

    def copy_block(self, source: int, destination: int) -> None:
        """Copies a whole block, for copy-on-write."""
        blocks = self._arena.view(-1, self.block_bytes)
        blocks[destination].copy_(blocks[source])
