"""Strict files: YAML or JSON in, a frozen `Spec` out, and for every mistake the line and column where it stands."""

from __future__ import annotations

import difflib
import json
import os
import re
import tempfile
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from planner.errors import Fault, InputError

MAX_FILE_BYTES = 64 * 2**20
_MAX_ALIASED = 100_000
_MAX_DEPTH = 100
LIKE = "like"
_MOST_LIKE = 8
_UNITS = {"bytes_per_s": "bytes/s", "flop_per_s": "FLOP/s", "_rps": "requests/s", "_bytes": "bytes", "_s": "s"}
_NAME = "a name of letters, digits and . _ / + - that begins with a letter or digit"  # the only pattern there is

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
    keys: dict[Path_, tuple[int, int]] = field(default_factory=dict)
    """Where the key of a piece stands; its value may begin a line later."""
    changed: dict[str, Document] = field(default_factory=dict)
    """Pieces that stand in another file than the rest (see `resolve`), by their key."""

    @property
    def folder(self) -> Path:
        """The folder against which relative paths in this document are resolved."""
        return Path(self.file).parent

    def at(self, *keys: str | int) -> Document:
        """Return the part under `keys`, still knowing its lines."""
        if keys and (elsewhere := self._elsewhere(keys)) is not None:
            return elsewhere.at(*keys[1:])
        data = self.data
        for key in keys:
            data = data[key]
        return Document(data, self.file, self.marks, self.prefix + keys, self.keys)

    def _elsewhere(self, path: Path_) -> Document | None:
        """Return the piece that `path` leads into, where another file has it."""
        return self.changed.get(str(path[0])) if path else None

    def fault(self, message: str, *path: str | int) -> Fault:
        """Return a fault at `path`, or at the closest enclosing piece that has a line."""
        if (elsewhere := self._elsewhere(path)) is not None:
            return elsewhere.fault(message, *path[1:])
        full = self.prefix + path
        for end in range(len(full), -1, -1):
            if full[:end] in self.marks:
                line, column = self.marks[full[:end]]
                return Fault(message, self.file, line, column, show_path(full))
        return Fault(message, self.file, None, None, show_path(full))

    def key_fault(self, message: str, *path: str | int) -> Fault:
        """Return a fault at the key that ends `path`, not at its value."""
        if (elsewhere := self._elsewhere(path)) is not None:
            return elsewhere.key_fault(message, *path[1:])
        full = self.prefix + path
        if full not in self.keys:
            return self.fault(message, *path)
        return Fault(message, self.file, *self.keys[full], show_path(full))


def show_path(path: Path_) -> str:
    """Return `nodes[2].gpus` for ("nodes", 2, "gpus")."""
    text = ""
    for key in path:
        text += f"[{key}]" if isinstance(key, int) else f".{key}" if text else str(key)
    return text


class _Loader(yaml.SafeLoader):
    """YAML 1.2 as plain data: `no` and `12:30` are text, `1e9` is a number, every key is text, no other tags."""

    depth = 0
    nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Return the next node; refuse nesting that would overflow the stack further on."""
        self.depth += 1
        self.nodes += 1
        if self.depth > _MAX_DEPTH:
            message = f"expected at most {_MAX_DEPTH} levels, got more"
            raise yaml.constructor.ConstructorError(None, None, message, self.peek_event().start_mark)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Return the value of a node; whatever its text cannot mean is a mistake at its place."""
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError, TypeError, OverflowError):
            kind = node.tag.rsplit(":", 1)[-1]
            message = f"expected a value of type {kind}, got {_short(node.value)}"
            raise yaml.constructor.ConstructorError(None, None, message, node.start_mark) from None

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """Return a mapping whose keys are the text that stands there, so that `1:` is the key "1"."""
        return {key.value: self.construct_object(value, deep) for key, value in node.value}

    def refuse(self, node: yaml.Node) -> Any:
        """Raise for a tag such as !!python/object, !!set or !include."""
        tag = node.tag.replace("tag:yaml.org,2002:", "!!")
        raise yaml.constructor.ConstructorError(None, None, f"expected plain data, got the tag {tag}", node.start_mark)


_PLAIN_TAGS = [f"tag:yaml.org,2002:{_name}" for _name in ("str", "int", "float", "bool", "null", "seq", "map")]
_Loader.yaml_constructors = {tag: yaml.SafeLoader.yaml_constructors[tag] for tag in _PLAIN_TAGS}
_Loader.add_constructor(None, _Loader.refuse)
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
        with path.open("rb") as file:  # never more than that: it may be a pipe or a device without end
            content = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        raise InputError(Fault("no such file" + _near_file(path), str(path))) from None
    except IsADirectoryError:
        raise InputError(Fault("expected a file, got a folder", str(path))) from None
    except (OSError, ValueError) as error:
        raise InputError(Fault(f"cannot be read: {getattr(error, 'strerror', None) or error}", str(path))) from None
    if len(content) > MAX_FILE_BYTES:
        raise InputError(Fault(f"expected at most {MAX_FILE_BYTES // 2**20} MiB", str(path)))
    return _decoded(content, str(path))


