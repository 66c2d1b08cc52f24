"""Drives a CpuExecutor a row at a time and keeps the logits that it would have sampled from."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.runner import CpuExecutor
from engine.sampler import Sampled, finite_rows
from engine.types import (
    BLOCK_TOKENS,
    AdapterBlob,
    Executor,
    PlanRow,
    RowResult,
    SamplingParams,
    SequenceStart,
    StepPlan,
)


class RecordingSampler:
    """Greedy, and remembers the logits of the last step by sequence."""

    def __init__(self) -> None:
        self.logits: dict[int, Tensor] = {}

    def start(self, start: SequenceStart) -> None:
        self.logits.pop(start.seq, None)

    def drop(self, seq: int) -> None:
        self.logits.pop(seq, None)

    def sample(self, logits: Tensor, seqs: list[int]) -> list[Sampled]:
        self.logits.update(zip(seqs, logits.clone(), strict=True))
        finite = finite_rows(logits)
        return [
            Sampled(int(token), None, good)
            for token, good in zip(logits.argmax(dim=-1), finite, strict=True)
        ]


@dataclass(frozen=True)
class Piece:
    """The next tokens of a sequence."""

    seq: int
    tokens: Sequence[int]
    slot: int = -1
    prompt_logprobs: int | None = None


class Driver:
    """One executor, a free list of its blocks, and what each sequence has been fed so far."""

    def __init__(self, base_model: Path, data_dir: Path, **options: Any) -> None:
        settings: dict[str, Any] = {
            "arena_bytes": 8 << 20, "max_slots": 16, "linear_path": "fp32", "kv_dtype": "fp32",
            "adapter_dtype": "fp32", "threads": 1,
        }  # fmt: skip
        settings |= {"base_model": base_model, "data_dir": data_dir, **options}
        self.config = EngineConfig(**settings)
        self.executor: Executor = self._open(self.config)
        self._free = list(range(self.executor.extent_count // 2))
        self._next_adapter = self.executor.extent_count
        self.extent_bytes = self.executor.description.kv_block_bytes
        self._blocks: dict[int, list[int]] = {}
        self._fed: dict[int, list[int]] = {}
        self.prompts: dict[int, Sequence[int]] = {}  # where it is longer than the first piece
        self._announced: dict[int, int] = {}  # blocks of a sequence that the executor knows
        self._closed: list[int] = []
        self.results: list[RowResult] = []

    def _open(self, config: EngineConfig) -> Executor:
        self.sampler = RecordingSampler()
        return CpuExecutor(config, sampler=self.sampler)

    def _logits(self, seqs: list[int]) -> list[Tensor]:
        """Those of the last step, which sampled these sequences."""
        return [self.sampler.logits[seq] for seq in seqs]

    def feed(self, *pieces: Piece) -> list[Tensor]:
        """One step of all pieces; the logits [vocab] after the last token of each."""
        started = [self._introduce(piece) for piece in pieces if piece.seq not in self._announced]
        rows = [self._row(piece) for piece in pieces]
        plan = StepPlan(0, self._closed, started, [], rows)
        self._closed = []
        self.results = self.executor.execute(plan).rows
        return self._logits([piece.seq for piece in pieces])

    def fed(self, seq: int) -> list[int]:
        """The tokens of a sequence so far."""
        return self._fed.get(seq, [])

    def close(self, seq: int) -> None:
        """Ends a sequence with the next step; its blocks are free at once."""
        self._closed.append(seq)
        del self._announced[seq], self._fed[seq]
        freed = self._blocks.pop(seq)
        used = {block for blocks in self._blocks.values() for block in blocks}
        self._free = [block for block in freed if block not in used] + self._free  # reused first

    def close_all(self) -> None:
        """Ends every sequence."""
        for seq in list(self._announced):
            self.close(seq)

    def share_prefix(self, seq: int, owner: int, blocks: int) -> None:
        """Lets a new sequence begin after the first full blocks of another."""
        self._blocks[seq] = self._blocks[owner][:blocks]
        self._fed[seq] = self._fed[owner][: blocks * BLOCK_TOKENS]

    def add_adapter(self, slot: int, blob: AdapterBlob) -> None:
        """Copies an adapter in, from the arena's top down."""
        self._next_adapter -= -(-blob.layout.nbytes // self.extent_bytes)
        assert self._next_adapter >= self.executor.extent_count // 2, "the arena is too small"
        self.executor.start_copy(slot, self._next_adapter, blob)
        self._let_copies_run()
        assert self.executor.poll_copies(blob.layout.nbytes) == [slot]

    def _let_copies_run(self) -> None:
        """Copies of this executor run when they are polled."""

    def _introduce(self, piece: Piece) -> SequenceStart:
        self._announced[piece.seq] = 0
        fed = self._fed.setdefault(piece.seq, [])
        prompt = list(self.prompts.get(piece.seq, [*fed, *piece.tokens]))
        self._blocks.setdefault(piece.seq, [])
        return SequenceStart(piece.seq, prompt, [], SamplingParams(max_tokens=1), 0)

    def _row(self, piece: Piece) -> PlanRow:
        fed, blocks = self._fed[piece.seq], self._blocks[piece.seq]
        start = len(fed)
        fed += piece.tokens
        missing = -(-len(fed) // BLOCK_TOKENS) - len(blocks)
        # the highest and the lowest free block by turns: tables are never in order
        blocks += [self._free.pop(-1 if index % 2 else 0) for index in range(missing)]
        new = blocks[self._announced[piece.seq] :]
        self._announced[piece.seq] = len(blocks)
        return PlanRow(
            piece.seq, start, list(piece.tokens), new, piece.slot, True, piece.prompt_logprobs
        )


def reference_logits(model: Any, tokens: Sequence[int]) -> Tensor:
    """transformers' (or PEFT's) logits at every position: [T, vocab] fp32."""
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([list(tokens)])).logits[0]
    return logits
