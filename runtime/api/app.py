"""The routes of the API."""

from __future__ import annotations

import time
from importlib.metadata import version
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from msgspec import to_builtins
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel

from runtime.api.answering import Answering
from runtime.api.entrance import Entrance
from runtime.api.errors import ApiError, add_handlers
from runtime.api.gate import Gate
from runtime.api.job import Job, chat_job, completion_job
from runtime.api.json_response import JsonResponse
from runtime.api.limits import ApiLimits
from runtime.api.metrics import Metrics
from runtime.api.prompts import encode, read_chat, tokenizer_of
from runtime.api.schema import ChatAsked, CompletionAsked, DetokenizeAsked, TokenizeAsked
from runtime.api.stream import EventStream, while_connected
from runtime.service import Service

OWNER = "goodput-planner"
DEFAULTS = ApiLimits()
AnyAsked = TypeVar("AnyAsked", bound=BaseModel)


def create_app(service: Service, limits: ApiLimits = DEFAULTS, gate: Gate | None = None) -> FastAPI:
    """Return the ASGI application over `service`. Close `gate` to drain it: see `runtime.api.server`."""
    gate = gate or Gate(limits.concurrent_requests, limits.retry_after_s)
    app = FastAPI(title=OWNER, version=version(OWNER), description=f"Serves {service.model}.")
    metrics = Metrics(service)
    app.add_middleware(Entrance, limits=limits, gate=gate, rejected=metrics.rejected)
    add_handlers(app, limits.retry_after_s)
    _add_answers(app, _Answers(service, limits, metrics))
    _add_text(app, _Text(service, limits))
    _add_state(app, _State(service, limits, gate, metrics))
    return app


def _add_answers(app: FastAPI, answers: _Answers) -> None:
    app.post("/v1/completions", **_takes(CompletionAsked))(answers.completions)
    app.post("/v1/chat/completions", **_takes(ChatAsked))(answers.chat)


def _add_text(app: FastAPI, text: _Text) -> None:
    app.post("/tokenize", **_takes(TokenizeAsked))(text.tokenize)
    app.post("/detokenize", **_takes(DetokenizeAsked))(text.detokenize)


def _add_state(app: FastAPI, state: _State) -> None:
    for path, answer in (
        ("/v1/models", state.models),
        ("/v1/models/{name:path}", state.model),
        ("/health", state.health),
        ("/status", state.status),
        ("/version", state.version),
        ("/metrics", state.metrics),
    ):
        app.get(path, response_model=None)(answer)


def _takes(kind: type[BaseModel]) -> dict[str, Any]:
    """Return what makes FastAPI describe a body that we read ourselves, with or without a content type."""
    schema = kind.model_json_schema()
    schema = _inlined(schema, schema.pop("$defs", {}))
    body = {"required": True, "content": {"application/json": {"schema": schema}}}
    return {"response_model": None, "openapi_extra": {"requestBody": body}}


