"""Who answers: where it is, what it serves, and whether it takes what a bench sends."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from planner.errors import InputError
from planner.specs.base import short

if TYPE_CHECKING:
    import httpx

OURS = "goodput-planner"
"""What the included runtime says in /v1/models; it alone is asked for the terms of TTFT."""
_CONNECT_S = 10.0


@dataclass(frozen=True, slots=True)
class Server:
    """A server and a model on it."""

    url: str
    """Without /v1."""
    model: str
    ours: bool = False
    max_tokens: int | None = None
    """Prompt plus output that the model can hold, where the server says so."""

    @property
    def completions(self) -> str:
        """Return the address that prompts go to."""
        return f"{self.url}/v1/completions"


def plain_url(text: str) -> str:
    """Return the server's address without a trailing /v1. Raises InputError."""
    text = text if "://" in text else f"http://{text}"
    try:
        parts = urlsplit(text)
        known = parts.scheme in ("http", "https") and parts.hostname is not None and (parts.port or 1) > 0
    except ValueError:
        known = False
    if not known:
        raise InputError(f"--url: expected an address such as http://127.0.0.1:8000, got {text!r}")
    return text.rstrip("/").removesuffix("/v1").rstrip("/")


@asynccontextmanager
async def connections(url: str, api_key: str | None) -> AsyncIterator[httpx.AsyncClient]:
    """Yield a client without a limit on connections: a pool of so many would queue requests where nobody sees it."""
    try:
        import httpx
    except ImportError:
        raise InputError("planner bench needs httpx: pip install 'goodput-planner[serve]'") from None
    headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
    async with httpx.AsyncClient(
        headers=headers,
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        timeout=httpx.Timeout(None, connect=_CONNECT_S),
        verify=url.startswith("https"),  # to read the certificates takes a tenth of a second
        trust_env=not _loopback(url),  # a proxy between this machine and itself would be measured as well
    ) as client:
        yield client


def _loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


async def find_server(client: httpx.AsyncClient, url: str, model: str | None) -> Server:
    """Return the server at `url` with the model asked for, or the only one. Raises InputError with the way out."""
    cards = await _models(client, url)
    names = [card["id"] for card in cards]
    if model is None and len(names) != 1:
        raise InputError(f"{url} serves {', '.join(names) or 'no model'}; choose one with --model")
    if model is not None and model not in names:
        raise InputError(f"{url} does not serve {model!r}; it has {', '.join(names) or 'no model'}")
    card = cards[0 if model is None else names.index(model)]
    most = card.get("max_model_len")
    return Server(url, card["id"], card.get("owned_by") == OURS, most if isinstance(most, int) else None)


async def _models(client: httpx.AsyncClient, url: str) -> list[dict[str, Any]]:
    import httpx

    try:
        reply = await client.get(f"{url}/v1/models", timeout=_CONNECT_S)
    except httpx.HTTPError as error:
        why = str(error) or type(error).__name__
        raise InputError(f"no server at {url} ({why}); start one with: planner serve deployment.yaml") from None
    if reply.status_code in (401, 403):
        raise InputError(f"{url} wants an API key (HTTP {reply.status_code}); give --api-key")
    try:
        cards = reply.json()["data"] if reply.status_code == 200 else None
    except (ValueError, KeyError, TypeError):
        cards = None
    if not isinstance(cards, list) or not all(isinstance(c, dict) and isinstance(c.get("id"), str) for c in cards):
        got = f"HTTP {reply.status_code}: {short(reply.text, 80)}"
        raise InputError(f"{url} is no OpenAI-compatible server: /v1/models gave {got}")
    return cards
