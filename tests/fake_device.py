"""A device that is not there: runs the CUDA runner on the CPU and checks what a real one demands.

Steps run at once. Copies of adapters wait until something that comes after them, or the test, lets
them run. Host memory that the device still reads must not change, and what the device writes to the
host is seen only after an event: `FakeDevice` fails a test that breaks either. `plain_faces` read
what kernels would read, the buffers on the device, and fail a step that holds more than was
started. Every shape that a face has not met counts as compiled: it would ask for a kernel or for
memory.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.cuda.device import Device, Event, Memory, Stream
from engine.cuda.faces import Faces
from engine.kernels import pointwise, sample
from engine.kernels.attention_cuda import AttentionGrid
from engine.kernels.int4 import Int4Gemm, PackedInt4
from engine.kernels.lora_cuda import DeviceBatch, DeviceLora
from engine.kernels.lora_triton import RANK_TILE
from engine.kernels.metadata import LoraBatch, SliceGroup
from engine.kernels.paged_work import HEADER, ITEM, MERGE, SPLIT_TOKENS, PagedWork
from engine.model.attention import QueryChunk
from engine.model.kv_cache import KvCache
from engine.types import BLOCK_TOKENS, ModuleSpec

MIB = 1 << 20


class FakeEvent:
    def __init__(self, device: "FakeDevice", stream: Stream, at: int) -> None:
        self._device = device
        self.stream, self.at = stream, at

    def done(self) -> bool:
        return self.stream == "steps" or self._device.copies_done >= self.at

    def wait(self) -> None:
        self._device.log.append(("host waits", self.stream, self.at))
        self._device.pass_event(self)


@dataclass
class FakeGraph:
    device: "FakeDevice"
    work: Callable[[], None]

    def replay(self) -> None:
        self.device.log.append(("replay",))
        self.work()


class FakeDevice(Device):
    """`log`: what was put on, in order. `graph_bytes`: what each graph takes of the memory."""

    name = "fake"
    torch_device = torch.device("cpu")

    def __init__(
        self, total_bytes: int = 64 * MIB, graph_bytes: int = 0, *, copies_at_once: bool = False
    ) -> None:
        self._copies_at_once = copies_at_once
        self.log: list[tuple[Any, ...]] = []
        self.copies_done = 0
        self._total = total_bytes
        self._graph_bytes = graph_bytes
        self._made_bytes = 0
        self._pinned: list[Tensor] = []
        self._copies: list[Callable[[], object]] = []  # all that were ever put on
        self._steps_at = 0
        self._reads: list[tuple[int, Tensor, Tensor]] = []  # step, host memory, as it was
        self._writes: list[tuple[int, Tensor, Tensor]] = []  # step, host memory, what will be
        self._shapes: set[tuple[Any, ...]] = set()

    @property
    def compiles(self) -> int:
        return len(self._shapes)

    def met(self, face: str, *shapes: Any) -> None:
        self._shapes.add((face, *shapes))

    def empty(self, nbytes: int) -> Tensor:
        self._made_bytes += nbytes
        return torch.zeros(nbytes, dtype=torch.uint8)

    def pinned(self, nbytes: int) -> Tensor:
        self._pinned.append(torch.zeros(nbytes, dtype=torch.uint8))
        return self._pinned[-1]

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        yield

    def copy(self, stream: Stream, destination: Tensor, source: Tensor) -> None:
        assert destination.nbytes == source.nbytes
        self.log.append(("copy", stream))
        if stream == "copies":
            self._copies.append(lambda: destination.copy_(source))
            if self._copies_at_once:
                self.finish_copies()
            return
        self._steps_at += 1
        if self._is_pinned(destination):
            destination.fill_(-77)  # whoever reads now reads nonsense
            self._writes.append((self._steps_at, destination, source.clone()))
            return
        destination.copy_(source)
        if self._is_pinned(source):
            self._reads.append((self._steps_at, source, source.clone()))

    def record(self, stream: Stream) -> FakeEvent:
        if stream == "copies":
            return FakeEvent(self, stream, len(self._copies))
        self._steps_at += 1
        return FakeEvent(self, stream, self._steps_at)

    def wait(self, stream: Stream, event: Event) -> None:
        assert isinstance(event, FakeEvent)
        self.log.append((f"{stream} wait", event.stream))
        if event.stream == "copies":
            self.pass_event(event)

    def pass_event(self, event: FakeEvent) -> None:
        if event.stream == "copies":
            self.finish_copies(event.at)
            return
        for at, host, before in self._reads:
            assert at > event.at or torch.equal(host, before), "the host wrote what is being read"
        self._reads = [read for read in self._reads if read[0] > event.at]
        for at, host, value in self._writes:
            if at <= event.at:
                host.copy_(value)
        self._writes = [write for write in self._writes if write[0] > event.at]

    def finish_copies(self, upto: int | None = None) -> None:
        """Lets copies run: all, or the first so many of those ever put on."""
        for copy in self._copies[self.copies_done : upto]:
            copy()
            self.copies_done += 1

    def capture(self, work: Callable[[], None]) -> FakeGraph:
        self.captures += 1
        self.log.append(("capture",))
        return FakeGraph(self, work)

    def memory(self) -> Memory:
        used = self._made_bytes + self.captures * self._graph_bytes
        return Memory(self._total, self._total - used, used, used)

    def reset_peak(self) -> None: ...

    def release_unused(self) -> None: ...

    def synchronize(self) -> None:
        self.pass_event(FakeEvent(self, "steps", self._steps_at))
        self.finish_copies()

    def _is_pinned(self, tensor: Tensor) -> bool:
        at = tensor.data_ptr()
        return any(p.data_ptr() <= at < p.data_ptr() + p.nbytes for p in self._pinned)


def product(x: Tensor, weight: Tensor, *, apart: bool) -> Tensor:
    """x W^T in fp32: [T, in] and [out, in] -> [T, out]. `apart`: no row's bits depend on others."""
    if not apart:
        return F.linear(x.float(), weight)
    return torch.cat([F.linear(row, weight) for row in x.float().split(1)])


