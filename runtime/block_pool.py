"""The physical KV blocks of one memory: free, in use (by how many), or kept in case their prefix returns."""

from __future__ import annotations

from collections import Counter, OrderedDict

from planner.errors import InvariantError


class BlockPool:
    """Blocks 0..total-1. Each is *free* (holds nothing), *used* (by one table or more), or *idle*.

    An idle block belongs to nobody but holds a published prefix: it is as good as free, and is evicted, oldest first,
    when no free one is left. The order is that in which blocks became idle, so it has no ties.

    Several used blocks may hold the same tokens, when requests with one prompt ran side by side. They are not merged: a
    table keeps its blocks, whose numbers may be on their way to a kernel or to another machine. Only the last of them
    becomes idle, so an idle block is always the only one of its hash.
    """

    def __init__(self, total: int):
        self.total = total
        self._free = list(range(total - 1, -1, -1))
        self._references = [0] * total
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._hash: dict[int, bytes] = {}
        self._holders: dict[bytes, list[int]] = {}

    @property
    def free(self) -> int:
        """Return the blocks that hold nothing."""
        return len(self._free)

    @property
    def idle(self) -> int:
        """Return the blocks that nobody uses and that hold a prefix."""
        return len(self._idle)

    @property
    def available(self) -> int:
        """Return the blocks that can be taken: free and idle."""
        return len(self._free) + len(self._idle)

    @property
    def used(self) -> int:
        """Return the blocks that some table holds; a shared one counts once."""
        return self.total - self.available

    def references(self, block: int) -> int:
        """Return how many tables hold `block`."""
        return self._references[block]

    def take(self, count: int) -> list[int]:
        """Return `count` blocks, each with one reference. Raises InvariantError, with nothing taken, when too few."""
        if count > self.available:
            raise InvariantError(f"asked for {count} blocks where {self.available} can be had")
        self.evict(count - self.free)
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def share(self, block: int) -> None:
        """Add a reference to a block that is used or idle."""
        if self._references[block] == 0 and block not in self._idle:
            raise InvariantError(f"block {block} is shared, yet it is free")
        self._idle.pop(block, None)
        self._references[block] += 1

    def release(self, block: int) -> bool:
        """Drop a reference; return True when it was the last one, so that the block is available again."""
        if self._references[block] == 0:
            raise InvariantError(f"block {block} is freed twice")
        self._references[block] -= 1
        if self._references[block] > 0:
            return False
        if self._holders.get(self._hash.get(block, b"")) == [block]:
            self._idle[block] = None
        else:
            self._clear(block)
        return True

    def publish(self, block: int, digest: bytes) -> None:
        """Let `find` know that the used `block` holds the tokens named `digest`, and will not be written again."""
        if self._references[block] == 0 or block in self._hash:
            raise InvariantError(f"block {block} is published, yet it is not in use or has a hash")
        other = self.find(digest)
        if other is not None and other in self._idle:
            self._drop(other)
        self._hash[block] = digest
        self._holders.setdefault(digest, []).append(block)

    def is_published(self, block: int) -> bool:
        """Return True when `find` may answer with `block`."""
        return block in self._hash

    def find(self, digest: bytes) -> int | None:
        """Return a block that holds the tokens named `digest`, or None."""
        holders = self._holders.get(digest)
        return holders[0] if holders else None

    def is_idle(self, block: int) -> bool:
        """Return True when nobody uses `block` and it holds a prefix."""
        return block in self._idle

    def evict(self, count: int) -> int:
        """Make up to `count` idle blocks free, those idle the longest first; return how many."""
        count = max(0, min(count, self.idle))
        for _ in range(count):
            self._drop(next(iter(self._idle)))
        return count

    def _drop(self, block: int) -> None:
        del self._idle[block]
        self._clear(block)

    def _clear(self, block: int) -> None:
        """Forget what `block` holds and make it free."""
        digest = self._hash.pop(block, None)
        if digest is not None:
            self._holders[digest].remove(block)
            if not self._holders[digest]:
                del self._holders[digest]
        self._free.append(block)

    def check(self, held: Counter[int]) -> None:
        """Raise InvariantError unless the counts agree with each other and with `held`, references by block."""
        references = Counter({block: count for block, count in enumerate(self._references) if count})
        if references != held:
            raise InvariantError(
                f"blocks that are leaked or freed too soon: {sorted((references - held) + (held - references))}"
            )
        apart = sorted([*self._free, *self._idle, *held])
        if apart != list(range(self.total)):
            raise InvariantError(f"free, idle and used blocks do not make up the pool of {self.total}: {apart}")
        for block, digest in self._hash.items():
            if block not in self._holders[digest] or (block in self._idle and len(self._holders[digest]) > 1):
                raise InvariantError(f"block {block} is not found under its hash, or idle beside another of that hash")
        if sum(map(len, self._holders.values())) != len(self._hash) or not self._idle.keys() <= self._hash.keys():
            raise InvariantError("a hash leads to a block without one, or an idle block has none")
