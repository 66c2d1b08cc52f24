"""Paged causal attention over a step's rows: decodes and prefill chunks in one flattened batch.

Two ways, both reading only the blocks that a sequence owns:

- *paged rows* (decodes, and everything in batch-invariant mode): every query row is a row of a
  sparse matrix whose columns are its own keys in the arena. Scores are a sampled product, the
  weighted sum of values an embedding bag; nothing is gathered or padded to the longest sequence.
- *spans* (prefill chunks): one dense attention a sequence over its gathered context.

All index tensors are built once a step and shared by the layers.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.model.kv_cache import KvCache
from engine.types import BLOCK_TOKENS

_PAGED_QUERY_LIMIT = 4  # chunks of at most so many tokens are computed as paged rows
_GROUP_ENTRIES = 1 << 22  # most scores of one group
_LANES = 16  # contexts are padded to a multiple: a softmax row is then always whole vectors

with warnings.catch_warnings():  # torch says once in a process that sparse CSR is in beta
    warnings.simplefilter("ignore", UserWarning)
    torch.sparse_csr_tensor(
        torch.zeros(2, dtype=torch.int32), torch.zeros(0, dtype=torch.int32), torch.zeros(0),
        (1, 1), check_invariants=False,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class QueryChunk:
    """One sequence's queries in the flattened batch: rows first .. first + count."""

    first: int
    count: int
    start: int  # position of the first query; it sees positions 0 .. start
    table: npt.NDArray[np.int64]  # block table of the sequence


