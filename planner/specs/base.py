"""Strict files: YAML or JSON in, a frozen `Spec` out, and for every mistake the line and column where it stands."""

from __future__ import annotations

import difflib
import json
import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from planner.errors import Fault, InputError

MAX_FILE_BYTES = 64 * 2**20
_MAX_NODES = 2_000_000

Path_ = tuple[str | int, ...]
S = TypeVar("S", bound="Spec")


class Spec(BaseModel):
    """What crosses a file: frozen, and a key it does not know is a mistake."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())


@dataclass(frozen=True, slots=True)
class Document:
    """Plain data plus where each piece of it stands in its file (line and column count from 1)."""

    data: Any
    file: str
    marks: dict[Path_, tuple[int, int]] = field(default_factory=dict)
    prefix: Path_ = ()

    @property
    def folder(self) -> Path:
        """The folder against which relative paths in this document are resolved."""
        return Path(self.file).parent

    def at(self, *keys: str | int) -> Document:
        """Return the part under `keys`, still knowing its lines."""
        data = self.data
        for key in keys:
            data = data[key]
        return Document(data, self.file, self.marks, self.prefix + keys)

    def fault(self, message: str, *path: str | int) -> Fault:
        """Return a fault at `path`, or at the closest enclosing piece that has a line."""
        full = self.prefix + path
        for end in range(len(full), -1, -1):
            if full[:end] in self.marks:
                line, column = self.marks[full[:end]]
                return Fault(message, self.file, line, column, show_path(full))
        return Fault(message, self.file, None, None, show_path(full))


def show_path(path: Path_) -> str:
    """Return `nodes[2].gpus` for ("nodes", 2, "gpus")."""
    text = ""
    for key in path:
        text += f"[{key}]" if isinstance(key, int) else f".{key}" if text else str(key)
    return text


class _Loader(yaml.SafeLoader):
    """YAML 1.2 scalars: `no` and `12:30` are text and `1e9` is a number, unlike in YAML 1.1."""


_Loader.yaml_implicit_resolvers = {}
for _tag, _regex, _first in (
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF"),
    ("null", r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    ("int", r"^[-+]?(?:0|[1-9][0-9_]*)$", "-+0123456789"),
    (
        "float",
        r"^(?:[-+]?(?:[0-9][0-9_]*)?\.?[0-9_]+(?:[eE][-+]?[0-9]+)?|[-+]?[0-9]+\.|[-+]?\.(?:inf|Inf)|\.nan|\.NaN)$",
        "-+.0123456789",
    ),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(_regex), list(_first))


def read_text(path: str | Path) -> str:
    """Return the text of a file, without a byte-order mark. Raises InputError when it cannot be read."""
    path = Path(path)
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise InputError(Fault(f"expected at most {MAX_FILE_BYTES // 2**20} MiB", str(path)))
        return path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise InputError(Fault("no such file" + _near_file(path), str(path))) from None
    except IsADirectoryError:
        raise InputError(Fault("expected a file, got a folder", str(path))) from None
    except UnicodeDecodeError as error:
        raise InputError(Fault(f"expected UTF-8 text, got byte {error.start} that is not", str(path))) from None
    except (OSError, ValueError) as error:
        raise InputError(Fault(f"cannot be read: {error}", str(path))) from None


def _near_file(path: Path) -> str:
    try:
        names = [entry.name for entry in path.parent.iterdir()]
    except (OSError, ValueError):
        return ""
    return suggest(path.name, names)


def suggest(word: str, known: list[str]) -> str:
    """Return `; did you mean 'x'?` for the closest known word, or nothing."""
    close = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def load(path: str | Path) -> Document:
    """Return the Document of a YAML (or JSON, a subset) file. Raises InputError with line and column."""
    return parse(read_text(path), str(path))


def parse(text: str, file: str) -> Document:
    """Return the Document of YAML `text`; `file` is only used in messages."""
    if file.endswith(".json"):
        text = text.expandtabs(2)  # JSON may be indented by tabs, YAML may not
    try:
        loader = _Loader(text)
        try:
            root = loader.get_single_node()
            if root is None:
                raise InputError(Fault("expected a mapping, got an empty file", file, 1))
            marks: dict[Path_, tuple[int, int]] = {}
            _mark(root, (), marks, file, [])
            data = loader.construct_document(root)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = (mark.line + 1, mark.column + 1) if mark else (None, None)
        raise InputError(Fault(f"not valid YAML: {_one_line(error.problem or error.context)}", file, *place)) from None
    except yaml.YAMLError as error:
        raise InputError(Fault(f"not valid YAML: {_one_line(error)}", file, 1)) from None
    except (RecursionError, ValueError, TypeError) as error:
        raise InputError(Fault(f"not valid YAML: {_one_line(error)}", file, 1)) from None
    return Document(data, file, marks)


def _one_line(what: object) -> str:
    return " ".join(str(what).split())


def _mark(node: yaml.Node, path: Path_, marks: dict[Path_, tuple[int, int]], file: str, open_: list[int]) -> None:
    """Record where every key and item stands; refuse duplicate keys and aliases that contain themselves."""
    marks[path] = (node.start_mark.line + 1, node.start_mark.column + 1)
    if len(marks) > _MAX_NODES or id(node) in open_ or len(open_) > 100:
        raise InputError(Fault("expected plain data, got aliases that unfold without end", file, *marks[path]))
    open_.append(id(node))
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            place = (key.start_mark.line + 1, key.start_mark.column + 1)
            if not isinstance(key, yaml.ScalarNode):
                raise InputError(Fault("expected a plain text key", file, *place))
            if key.value in seen:
                raise InputError(Fault(f"duplicate key {key.value!r}", file, *place, show_path((*path, key.value))))
            seen.add(key.value)
            _mark(value, (*path, key.value), marks, file, open_)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            _mark(value, (*path, index), marks, file, open_)
    open_.pop()


def validate(kind: type[S], document: Document) -> S:
    """Return the checked `kind`. Raises InputError with one fault per mistake, each with its line."""
    if not isinstance(document.data, dict):
        raise InputError(document.fault(f"expected a mapping, got {_short(document.data)}"))
    try:
        return kind.model_validate(document.data)
    except ValidationError as error:
        raise InputError(list(_faults(kind, document, error))) from None


def _faults(kind: type[Spec], document: Document, error: ValidationError) -> Iterator[Fault]:
    seen: set[str] = set()
    for item in error.errors(include_url=False):
        # pydantic names union members and validators inside the path; only real keys and indexes have lines
        path = tuple(p for p in item["loc"] if _reaches(document.data, p, item["loc"]))
        known = list(kind.model_fields) if len(item["loc"]) == 1 else []
        fault = document.fault(_message(item, known), *path)
        if str(fault) not in seen:
            seen.add(str(fault))
            yield fault


def _reaches(data: Any, key: str | int, loc: tuple[str | int, ...]) -> bool:
    """True where `key` is a step into the data, or the last (missing) key of the path."""
    for step in loc:
        inside = (isinstance(data, dict) and step in data) or (
            isinstance(data, list) and isinstance(step, int) and step < len(data)
        )
        if step == key:
            return inside or step == loc[-1]
        if inside:
            data = data[step]
    return False


def _message(item: Any, known: list[str]) -> str:
    kind, value, context = item["type"], item.get("input"), item.get("ctx", {})
    name = str(item["loc"][-1]) if item["loc"] else ""
    got = f", got {_short(value)}"
    plain = {
        "missing": "is required",
        "extra_forbidden": f"unknown key{suggest(name, known)}"
        + (f"; expected one of {', '.join(known)}" if known else ""),
        "int_type": "expected an integer" + got,
        "int_from_float": "expected a whole number" + got,
        "float_type": "expected a number" + got,
        "string_type": "expected text" + got,
        "bool_type": "expected true or false" + got,
        "list_type": "expected a list" + got,
        "tuple_type": "expected a list" + got,
        "dict_type": "expected a mapping" + got,
        "model_type": "expected a mapping" + got,
        "finite_number": "expected a finite number" + got,
        "literal_error": f"expected {context.get('expected')}" + got,
        "greater_than": f"expected more than {context.get('gt')}" + got,
        "greater_than_equal": f"expected at least {context.get('ge')}" + got,
        "less_than": f"expected less than {context.get('lt')}" + got,
        "less_than_equal": f"expected at most {context.get('le')}" + got,
    }
    return _one_line(plain.get(kind, item["msg"].removeprefix("Value error, ")))


def _short(value: Any) -> str:
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def topologies_folder() -> Path:
    """Return the folder of presets: beside the package in a checkout, inside it in a wheel."""
    inside = Path(__file__).resolve().parents[1] / "topologies"
    return inside if inside.is_dir() else Path(__file__).resolve().parents[2] / "topologies"


def preset_names(family: str) -> list[str]:
    """Return the sorted names of the shipped presets of `family` (gpus, models, clusters, profiles)."""
    return sorted(path.stem for path in (topologies_folder() / family).glob("*.yaml"))


def load_preset(family: str, name: str) -> Document | None:
    """Return the Document of a shipped preset, or None when there is none of that name."""
    return load(topologies_folder() / family / f"{name}.yaml") if name in preset_names(family) else None


def resolve(family: str, document: Document) -> Document:
    """Return what a reference means: a mapping is meant as it stands, text is a preset's name or a file.

    Files are looked up beside the document that names them. Raises InputError at the reference's line.
    """
    value = document.data
    if isinstance(value, dict):
        return document
    if not isinstance(value, str) or not value:
        raise InputError(document.fault(f"expected a preset name, a file or a mapping, got {_short(value)}"))
    if (preset := load_preset(family, value)) is not None:
        return preset
    if "/" in value or value.endswith((".yaml", ".yml", ".json")):
        path = document.folder / value
        if not path.is_file():
            raise InputError(document.fault(f"no such file {str(path)!r}{_near_file(path)}"))
        return load(path)
    names = preset_names(family)
    raise InputError(
        document.fault(f"no preset named {value!r}{suggest(value, names)}; shipped {family}: {', '.join(names)}")
    )


def write_text(path: str | Path, text: str) -> None:
    """Write a file whole or not at all: into a neighbour first, then renamed over it."""
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    except OSError as error:
        raise InputError(Fault(f"cannot be written: {error.strerror or error}", str(path))) from None
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except OSError as error:
        Path(name).unlink(missing_ok=True)
        raise InputError(Fault(f"cannot be written: {error.strerror or error}", str(path))) from None
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def dump_yaml(data: Any) -> str:
    """Return stable YAML: keys in the order given, no aliases, one line per short list."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, width=110, allow_unicode=True, default_flow_style=None)


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def dump_json(data: Any) -> str:
    """Return one JSON document, stable, without NaN."""
    return json.dumps(data, indent=2, allow_nan=False, ensure_ascii=False)