def _decoded(content: bytes, file: str) -> str:
    if content.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise InputError(Fault("expected UTF-8 text, got UTF-16; save it as UTF-8", file, 1))
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        message = f"expected UTF-8 text, got the byte 0x{content[error.start]:02x}; save it as UTF-8"
        raise InputError(Fault(message, file, line)) from None


def _near_file(path: Path) -> str:
    try:
        names = [entry.name for entry in path.parent.iterdir()]
    except (OSError, ValueError):
        return ""
    return suggest(path.name, names)


def suggest(word: str, known: Sequence[str]) -> str:
    """Return `; did you mean 'x'?` for the closest known word, or nothing."""
    close = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def load(path: str | Path) -> Document:
    """Return the Document of a YAML (or JSON, a subset) file. Raises InputError with line and column."""
    return parse(read_text(path), str(path))


def parse(text: str, file: str) -> Document:
    """Return the Document of YAML `text`; `file` is only used in messages. Raises InputError."""
    if file.endswith(".json"):
        text = text.expandtabs(2)  # JSON may be indented by tabs, YAML may not
    try:
        return _parsed(text, file)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = (mark.line + 1, mark.column + 1) if mark else (None, None)
        raise InputError(Fault(f"not valid YAML: {_explained(error)}", file, *place)) from None
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        place = (before.count("\n") + 1, error.position - before.rfind("\n"))
        raise InputError(Fault(f"not valid YAML: the character {chr(error.character)!r}", file, *place)) from None


def _parsed(text: str, file: str) -> Document:
    loader = _Loader(text)
    try:
        root = loader.get_single_node()
        if root is None:
            raise InputError(Fault("expected a mapping, got an empty file", file, 1))
        document = Document(None, file)
        _mark(root, (), document, [], loader.nodes + _MAX_ALIASED)
        return replace(document, data=loader.construct_document(root))
    finally:
        loader.dispose()


def _explained(error: yaml.MarkedYAMLError) -> str:
    """Return the parser's own words in one line, with where it began, and the way out where it is known."""
    text = _one_line(error.problem or error.context)
    if "another document" in text:
        return "expected one document, got another after '---'"
    if "'\\t'" in text:
        return f"{text}; indent with spaces"
    if error.context and error.context_mark and error.problem_mark and error.context.startswith("while parsing a flow"):
        return f"{text}, {_one_line(error.context)} that begins on line {error.context_mark.line + 1}"
    return text


def _one_line(what: object) -> str:
    return " ".join(str(what).split())


def _mark(node: yaml.Node, path: Path_, document: Document, open_: list[int], most: int) -> None:
    """Record where every key and item stands (`most` at most); refuse duplicate keys and endless aliases."""
    place = document.marks[path] = (node.start_mark.line + 1, node.start_mark.column + 1)
    if len(document.marks) > most or id(node) in open_ or len(open_) > _MAX_DEPTH:
        raise InputError(Fault("expected plain data, got aliases that unfold without end", document.file, *place))
    open_.append(id(node))
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            _mark_key(key, path, document)
            _mark(value, (*path, key.value), document, open_, most)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            _mark(value, (*path, index), document, open_, most)
    open_.pop()


def _mark_key(key: yaml.Node, path: Path_, document: Document) -> None:
    place = (key.start_mark.line + 1, key.start_mark.column + 1)
    if not isinstance(key, yaml.ScalarNode):
        raise InputError(Fault("expected a plain text key", document.file, *place, show_path(path)))
    full = (*path, key.value)
    if full in document.keys:
        raise InputError(Fault(f"duplicate key {key.value!r}", document.file, *place, show_path(full)))
    document.keys[full] = place


def validate(kind: type[S], document: Document) -> S:
    """Return the checked `kind`. Raises InputError with one fault per mistake, each with its line."""
    if not isinstance(document.data, dict):
        raise InputError(document.fault(f"expected a mapping, got {_short(document.data)}"))
    try:
        return kind.model_validate(document.data)
    except ValidationError as error:
        raise InputError(list(_faults(kind, document, error))) from None


