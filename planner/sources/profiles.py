"""Profiles in: our own YAML, and a registry of loaders for tables that others published.

python -m planner.sources.profiles KIND PATH [key=value ...] [-o FILE]
"""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from planner.errors import Fault, InputError, PlannerError
from planner.sources import distserve, dynamo, layer_tables, splitwise
from planner.specs.base import Document, dump_yaml, load_preset, preset_names, suggest, validate, write_text
from planner.specs.gpu import Gpu
from planner.specs.model import ModelSpec
from planner.specs.profile import COLUMNS, Profile, row_fault

LOADERS: dict[str, Callable[..., Profile]] = {
    "splitwise": splitwise.load,
    "distserve": distserve.load,
    "dynamo": dynamo.load,
    "vidur": layer_tables.vidur,
    "llmservingsim": layer_tables.llmservingsim,
}
"""Each takes a path and its own selectors and returns one Profile. To add one: a file and a line here."""

_MOST_FAULTS = 20


def read_profile(document: Document) -> Profile:
    """Return the profile in our own format. Raises InputError with one fault per mistake and its line."""
    if faults := _row_faults(document)[:_MOST_FAULTS]:
        raise InputError(faults)
    return validate(Profile, document)


def _row_faults(document: Document) -> list[Fault]:
    """Check the rows before the rest: a validator of the whole table could not say which line failed."""
    samples = document.data.get("samples") if isinstance(document.data, dict) else None
    if not isinstance(samples, dict):
        return []
    columns, rows = samples.get("columns"), samples.get("rows")
    if not isinstance(columns, list) or not isinstance(rows, list):
        return []
    if not all(isinstance(name, str) for name in columns):
        return []
    if not {"phase", "time_s"} <= set(columns) <= set(COLUMNS) or len(set(columns)) != len(columns):
        return []
    found = ((index, row_fault(tuple(columns), row)) for index, row in enumerate(rows))
    return [document.fault(text, "samples", "rows", index) for index, text in found if text]


def import_profile(kind: str, path: str | Path, *, name: str | None = None, **selectors: Any) -> Profile:
    """Return the profile in a foreign table, called `name` where given.

    Raises InputError for a bad kind, selector or table.
    """
    if kind not in LOADERS:
        names = list(LOADERS)
        raise InputError(f"unknown kind of profile {kind!r}{suggest(kind, names)}; known: {', '.join(names)}")
    parameters = list(inspect.signature(LOADERS[kind]).parameters.values())[1:]
    names = [parameter.name for parameter in parameters]
    if unknown := sorted(set(selectors) - set(names)):
        raise InputError(f"{kind}: unknown selector {unknown[0]!r}; expected {', '.join([*names, 'name'])}")
    needed = [p.name for p in parameters if p.default is inspect.Parameter.empty and p.name not in selectors]
    if needed:
        raise InputError(f"{kind}: needs {', '.join(needed)}")
    try:
        profile = LOADERS[kind](path, **selectors)
    except ValidationError as error:
        what = error.errors(include_url=False)[0]["msg"].removeprefix("Value error, ")
        raise InputError(Fault(f"gives no sound profile: {what}", str(path))) from None
    if name is None:
        return profile
    return validate(Profile, Document(profile.model_dump(mode="json") | {"name": name}, str(path)))


def to_yaml(profile: Profile) -> str:
    """Return the profile as a file of our own format: stable, without what is left at its default."""
    data = profile.model_dump(mode="json", exclude_defaults=True)
    return dump_yaml({"format": profile.format, **data})


def _selector(kind: str, text: str) -> tuple[str, Any]:
    """Return one `key=value` of the command line in the type that the loader takes."""
    key, equals, value = text.partition("=")
    if not equals or not value:
        raise InputError(f"expected key=value, got {text!r}")
    parameter = inspect.signature(LOADERS[kind]).parameters.get(key) if kind in LOADERS else None
    wanted = str(parameter.annotation) if parameter else ""
    if wanted == "ModelSpec":
        return key, _preset("models", ModelSpec, value)
    if wanted == "Gpu":
        return key, _preset("gpus", Gpu, value)
    if wanted.startswith("int"):
        if not value.isascii() or not value.isdigit():
            raise InputError(f"{key}: expected a whole number, got {value!r}")
        return key, int(value)
    return key, value


def _preset(family: str, kind: Any, name: str) -> Any:
    document = load_preset(family, name)
    if document is None:
        names = preset_names(family)
        raise InputError(f"no preset named {name!r}{suggest(name, names)}; shipped {family}: {', '.join(names)}")
    return validate(kind, document)


def main(arguments: list[str] | None = None) -> int:
    """Convert one table; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m planner.sources.profiles", description="Convert a table to a profile."
    )
    parser.add_argument("kind", help=", ".join(LOADERS))
    parser.add_argument("path")
    parser.add_argument("selectors", nargs="*", metavar="key=value")
    parser.add_argument("-o", "--output", help="file to write; without it, the profile is printed")
    given = parser.parse_args(arguments)
    try:
        selectors = dict(_selector(given.kind, text) for text in given.selectors)
        text = to_yaml(import_profile(given.kind, given.path, **selectors))
        if given.output:
            write_text(given.output, text)
        else:
            sys.stdout.write(text)
    except PlannerError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
