"""One instance of the runtime: requests in, tokens out. `step` is the whole of it: schedule, run, settle."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Several
from itertools import count
from typing import TYPE_CHECKING, Literal

from planner.errors import InputError
from planner.policies.decode import blocks_for
from runtime.answer import Answer, Delta, whole
from runtime.beam import Beams
from runtime.build_step import build_step
from runtime.executor import Executor
from runtime.kv_cache import KVCache
from runtime.model_config import ModelConfig
from runtime.out_of_blocks import OutOfBlocksError
from runtime.output_text import NoText, OutputText
from runtime.request import Request, Sequence
from runtime.sampling import Sampling
from runtime.scheduler import Plan, Scheduler
from runtime.settings import EngineSettings
from runtime.swap_cost import SwapCost, measure_swap_cost

if TYPE_CHECKING:
    from runtime.tokenizer import Tokenizer

GREEDY = Sampling()


class Engine:
    """Serves one model with one executor. Not thread-safe: one thread adds, aborts and steps."""

    def __init__(
        self, config: ModelConfig, executor: Executor, settings: EngineSettings, tokenizer: Tokenizer | None = None
    ):
        self.config, self.settings, self._executor, self.tokenizer = config, settings, executor, tokenizer
        self.cache = KVCache(
            executor.kv_blocks, settings.host_blocks, settings.block_tokens, prefix_caching=settings.prefix_caching
        )
        self.scheduler = Scheduler(
            self.cache,
            max_batch=settings.max_batch,
            step_tokens=settings.step_tokens,
            depth=executor.depth,
            preemption=self._preemption(),
        )
        self.counters = self.scheduler.counters
        self._requests: dict[str, Request] = {}
        self._under_way: deque[Plan] = deque()
        self._ids = count()

    def _preemption(self) -> SwapCost | Literal["swap", "recompute"]:
        settings = self.settings
        if settings.preemption != "auto":
            return settings.preemption
        if not settings.host_blocks:
            return "recompute"
        return measure_swap_cost(self._executor, settings.block_tokens, settings.host_blocks)

    # ---- requests

    def add(self, prompt: Several[int], sampling: Sampling = GREEDY, request_id: str = "") -> str:
        """Queue a prompt of token ids; return the request's id. Raises InputError for one that can never be served."""
        self._check(prompt, sampling)
        request_id = request_id or f"request-{next(self._ids)}"
        if request_id in self._requests:
            raise InputError(f"request id: {request_id!r} is taken")
        seed = secrets.randbits(62) if sampling.seed is None else sampling.seed
        request = Request(request_id, tuple(prompt), sampling, seed)
        if sampling.beam_width:
            request.beams = Beams(sampling, sorted(sampling.ends(self.config.eos_ids)))
        self._requests[request_id] = request
        self.scheduler.add(request)
        return request_id

    def adopt(self, prompt: Several[int], cached_tokens: int, sampling: Sampling = GREEDY) -> str:
        """Take in a request the KV of whose first tokens lies in the cache, or is said to; return its id.

        So arrives what a prefill instance has prepared, and what the profiler measures. Raises InputError as `add`
        does, and OutOfBlocksError.
        """
        if not 0 <= cached_tokens < len(prompt):
            raise InputError(f"expected cached_tokens from 0 to below the prompt's {len(prompt)}, got {cached_tokens}")
        request_id = self.add(prompt, sampling)
        try:
            self.scheduler.adopt(self._requests[request_id], cached_tokens)
        except OutOfBlocksError:
            self.abort(request_id)
            raise
        return request_id

    def abort(self, request_id: str) -> None:
        """Drop a request and free what it holds. An id that is unknown, or done, is no error: ends cross on the way."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            self.scheduler.abort(request)

    def _check(self, prompt: Several[int], sampling: Sampling) -> None:
        if not prompt:
            raise InputError("prompt: expected at least one token")
        if not all(0 <= token < self.config.vocab_size for token in prompt):
            raise InputError(f"prompt: expected token ids from 0 to {self.config.vocab_size - 1}")
        longest = len(prompt) + sampling.max_tokens
        if longest > self.config.max_positions:
            raise InputError(
                f"prompt of {len(prompt)} tokens and max_tokens {sampling.max_tokens} are more than the "
                f"{self.config.max_positions} positions of the model; shorten the prompt or lower max_tokens"
            )
        if sampling.stop and self.tokenizer is None:
            raise InputError("stop: this model has no tokenizer, so no text to stop at; use stop_token_ids")
        if sampling.width > self.settings.max_batch:
            raise InputError(f"n or beam_width: expected up to max_batch {self.settings.max_batch}")
        shared = len(prompt) // self.settings.block_tokens
        blocks = shared + sampling.width * (blocks_for(longest, self.settings.block_tokens) - shared)
        if blocks > self.cache.device.total:
            raise InputError(
                f"prompt of {len(prompt)} tokens, max_tokens {sampling.max_tokens} and {sampling.width} answers can "
                f"take {blocks} KV blocks, the instance has {self.cache.device.total}; lower one of them, or raise "
                "kv_blocks or memory_fraction"
            )

    @property
    def unfinished(self) -> int:
        """Return the requests that are not done."""
        return self.scheduler.unfinished

    # ---- the step

    def step(self) -> list[Delta]:
        """Run until one step has ended; return what it has brought, nothing when there is nothing to do."""
        while len(self._under_way) < self._executor.depth:
            plan = self.scheduler.schedule()
            if plan is None:
                break
            self._submit(plan)
        if not self._under_way:
            return []
        changed = self.scheduler.settle(self._under_way.popleft(), self._executor.collect())
        deltas = [delta for request in changed for delta in self._deltas(request)]
        for delta in deltas:
            if delta.last:
                del self._requests[delta.request_id]
        return deltas

    def _submit(self, plan: Plan) -> None:
        wanted = max(entry.sequence.request.logprobs_wanted for entry in plan.entries)
        self._executor.submit(build_step(plan, self.cache, self.counters.steps, self.config.eos_ids, wanted))
        self.counters.steps += 1
        self._under_way.append(plan)

    def _deltas(self, request: Request) -> Iterator[Delta]:
        """Yield what is new about each answer; those that are complete end here."""
        if request.beams is not None:
            if request.beams.done:
                yield from self._best_beams(request, request.beams)
            return
        for sequence in tuple(request.live):
            if sequence.chosen > sequence.told:
                yield self._news(sequence)

    def _news(self, sequence: Sequence) -> Delta:
        request, first = sequence.request, sequence.told
        if sequence.text is None:
            sequence.text = self._new_text(request)
        sequence.told = sequence.chosen
        tokens = tuple(sequence.tokens[len(request.prompt) + first :])
        text = "".join([sequence.text.add(token) for token in tokens])
        if sequence.text.finish_reason:
            self.scheduler.finish(sequence)
        return Delta(
            request.id,
            sequence.index,
            tokens,
            text,
            tuple(sequence.logprobs[first:]),
            tuple(sequence.top[first:]),
            sequence.text.finish_reason,
            not request.live,
        )

    def _best_beams(self, request: Request, beams: Beams) -> Iterator[Delta]:
        best = beams.best(request.sampling.n)
        for index, beam in enumerate(best):
            ended = beam.token_ids[-1] in request.sampling.ends(self.config.eos_ids)
            text = self.tokenizer.decode(beam.token_ids[: -ended or None]) if self.tokenizer else ""
            last = index == len(best) - 1
            yield Delta(request.id, index, beam.token_ids, text, beam.logprobs, (), beam.finish_reason, last)

    def _new_text(self, request: Request) -> OutputText:
        decoder = self.tokenizer.stream(request.prompt) if self.tokenizer else NoText()
        return OutputText(request.sampling, self.config.eos_ids, decoder)

    # ---- offline

    def generate(
        self,
        prompts: Several[Several[int]],
        sampling: Sampling | Several[Sampling],
        progress: Callable[[int], None] = lambda done: None,
    ) -> list[tuple[Answer, ...]]:
        """Return the answers to each prompt, in order; `progress` is told how many prompts are done."""
        each = [sampling] * len(prompts) if isinstance(sampling, Sampling) else sampling
        ids = [self.add(prompt, asked) for prompt, asked in zip(prompts, each, strict=True)]
        told: dict[str, dict[int, list[Delta]]] = {request_id: {} for request_id in ids}
        left = len(ids)
        while left:
            for delta in self.step():
                told[delta.request_id].setdefault(delta.index, []).append(delta)
                left -= delta.last
            progress(len(ids) - left)
        return [tuple(whole(answer) for _, answer in sorted(told[request_id].items())) for request_id in ids]

    def close(self) -> None:
        """End the executor."""
        self._executor.close()
