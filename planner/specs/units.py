"""Quantities as people write them, SI inside: `200ms` -> 0.2 [s], `80GiB` -> 85899345920 [bytes], `400Gb/s` -> 5e10.

Units of size follow IEC and SI: GB = 10^9 bytes, GiB = 2^30 bytes; a small `b` means bits. A bare number is taken
in the SI unit that the field's name ends in (`ttft_s: 0.2`).
"""

from __future__ import annotations

import math
import re
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

_PREFIX = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
_NUMBER = r"(?P<number>[+-]?(?:\d+(?:_\d+)*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)"

_TIME = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
_SIZE = {f"{p}B": v for p, v in (_PREFIX | _BINARY).items()} | {f"{p}b": v / 8 for p, v in _PREFIX.items() if p}
_SPEED = {f"{unit}{per}": v for unit, v in _SIZE.items() for per in ("/s", "ps")}
_FLOPS = {f"{p}FLOP{per}": v for p, v in _PREFIX.items() for per in ("/s", "S", "s")}
_RATE = {"rps": 1.0, "req/s": 1.0, "/s": 1.0, "rpm": 1 / 60, "req/min": 1 / 60, "/min": 1 / 60}
_SHARE = {"%": 0.01}
_MONEY = {"$/h": 1.0, "USD/h": 1.0, "EUR/h": 1.0}


def parse_quantity(value: Any, units: dict[str, float], example: str) -> float:
    """Return `value` in SI. Numbers pass through; text needs a unit out of `units`.

    Raises ValueError saying what was expected, with `example` as the way to write it.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"expected a quantity such as {example}, got {value!r}")
    if isinstance(value, str):
        match = re.fullmatch(_NUMBER + r"\s*(?P<unit>\S*)", value.strip())
        if not match:
            raise ValueError(f"expected a quantity such as {example}, got {value!r}")
        unit = match["unit"]
        if unit and unit not in units:
            known = ", ".join(list(units)[:8])
            raise ValueError(f"unknown unit {unit!r} in {value!r}; expected one of {known} (for example {example})")
        value = float(match["number"].replace("_", "")) * (units[unit] if unit else 1.0)
    try:
        number = float(value)
    except OverflowError:
        raise ValueError(f"expected a quantity such as {example}, got a number too large to hold") from None
    if not math.isfinite(number):
        raise ValueError(f"expected a finite quantity such as {example}, got {value!r}")
    return number


def _quantity(units: dict[str, float], example: str) -> BeforeValidator:
    return BeforeValidator(lambda value: parse_quantity(value, units, example))


def _whole_bytes(value: Any) -> int:
    return round(parse_quantity(value, _SIZE, "80GiB"))


Seconds = Annotated[float, _quantity(_TIME, "200ms"), Field(gt=0)]
SecondsOrZero = Annotated[float, _quantity(_TIME, "200ms"), Field(ge=0)]
Bytes = Annotated[int, BeforeValidator(_whole_bytes), Field(gt=0, le=10**18)]
BytesPerSecond = Annotated[float, _quantity(_SPEED, "400Gb/s"), Field(gt=0, ge=1e6, le=1e18)]
"""At least 1 MB/s: what is less has lost its unit (`bytes_per_s: 25` is 25 bytes/s)."""
FlopPerSecond = Annotated[float, _quantity(_FLOPS, "312TFLOP/s"), Field(gt=0, ge=1e9, le=1e21)]
RequestsPerSecond = Annotated[float, _quantity(_RATE, "4rps"), Field(gt=0, ge=1e-4, le=1e6)]
"""At least one request in three hours: what is less is no load to plan for."""
Share = Annotated[float, _quantity(_SHARE, "90%"), Field(gt=0, le=1)]
MoneyPerHour = Annotated[float, _quantity(_MONEY, "2.5$/h"), Field(ge=0)]
Count = Annotated[int, Field(strict=True, ge=1, le=10**9)]
CountOrZero = Annotated[int, Field(strict=True, ge=0, le=10**9)]
Name = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[A-Za-z0-9][A-Za-z0-9._/+-]*$")]


def show_seconds(value: float) -> str:
    """Return a time as people read it: `1.80 s`, `243 ms`, `12.3 us`."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if abs(value) >= scale or unit == "us":
            return f"{value / scale:{'.0f' if 1000 <= abs(value / scale) < 1e6 else '.3g'}} {unit}"
    raise AssertionError("unreachable")


def show_bytes(value: float) -> str:
    """Return a size as people read it, in powers of ten: `1.13 GB`."""
    for scale, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(value) >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value:.0f} B"
