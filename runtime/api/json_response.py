"""JSON out, alone or as an event, by msgspec: encoding its small documents is much of what a stream costs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.responses import Response

_ENCODER = msgspec.json.Encoder()


def to_json(value: Any) -> bytes:
    """Return `value` as JSON; NaN becomes null."""
    return _ENCODER.encode(value)


def event(document: Any) -> bytes:
    """Return a document as one server-sent event."""
    return b"data: " + to_json(document) + b"\n\n"


class JsonResponse(Response):
    """A whole JSON document."""

    media_type = "application/json"

    def __init__(self, value: Any, status: int = 200, headers: Mapping[str, str] | None = None):
        super().__init__(to_json(value), status, headers)
