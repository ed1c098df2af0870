"""One instance of the runtime: requests in, tokens out. `step` is the whole of it: schedule, run, settle."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Several
from itertools import count
from typing import TYPE_CHECKING, Literal, NamedTuple

from planner.errors import InputError
from runtime.admissible import Room, check_request, no_room_for
from runtime.answer import Answer, Begun, Delta, whole
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


class Reserved(NamedTuple):
    """Blocks of a request whose KV is on its way; the first `known_tokens` tokens of them are there already."""

    known_tokens: int
    blocks: tuple[int, ...]


class HandOver(NamedTuple):
    """A prompt that has run, and its answers so far, which a decode instance is to go on with."""

    request_id: str
    answers: tuple[Begun, ...]


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
            role=settings.role,
        )
        self.on_submit: Callable[[Plan], None] = lambda plan: None
        """Told of each step before it runs."""
        self._handed_over: list[HandOver] = []
        self.idle = True
        """True when the last call of `step` found nothing to run: no more will come of it before something changes."""
        self.counters = self.scheduler.counters
        self._requests: dict[str, Request] = {}
        self._under_way: deque[Plan] = deque()
        self._ids, self._tickets = count(), count(1)

    def _preemption(self) -> SwapCost | Literal["swap", "recompute"]:
        settings = self.settings
        if settings.preemption != "auto":
            return settings.preemption
        if not settings.host_blocks:
            return "recompute"
        return measure_swap_cost(self._executor, settings.block_tokens, settings.host_blocks)

    # ---- requests

    def add(
        self,
        prompt: Several[int],
        sampling: Sampling = GREEDY,
        request_id: str = "",
        answers: Several[Begun] = (),
        prompt_only: bool = False,
    ) -> str:
        """Queue a prompt of token ids; return the request's id. Raises InputError for one that can never be served.

        `answers`: those that go on where another instance has left them; the others have ended. With `prompt_only` a
        prefill instance hands the KV over and chooses no token.
        """
        request = self._request(prompt, sampling, request_id)
        request.prompt_only = prompt_only
        self.scheduler.add(request, answers)
        self._requests[request.id] = request
        return request.id

    def _request(self, prompt: Several[int], sampling: Sampling, request_id: str = "") -> Request:
        """Return a request that nobody has queued yet. Raises InputError."""
        self._check(prompt, sampling)
        request_id = request_id or f"request-{next(self._ids)}"
        if request_id in self._requests:
            raise InputError(f"request id: {request_id!r} is taken")
        seed = secrets.randbits(62) if sampling.seed is None else sampling.seed
        request = Request(request_id, tuple(prompt), sampling, seed)
        if sampling.beam_width:
            request.beams = Beams(sampling, sorted(sampling.ends(self.config.eos_ids)))
        return request

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

    def reserve(self, prompt: Several[int], cached_tokens: int, sampling: Sampling, request_id: str) -> Reserved | None:
        """Take blocks for the first tokens of a request, whose KV is to be pulled; None: there is no room now.

        It runs once it is joined. Until then nobody but whoever pulls may touch its blocks: abort it only when the pull
        has ended. Raises InputError as `add` does.
        """
        request = self._request(prompt, sampling, request_id)
        known = self.scheduler.reserve(request, cached_tokens)
        if known is None:
            return None
        self._requests[request.id] = request
        return Reserved(known, self.cache.blocks(request.leader.id))

    def join(self, request_id: str, answers: Several[Begun]) -> None:
        """Let a request run whose blocks were reserved, and are filled; its answers go on where they stand."""
        self.scheduler.join(self._requests[request_id], answers)

    def take_handed_over(self) -> list[HandOver]:
        """Return the prompts that have run since the last call; each is held until it is aborted."""
        found, self._handed_over = self._handed_over, []
        return found

    def abort(self, request_id: str) -> None:
        """Drop a request and free what it holds. An id that is unknown, or done, is no error: ends cross on the way."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            self.scheduler.abort(request)

    def _check(self, prompt: Several[int], sampling: Sampling) -> None:
        check_request(prompt, sampling, self.config, self.tokenizer is not None)
        settings = self.settings
        room = Room(
            self.cache.device.total, settings.block_tokens, settings.max_batch, prompts_only=settings.role == "prefill"
        )
        if why := no_room_for(len(prompt), sampling, room):
            raise InputError(why)

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
        self.idle = not self._under_way
        if self.idle:
            return []
        changed = self.scheduler.settle(self._under_way.popleft(), self._executor.collect())
        deltas = [delta for request in changed for delta in self._deltas(request)]
        if self.settings.role == "prefill":
            self._hand_over(changed)
        for delta in deltas:
            if delta.last:
                del self._requests[delta.request_id]
        return deltas

    def _hand_over(self, requests: Several[Request]) -> None:
        """Hold the prompts that have run, for decode instances; those that are done with their first token are gone."""
        for request in requests:
            if request.live:
                begun = () if request.prompt_only else tuple(self._begun(sequence) for sequence in request.live)
                self.scheduler.hold(request)
                self._handed_over.append(HandOver(request.id, begun))

    def _begun(self, sequence: Sequence) -> Begun:
        return Begun(sequence.index, tuple(sequence.tokens[len(sequence.request.prompt) :]))

    def _submit(self, plan: Plan) -> None:
        if self.settings.role == "prefill":
            for entry in plan.entries:
                entry.sequence.request.ticket = next(self._tickets)
        self.on_submit(plan)
        wanted = max(entry.sequence.request.logprobs_wanted for entry in plan.entries)
        self._executor.submit(build_step(plan, self.cache, self.counters.steps, self.config.eos_ids, wanted))
        self.counters.steps += 1
        self._under_way.append(plan)

    def _deltas(self, request: Request) -> Iterator[Delta]:
        """Yield what is new about each answer; those that are complete end here."""
        if request.prompt_only:
            return
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
            sequence.text = self._new_text(sequence)
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

    def _new_text(self, sequence: Sequence) -> OutputText:
        """Return the text of an answer, up to where another instance has told it."""
        request = sequence.request
        decoder = self.tokenizer.stream(request.prompt) if self.tokenizer else NoText()
        text = OutputText(request.sampling, self.config.eos_ids, decoder)
        for token in sequence.tokens[len(request.prompt) : len(request.prompt) + sequence.told]:
            text.add(token)
        return text

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
