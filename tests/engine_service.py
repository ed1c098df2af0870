"""A Service for tests: one real engine that steps in a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from planner.errors import InputError
from runtime.answer import Delta
from runtime.api.limits import ApiLimits
from runtime.api.server import ApiServer
from runtime.engine import Engine
from runtime.load import load_engine
from runtime.sampling import Sampling
from runtime.service import InstanceState, RejectedError, Snapshot, Times, UnavailableError
from runtime.settings import EngineSettings
from tests.model_folders import TINY, random_tensors, write_gguf

NAME = "engine-0"
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|turn|>' + m['role'] + ':' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant:{% endif %}"
)
TALKATIVE = replace(TINY, max_positions=2048)
"""Tokens are bytes, nearly; none but <|turn|> ends an answer."""


def tiny_engine(folder: Path, **settings) -> Engine:
    """Return an engine with a random model, a byte-level tokenizer and a chat template."""
    path = folder / "tiny.gguf"
    if not path.exists():
        write_gguf(path, TALKATIVE, random_tensors(TALKATIVE), metadata={"tokenizer.chat_template": CHAT_TEMPLATE})
    return load_engine(str(path), EngineSettings(**{"kv_blocks": 512, "threads": 1, "dtype": "float32", **settings}))


class EngineService:
    """Serves requests with one engine. `pause_s` is waited after each step, so that a test can act in between."""

    def __init__(self, engine: Engine, model: str = "tiny", most_requests: int = 1000, pause_s: float = 0.0):
        self.model, self.config, self.tokenizer = model, engine.config, engine.tokenizer
        self.most_requests, self.pause_s = most_requests, pause_s
        self._engine = engine
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._streams: dict[str, EngineStream] = {}
        self._ids = itertools.count()
        self._counts = dict.fromkeys(("accepted", "finished", "cancelled", "rejected", "lost"), 0)
        self._down = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def ready(self) -> bool:
        return not self._down

    def submit(self, prompt: Sequence[int], sampling: Sampling, request_id: str = "") -> EngineStream:
        if self._down:
            raise UnavailableError("the engine has stopped")
        self._engine._check(prompt, sampling)  # reads only what never changes
        if len(self._streams) >= self.most_requests:
            self._counts["rejected"] += 1
            raise RejectedError(f"{self.most_requests} requests are enough", 2.5)
        request_id = request_id or f"request-{next(self._ids)}"
        if request_id in self._streams:
            raise InputError(f"request id: {request_id!r} is taken")
        stream = self._streams[request_id] = EngineStream(self, request_id)
        self._counts["accepted"] += 1
        self._inbox.put(lambda: self._add(stream, prompt, sampling))
        return stream

    def snapshot(self) -> Snapshot:
        engine = self._engine
        counts, counters = engine.cache.counts(), engine.counters
        state = InstanceState(
            NAME,
            "aggregated",
            "gone" if self._down else "ready",
            running=len(engine.scheduler.running),
            waiting=engine.unfinished - len(engine.scheduler.running),
            kv_blocks=engine.cache.device.total,
            used_blocks=counts.used,
            steps=counters.steps,
            run_tokens=counters.run_tokens,
            output_tokens=counters.output_tokens,
            cached_tokens=counters.cached_tokens,
            preemptions=counters.preemptions,
            starts=1,
        )
        return Snapshot((state,), requests=len(self._streams), **self._counts)

    def check(self) -> None:
        """Hold the engine's books to their laws; for a service that has come to rest."""
        self._engine.cache.check()

    def break_down(self) -> None:
        """End the engine's thread as a crash does: whoever waits is told so, nobody is served again."""
        self._down = True
        self._inbox.put(None)
        self._thread.join()

    # ---- in the engine's thread

    def _run(self) -> None:
        while self._take_in(wait=not self._engine.unfinished):
            start_s = time.monotonic()
            deltas = self._engine.step()
            end_s = time.monotonic()
            for delta in deltas:
                stream = self._streams.get(delta.request_id)
                if stream is not None:
                    stream.mark(start_s, end_s, self._engine.counters.cached_tokens)
                    stream.tell(delta)
            time.sleep(self.pause_s)
        for stream in tuple(self._streams.values()):
            stream.tell(UnavailableError("the engine has stopped"))
        self._engine.close()

    def _take_in(self, wait: bool) -> bool:
        """Do what has been asked for; return False when that is to end."""
        with contextlib.suppress(queue.Empty):
            while True:
                asked = self._inbox.get(block=wait)
                if asked is None:
                    return False
                asked()
                wait = False
        return True

    def _add(self, stream: EngineStream, prompt: Sequence[int], sampling: Sampling) -> None:
        self._engine.add(prompt, sampling, stream.request_id)
        stream.added_s, stream.cached_before = time.monotonic(), self._engine.counters.cached_tokens

    # ---- in the event loop

    def ended(self, stream: EngineStream, how: str) -> None:
        if self._streams.pop(stream.request_id, None) is not None:
            self._counts[how] += 1
            if how == "cancelled":
                self._inbox.put(lambda: self._engine.abort(stream.request_id))