class PlainLora(DeviceLora):
    def __init__(
        self, device: FakeDevice, *args: Any, batch_invariant: bool, **options: Any
    ) -> None:
        super().__init__(*args, **options)
        self._device, self._apart = device, batch_invariant

    def new_batch(self, capacity: int) -> DeviceBatch:
        return DeviceBatch(capacity, self.arena.device, None)

    def linear(self, group: SliceGroup, batch: LoraBatch, x: Tensor, y: Tensor) -> None:
        self._device.met("lora", group, x.shape, y.dtype)
        for slot, rows, most in self._chunks(batch):
            for module, columns in self._slices(group, slot, y, most):
                a, b = (part.float() for part in self.matrices(slot, module))
                update = product(product(x[rows], a, apart=self._apart), b, apart=self._apart)
                update *= float(self.table.scale[slot, module])
                columns[rows] = (columns[rows].float() + update).to(y.dtype)

    def embedding(self, group: SliceGroup, batch: LoraBatch, tokens: Tensor, y: Tensor) -> None:
        self._device.met("lora embedding", y.shape)
        for slot, rows, _ in self._chunks(batch):
            for module, columns in self._slices(group, slot, y, None):
                a, b = (part.float() for part in self.matrices(slot, module))
                update = product(a[tokens[rows]], b, apart=self._apart)
                update *= float(self.table.scale[slot, module])
                columns[rows] = (columns[rows].float() + update).to(y.dtype)

    def _chunks(self, batch: LoraBatch) -> Iterator[tuple[int, Tensor, int | None]]:
        """(slot, rows, ranks that are started) of what lies on the device."""
        assert isinstance(batch, DeviceBatch)
        count, rows, starts, lengths, slots = (
            batch.device_buffer[:1], *batch.device_buffer[1:].view(4, -1)
        )  # fmt: skip
        most = None
        if batch.grid is not None:
            assert int(count) <= batch.grid.chunks, "more chunks than were started"
            most = batch.grid.rank_tiles * RANK_TILE
        for chunk in range(int(count)):
            assert int(lengths[chunk]) <= batch.tile.rows
            part = slice(int(starts[chunk]), int(starts[chunk] + lengths[chunk]))
            yield int(slots[chunk]), rows[part].long(), most

    def _slices(
        self, group: SliceGroup, slot: int, y: Tensor, most: int | None
    ) -> Iterator[tuple[int, Tensor]]:
        for module, column, width in zip(
            group.modules, group.columns, group.out_features, strict=True
        ):
            rank = int(self.table.rank[slot, module])
            assert most is None or rank <= most, "a rank beyond those that were started"
            if rank:
                yield module, y[:, column : column + width]


