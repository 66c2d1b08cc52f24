"""Paged caches with a context of each sequence, and the queries of a step over them."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from engine.kernels import reference
from engine.model.attention import QueryChunk, token_rows
from engine.model.config import ModelConfig, RopeScaling
from engine.model.kv_cache import KvCache, KvDtype, block_bytes
from engine.types import BLOCK_TOKENS

LAYER = 1


@dataclass(frozen=True)
class AttentionCase:
    """Sequences as (tokens before the step's queries, queries)."""

    sequences: tuple[tuple[int, int], ...]
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    window: int | None = None
    dtype: KvDtype = "bf16"
    seed: int = 0

    @property
    def rows(self) -> int:
        return sum(queries for _, queries in self.sequences)

    @property
    def blocks(self) -> int:
        return sum(-(-sum(each) // BLOCK_TOKENS) for each in self.sequences)

    def config(self) -> ModelConfig:
        return ModelConfig(
            "LlamaForCausalLM", 64, self.heads * self.head_dim, 64, 2, self.heads, self.kv_heads,
            self.head_dim, 1e-5, 1e4, RopeScaling("none"), 4096, True, (0,),
            sliding_window=self.window,
        )  # fmt: skip

    def cache(self, device: str = "cpu") -> tuple[KvCache, list[QueryChunk]]:
        """Blocks in random order. All that no query sees is NaN: reading it shows."""
        config = self.config()
        generator = torch.Generator().manual_seed(self.seed)
        size = (self.blocks + 2) * block_bytes(config, self.dtype)
        host = KvCache(torch.full((size,), 0xFF, dtype=torch.uint8), config, self.dtype)
        free = torch.randperm(self.blocks + 2, generator=generator).numpy()
        chunks, first, used = [], 0, 0
        for start, count in self.sequences:
            size = -(-(start + count) // BLOCK_TOKENS)
            table = free[used : used + size].astype(np.int64)
            chunks.append(QueryChunk(first, count, start, table))
            first, used = first + count, used + size
            lowest = 0 if self.window is None else max(0, start + 1 - self.window)
            seen = np.arange(lowest, start + count)
            shape = (2, seen.size, config.kv_width)
            keys, values = torch.randn(shape, generator=generator)
            host.write(
                LAYER, token_rows(host, [QueryChunk(0, seen.size, lowest, table)]), keys, values
            )
        return KvCache(host._arena.to(device), config, self.dtype), chunks

    def queries(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed + 1)
        return torch.randn(self.rows, self.heads, self.head_dim, generator=generator)

    def expected(self, device: str = "cpu") -> Tensor:
        cache, chunks = self.cache(device)
        return reference.paged_attention(cache, LAYER, chunks, self.queries().to(device)).flatten(1)

    def of_row(self, row: int) -> "AttentionCase":
        """The case in which sequences have the same contexts, and one row's query is the last."""
        return replace(self, sequences=((row, 1),))


CASES = {
    "no rows": AttentionCase(()),
    "one token": AttentionCase(((0, 1),)),
    "decodes": AttentionCase(((4, 1), (255, 1), (256, 1), (700, 1), (15, 1))),
    "groups of three": AttentionCase(((300, 1), (3, 1), (17, 4)), heads=9, kv_heads=3),
    "heads of their own": AttentionCase(((30, 1), (0, 20)), heads=2, kv_heads=2, head_dim=128),
    "one key head for 32": AttentionCase(((300, 1), (16, 2)), heads=32, kv_heads=1),
    "a prompt": AttentionCase(((0, 70),)),
    "chunks and decodes": AttentionCase(((280, 40), (40, 1), (100, 3), (513, 2))),
    "fp32": AttentionCase(((280, 12), (290, 1), (3, 1)), dtype="fp32"),
    "a window": AttentionCase(((700, 1), (5, 1), (290, 30), (90, 3)), window=100),
    "a window shorter than a block": AttentionCase(((50, 1), (30, 9)), window=7),
}
