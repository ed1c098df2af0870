"""Print what handing KV over takes on this machine: each transport beside shared memory.

    make bench-transfer

SmolLM2-135M in fp32 (30 layers, 3 KV heads of 64), blocks of 16 tokens. Another process holds the KV; this one pulls
all layers of a prompt that has run, with the code that serves. Transports take turns within a round, and each number is
the least of the rounds, so that other load on the machine does most harm to none. "There" is the CPU time that the
process spends that holds the KV: in a prefill instance it is taken from the prefills.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch

from runtime.transfer.base import TRANSPORTS, Source, open_reader, reason_against
from runtime.transfer.pull import Pull, Pulled, Puller
from tests.kv_peer import CPU, Model, Peer, peer

PROMPTS = (128, 512, 2000)
SMOLLM2 = Model(layers=30, heads=3, head_dim=64, blocks=256, block_tokens=16, dtype="float32", seed=0)
TICKET = 1


@dataclass(slots=True)
class Side:
    """A transport under test: who holds the KV, and who pulls it."""

    transport: str
    peer: Peer
    source: Source
    pullers: dict[bool, Puller]
    """Without checksums, and with them."""
    told: list[Pulled] = field(default_factory=list)
    bell: threading.Event = field(default_factory=threading.Event)

    def ring(self, pulled: Pulled) -> None:
        self.told.append(pulled)
        self.bell.set()

    def pull_s(self, blocks: np.ndarray, kv: torch.Tensor, checksums: bool) -> tuple[float, float]:
        """Return the seconds of a pull, and the CPU seconds that it has cost the other process."""
        self.bell.clear()
        spent_s = self.peer.cpu_s()
        pull = Pull("a", TICKET, (self.source,), blocks, np.arange(len(blocks)))
        begun = time.perf_counter()
        self.pullers[checksums].start(pull, kv)
        self.bell.wait()
        took_s = time.perf_counter() - begun
        if self.told[-1].error:
            raise SystemExit(self.told[-1].error)
        return took_s, self.peer.cpu_s() - spent_s


@contextmanager
def side(transport: str, folder: str) -> Iterator[Side]:
    """Give a transport, ready to be pulled from."""
    with peer() as made:
        (source,) = made.open(SMOLLM2, transport, folder)
        made.ran(TICKET, SMOLLM2.layers)
        found = Side(transport, made, source, {})
        for checksums in (False, True):
            heads = slice(0, SMOLLM2.heads)
            found.pullers[checksums] = Puller(range(SMOLLM2.layers), heads, found.ring, 1, checksums)
        try:
            yield found
        finally:
            for puller in found.pullers.values():
                puller.close()


def main() -> None:
    """Print a table of transports and prompts, and one of the question how far a prompt is."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, ExitStack() as stack:
        sides = []
        for transport in TRANSPORTS:
            against = reason_against(transport, CPU)
            if against:
                print(f"{transport}: {against}")
            else:
                sides.append(stack.enter_context(side(transport, folder)))
        print("| tokens | transport | ms a layer | GB/s | x shm | scattered | checksums | there, ms a layer |")
        print("|---|---|---|---|---|---|---|---|")
        for tokens in PROMPTS:
            _print_rows(tokens, sides, rounds)
        print("\n| transport | asking how far a prompt is, us |\n|---|---|")
        for each in sides:
            print(f"| {each.transport} | {_ask_us(each):.0f} |", flush=True)


def _print_rows(tokens: int, sides: list[Side], rounds: int) -> None:
    count = -(-tokens // SMOLLM2.block_tokens)
    kv = torch.zeros((SMOLLM2.layers, 2, count, SMOLLM2.block_tokens, SMOLLM2.heads, SMOLLM2.head_dim))
    row = np.arange(count) + 3
    scattered = np.random.default_rng(0).permutation(SMOLLM2.blocks)[:count]
    best: dict[tuple[str, str], tuple[float, float]] = {}
    for _ in range(rounds):
        for each in sides:
            for name, blocks, checksums in (
                ("row", row, False),
                ("scattered", scattered, False),
                ("sums", row, True),
            ):
                found = each.pull_s(blocks, kv, checksums)
                key = (each.transport, name)
                best[key] = tuple(map(min, best.get(key, found), found))  # type: ignore[assignment]
    layer_bytes = kv[0].nbytes
    for each in sides:
        took_s, there_s = best[each.transport, "row"]
        layer_ms = {name: best[each.transport, name][0] / SMOLLM2.layers * 1e3 for name in ("row", "scattered", "sums")}
        ratio = took_s / best[sides[0].transport, "row"][0]
        print(
            f"| {tokens} | {each.transport} | {layer_ms['row']:.3f} | {layer_bytes / layer_ms['row'] / 1e6:.2f} | "
            f"{ratio:.1f} | {layer_ms['scattered']:.3f} | {layer_ms['sums']:.3f} | "
            f"{there_s / SMOLLM2.layers * 1e3:.3f} |",
            flush=True,
        )


def _ask_us(side: Side) -> float:
    reader = open_reader(side.source)
    took = []
    for _ in range(200):
        begun = time.perf_counter()
        reader.ran(TICKET)
        took.append(time.perf_counter() - begun)
    reader.close()
    return min(took) * 1e6


if __name__ == "__main__":
    main()
