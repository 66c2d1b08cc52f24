"""KV blocks: reference counts, the prefix cache, and who may share what.

A block's hash covers every token up to its end, so equal hashes mean equal contents. The chain
starts from `prefix_seed`: two base models, two adapters, two versions or two tenants never meet.
Unreferenced blocks that have a hash are kept, least recently used first to go.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence

import numpy as np

from engine.arena import Arena, Span
from engine.types import BLOCK_TOKENS


def prefix_seed(base_digest: str, adapter_digest: str, cache_salt: str) -> bytes:
    """Where a prefix-cache chain starts; `adapter_digest` is "" for the base model alone.

    Each part is preceded by its length, so no two triples read the same.
    """
    chain = hashlib.sha256(b"loramux-prefix-v1")
    for part in (base_digest, adapter_digest, cache_salt):
        data = part.encode()
        chain.update(len(data).to_bytes(4, "little") + data)
    return chain.digest()


def block_hash(previous: bytes, tokens: Sequence[int]) -> bytes:
    """The hash of a full block whose predecessor (or seed) hashes to `previous`."""
    return hashlib.sha256(previous + np.asarray(tokens, dtype="<u4").tobytes()).digest()


def blocks_for(tokens: int) -> int:
    """Blocks that hold `tokens` tokens."""
    return -(-tokens // BLOCK_TOKENS)


class KvBlocks:
    """The KV side of the arena. A block is free, referenced, or cached (kept for its prefix)."""

    def __init__(self, arena: Arena, *, prefix_caching: bool = True) -> None:
        self._arena = arena
        self._caching = prefix_caching
        self._references: dict[int, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._owner_of: dict[int, Hashable] = {}
        self._owned: dict[Hashable, set[int]] = {}

    @property
    def available(self) -> int:
        """Blocks that `take` could give: the free ones and the cached ones."""
        return self._arena.kv_free + len(self._cached)

    @property
    def referenced(self) -> int:
        return len(self._references)

    @property
    def cached(self) -> int:
        return len(self._cached)

    def references(self, block: int) -> int:
        return self._references.get(block, 0)

    def referenced_in(self, window: Span) -> int:
        """How many blocks of `window` are in use by a sequence."""
        if not self._arena.kv_in(window):
            return 0
        return sum(1 for block in range(window.first, window.end) if block in self._references)

    def take(self, count: int) -> list[int] | None:
        """`count` blocks of one reference each, or None and nothing is changed."""
        if count > self.available:
            return None
        taken = []
        for _ in range(count):
            block = self._arena.take_block()
            while block is None:
                self._drop(next(iter(self._cached)))
                block = self._arena.take_block()
            self._references[block] = 1
            taken.append(block)
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """One more reference on each; a cached block becomes referenced again."""
        for block in blocks:
            if block in self._cached:
                del self._cached[block]
            self._references[block] = self._references.get(block, 0) + 1

    def release(self, blocks: Sequence[int]) -> None:
        """One reference less on each; the last one caches a hashed block and frees another.

        The end of a chain is the first to be evicted: a beginning serves more prompts.
        """
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block]:
                continue
            del self._references[block]
            if block in self._hash_of and block < self._arena.kv_limit:
                self._cached[block] = None
            else:
                self._forget_hash(block)
                self._arena.give_block(block)

    # ------------------------------------------------------------------ prefix cache

    def register(self, block: int, digest: bytes, owner: Hashable) -> None:
        """Offers a full, computed block to later sequences. The first of equals is kept."""
        if not self._caching or digest in self._block_of or block in self._hash_of:
            return
        self._block_of[digest] = block
        self._hash_of[block] = digest
        self._owner_of[block] = owner
        self._owned.setdefault(owner, set()).add(block)

    def match(self, hashes: Iterable[bytes]) -> list[int]:
        """The blocks of the longest known beginning of a chain (not yet referenced)."""
        found = []
        for digest in hashes:
            block = self._block_of.get(digest)
            if block is None:
                break
            found.append(block)
        return found

    def count_cached(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` nobody references now: sharing them takes them from `available`."""
        return sum(1 for block in blocks if block in self._cached)

    def unregister(self, blocks: Iterable[int]) -> None:
        """Nobody may share these from now on (their contents are in doubt)."""
        for block in blocks:
            if block in self._cached:
                self._drop(block)
            else:
                self._forget_hash(block)

    def drop_owner(self, owner: Hashable) -> int:
        """Removes everything an owner (an adapter) left in the prefix cache; how many blocks."""
        blocks = list(self._owned.get(owner, ()))
        self.unregister(blocks)
        return len(blocks)

    def clear(self, window: Span) -> bool:
        """Frees the cached blocks of `window`; whether no KV block is left in it."""
        for block in range(window.first, window.end):
            if block in self._cached:
                self._drop(block)
        return self.referenced_in(window) == 0

    def _drop(self, block: int) -> None:
        del self._cached[block]
        self._forget_hash(block)
        self._arena.give_block(block)

    def _forget_hash(self, block: int) -> None:
        digest = self._hash_of.pop(block, None)
        if digest is None:
            return
        del self._block_of[digest]
        owner = self._owner_of.pop(block)
        owned = self._owned[owner]
        owned.discard(block)
        if not owned:
            del self._owned[owner]