class AttentionBatch:
    """The step's queries, sorted into paged groups and spans."""

    def __init__(
        self, cache: KvCache, chunks: Sequence[QueryChunk], *, batch_invariant: bool
    ) -> None:
        self._cache = cache
        self.rows = sum(chunk.count for chunk in chunks)
        paged: list[QueryChunk] = []
        self._spans: list[_Span] = []
        for chunk in chunks:
            if batch_invariant or chunk.count <= _PAGED_QUERY_LIMIT:
                paged.append(chunk)
            else:
                self._spans.append(_Span.build(cache, chunk))
        self._blocks, self._groups = _paged_groups(cache, paged) if paged else (None, [])

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The heads' outputs, [T, heads * head_dim] fp32.

        q: [T, heads, head_dim] rotated; k, v: [T, kv_heads, head_dim] fp32, already written to
        the cache.
        """
        out = torch.empty_like(q)
        if self._groups:
            keys, values = self._sources(layer, q.shape[-1])
            for group in self._groups:
                group.attend(q, keys, values, out)
        for span in self._spans:
            span.attend(self._cache, layer, q, k, v, out)
        return out.view(q.shape[0], -1)

    def _sources(self, layer: int, head_dim: int) -> tuple[Tensor, Tensor]:
        """fp32 keys and values as rows of one head: the arena itself, or its used blocks."""
        parts = (self._cache.keys(layer), self._cache.values(layer))
        if self._blocks is not None:
            stride = self._cache.rows_per_block * parts[0].shape[1]
            size = (self._cache.block_count, BLOCK_TOKENS * parts[0].shape[1])
            parts = tuple(  # type: ignore[assignment]
                part.as_strided(size, (stride, 1)).index_select(0, self._blocks).float()
                for part in parts
            )
        return parts[0].view(-1, head_dim), parts[1].view(-1, head_dim)


@dataclass(slots=True)
class _PagedGroup:
    """Query rows of similar context length, padded to the longest of them."""

    rows: Tensor  # [n] int64, in the flattened batch
    columns: Tensor  # [n * heads * context] int32, rows of one head in the source
    offsets: Tensor  # [n * heads + 1] int32
    mask: Tensor  # [n, 1, context] fp32, 0 or -inf
    scores: Tensor  # sparse CSR [n * heads, source rows]

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> None:
        heads, head_dim = q.shape[1:]
        queries = q.index_select(0, self.rows).view(-1, head_dim)
        torch.sparse.sampled_addmm(
            self.scores, queries, keys.t(), beta=0.0, alpha=head_dim**-0.5, out=self.scores
        )
        scores = self.scores.values().view(self.rows.numel(), heads, -1)
        weights = torch.softmax(scores + self.mask, dim=-1).view(-1)
        result = torch.embedding_bag(
            values, self.columns, self.offsets, False, 0, False, weights, True
        )[0]
        out.index_copy_(0, self.rows, result.view(-1, heads, head_dim))


def _paged_groups(
    cache: KvCache, chunks: Sequence[QueryChunk]
) -> tuple[Tensor | None, list[_PagedGroup]]:
    """The blocks to gather (None: read the arena in place) and the groups."""
    blocks: Tensor | None = None
    tables = [chunk.table[: _blocks_for(chunk.start + chunk.count)] for chunk in chunks]
    block_rows = cache.rows_per_block
    if cache.dtype != torch.float32:  # the sampled product takes fp32 alone
        used, position = np.unique(np.concatenate(tables), return_inverse=True)
        tables = np.split(position, np.cumsum([table.size for table in tables])[:-1])
        blocks, block_rows = torch.from_numpy(used), BLOCK_TOKENS
    row, context, owner = _query_rows(chunks)
    order = np.argsort(-context, kind="stable")
    row, context, owner = row[order], context[order], owner[order]
    seen = _visible(context, cache.config.sliding_window)
    groups, first = [], 0
    while first < row.size:
        longest = _padded(int(seen[first]))
        most = max(1, _GROUP_ENTRIES // (longest * cache.config.heads))
        similar = np.count_nonzero(seen[first : first + most] >= 0.75 * longest - 4 * _LANES)
        last = first + max(1, int(similar))
        groups.append(
            _paged_group(
                cache, block_rows, blocks, row[first:last], context[first:last],
                [tables[index] for index in owner[first:last]], longest,
            )
        )  # fmt: skip
        first = last
    return blocks, groups


def _query_rows(chunks: Sequence[QueryChunk]) -> tuple[npt.NDArray[np.int64], ...]:
    """Of every query: its row in the batch, how many positions it sees, the index of its chunk."""
    counts = [chunk.count for chunk in chunks]
    within = np.concatenate([np.arange(count) for count in counts])
    owner = np.repeat(np.arange(len(chunks)), counts)
    row = np.array([chunk.first for chunk in chunks])[owner] + within
    context = np.array([chunk.start for chunk in chunks])[owner] + within + 1
    return row, context, owner


def _paged_group(
    cache: KvCache,
    block_rows: int,
    blocks: Tensor | None,
    row: npt.NDArray[np.int64],
    context: npt.NDArray[np.int64],
    tables: Sequence[npt.NDArray[np.int64]],
    longest: int,
) -> _PagedGroup:
    config = cache.config
    token = _source_rows(tables, context, longest, block_rows, config.sliding_window)
    token *= config.kv_heads
    visible = np.arange(longest) < _visible(context, config.sliding_window)[:, None]
    token = np.where(visible, token, token[:, :1])  # padding reads what the row itself may read
    head = np.arange(config.heads, dtype=np.int32) // (config.heads // config.kv_heads)
    columns = torch.from_numpy((token[:, None, :] + head[:, None]).reshape(-1))
    lines = row.size * config.heads
    offset = torch.arange(0, lines * longest + 1, longest, dtype=torch.int32)
    source_rows = cache.keys(0).shape[0] if blocks is None else blocks.numel() * BLOCK_TOKENS
    scores = torch.sparse_csr_tensor(
        offset, columns, torch.zeros(columns.numel()),
        (lines, source_rows * config.kv_heads), check_invariants=False,
    )  # fmt: skip
    mask = torch.zeros(row.size, 1, longest)
    mask[:, 0].masked_fill_(torch.from_numpy(~visible), float("-inf"))
    return _PagedGroup(torch.from_numpy(row), columns, offset, mask, scores)


def _source_rows(
    tables: Sequence[npt.NDArray[np.int64]],
    context: npt.NDArray[np.int64],
    longest: int,
    block_rows: int,
    window: int | None,
) -> npt.NDArray[np.int32]:
    """Where the first `longest` tokens that each query sees lie in the source: [n, longest]."""
    first = context - _visible(context, window)
    first_block = first // BLOCK_TOKENS
    width = _blocks_for(longest) + (window is not None)
    table = np.zeros((len(tables), width), np.int32)
    for index, own in enumerate(tables):
        used = own[first_block[index] : first_block[index] + width]
        table[index, : used.size] = used * block_rows
    within = np.arange(BLOCK_TOKENS, dtype=np.int32)
    token: npt.NDArray[np.int32] = (table[:, :, None] + within).reshape(len(tables), -1)
    if window is None:
        return token[:, :longest]
    seen = (first % BLOCK_TOKENS)[:, None] + np.arange(longest)
    return np.take_along_axis(token, seen, axis=1)


def _visible(context: npt.NDArray[np.int64], window: int | None) -> npt.NDArray[np.int64]:
    """How many of its `context` positions a query sees: the last `window`."""
    return context if window is None else np.minimum(context, window)


@dataclass(slots=True)
class _Span:
    """A prefill chunk of one sequence."""

    first: int
    count: int
    context_rows: Tensor | None  # [context] int64 token rows; None: the chunk is its own context
    mask: Tensor | None  # [count, context] bool; None: causal from position 0

    @classmethod
    def build(cls, cache: KvCache, chunk: QueryChunk) -> "_Span":
        end, window = chunk.start + chunk.count, cache.config.sliding_window
        causal = chunk.start == 0 and (window is None or end <= window)
        if causal and cache.dtype == torch.float32:
            return cls(chunk.first, chunk.count, None, None)
        first = 0 if window is None else max(0, chunk.start + 1 - window)
        positions = np.arange(first, end)
        rows = torch.from_numpy(_rows_at(cache, chunk.table, positions))
        if causal:
            return cls(chunk.first, chunk.count, rows, None)
        query = torch.arange(chunk.start, end)[:, None]
        keys = torch.from_numpy(positions)
        mask = keys <= query
        if window is not None:
            mask &= keys > query - window
        return cls(chunk.first, chunk.count, rows, mask)

    def attend(
        self, cache: KvCache, layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor
    ) -> None:
        rows = slice(self.first, self.first + self.count)
        if self.context_rows is None:
            keys, values = k[rows], v[rows]
        else:
            shape = (-1, *k.shape[1:])
            keys = cache.keys(layer).index_select(0, self.context_rows).float().view(shape)
            values = cache.values(layer).index_select(0, self.context_rows).float().view(shape)
        result = F.scaled_dot_product_attention(
            q[rows].transpose(0, 1)[None],
            keys.transpose(0, 1)[None],
            values.transpose(0, 1)[None],
            attn_mask=self.mask,
            is_causal=self.mask is None,
            enable_gqa=True,
        )
        out[rows] = result[0].transpose(0, 1)


def token_rows(cache: KvCache, chunks: Sequence[QueryChunk]) -> Tensor:
    """The token rows of all chunks' queries: [T] int64."""
    rows = [
        _rows_at(cache, chunk.table, np.arange(chunk.start, chunk.start + chunk.count))
        for chunk in chunks
    ]
    return torch.from_numpy(np.concatenate(rows))


def _rows_at(
    cache: KvCache, table: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """The token rows of a sequence's positions. Both [n] int64."""
    rows: npt.NDArray[np.int64] = table[positions // BLOCK_TOKENS] * cache.rows_per_block
    return rows + positions % BLOCK_TOKENS


def _blocks_for(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)


def _padded(context: int) -> int:
    return -(-context // _LANES) * _LANES