class PlainAttention:
    """Reads items, merges and tables as the kernels of `attention_triton` do."""

    def __init__(
        self,
        device: FakeDevice,
        cache: KvCache,
        *,
        max_rows: int,
        max_blocks: int,
        max_partials: int,
    ) -> None:
        config = cache.config
        self._device, self._cache = device, cache
        group = config.heads // config.kv_heads
        self.work = PagedWork(
            max_rows=max_rows,
            max_blocks=max_blocks,
            max_partials=max_partials,
            short_queries=max(1, 16 // group),
            long_queries=128 // group,
            window=config.sliding_window,
        )
        self.grid: AttentionGrid | None = None
        self._partial = torch.zeros(max_partials, config.heads, config.head_dim)
        self._stats = torch.zeros(max_partials, config.heads, 2)
        self._buffer = torch.zeros(0)

    def place(self, buffer: Tensor) -> None:
        self._buffer = buffer

    def build(self, chunks: Sequence[QueryChunk]) -> None:
        self.work.build(chunks)

    def decode_grid(self, rows: int) -> AttentionGrid:
        return AttentionGrid(rows + self.work.max_partials, 0, rows)

    def every_grid(self) -> AttentionGrid:
        return AttentionGrid(1, 1, 1)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self._device.met("attention", q.shape, q.dtype)
        out = torch.zeros_like(q)
        work, buffer = self.work, self._buffer
        short, long, merges = buffer[:HEADER].tolist()
        if self.grid is not None:
            for held, started in zip((short, long, merges), self.grid, strict=True):
                assert held <= started, "more than was started"
        for start, count in ((work.short_start, short), (work.long_start, long)):
            for item in buffer[start : start + ITEM * count].view(-1, ITEM).tolist():
                self._attend_item(layer, q, out, *item)
        merge_start = work.merge_start
        for row, first, count in buffer[merge_start:][: MERGE * merges].view(-1, MERGE).tolist():
            parts = slice(first, first + count)
            out[row] = merged(self._partial[parts], *self._stats[parts].unbind(-1)).to(q.dtype)
        return out.flatten(1)

    def _attend_item(
        self, layer: int, q: Tensor, out: Tensor, table: int, first_row: int, rows: int,
        start: int, first_key: int, end: int, partial: int, step: int,
    ) -> None:  # fmt: skip
        assert partial < 0 or end - first_key <= SPLIT_TOKENS
        for query in range(rows):
            row, position = q[first_row + query].float(), start + query
            splits = [
                self._attend_split(layer, row, table, position, at, min(at + SPLIT_TOKENS, end))
                for at in range(first_key, end, SPLIT_TOKENS)
            ]
            if partial < 0:
                parts = (torch.stack(part) for part in zip(*splits, strict=True))
                out[first_row + query] = merged(*parts).to(q.dtype)
            else:
                at = partial + query * step
                ((self._partial[at], self._stats[at, :, 0], self._stats[at, :, 1]),) = splits

    def _attend_split(
        self, layer: int, row: Tensor, table: int, position: int, begin: int, end: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Over keys begin..end, as far as a row at `position` sees them: the weighted sum of values
        [heads, head_dim], and of each head the largest score and the sum of weights."""
        cache, config = self._cache, self._cache.config
        if config.sliding_window is not None:
            begin = max(begin, position - config.sliding_window + 1)
        key = torch.arange(begin, max(begin, min(end, position + 1)))
        if not key.numel():
            return torch.zeros_like(row), torch.full((len(row),), -1e30), torch.zeros(len(row))
        blocks = self._buffer[self.work.table_start + table :][key // BLOCK_TOKENS].long()
        token = blocks * cache.rows_per_block + key % BLOCK_TOKENS
        shape = (len(key), config.kv_heads, config.head_dim)
        keys, values = (part[token].float().view(shape) for part in
                        (cache.keys(layer), cache.values(layer)))  # fmt: skip
        grouped = row.view(config.kv_heads, -1, config.head_dim)
        scores = torch.einsum("kgd,nkd->kgn", grouped, keys) * config.head_dim**-0.5
        largest = scores.amax(-1, keepdim=True).clamp(min=-1e30)
        weights = torch.exp(scores - largest)
        sums = torch.einsum("kgn,nkd->kgd", weights, values)
        return sums.flatten(0, 1), largest.flatten(), weights.sum(-1).flatten()


def merged(sums: Tensor, largest: Tensor, total: Tensor) -> Tensor:
    """The output [heads, head_dim] of a row from its splits', in their order.

    sums: [splits, heads, head_dim]; largest, total: [splits, heads].
    """
    weight = torch.exp(largest - largest.amax(0))[..., None]
    above, below = torch.zeros_like(sums[0]), torch.zeros_like(sums[0, :, :1])
    for split in range(len(sums)):
        above += sums[split] * weight[split]
        below += total[split, :, None] * weight[split]
    return above / below


class PlainInt4(Int4Gemm):
    def __init__(self, device: FakeDevice, *, batch_invariant: bool) -> None:
        self._device, self._apart = device, batch_invariant

    def linear(self, x: Tensor, weight: PackedInt4) -> Tensor:
        self._device.met("int4", x.shape, weight.out_features)
        return product(x, weight.dequantize(), apart=self._apart).to(x.dtype)


def plain_faces(device: FakeDevice) -> Faces:
    """The plain faces, which tell the device of each shape that they meet.

    In batch-invariant mode each of them computes a row as if it were alone, as kernels must.
    """

    def lora(
        arena: Tensor, modules: Sequence[ModuleSpec], *, slots: int, dtype: Any,
        batch_invariant: bool, **_: Any,
    ) -> PlainLora:  # fmt: skip
        return PlainLora(
            device, arena, modules, slots=slots, dtype=dtype, batch_invariant=batch_invariant
        )

    def attention(
        cache: KvCache, *, dtype: torch.dtype, batch_invariant: bool, **bounds: int
    ) -> PlainAttention:
        return PlainAttention(device, cache, **bounds)

    def int4(_: torch.device, *, batch_invariant: bool, **__: int) -> PlainInt4:
        return PlainInt4(device, batch_invariant=batch_invariant)

    def met(name: str, operation: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(x: Tensor, *args: Any, **options: Any) -> Tensor:
            device.met(name, x.shape)
            return operation(x, *args, **options)

        return run

    return Faces(
        head_sizes=None,
        lora=lora,
        attention=attention,
        int4=int4,
        rms_norm=met("norm", pointwise.rms_norm),
        add_rms_norm=met("norm with residual", pointwise.add_rms_norm),
        rotate_and_write=met("rotate", pointwise.rotate_and_write),
        silu_gate=met("gate", pointwise.silu_gate),
        sample=met("sample", sample.sample),
    )
