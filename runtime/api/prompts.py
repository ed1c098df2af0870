"""What a client sends as a prompt -> token ids."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from runtime.api.errors import bad_request
from runtime.api.limits import ApiLimits
from runtime.api.schema import Message
from runtime.model_config import ModelConfig
from runtime.service import Service
from runtime.tokenizer import Tokenizer

T = TypeVar("T")
_LONG_CHARS = 4096
"""From here on a text is encoded in a thread of its own; one of 4,096 takes about a millisecond."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt as it goes to the model."""

    ids: tuple[int, ...]
    text: str | None
    """None for one that came as ids."""


def tokenizer_of(service: Service, param: str) -> Tokenizer:
    """Return the model's tokenizer. Raises ApiError when it has none."""
    if service.tokenizer is None:
        raise bad_request(f"{param}: this model has no tokenizer; send a prompt of token ids", param)
    return service.tokenizer


async def read_prompts(service: Service, prompt: Any, add_special: bool, limits: ApiLimits) -> list[Prompt]:
    """Return the prompts of a completion: a text, a list of texts, token ids, or a list of those. Raises ApiError."""
    several = _several(prompt)
    if len(several) > limits.prompts:
        raise bad_request(f"prompt: expected up to {limits.prompts} prompts, got {len(several)}", "prompt")
    return [await _read_prompt(service, each, add_special) for each in several]


def _several(prompt: Any) -> Sequence[Any]:
    if isinstance(prompt, str) or _is_ids(prompt):
        return (prompt,)
    if isinstance(prompt, list) and prompt and all(isinstance(each, str) or _is_ids(each) for each in prompt):
        return prompt
    raise bad_request("prompt: expected a text, token ids, or a list of one of them, not empty", "prompt")


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)


async def _read_prompt(service: Service, prompt: str | list[int], add_special: bool) -> Prompt:
    if not isinstance(prompt, str):
        return Prompt(tuple(prompt), None)
    tokenizer = tokenizer_of(service, "prompt")
    return Prompt(tuple(await encode(tokenizer, prompt, add_special)), prompt)


async def encode(tokenizer: Tokenizer, text: str, add_special: bool) -> list[int]:
    """Return the ids of `text`, other requests going on meanwhile. Raises InputError."""
    return await unless_short(len(text), lambda: tokenizer.encode(text, add_special=add_special))


async def unless_short(chars: int, work: Callable[[], T]) -> T:
    """Return what `work` returns, done in a thread when `chars` are many."""
    return await asyncio.to_thread(work) if chars > _LONG_CHARS else work()


async def read_chat(
    service: Service,
    messages: Sequence[Message],
    variables: dict[str, Any],
    add_special: bool = False,
) -> Prompt:
    """Return the prompt of a chat by the model's template. Raises ApiError; InputError when the template refuses."""
    tokenizer = tokenizer_of(service, "messages")
    plain = [_plain(index, message) for index, message in enumerate(messages)]
    chars = sum(len(message["content"] or "") for message in plain)

    def render() -> Prompt:
        text = tokenizer.chat(plain, **variables)
        return Prompt(tuple(tokenizer.encode(text, add_special=add_special)), text)

    return await unless_short(chars, render)


def _plain(index: int, message: Message) -> dict[str, Any]:
    """Return a message with its content as one text, which is what templates of text models expect."""
    content = message.content
    if isinstance(content, list):
        content = "\n".join(_text(f"messages.{index}.content.{place}", part) for place, part in enumerate(content))
    return {**(message.model_extra or {}), "role": message.role, "content": content}


def _text(where: str, part: dict[str, Any]) -> str:
    text = part.get("text")
    if part.get("type") != "text" or not isinstance(text, str):
        raise bad_request(f"{where}: expected a part of type 'text' with a text; this model reads nothing else", where)
    return text


def check_length(prompt: Prompt, max_tokens: int | None, config: ModelConfig, limits: ApiLimits, param: str) -> None:
    """Raise ApiError for a prompt that is too long, on its own or with `max_tokens` of answer."""
    tokens = len(prompt.ids)
    if limits.prompt_tokens and tokens > limits.prompt_tokens:
        message = f"{param}: the prompt has {tokens} tokens; this server takes up to {limits.prompt_tokens}"
        raise bad_request(message, param, "context_length_exceeded")
    asked = 1 if max_tokens is None else max_tokens
    context = limits.context(config)
    if tokens + asked > context:
        message = (
            f"{param}: the prompt has {tokens} tokens and {asked} are to follow, which is more than the context "
            f"of {context}; shorten the prompt or lower max_tokens"
        )
        raise bad_request(message, param, "context_length_exceeded")
