"""What a sequence holds of the KV cache: the prefix it starts from, further blocks, its fork."""

from engine.kv_blocks import KvBlocks
from engine.request import Sequence
from engine.types import BLOCK_TOKENS


def cached_prefix(blocks: KvBlocks, sequence: Sequence) -> list[int]:
    """The cached blocks that a waiting sequence can start from; not yet taken.

    The last token is always computed: its logits are what is asked for.
    """
    if sequence.wants_prompt_logprobs:
        return []
    return blocks.match(sequence.block_hashes((sequence.length - 1) // BLOCK_TOKENS))


def start_from(blocks: KvBlocks, sequence: Sequence, prefix: list[int]) -> None:
    """Takes the cached prefix: its tokens are computed, and cost the tenant nothing."""
    blocks.share(prefix)
    sequence.blocks = prefix
    sequence.registered = len(prefix)
    sequence.computed = len(prefix) * BLOCK_TOKENS
    sequence.charged = max(sequence.charged, sequence.computed)


def extend(blocks: KvBlocks, sequence: Sequence, end: int) -> list[int]:
    """Takes what is missing for the first `end` tokens; the blocks new to the executor."""
    missing = -(-end // BLOCK_TOKENS) - len(sequence.blocks)
    if missing > 0:
        taken = blocks.take(missing)
        if taken is None:
            raise AssertionError("a row is planned only when its blocks are available")
        sequence.blocks += taken
    if sequence.announced_blocks == len(sequence.blocks):
        return []
    new_blocks = sequence.blocks[sequence.announced_blocks :]
    sequence.announced_blocks = len(sequence.blocks)
    return new_blocks


def register_full(blocks: KvBlocks, sequence: Sequence) -> None:
    """Offers the blocks that have become full to the prefix cache."""
    full = sequence.computed // BLOCK_TOKENS
    if full == sequence.registered:
        return
    hashes = sequence.block_hashes(full)
    for index in range(sequence.registered, full):
        owner = sequence.call.request.adapter
        blocks.register(sequence.blocks[index], hashes[index], owner)
    sequence.registered = full


def branch(blocks: KvBlocks, leader: Sequence, child: Sequence) -> list[tuple[int, int]] | None:
    """The child shares the prompt's blocks of its leader and has a block of its own to write.

    It computes the last prompt token once more, to draw a first token of its own. Returns which
    block has to be copied to which, if one has, and None when no block is free.
    """
    last = len(leader.call.request.prompt) - 1
    shared = leader.blocks[: last // BLOCK_TOKENS]
    own = blocks.take(1)
    if own is None:
        return None
    blocks.share(shared)
    child.blocks = shared + own
    child.registered = len(shared)
    child.computed = last
    return [(leader.blocks[last // BLOCK_TOKENS], own[0])] if last % BLOCK_TOKENS else []


def release(blocks: KvBlocks, sequence: Sequence) -> None:
    """Gives everything back; nothing of the sequence is computed any more."""
    blocks.release(sequence.blocks)
    sequence.blocks = []
    sequence.announced_blocks = 0
    sequence.computed = 0
