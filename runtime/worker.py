"""One rank at work: its part of the weights, its part of the KV blocks, and what a step does to them."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from runtime.attention.base import Setting, choose
from runtime.batch import Batch
from runtime.copies import Copy, Direction, batches
from runtime.memory import free_bytes, total_bytes, within_memory
from runtime.model_config import ModelConfig
from runtime.models.registry import build
from runtime.sampler import choose as choose_tokens
from runtime.settings import EngineSettings
from runtime.shard import Shard
from runtime.step import Step, StepOutput, prompt_step
from runtime.tensor_shapes import tensor_shapes
from runtime.transfer.base import Outlet, Source, open_outlet
from runtime.transfer.pull import Pulled, Puller
from runtime.weights import Weights


class Worker:
    """Runs steps. `run` takes token ids, or the hidden states of the stage before, as far as its own stage goes."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        shard: Shard,
        settings: EngineSettings,
        device: torch.device,
    ):
        self.config, self.shard, self.device = config, shard, device
        self.dtype: torch.dtype = getattr(torch, settings.dtype or config.dtype)
        self._settings = settings
        keys, queries = shard.kv_heads(config), shard.heads(config)
        self._kv_heads = keys.stop - keys.start
        self._keys = keys
        setting = Setting(
            device, self.dtype, queries.stop - queries.start, self._kv_heads, config.head_dim, settings.block_tokens
        )
        self._attention = choose(setting, settings.attention)
        what = f"the weights of {len(shard.layers)} layers in {str(self.dtype).removeprefix('torch.')}"
        way_out = "raise tp or pp to spread them over devices, or take a smaller dtype or model"
        with within_memory(device, what, self._weight_bytes(), way_out), torch.inference_mode():
            self._model = build(config, shard, weights, device)
        self.kv = self._blocks(0)
        self._host = self._blocks(0)
        self.outlet: Outlet | None = None

    def _weight_bytes(self) -> int:
        """Return roughly the bytes of this rank's weights: even shares of its layers' tensors, and of the tables."""
        config, share = self.config, len(self.shard.layers) / self.config.layers
        numbers = [(name, math.prod(shape)) for name, shape in tensor_shapes(config)]
        layers = sum(size for name, size in numbers if ".layers." in name)
        tables = sum(size for name, size in numbers if ".layers." not in name)
        held = layers * share + tables * (self.shard.first or self.shard.last)
        return int(held / self.shard.tp) * self.dtype.itemsize

    # ---- KV blocks

    @property
    def block_bytes(self) -> int:
        """Return the bytes of one KV block on this rank, all its layers."""
        numbers = len(self.shard.layers) * 2 * self._settings.block_tokens * self._kv_heads * self.config.head_dim
        return numbers * self.dtype.itemsize

    def fitting_blocks(self) -> int:
        """Return how many KV blocks fit into what is left of the memory that this rank may use."""
        if self.device.type == "cuda":
            self._warm_up()
            spared = (1 - self._settings.memory_fraction) * total_bytes(self.device)
            return max(0, int((free_bytes(self.device) - spared) // self.block_bytes))
        # ranks on CPUs share one memory, with the rest of the machine: half of what is free, by default
        share = free_bytes(self.device) * self._settings.memory_fraction / 2 / self._settings.ranks
        most = self._settings.max_batch * -(-self.config.max_positions // self._settings.block_tokens)
        return max(0, min(most, int(share // self.block_bytes)))

    def allocate(self, blocks: int, host_blocks: int) -> None:
        """Take memory for `blocks` KV blocks on the device and `host_blocks` to swap to."""
        lower = "lower kv_blocks, host_blocks or block_tokens, or raise tp or pp"
        self.close()
        with within_memory(self.device, f"{blocks} KV blocks", blocks * self.block_bytes, lower):
            if self._settings.transport and blocks:
                self.outlet = open_outlet(self._settings.transport, self._source(blocks), self.device)
            self.kv = self.outlet.kv if self.outlet else self._blocks(blocks)
        host = torch.device("cpu")
        with within_memory(host, f"{host_blocks} host blocks", host_blocks * self.block_bytes, lower):
            self._host = self._blocks(host_blocks, host)

    def _source(self, blocks: int) -> Source:
        shard, settings = self.shard, self._settings
        name, _, start = settings.name.partition("@")
        return Source(
            transport=settings.transport,
            address=settings.address.format(rank=shard.rank),
            layers=(shard.layers.start, shard.layers.stop),
            heads=(self._keys.start, self._keys.stop),
            blocks=blocks,
            block_tokens=settings.block_tokens,
            head_dim=self.config.head_dim,
            dtype=str(self.dtype).removeprefix("torch."),
            instance=name,
            rank=shard.rank,
            start=int(start or 0),
        )

    def puller(self, done: Callable[[Pulled], None]) -> Puller:
        """Return what pulls this rank's part of prompts out of prefill instances, into `kv`."""
        settings = self._settings
        return Puller(self.shard.layers, self._keys, done, settings.max_pulls, settings.transfer_checksums)

    def close(self) -> None:
        """Offer the KV blocks to no one any more, and free them."""
        if self.outlet is not None:
            self.outlet.close()
            self.outlet = None
        self.kv = self._blocks(0)

    def _blocks(self, blocks: int, device: torch.device | None = None) -> torch.Tensor:
        """Return [layers, 2, blocks, block_tokens, kv_heads, head_dim]: keys at 0, values at 1."""
        shape = (
            len(self.shard.layers),
            2,
            blocks,
            self._settings.block_tokens,
            self._kv_heads,
            self.config.head_dim,
        )
        pinned = device is not None and self.device.type == "cuda"
        return torch.zeros(shape, dtype=self.dtype, device=device or self.device, pin_memory=pinned)

    def _warm_up(self) -> None:
        """Run the largest step once: what it needs beside weights and KV cache must be taken before they are sized."""
        width = self.config.hidden_size
        tokens = min(self._settings.step_tokens or self.config.max_positions, self.config.max_positions)
        blocks = -(-tokens // self._settings.block_tokens)
        self.kv = self._blocks(blocks)
        hidden = None if self.shard.first else torch.zeros(tokens, width, dtype=self.dtype, device=self.device)
        self.run(prompt_step(tokens, self._settings.block_tokens), hidden)
        self.kv = self._blocks(0)

    def _copy(self, copies: tuple[Copy, ...]) -> None:
        for run in batches(copies):
            memories = {
                Direction.WITHIN: (self.kv, self.kv),
                Direction.OUT: (self.kv, self._host),
                Direction.IN: (self._host, self.kv),
            }
            source, target = memories[run[0].direction]
            moved = source[:, :, [copy.source for copy in run]]
            target[:, :, [copy.target for copy in run]] = moved.to(target.device)

    # ---- steps

    @torch.inference_mode()
    def run(self, step: Step, hidden: torch.Tensor | None = None) -> torch.Tensor | StepOutput:
        """Return the hidden states [T, width] for the next stage or, from the last stage, the chosen tokens.

        `hidden` is what the stage before has returned; None on the first stage.
        """
        result = self.forward(step, hidden)
        return choose_tokens(result, step.choices, step.number) if self.shard.last else result

    @torch.inference_mode()
    def forward(self, step: Step, hidden: torch.Tensor | None = None) -> torch.Tensor:
        """Return hidden states [T, width] for the next stage or, from the last stage, logits [L, vocabulary]."""
        self._copy(step.copies)
        batch = Batch.of(step, self.device)
        if hidden is None:
            hidden = self._model.embed(batch)
        hidden = self._model.run(hidden, self.kv, batch, self._attention, self._progress(step.tickets))
        return self._model.logits(hidden, batch.sampled) if self.shard.last else hidden

    def _progress(self, tickets: tuple[int, ...]) -> Callable[[int], None] | None:
        """Return what tells, layer by layer, how far the prompts are that are to be handed over; None without any."""
        if not tickets or self.outlet is None:
            return None
        outlet, device = self.outlet, self.device

        def ran(layers: int) -> None:
            if device.type == "cuda":  # kernels are only queued so far
                torch.cuda.current_stream(device).synchronize()
            for ticket in tickets:
                outlet.ran(ticket, layers)

        return ran
