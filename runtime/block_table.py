"""The KV blocks of one sequence, in the order of its tokens."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class BlockTable:
    """Token t lives in slot t % block_tokens of `blocks[t // block_tokens]`: numbers of the device, or of the host.

    Slots are assigned before a step and hold KV after it: `committed <= tokens`, and the difference is in flight.
    """

    blocks: list[int] = field(default_factory=list)
    tokens: int = 0
    """Tokens that have a slot."""
    committed: int = 0
    """Tokens whose KV has been computed."""
    chain: list[bytes] = field(default_factory=list)
    """Hashes of the blocks that are full and committed; empty without prefix caching."""
    tail_ids: list[int] = field(default_factory=list)
    """Ids of the committed tokens after those blocks, kept until they fill one; empty without prefix caching."""
    on_host: bool = False

    @property
    def in_flight(self) -> int:
        """Return the tokens that have a slot whose KV has not been computed."""
        return self.tokens - self.committed

    def copy(self) -> BlockTable:
        """Return a table that holds the same blocks and grows on its own."""
        return BlockTable(
            list(self.blocks), self.tokens, self.committed, list(self.chain), list(self.tail_ids), self.on_host
        )
