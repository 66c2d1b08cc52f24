"""The sequences in progress: what they hold, what they still need, and whom to preempt."""

from collections import Counter
from dataclasses import dataclass, field

from engine import sequence_blocks
from engine.adapters.pool import AdapterPool
from engine.kv_blocks import KvBlocks
from engine.policy import Policy
from engine.request import Sequence, SequenceState
from engine.step_budget import Commitments
from engine.step_time import StepTimes
from engine.types import BLOCK_TOKENS

PROTECTED_AFTER = 3
"""A sequence preempted so often is preempted last: each of them finishes in the end."""


@dataclass(slots=True)
class Demand:
    """What running sequences still need for the tokens they have."""

    keeps_budgets: bool
    tokens: int = 0  # whose KV is to be computed
    blocks: int = 0
    decode_blocks: int = 0  # of `blocks`, those without which a decode cannot go on
    commitments: Commitments = field(default_factory=Commitments)

    def breaks_a_budget(self, sequence: Sequence, times: StepTimes) -> bool:
        """Whether the batch must not grow by the sequence: a decode's budget would break."""
        return self.keeps_budgets and self.commitments.breaks(sequence, times)


class Running:
    """`closed`, `copies`: what the executor has to be told with the next step."""

    def __init__(self, blocks: KvBlocks, pool: AdapterPool, policy: Policy) -> None:
        self._blocks = blocks
        self._pool = pool
        self._policy = policy
        self.sequences: dict[int, Sequence] = {}  # by their number
        self.closed: list[int] = []
        self.copies: dict[int, tuple[int, int]] = {}  # by the sequence that they are for
        self._of: Counter[str] = Counter()  # by tenant
        self._choices_to_come = 0  # places kept for choices that will branch off

    def __len__(self) -> int:
        return len(self.sequences)

    def of(self, tenant: str) -> int:
        """Sequences of a tenant."""
        return self._of[tenant]

    @property
    def places(self) -> int:
        """Places taken, those of choices that will branch off included."""
        return len(self.sequences) + self._choices_to_come

    @property
    def drawn_tokens(self) -> int:
        """Tokens of the answers so far."""
        return sum(len(sequence.generated) for sequence in self.sequences.values())

    def start(self, sequence: Sequence) -> None:
        """The sequence runs, with a place for each choice that will branch off it."""
        adapter = sequence.call.request.adapter
        if adapter is not None:
            sequence.slot = self._pool.pin(sequence)
            sequence.rank = self._pool.rank(adapter)
            sequence.adapter_bytes = self._pool.nbytes(adapter)
        sequence.state = SequenceState.RUNNING
        self.sequences[sequence.seq] = sequence
        self._of[sequence.tenant] += 1
        self._choices_to_come += sequence.places - 1

    def branch_off(self, leader: Sequence, child: Sequence) -> bool:
        """A further choice runs beside its leader; False: there is no block for it."""
        copies = sequence_blocks.branch(self._blocks, leader, child)
        if copies is None:
            return False
        self.copies.update((child.seq, copy) for copy in copies)
        self.start(child)
        return True

    def give_up_places(self, sequence: Sequence) -> None:
        """The choices that were to come take their places now, or never."""
        self._choices_to_come -= sequence.places - 1

    def stop(self, sequence: Sequence) -> None:
        """Takes a sequence out; all that it held is given back."""
        del self.sequences[sequence.seq]
        self.give_up_places(sequence)
        self._of[sequence.tenant] -= 1
        if not self._of[sequence.tenant]:
            del self._of[sequence.tenant]
        self.copies.pop(sequence.seq, None)
        sequence_blocks.release(self._blocks, sequence)
        if sequence.started:
            self.closed.append(sequence.seq)
            sequence.started = False
        if sequence.call.request.adapter is not None:
            self._pool.unpin(sequence.call.request.adapter)

    def demand(self) -> Demand:
        """What the running sequences need, in one pass."""
        budgets = self._policy.keeps_budgets
        demand = Demand(budgets)
        for sequence in self.sequences.values():
            length = sequence.length
            pending = length - sequence.computed
            missing = -(-length // BLOCK_TOKENS) - len(sequence.blocks)
            demand.tokens += pending
            demand.blocks += missing
            if budgets:
                demand.commitments.add(sequence)
            if pending == 1:
                demand.decode_blocks += missing
        return demand

    def needed_blocks(self) -> int:
        """KV blocks that adapters must leave: what the sequences need now and next."""
        return self.demand().blocks + len(self.sequences)

    def least_valued(self) -> Sequence:
        """Whom to preempt: of the tenants served too much, then of those without a budget."""
        policy = self._policy
        least = min(policy.priority(s.tenant) for s in self.sequences.values())

        def value(s: Sequence) -> tuple[bool, bool, bool, float, tuple[int, int]]:
            priority = policy.priority(s.tenant)
            budget = s.call.request.budget
            promised = budget.ttft_ms is not None or budget.tpot_ms is not None
            return (
                s.preemptions < PROTECTED_AFTER,
                policy.keeps_budgets and priority - policy.lead(s.tenant) > least,
                policy.keeps_budgets and not promised,
                priority,
                s.order,
            )

        return max(self.sequences.values(), key=value)
