"""One request of a client, read and checked: what is to be run, and how it is to be answered."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from runtime.api.limits import ApiLimits
from runtime.api.logprobs import TokenTexts
from runtime.api.prompts import Prompt, check_length, read_chat, read_prompts
from runtime.api.schema import Asked, ChatAsked, CompletionAsked
from runtime.api.shapes import ChatShape, CompletionShape, Shape
from runtime.sampling import Sampling
from runtime.service import Service

_COMPLETION_TOKENS = 16
"""OpenAI's default of max_tokens for completions."""


@dataclass(frozen=True, slots=True)
class Job:
    """What is to be run and how it is to be answered."""

    id: str
    asked: Asked
    prompts: tuple[Prompt, ...]
    samplings: tuple[Sampling, ...]
    """Of each prompt."""
    shape: Shape
    created: int = field(default_factory=lambda: int(time.time()))

    def choice(self, prompt: int, index: int) -> int:
        """Return the index of a prompt's answer among all choices."""
        return prompt * self.samplings[0].n + index

    @property
    def several(self) -> bool:
        """Return True for more than one prompt."""
        return len(self.prompts) > 1

    def head(self, model: str, kind: str) -> dict[str, Any]:
        """Return what each document of the answer begins with."""
        return {"id": self.id, "object": kind, "created": self.created, "model": model}


async def completion_job(service: Service, asked: CompletionAsked, limits: ApiLimits) -> Job:
    """Return the job of a completion. Raises ApiError and InputError."""
    asked.refuse_unsupported()
    max_tokens = _COMPLETION_TOKENS if asked.max_tokens is None else asked.max_tokens
    sampling = asked.sampling(max_tokens, asked.logprobs, limits)
    prompts = await read_prompts(service, asked.prompt, asked.add_special_tokens is not False, limits)
    for prompt in prompts:
        check_length(prompt, max_tokens, service.config, limits, "prompt")
    texts = TokenTexts(service.tokenizer)
    echoes = [_text(service, prompt) for prompt in prompts for _ in range(sampling.n)] if asked.echo else []
    shape = CompletionShape(texts, logprobs=asked.logprobs is not None, echoes=echoes)
    return Job(f"cmpl-{uuid.uuid4().hex}", asked, tuple(prompts), (sampling,) * len(prompts), shape)


def _text(service: Service, prompt: Prompt) -> str:
    if prompt.text is not None:
        return prompt.text
    return service.tokenizer.decode(prompt.ids, skip_special=False) if service.tokenizer else ""


async def chat_job(service: Service, asked: ChatAsked, limits: ApiLimits) -> Job:
    """Return the job of a chat. Raises ApiError and InputError."""
    asked.refuse_unsupported()
    variables = {
        **(asked.chat_template_kwargs or {}),
        "add_generation_prompt": asked.add_generation_prompt is not False,
    }
    prompt = await read_chat(service, asked.messages, variables, bool(asked.add_special_tokens))
    max_tokens = asked.max_tokens if asked.max_completion_tokens is None else asked.max_completion_tokens
    check_length(prompt, max_tokens, service.config, limits, "messages")
    if max_tokens is None:
        left = limits.context(service.config) - len(prompt.ids)
        max_tokens = min(left, limits.answer_tokens or left)
    wanted = bool(asked.logprobs)
    sampling = asked.sampling(max_tokens, (asked.top_logprobs or 0) if wanted else None, limits)
    shape = ChatShape(TokenTexts(service.tokenizer), logprobs=wanted)
    return Job(f"chatcmpl-{uuid.uuid4().hex}", asked, (prompt,), (sampling,), shape)
