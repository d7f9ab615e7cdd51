"""Room for KV, counted in blocks. Pure.

Every block is one of three things, and the pool knows how many of each: it holds tokens (resident), it is promised to
admitted work that has not filled it yet (reserved), or it is free. The three sum to the pool.
"""

from dataclasses import dataclass


@dataclass(slots=True)
class _Holding:
    promised: int  # blocks
    resident: int = 0  # of the promised ones, those that hold tokens


class BlockPool:
    """A promise is made whole at admission or not at all, so that admitted work never lacks room."""

    def __init__(self, blocks: int, block_tokens: int = 16) -> None:
        assert blocks >= 1 and block_tokens >= 1
        self.blocks = blocks
        self.block_tokens = block_tokens
        self._holdings: dict[str, _Holding] = {}
        self._promised = 0
        self._resident = 0

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)

    @property
    def resident(self) -> int:
        return self._resident

    @property
    def reserved(self) -> int:
        return self._promised - self._resident

    @property
    def free(self) -> int:
        return self.blocks - self._promised

    def fits(self, tokens: int) -> bool:
        return self.blocks_for(tokens) <= self.free

    def promise(self, key: str, tokens: int) -> None:
        """Room for this many tokens; ask `fits` first."""
        assert key not in self._holdings, f"{key} holds blocks already"
        need = self.blocks_for(tokens)
        assert need <= self.free, f"{key}: {need} blocks of {self.free} free"
        self._holdings[key] = _Holding(need)
        self._promised += need

    def hold(self, key: str, tokens: int) -> None:
        """`key` holds this many tokens by now."""
        holding = self._holdings[key]
        resident = self.blocks_for(tokens)
        assert holding.resident <= resident <= holding.promised, f"{key}: {resident} of {holding.promised} promised"
        self._resident += resident - holding.resident
        holding.resident = resident

    def release(self, key: str) -> int:
        """Gives everything back, once; the number of blocks."""
        holding = self._holdings.pop(key)
        self._promised -= holding.promised
        self._resident -= holding.resident
        return holding.promised

    def holders(self) -> frozenset[str]:
        return frozenset(self._holdings)

    def check_integrity(self) -> None:
        holdings = self._holdings.values()
        assert self._promised == sum(h.promised for h in holdings)
        assert self._resident == sum(h.resident for h in holdings)
        assert all(0 <= h.resident <= h.promised for h in holdings)
        assert min(self.resident, self.reserved, self.free) >= 0
        assert self.resident + self.reserved + self.free == self.blocks
