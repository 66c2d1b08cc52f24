"""Multi-LoRA on the CPU: one call into the compiled pass a slice group.

Decoding with many small adapters is bound by memory and by the number of operations, so a call
does all slices, adapters and rows of a group. It runs on the threads that torch's own operations
use. Needs numba; `lora_torch` serves where it is not installed.
"""

import ctypes
import functools
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.kernels.lora import Lora
from engine.kernels.lora_numba import Call, worker
from engine.kernels.metadata import AdapterDtype, LoraBatch, SliceGroup
from engine.types import ModuleSpec

CHUNK_ROWS = 32
PART_COLUMNS = 4096
"""Wider slices (lm_head) are cut, so that several threads share one adapter's columns."""


@functools.cache
def thread_pool() -> Any | None:
    """`GOMP_parallel` of the OpenMP runtime that torch has loaded; None where it has another.

    Threads of a pool of our own would fight torch's, which spin between two operations.
    """
    try:
        runtime = ctypes.CDLL("libgomp.so.1", mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except (OSError, AttributeError):
        return None
    run = runtime.GOMP_parallel
    run.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    run.restype = None
    return run


class CompiledLora(Lora):
    """x and y are fp32; uses as many threads as torch's operations do."""

    def __init__(
        self,
        arena: Tensor,
        modules: Sequence[ModuleSpec],
        *,
        slots: int,
        dtype: AdapterDtype,
        batch_invariant: bool = False,
        work: int | None = None,
        max_rank: int = 0,
    ) -> None:
        """`work`: address of another pass over bf16 adapters that takes a `Call`, and whose rows do
        not depend on each other; default: numba's. `max_rank`: what that pass needs room for.

        Raises RuntimeError where torch does not run on GNU's OpenMP.
        """
        super().__init__(arena, modules, slots=slots, dtype=dtype)
        run = thread_pool()
        if run is None:
            raise RuntimeError("torch runs on no GNU OpenMP here; use TorchLora")
        self._run = run
        self._work = work or worker(np.uint16 if dtype == "bf16" else np.float32).address
        self._batch_invariant, self._max_rank = batch_invariant, max_rank
        self._chunk_rows = 1 if batch_invariant and work is None else CHUNK_ROWS
        self._calls: dict[SliceGroup, Call] = {}
        self._slices: list[npt.NDArray[np.int64]] = []  # keeps what the calls point to

    def new_batch(self, capacity: int) -> LoraBatch:
        return LoraBatch(capacity, self._chunk_rows)

    def linear(self, group: SliceGroup, batch: LoraBatch, x: Tensor, y: Tensor) -> None:
        self._check(x)
        if not self._changes(group, batch):
            return
        call = self._call(group)
        call.x, call.x_stride, call.tokens = x.data_ptr(), x.stride(0), 0
        self._start(call, batch, y)

    def embedding(self, group: SliceGroup, batch: LoraBatch, tokens: Tensor, y: Tensor) -> None:
        if not self._changes(group, batch):
            return
        tokens = tokens.to(torch.int64).contiguous()
        call = self._call(group)
        call.tokens = tokens.data_ptr()
        self._start(call, batch, y)

    def prepare(self, groups: Sequence[SliceGroup], x: Tensor, y: Tensor) -> "PreparedCalls":
        """Calls that a compiled forward pass makes itself, all from x into y: fp32, dense rows.

        A group's rows begin at x and y and are `in_features` and `width` long.
        """
        calls = np.zeros(len(groups), np.dtype(Call))
        for index, group in enumerate(groups):
            call = self._call(group)
            call.x, call.x_stride, call.tokens = x.data_ptr(), group.in_features, 0
            call.y, call.y_stride = y.data_ptr(), group.width
            calls[index] = np.frombuffer(bytes(call), calls.dtype)[0]
        return PreparedCalls(calls, self._work)

    def _changes(self, group: SliceGroup, batch: LoraBatch) -> bool:
        """Whether an adapter of the batch changes a linear of the group, which wakes threads."""
        rank = self.table.rank
        return any(rank[slot, module] for slot in batch.adapters for module in group.modules)

    def _start(self, call: Call, batch: LoraBatch, y: Tensor) -> None:
        self._check(y)
        if not batch.chunk_count:
            return
        call.y, call.y_stride = y.data_ptr(), y.stride(0)
        call.chunks, call.capacity = batch.chunk_count, batch.capacity
        call.batch = batch.buffer.ctypes.data
        call.next_unit, call.units = 0, call.chunks * call.slice_count * call.parts
        threads = min(call.units, torch.get_num_threads())
        self._run(self._work, ctypes.addressof(call), threads, 0)

    def _call(self, group: SliceGroup) -> Call:
        """The arguments of a group's calls, with all that stays the same filled in."""
        call = self._calls.get(group)
        if call is None:
            slices = np.array([group.modules, group.columns, group.out_features], np.int64)
            self._slices.append(slices)
            table = self.table
            call = Call(
                in_features=group.in_features,
                weights=self.weights.data_ptr(),
                elements=self.weights.numel(),
                a=table.a.ctypes.data,
                b=table.b.ctypes.data,
                rank=table.rank.ctypes.data,
                scale=table.scale.ctypes.data,
                modules=len(self.modules),
                slices=slices.ctypes.data,
                slice_count=len(group.modules),
                parts=-(-max(group.out_features) // PART_COLUMNS),
                invariant=self._batch_invariant,
                max_rank=self._max_rank,
            )
            self._calls[group] = call
        return call

    @staticmethod
    def _check(matrix: Tensor) -> None:
        if matrix.dtype != torch.float32 or matrix.stride(-1) != 1:
            raise ValueError("LoRA on the CPU takes fp32 rows that are contiguous")


class PreparedCalls:
    """The arguments of many calls, filled in together once a step."""

    def __init__(self, calls: npt.NDArray[Any], work: int) -> None:
        """calls: structured like `Call`; `work`: address of the pass's thread function."""
        self._calls = calls
        self._work = work
        first = calls.ctypes.data
        self.addresses: npt.NDArray[np.int64] = first + calls.itemsize * np.arange(calls.size)

    def begin(self, batch: LoraBatch) -> int:
        """Makes every call ready for this batch; the address of what each thread is to run."""
        calls = self._calls
        calls["batch"], calls["capacity"] = batch.buffer.ctypes.data, batch.capacity
        calls["chunks"] = batch.chunk_count
        calls["next_unit"] = 0
        calls["units"] = batch.chunk_count * calls["slice_count"] * calls["parts"]
        return self._work