def _inlined(schema: Any, parts: dict[str, Any]) -> Any:
    """Return a JSON schema with its parts where they are referred to."""
    if isinstance(schema, list):
        return [_inlined(each, parts) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inlined(parts[schema["$ref"].rpartition("/")[2]], parts)
    return {key: _inlined(value, parts) for key, value in schema.items()}


async def _read(request: Request, kind: type[AnyAsked], service: Service) -> AnyAsked:
    """Return the body. Raises pydantic's ValidationError, and ApiError for a model that is not served."""
    asked = kind.model_validate_json(await request.body())
    _check_model(getattr(asked, "model", None), service)
    return asked


def _check_model(name: str | None, service: Service) -> None:
    if name and name != service.model:
        message = f"model: {name!r} is not served here; {service.model!r} is"
        raise ApiError(404, message, "model", "model_not_found")


class _Answers:
    """What the model says."""

    def __init__(self, service: Service, limits: ApiLimits, metrics: Metrics):
        self._service, self._limits, self._metrics = service, limits, metrics
        self._answering = Answering(service, metrics)

    async def completions(self, request: Request) -> Response:
        """Continue prompts."""
        asked = await _read(request, CompletionAsked, self._service)
        return await self._answer(request, await completion_job(self._service, asked, self._limits))

    async def chat(self, request: Request) -> Response:
        """Answer a conversation."""
        asked = await _read(request, ChatAsked, self._service)
        return await self._answer(request, await chat_job(self._service, asked, self._limits))

    async def _answer(self, request: Request, job: Job) -> Response:
        if job.asked.stream:
            response: Response = EventStream(self._answering.events(job), self._limits.retry_after_s)
        else:
            response = JsonResponse(await while_connected(self._answering.answer(job), request.receive))
        response.headers["x-request-id"] = request.headers.get("x-request-id", job.id)
        return response


class _Text:
    """Text to tokens and back."""

    def __init__(self, service: Service, limits: ApiLimits):
        self._service, self._context = service, limits.context(service.config)

    async def tokenize(self, request: Request) -> Response:
        """Return the tokens of a text or of a conversation."""
        asked = await _read(request, TokenizeAsked, self._service)
        ids = await self._ids(asked)
        known = {"count": len(ids), "max_model_len": self._context, "tokens": ids}
        return JsonResponse({**known, "token_strs": self._strings(ids) if asked.return_token_strs else None})

    async def _ids(self, asked: TokenizeAsked) -> list[int]:
        if asked.messages:
            variables = asked.chat_template_kwargs or {}
            variables = {**variables, "add_generation_prompt": asked.add_generation_prompt is not False}
            prompt = await read_chat(self._service, asked.messages, variables, bool(asked.add_special_tokens))
            return list(prompt.ids)
        if asked.prompt is None:
            raise ApiError(400, "prompt: expected a text, or messages", "prompt")
        return await encode(tokenizer_of(self._service, "prompt"), asked.prompt, asked.add_special_tokens is not False)

    def _strings(self, ids: list[int]) -> list[str]:
        tokenizer = tokenizer_of(self._service, "return_token_strs")
        return [tokenizer.token_bytes(token).decode(errors="replace") for token in ids]

    async def detokenize(self, request: Request) -> Response:
        """Return the text of tokens."""
        asked = await _read(request, DetokenizeAsked, self._service)
        if not all(0 <= token < self._service.config.vocab_size for token in asked.tokens):
            raise ApiError(400, f"tokens: expected ids from 0 to {self._service.config.vocab_size - 1}", "tokens")
        text = tokenizer_of(self._service, "tokens").decode(asked.tokens, skip_special=False)
        return JsonResponse({"prompt": text})


class _State:
    """What is served, and how it is."""

    def __init__(self, service: Service, limits: ApiLimits, gate: Gate, metrics: Metrics):
        self._service, self._gate, self._metrics = service, gate, metrics
        self._context = limits.context(service.config)
        self._created = int(time.time())

    def _card(self) -> dict[str, Any]:
        name = self._service.model
        about = {"id": name, "object": "model", "created": self._created, "owned_by": OWNER}
        return {**about, "root": name, "parent": None, "max_model_len": self._context}

    async def models(self) -> Response:
        """List the one model."""
        return JsonResponse({"object": "list", "data": [self._card()]})

    async def model(self, name: str) -> Response:
        """Describe the model."""
        _check_model(name, self._service)
        return JsonResponse(self._card())

    async def health(self) -> Response:
        """Say 200 while every instance takes requests, else 503."""
        return Response(status_code=200 if self._service.ready and not self._gate.draining else 503)

    async def status(self) -> Response:
        """Return the snapshot of the service."""
        about = {"model": self._service.model, "ready": self._service.ready, "draining": self._gate.draining}
        return JsonResponse({**about, **to_builtins(self._service.snapshot())})

    async def version(self) -> Response:
        """Return the version of this package."""
        return JsonResponse({"version": version(OWNER)})

    async def metrics(self) -> Response:
        """Return what Prometheus scrapes."""
        return Response(self._metrics.text(), media_type=CONTENT_TYPE_LATEST)