class EngineStream:
    """One request of an EngineService."""

    def __init__(self, service: EngineService, request_id: str):
        self.request_id = request_id
        self.times = Times(arrival_s=time.monotonic(), prefill_at=NAME, decode_at=NAME)
        self.added_s, self.cached_before = float("nan"), 0
        self._service, self._loop = service, asyncio.get_running_loop()
        self._told: asyncio.Queue[Delta | Exception] = asyncio.Queue()

    def mark(self, start_s: float, end_s: float, cached_tokens: int) -> None:
        """Note the step that brought the request's first token as its prefill, and what the cache gave meanwhile: its
        own where no other request came at the same time.
        """
        if self.times.prefill_end_s != self.times.prefill_end_s:
            self.times.cached_tokens = cached_tokens - self.cached_before
            self.times.prefill_start_s = max(start_s, self.added_s)
            self.times.prefill_end_s = self.times.first_step_s = self.times.first_token_s = end_s
        self.times.finish_s = end_s

    def tell(self, news: Delta | Exception) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended, and with it whoever asked
            self._loop.call_soon_threadsafe(self._told.put_nowait, news)

    async def __aiter__(self) -> AsyncIterator[Delta]:
        while True:
            news = await self._told.get()
            if isinstance(news, Exception):
                self._service.ended(self, "lost")
                raise news
            if news.last:
                self._service.ended(self, "finished")
            yield news
            if news.last:
                return

    async def aclose(self) -> None:
        self._service.ended(self, "cancelled")


class Served:
    """A server in a thread, and the service behind it."""

    def __init__(self, service: EngineService, limits: ApiLimits):
        self.service = service
        self.server: ApiServer
        self.loop: asyncio.AbstractEventLoop
        self.drained: bool | None = None
        self._limits, self._up = limits, threading.Event()
        self._thread = threading.Thread(target=asyncio.run, args=(self._serve(),), name="api")

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.server = ApiServer(self.service, limits=self._limits)
        serving = asyncio.create_task(self.server.run())
        self._up.set()
        await serving

    def start(self) -> Served:
        self._thread.start()
        self._up.wait()
        return self

    def stop(self) -> None:
        with contextlib.suppress(RuntimeError):  # stopped already
            self.loop.call_soon_threadsafe(self.server.stop)
        self._thread.join()

    @property
    def url(self) -> str:
        return self.server.url

    def at_rest(self, timeout_s: float = 10.0) -> bool:
        """Wait until nothing runs, waits or holds a block; return False when that does not happen."""
        end_s = time.monotonic() + timeout_s
        while time.monotonic() < end_s:
            snapshot = self.service.snapshot()
            (instance,) = snapshot.instances
            left = snapshot.requests, instance.running, instance.waiting, instance.used_blocks, self.server.gate.inside
            if not any(left):
                return True
            time.sleep(0.005)
        return False


@contextlib.contextmanager
def served(engine: Engine, limits: ApiLimits = ApiLimits(), **settings) -> Iterator[Served]:  # noqa: B008 (frozen)
    """Serve `engine` on a free port of this host."""
    found = Served(EngineService(engine, **settings), limits).start()
    try:
        yield found
    finally:
        found.stop()
        if found.service.ready:
            found.service.break_down()
