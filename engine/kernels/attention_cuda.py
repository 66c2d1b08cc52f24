"""Paged attention on CUDA: where the kernels of `attention_triton` get their arguments.

The other faces are `engine.model.attention` (torch, on the CPU), with the same `attend`, and the
plain `reference.paged_attention`.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
from torch import Tensor

from engine.kernels.attention_triton import LONG, SHORT, AttentionTile, attend, merge
from engine.kernels.dtypes import compute_dtype
from engine.kernels.paged_work import SPLIT_TOKENS, PagedWork
from engine.model.kv_cache import KvCache
from engine.types import BLOCK_TOKENS

if TYPE_CHECKING:
    from engine.model.attention import QueryChunk

HEAD_SIZES = (64, 128)
_MERGE_HEADS = 4


class AttentionGrid(NamedTuple):
    """How many items of each kind get programs. Those without work end at once."""

    short: int
    long: int
    merges: int


class TritonAttention:
    """A step's queries on the device, and attention over them in every layer.

    `build` it anew every step; its buffers keep their addresses. `grid`: what is started, whatever
    the step holds, as a captured graph must; None: as the step asks.
    """

    def __init__(
        self,
        cache: KvCache,
        *,
        max_rows: int,
        max_blocks: int,
        max_partials: int = 2048,
        dtype: torch.dtype = torch.bfloat16,
        batch_invariant: bool = False,
        device: torch.device | None = None,
    ) -> None:
        """`max_blocks`: most entries of all block tables of a step. `max_partials`: most splits,
        one of each row, that are attended apart at a time. `dtype`: of the queries.

        Raises ValueError for heads of another size than 64 or 128.
        """
        config = cache.config
        if config.head_dim not in HEAD_SIZES:
            raise ValueError(f"heads of {config.head_dim} are not supported: {HEAD_SIZES}")
        self._cache = cache
        self._dtype = dtype
        self._compute = compute_dtype(attend, dtype)
        group = config.heads // config.kv_heads
        self._short_rows = max(SHORT.rows, triton.next_power_of_2(group))
        one_tile = batch_invariant or dtype == torch.float32 or group > LONG.rows
        self._has_long = not one_tile
        self.work = PagedWork(
            max_rows=max_rows,
            max_blocks=max_blocks,
            max_partials=max_partials,
            short_queries=self._short_rows // group,
            long_queries=None if one_tile else LONG.rows // group,
            window=config.sliding_window,
        )
        device = device or cache.keys(0).device
        self._buffer = torch.zeros(self.work.buffer.size, dtype=torch.int32, device=device)
        self._partial = torch.empty(max_partials, config.heads, config.head_dim, device=device)
        self._stats = torch.empty(max_partials, config.heads, 2, device=device)
        self.grid: AttentionGrid | None = None
        self._uploads = True

    def place(self, buffer: Tensor) -> None:
        """From now on the work lies there, int32 [work.buffer.size]; the caller brings it over."""
        self._buffer = buffer
        self._uploads = False

    def decode_grid(self, rows: int) -> AttentionGrid:
        """For any step of at most `rows` decodes."""
        return AttentionGrid(rows + self.work.max_partials, 0, rows)

    def every_grid(self) -> AttentionGrid:
        """Starts each kernel that any step may need."""
        return AttentionGrid(1, int(self._has_long), 1)

    def build(self, chunks: "Sequence[QueryChunk]") -> None:
        """Describes a new step; see PagedWork.build."""
        self.work.build(chunks)
        if self._uploads:
            self._buffer.copy_(torch.from_numpy(self.work.buffer))

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The heads' outputs, [T, heads * head_dim] in the dtype of q.

        q: [T, heads, head_dim] rotated, rows contiguous. k and v are read from the cache, where
        they are written already.
        """
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        work = self.work
        grid = self.grid or AttentionGrid(work.short_count, work.long_count, work.merge_count)
        if grid.long:
            self._start(layer, q, out, LONG, LONG.rows, work.long_start, grid.long, 1)
        if grid.short:
            rows = self._short_rows
            self._start(layer, q, out, SHORT, rows, work.short_start, grid.short, 0)
        if grid.merges:
            heads, head_dim = q.shape[1:]
            merge[(grid.merges, triton.cdiv(heads, _MERGE_HEADS))](
                self._partial, self._stats, out, self._buffer, work.merge_start,
                HEADS=heads, D=head_dim, BLOCK=_MERGE_HEADS, num_warps=4,
            )  # fmt: skip
        return out.flatten(1)

    def _start(
        self,
        layer: int,
        q: Tensor,
        out: Tensor,
        tile: AttentionTile,
        rows: int,
        item_start: int,
        items: int,
        count: int,
    ) -> None:
        cache, config = self._cache, self._cache.config
        window = config.sliding_window
        attend[(items, config.kv_heads)](
            q, q.stride(0), cache.keys(layer), cache.values(layer), out, self._partial,
            self._stats, self._buffer, item_start, self.work.table_start,
            cache.rows_per_block * config.kv_width,
            config.head_dim**-0.5 * math.log2(math.e), window or 0,
            COUNT=count,
            HEADS=config.heads,
            KV_HEADS=config.kv_heads,
            D=config.head_dim,
            BLOCK_TOKENS=BLOCK_TOKENS,
            ROWS=rows,
            COLUMNS=tile.columns,
            SPLIT=SPLIT_TOKENS if tile is SHORT else 0,
            WINDOWED=window is not None,
            COMPUTE=self._compute,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )  # fmt: skip
