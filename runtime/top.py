"""What `planner top` shows: a running server at one moment."""

from __future__ import annotations

import json
import math
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from planner.errors import InputError

_BAR = 10


@dataclass(slots=True)
class Moment:
    """A status, and what has been done since the one before."""

    url: str
    status: dict[str, Any]
    rates: dict[str, tuple[float, float]]
    """By instance: steps and output tokens a second; none at first."""


class Status:
    """Reads /status, again and again."""

    def __init__(self, url: str, api_key: str = ""):
        self.url = url.rstrip("/")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._request = urllib.request.Request(f"{self.url}/status", headers=headers)
        self._before: tuple[float, dict[str, Any]] | None = None

    def read(self) -> Moment:
        """Return how things stand. Raises InputError when nobody answers."""
        try:
            with urllib.request.urlopen(self._request, timeout=5) as answer:
                status = json.load(answer)
        except (OSError, ValueError, urllib.error.URLError) as error:
            raise InputError(f"{self.url}: no status ({error}); is `planner serve` running there?") from None
        now_s, before = time.monotonic(), self._before
        self._before = (now_s, status)
        return Moment(self.url, status, _rates(before, now_s, status) if before else {})


def _rates(
    before: tuple[float, dict[str, Any]], now_s: float, status: dict[str, Any]
) -> dict[str, tuple[float, float]]:
    old = {each["name"]: each for each in before[1]["instances"]}
    gone_s = max(now_s - before[0], 1e-3)
    return {
        each["name"]: tuple(max(0, each[key] - old[each["name"]][key]) / gone_s for key in ("steps", "output_tokens"))
        for each in status["instances"]
        if each["name"] in old
    }


def picture(moment: Moment) -> Group:
    """Return the screen."""
    status = moment.status
    attained = status["attained"].get("all")
    counts = ", ".join(f"{status[name]} {name}" for name in ("finished", "cancelled", "rejected", "lost", "retries"))
    share = "no request judged yet" if attained is None else f"{attained:.1%} of the last requests met their SLO"
    head = Text(f"{status.get('model', '')} at {moment.url}: {status['requests']} requests running, {counts}\n{share}")
    return Group(head, Text(), _table(moment))


def _table(moment: Moment) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("instance", "state"):
        table.add_column(name)
    for name in ("runs", "waits"):
        table.add_column(name, justify="right")
    table.add_column("KV blocks", no_wrap=True)
    for name in ("steps/s", "tokens/s", "starts"):
        table.add_column(name, justify="right")
    for each in moment.status["instances"]:
        steps, tokens = moment.rates.get(each["name"], (float("nan"), float("nan")))
        table.add_row(
            each["name"],
            each["state"],
            str(each["running"]),
            str(each["waiting"]),
            _bar(each["used_blocks"], each["kv_blocks"]),
            *("-" if math.isnan(rate) else f"{rate:.1f}" for rate in (steps, tokens)),
            str(each["starts"]),
        )
    return table


def _bar(used: int, total: int) -> str:
    share = used / total if total else 0.0
    filled = round(share * _BAR)
    return f"{'#' * filled}{'.' * (_BAR - filled)} {share:4.0%}"
