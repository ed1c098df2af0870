"""A job is run: its requests go to the service, and their deltas come back whole or as a stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

from runtime.answer import Delta, whole
from runtime.api.counted import Counted
from runtime.api.job import Job
from runtime.api.json_response import event
from runtime.api.metrics import Metrics
from runtime.api.stations import times_json
from runtime.service import RejectedError, Service

DONE = b"data: [DONE]\n\n"


class Answering:
    """Runs jobs on a service."""

    def __init__(self, service: Service, metrics: Metrics):
        self._service, self._metrics = service, metrics

    async def answer(self, job: Job) -> dict[str, Any]:
        """Return the whole answer. Raises PlannerError; cancelled, it frees what the job holds."""
        told: dict[int, list[Delta]] = {}
        async with self._opened(job) as requests, aclosing(_merged(requests)) as deltas:
            async for prompt, delta in deltas:
                told.setdefault(job.choice(prompt, delta.index), []).append(delta)
        choices = [self._whole_choice(job, choice, told[choice]) for choice in sorted(told)]
        document = {**job.head(self._service.model, job.shape.whole), "choices": choices, "usage": _usage(requests)}
        return {**document, **_times(job, requests)}

    def _whole_choice(self, job: Job, choice: int, deltas: Sequence[Delta]) -> dict[str, Any]:
        answer = whole(deltas)
        ids = _ids(job, answer.token_ids)
        return {**job.shape.answer(choice, answer), **ids, **_prompt_ids(job, choice)}

    async def events(self, job: Job) -> AsyncGenerator[bytes, None]:
        """Yield the answer as server-sent events. Raises PlannerError; closed early, it frees what the job holds."""
        head, opened = job.head(self._service.model, job.shape.chunk), set[int]()
        async with self._opened(job) as requests, aclosing(_merged(requests)) as deltas:
            left = len(requests)
            async for prompt, delta in deltas:
                choice, left = job.choice(prompt, delta.index), left - delta.last
                if choice not in opened:
                    opened.add(choice)
                    if (opening := job.shape.opening(choice)) is not None:
                        piece = {**opening, **_prompt_ids(job, choice)}
                        yield event({**head, "choices": [piece], **_usage_so_far(job, requests)})
                piece = {**job.shape.piece(choice, delta), **_ids(job, delta.token_ids)}
                document = {**head, "choices": [piece], **_usage_so_far(job, requests)}
                if not left and not job.asked.usage_in_stream:
                    document |= _times(job, requests)
                yield event(document)
        if job.asked.usage_in_stream:
            yield event({**head, "choices": [], "usage": _usage(requests), **_times(job, requests)})
        yield DONE

    @asynccontextmanager
    async def _opened(self, job: Job) -> AsyncIterator[list[Counted]]:
        """Submit each prompt; whatever happens, none runs on afterwards."""
        requests: list[Counted] = []
        try:
            for place, (prompt, sampling) in enumerate(zip(job.prompts, job.samplings, strict=True)):
                request_id = f"{job.id}-{place}" if job.several else job.id
                stream = self._service.submit(prompt.ids, sampling, request_id)
                requests.append(Counted(stream, len(prompt.ids), sampling, self._metrics))
            yield requests
        except RejectedError:
            self._metrics.rejected("service")
            raise
        finally:
            await asyncio.gather(*(request.close() for request in requests))


async def _merged(requests: Sequence[Counted]) -> AsyncGenerator[tuple[int, Delta], None]:
    """Yield the deltas of all, each with the place of its prompt, as they come."""
    if len(requests) == 1:
        async for delta in requests[0]:
            yield 0, delta
        return
    come: asyncio.Queue[tuple[int, Delta] | BaseException] = asyncio.Queue(len(requests))
    tasks = [asyncio.create_task(_forward(place, request, come)) for place, request in enumerate(requests)]
    try:
        left = len(requests)
        while left:
            found = await come.get()
            if isinstance(found, BaseException):
                raise found
            left -= found[1].last
            yield found
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _forward(place: int, request: Counted, come: asyncio.Queue[tuple[int, Delta] | BaseException]) -> None:
    try:
        async for delta in request:
            await come.put((place, delta))
    except Exception as error:
        await come.put(error)  # raised where the deltas are read


def _usage(requests: Sequence[Counted]) -> dict[str, Any]:
    prompt = sum(request.prompt_tokens for request in requests)
    answer = sum(request.output_tokens for request in requests)
    cached = sum(request.stream.times.cached_tokens for request in requests)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": answer,
        "total_tokens": prompt + answer,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def _usage_so_far(job: Job, requests: Sequence[Counted]) -> dict[str, Any]:
    """Return what a chunk says of usage: with include_usage every chunk but the last says null."""
    if job.asked.usage_in_chunks:
        return {"usage": _usage(requests)}
    return {"usage": None} if job.asked.usage_in_stream else {}


def _times(job: Job, requests: Sequence[Counted]) -> dict[str, Any]:
    """Return when the request passed which station, where asked for; of several prompts a list."""
    if not job.asked.return_times:
        return {}
    found = [times_json(request.stream.times) for request in requests]
    return {"times": found if job.several else found[0]}


def _ids(job: Job, token_ids: Sequence[int]) -> dict[str, Any]:
    return {"token_ids": token_ids} if job.asked.return_token_ids else {}


def _prompt_ids(job: Job, choice: int) -> dict[str, Any]:
    if not job.asked.return_token_ids:
        return {}
    return {"prompt_token_ids": job.prompts[choice // job.samplings[0].n].ids}
