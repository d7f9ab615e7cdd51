"""KV in blocks of a fixed number of tokens: who holds which, what is promised, what can be reused. Pure.

Every block is one of three things, and the pool knows how many of each: it is held by a request (resident), it is
promised to admitted work that has not taken it yet (reserved), or it is free. The three sum to the pool.

A full block can be reused: it is known by a digest of all tokens up to its end, so that equal digests mean equal KV. A
block that several requests share is counted once. A free block keeps its content, and its digest, until it is taken
for something else; `cached` counts those.
"""

import heapq
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from reference_server.request import InvariantError

BLOCK_TOKENS = 32  # positions of a block; docs/decisions/011 says why
_DIGEST_BYTES = 16


@dataclass(slots=True)
class _Holding:
    promised: int  # blocks in all, those in the table among them
    table: list[int] = field(default_factory=list)
    digest: bytes = b""  # of the first `registered` blocks
    registered: int = 0


class BlockPool:
    """A promise is made whole or not at all, and admitted work never lacks what it was promised."""

    def __init__(self, blocks: int, block_tokens: int = BLOCK_TOKENS, prefix_reuse: bool = False) -> None:
        assert blocks >= 1 and block_tokens >= 1
        self.blocks = blocks
        self.block_tokens = block_tokens
        self.prefix_reuse = prefix_reuse
        self._holdings: dict[str, _Holding] = {}
        self._references = [0] * blocks
        self._resident = 0
        self._reserved = 0
        # The lowest free block is taken first: attention reads the pool from its start, and a dense start is cheap.
        self._empty = list(range(blocks))
        self._cached: OrderedDict[int, bytes] = OrderedDict()  # free, with content; the least recently used first
        self._by_digest: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)

    @property
    def resident(self) -> int:
        return self._resident

    @property
    def reserved(self) -> int:
        return self._reserved

    @property
    def free(self) -> int:
        return self.blocks - self._resident - self._reserved

    @property
    def cached(self) -> int:
        """Of the free blocks, those whose content can be reused."""
        return len(self._cached)

    def holders(self) -> frozenset[str]:
        return frozenset(self._holdings)

    def held(self, key: str) -> int:
        """Blocks in the table of `key`."""
        return len(self._holdings[key].table)

    def promised(self, key: str) -> int:
        """Blocks promised to `key`, those in its table among them."""
        return self._holdings[key].promised

    # --- taking

    def lacking(self, tokens: Sequence[int], promised_tokens: int) -> int:
        """How many free blocks `open` would lack; 0 or less: it fits, and so many would be left."""
        shared = sum(1 for block in self._match(tokens) if self._references[block])
        return self.blocks_for(promised_tokens) - shared - self.free

    def open(self, key: str, tokens: Sequence[int], promised_tokens: int) -> tuple[list[int], int]:
        """Promises room; ask `lacking` first. The block table, which grows with `extend`, and the tokens that it holds
        already because their KV is reused: whole blocks, and never all of `tokens`, whose last must be run."""
        if key in self._holdings:
            raise InvariantError(f"{key} holds blocks already")
        if promised_tokens <= len(tokens):
            raise InvariantError(f"{key}: a promise of {promised_tokens} tokens for {len(tokens)}")
        reused = self._match(tokens)
        need = self.blocks_for(promised_tokens)
        if self.lacking(tokens, promised_tokens) > 0:
            raise InvariantError(f"{key}: {need} blocks of {self.free} free")
        for block in reused:
            if not self._references[block]:
                del self._cached[block]
                self._resident += 1
            self._references[block] += 1
        digest = self._digest_of[reused[-1]] if reused else b""
        self._holdings[key] = _Holding(need, reused, digest, len(reused))
        self._reserved += need - len(reused)
        return reused, len(reused) * self.block_tokens

    def extend(self, key: str, tokens: int) -> bool:
        """The table of `key` covers this many tokens; False, and nothing changed, where that needs more than was
        promised and is not free."""
        holding = self._holdings[key]
        need = self.blocks_for(tokens)
        if need > holding.promised:
            if need - holding.promised > self.free:
                return False
            self._reserved += need - holding.promised
            holding.promised = need
        while len(holding.table) < need:
            block = self._take()
            self._references[block] = 1
            holding.table.append(block)
            self._resident += 1
            self._reserved -= 1
        return True

    def has_new_full_block(self, key: str, computed: int) -> bool:
        """Whether `register` would do something."""
        return self.prefix_reuse and computed // self.block_tokens > self._holdings[key].registered

    def register(self, key: str, tokens: Sequence[int], computed: int) -> None:
        """The first `computed` of `tokens` have their KV in the table: full blocks of them can be reused from now."""
        assert self.prefix_reuse
        holding, size = self._holdings[key], self.block_tokens
        for i in range(holding.registered, computed // size):
            holding.digest = _digest(holding.digest, tokens[i * size : (i + 1) * size])
            holding.registered += 1
            if holding.digest not in self._by_digest:
                block = holding.table[i]
                self._by_digest[holding.digest] = block
                self._digest_of[block] = holding.digest

    def release(self, key: str) -> int:
        """Gives everything back, once; the number of blocks that came free by it."""
        holding = self._holdings.pop(key)
        before = self.free
        self._reserved -= holding.promised - len(holding.table)
        # From the end: of a prefix the longer part is the first to be forgotten.
        for block in reversed(holding.table):
            self._references[block] -= 1
            if self._references[block]:
                continue
            self._resident -= 1
            if digest := self._digest_of.get(block):
                self._cached[block] = digest
            else:
                heapq.heappush(self._empty, block)
        return self.free - before

    # --- inside

    def _match(self, tokens: Sequence[int]) -> list[int]:
        """Blocks that hold the KV of the beginning of `tokens`."""
        blocks: list[int] = []
        if not self.prefix_reuse:
            return blocks
        digest, size = b"", self.block_tokens
        for i in range((len(tokens) - 1) // size):
            digest = _digest(digest, tokens[i * size : (i + 1) * size])
            block = self._by_digest.get(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def _take(self) -> int:
        if self._empty:
            return heapq.heappop(self._empty)
        block, digest = self._cached.popitem(last=False)
        del self._by_digest[digest], self._digest_of[block]
        return block

    def check_integrity(self) -> None:
        holdings = self._holdings.values()
        references = [0] * self.blocks
        for holding in holdings:
            assert len(holding.table) <= holding.promised, "more blocks than promised"
            assert len(set(holding.table)) == len(holding.table), "a block twice in one table"
            for block in holding.table:
                references[block] += 1
        assert references == self._references, "a reference is lost or counted twice"
        used = {block for block, count in enumerate(references) if count}
        assert self._resident == len(used)
        assert self._reserved == sum(h.promised - len(h.table) for h in holdings)
        assert min(self.resident, self.reserved, self.free) >= 0
        assert self.resident + self.reserved + self.free == self.blocks
        assert sorted([*used, *self._empty, *self._cached]) == list(range(self.blocks)), "a block is lost or is twice"
        assert self._cached.keys() <= self._digest_of.keys() and not self._digest_of.keys() & set(self._empty)
        assert {digest: block for block, digest in self._digest_of.items()} == self._by_digest


def _digest(before: bytes, tokens: Sequence[int]) -> bytes:
    return blake2b(before + array("q", tokens).tobytes(), digest_size=_DIGEST_BYTES).digest()