def _faults(kind: type[Spec], document: Document, error: ValidationError) -> Iterator[Fault]:
    """Yield one fault per place and message, those of a union's members as one, in the order of the file's fields."""
    items = [(_real_path(document.data, item), item) for item in error.errors(include_url=False)]
    members: dict[Path_, list[str]] = {}  # what each member of a union says at one place
    for path, item in items:
        if len(path) < len(item["loc"]):
            members.setdefault(path, []).append(_message(item, ()))
    seen: set[Path_] = set()
    for path, item in items:
        if item["type"] == "too_short" and _any_below(path, items):
            continue  # only the faulty items are missing
        if len(path) == len(item["loc"]):
            message = _message(item, _known_keys(kind, item["loc"]))
            place = document.key_fault if item["type"] == "extra_forbidden" else document.fault
            yield place(message, *path)
        elif path not in seen and not _any_below(path, items):
            yield document.fault(_joined(members[path]), *path)
        seen.add(path)


def _real_path(data: Any, item: Any) -> Path_:
    """Return the steps that lead through the data; pydantic also names union members and validators on the way."""
    path: list[str | int] = []
    for step in item["loc"]:
        if (isinstance(data, dict) and step in data) or (
            isinstance(data, list | tuple) and isinstance(step, int) and step < len(data)
        ):
            path.append(step)
            data = data[step]
    return (*path, item["loc"][-1]) if item["type"] == "missing" else tuple(path)


def _any_below(path: Path_, items: list[tuple[Path_, Any]]) -> bool:
    """True where a member of the union got further into the data, so that the others were not meant."""
    return any(len(other) > len(path) and other[: len(path)] == path for other, _ in items)


def _joined(messages: list[str]) -> str:
    """Return `expected a or b, got x` for two messages of that form, else the first."""
    parts = [message.removeprefix("expected ").rpartition(", got ") for message in dict.fromkeys(messages)]
    if any(not sep for _, sep, _ in parts):
        return messages[0]
    return f"expected {' or '.join(dict.fromkeys(part[0] for part in parts))}, got {parts[0][2]}"


def _known_keys(kind: type[BaseModel], loc: tuple[str | int, ...]) -> list[str]:
    """Return the keys that could stand where the last of `loc` does."""
    kinds = [kind]
    for step in loc[:-1]:
        fields = [one.model_fields[str(step)] for one in kinds if step in one.model_fields]
        kinds = [inner for field in fields for inner in _specs_in(field.annotation)] or kinds
    return [name for one in kinds for name in one.model_fields]


def _specs_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _specs_in(argument)


def _message(item: Any, known: Sequence[str]) -> str:
    kind, value, context = item["type"], item.get("input"), item.get("ctx", {})
    name = str(item["loc"][-1]) if item["loc"] else ""
    got = f", got {_short(value)}"
    plain = {
        "missing": "is required",
        "extra_forbidden": f"unknown key{suggest(name, known)}" + f"; expected one of {', '.join(known)}" * bool(known),
        "int_type": "expected an integer" + got,
        "int_from_float": "expected a whole number" + got,
        "int_parsing": "expected an integer" + got,
        "int_parsing_size": "expected a number that fits 64 bits" + got,
        "float_type": "expected a number" + got,
        "float_parsing": "expected a number" + got,
        "string_type": "expected text" + got,
        "string_too_short": "expected text that is not empty" + got,
        "string_too_long": f"expected at most {context.get('max_length')} characters" + got,
        "string_pattern_mismatch": f"expected {_NAME}" + got,
        "bool_type": "expected true or false" + got,
        "bool_parsing": "expected true or false" + got,
        "list_type": "expected a list" + got,
        "tuple_type": "expected a list" + got,
        "dict_type": "expected a mapping" + got,
        "model_type": "expected a mapping" + got,
        "too_short": f"expected at least {context.get('min_length')} items" + got,
        "too_long": f"expected at most {context.get('max_length')} items" + got,
        "finite_number": "expected a finite number" + got,
        "literal_error": f"expected {context.get('expected')}" + got,
        "greater_than": f"expected more than {_bound(context.get('gt'), name)}" + got,
        "greater_than_equal": f"expected at least {_bound(context.get('ge'), name)}" + got,
        "less_than": f"expected less than {_bound(context.get('lt'), name)}" + got,
        "less_than_equal": f"expected at most {_bound(context.get('le'), name)}" + got + _percent(value, context),
    }
    return _one_line(plain.get(kind, item["msg"].removeprefix("Value error, ")))


def _bound(bound: Any, name: str) -> str:
    """Return a bound with the SI unit that the field's name ends in, where it has one and the bound is not 0."""
    unit = next((unit for end, unit in _UNITS.items() if name.endswith(end)), "") if bound else ""
    return f"{bound:g} {unit}" if unit else str(bound)


