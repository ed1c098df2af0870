"""Everything that goes wrong, in OpenAI's shape: {"error": {"message", "type", "param", "code"}} and an HTTP status."""

from __future__ import annotations

import logging
import math
import re
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request, Response
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from planner.errors import InputError, PlannerError
from runtime.api.json_response import JsonResponse
from runtime.service import RejectedError, UnavailableError

log = logging.getLogger("runtime.api")

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
_SHOWN_FAULTS = 3


class ClientGoneError(Exception):
    """The client has closed the connection, or takes nothing any more: there is nobody to answer."""


class ApiError(PlannerError):
    """A request that is answered with an HTTP status of 400 or above."""

    exit_code = 1

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.retry_after_s = retry_after_s

    @property
    def body(self) -> dict[str, Any]:
        """Return the JSON document that says so."""
        kind = _TYPES.get(self.status, "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """Return the whole answer."""
        headers = {}
        if self.retry_after_s is not None:
            headers["retry-after"] = str(max(1, math.ceil(self.retry_after_s)))
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return JsonResponse(self.body, self.status, headers)


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Return a 400: the request can never be served as it is."""
    return ApiError(400, message, param, code)


def busy(message: str, retry_after_s: float) -> ApiError:
    """Return a 429: the same request may be served later."""
    return ApiError(429, message, code="rate_limit_exceeded", retry_after_s=retry_after_s)


def unavailable(message: str, retry_after_s: float) -> ApiError:
    """Return a 503: nothing is served now."""
    return ApiError(503, message, code="service_unavailable", retry_after_s=retry_after_s)


def api_error(error: Exception, retry_after_s: float = 1.0) -> ApiError:
    """Return what a client is told of `error`. What nobody foresaw is logged, and told without its details."""
    match error:
        case ApiError():
            return error
        case RejectedError():
            return busy(str(error), error.retry_after_s)
        case UnavailableError():
            return unavailable(str(error), retry_after_s)
        case InputError():
            return _of_input(error)
        case ValidationError():
            return _of_validation(error)
        case HTTPException():
            return ApiError(error.status_code, error.detail or HTTPStatus(error.status_code).phrase)
    log.error("a request failed", exc_info=error)
    return ApiError(500, "the server failed to answer; its log says why", code="internal_error")


def _of_input(error: InputError) -> ApiError:
    """Return a 400. Our messages begin with the field that is wrong, where there is one."""
    fault = error.faults[0]
    named = re.match(r"(\w+)(?: string)?: ", fault.message)
    return bad_request(str(error), fault.field or (named.group(1) if named else None))


def _of_validation(error: ValidationError) -> ApiError:
    found = error.errors(include_url=False, include_context=False, include_input=False)
    if found[0]["type"] == "json_invalid":
        return bad_request(f"the body is not valid JSON: {found[0]['msg'].removeprefix('Invalid JSON: ')}")
    places = [".".join(map(str, fault["loc"])) for fault in found]
    lines = [f"{place}: {fault['msg']}" if place else fault["msg"] for place, fault in zip(places, found, strict=True)]
    more = f" (and {len(lines) - _SHOWN_FAULTS} more)" if len(lines) > _SHOWN_FAULTS else ""
    return bad_request("; ".join(lines[:_SHOWN_FAULTS]) + more, places[0] or None)


def add_handlers(app: FastAPI, retry_after_s: float) -> None:
    """Make `app` answer every error in OpenAI's shape."""

    async def answer(_request: Request, error: Exception) -> Response:
        return api_error(error, retry_after_s).response()

    for kind in (PlannerError, ValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, answer)
