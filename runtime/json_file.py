"""JSON files of a checkpoint, strict where they are wrong and silent about what nobody asks for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from planner.errors import Fault, InputError
from planner.specs.base import read_text


def read_json(path: str | Path) -> dict[str, Any]:
    """Return the mapping in a JSON file. Raises InputError with the line and column of a mistake."""
    text = read_text(path)
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(Fault(f"not valid JSON: {error.msg}", str(path), error.lineno, error.colno)) from None
    except RecursionError:
        raise InputError(Fault("not valid JSON: nested too deeply", str(path))) from None
    if not isinstance(data, dict):
        raise InputError(Fault(f"expected a JSON object, got {type(data).__name__}", str(path), 1))
    return data