def _percent(value: Any, context: dict[str, Any]) -> str:
    bare = isinstance(value, int | float) and context.get("le") == 1 and 2 <= value <= 100
    return f"; for a percentage write {value}%" if bare else ""


def short(value: Any, most: int = 60) -> str:
    """Return how Python writes `value`, cut to `most` characters: for errors that quote what came."""
    text = repr(value)
    return text if len(text) <= most else text[: most - 3] + "..."


def _short(value: Any) -> str:
    return "nothing" if value is None else short(value)


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

    A mapping with `like: NAME` is that preset or file, with what else the mapping says in place of what stands there.
    Files are looked up beside the document that names them. Raises InputError at the reference's line.
    """
    found = document if isinstance(document.data, dict) else _referred(family, document)
    return _varied(family, found)


def _varied(family: str, document: Document) -> Document:
    """Return a document with `like` followed, however often; the others as they are."""
    changes: list[Document] = []
    while isinstance(document.data, dict) and LIKE in document.data:
        if len(changes) == _MOST_LIKE:
            raise InputError(document.fault(f"expected at most {_MOST_LIKE} files, each like the next, got more", LIKE))
        changes.append(document)
        document = _referred(family, document.at(LIKE))
    for change in reversed(changes):
        keys = [key for key in change.data if key != LIKE]
        changed = {**document.changed, **{key: change.at(key) for key in keys}}
        document = replace(document, data={**document.data, **{key: change.data[key] for key in keys}}, changed=changed)
    return document


def _referred(family: str, document: Document) -> Document:
    """Return the preset or file that text names. Raises InputError at its line."""
    value = document.data
    if not isinstance(value, str) or not value:
        raise InputError(document.fault(f"expected a preset name, a file or a mapping, got {_short(value)}"))
    if (preset := load_preset(family, value)) is not None:
        return preset
    if family == "workloads" and value.endswith((".csv", ".jsonl")):
        way_out = f"for a trace give a mapping, such as {{source: trace, file: {value}}}"
        raise InputError(document.fault(f"expected a preset name, a YAML file or a mapping, got {value!r}; {way_out}"))
    if "/" in value or value.endswith((".yaml", ".yml", ".json")):
        return load(locate(document, value))
    if os.path.isfile(document.folder / value):
        raise InputError(document.fault(f"no preset named {value!r}; if the file is meant, write ./{value}"))
    names = preset_names(family)
    raise InputError(
        document.fault(f"no preset named {value!r}{suggest(value, names)}; shipped {family}: {', '.join(names)}")
    )


def locate(document: Document, name: str, *path: str | int) -> Path:
    """Return the path of a file that stands beside the document; without it, raise InputError at `path`'s line."""
    found = (document._elsewhere(path) or document).folder / name
    if os.path.isdir(found):
        raise InputError(document.fault(f"expected a file, got the folder {str(found)!r}", *path))
    if not os.path.exists(found):
        raise InputError(document.fault(f"no such file {str(found)!r}{_near_file(found)}", *path))
    return found


def check_output(path: str | Path, *inputs: str | Path) -> None:
    """Raise InputError when `path` cannot be written, or is one of the inputs: before the work, not after it."""
    path = Path(path)
    if _is_stream(path):
        return
    if any(os.path.realpath(path) == os.path.realpath(one) for one in inputs):
        raise InputError(Fault("would overwrite the input; give another file", str(path)))
    if os.path.isdir(path) or not path.name:
        raise InputError(Fault("cannot be written: expected a file, got a folder", str(path)))
    folder = next(folder for folder in Path(os.path.realpath(path)).parents if os.path.lexists(folder))
    if not os.path.isdir(folder):
        raise InputError(Fault(f"cannot be written: {str(folder)!r} is not a folder", str(path)))
    if not os.access(folder, os.W_OK):
        raise InputError(Fault(f"cannot be written: no permission in {str(folder)!r}", str(path)))


def _is_stream(path: str | Path) -> bool:
    """True for a pipe or a device such as /dev/stdout, which nothing can be renamed over."""
    return os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)


def write_text(path: str | Path, text: str) -> None:
    """Write a file whole or not at all, as UTF-8. Raises InputError."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: str | Path, content: bytes) -> None:
    """Write a file whole or not at all: into a neighbour first, then renamed over it. Raises InputError."""
    check_output(path)
    target = Path(os.path.realpath(path))  # what a link points to, not the link
    try:
        if _is_stream(path):
            Path(path).write_bytes(content)
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        _write_whole(target, content)
    except OSError as error:
        raise InputError(Fault(f"cannot be written: {error.strerror or error}", str(path))) from None


def _write_whole(path: Path, content: bytes) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:100]}.", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
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
