"""Measurements on disk as they are made: a journal beside the profile, so that a run which was killed can go on.

One JSON document per line, flushed to the disk before the next measurement starts. The first line says what is measured
where; a journal of another model or machine is refused. A last line that was cut short is dropped.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

from planner.errors import Fault, InputError
from planner.specs.base import check_output

FORMAT = 1
Record = dict[str, Any]
_FRESH = "give --fresh to measure anew, or another file with -o"


def journal_path(output: Path) -> Path:
    """Return where the journal of a profile lies: beside it."""
    return output.with_name(output.name + ".journal")


class Journal:
    """What was measured so far, in order, and the file that more goes to. One process at a time holds it."""

    def __init__(self, path: Path, identity: Mapping[str, str | int], fresh: bool = False):
        """Open or begin the journal of a run. Raises InputError when it belongs to another one."""
        check_output(path)
        self.path = path
        self.records: list[Record] = []
        self._by_kind: dict[str, list[Record]] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: IO[bytes] = _held(path)
        try:
            if fresh:
                self._file.truncate(0)
            self.resumed = self._load(dict(identity))
        except BaseException:
            self._file.close()
            raise

    def _load(self, identity: Record) -> bool:
        """Take over what the file holds; return False when it held nothing."""
        found = _read(self._file, self.path)
        if not found:
            self.append([{"kind": "run", "format": FORMAT, "identity": identity}])
            return False
        _same_run(found[0], identity, self.path)
        self._keep(found)
        return len(found) > 1

    def append(self, records: Iterable[Record]) -> None:
        """Keep records, on the disk when this returns."""
        added = list(records)
        text = "".join(json.dumps(record, separators=(",", ":"), allow_nan=False) + "\n" for record in added)
        self._file.seek(0, os.SEEK_END)
        self._file.write(text.encode())
        self._file.flush()
        os.fsync(self._file.fileno())
        self._keep(added)

    def of(self, kind: str, **having: Any) -> list[Record]:
        """Return the records of a kind that hold all these values, in order."""
        mine = self._by_kind.get(kind, [])
        return [record for record in mine if all(record.get(key) == value for key, value in having.items())]

    def _keep(self, records: Iterable[Record]) -> None:
        for record in records:
            self.records.append(record)
            self._by_kind.setdefault(record["kind"], []).append(record)

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()


def _held(path: Path) -> IO[bytes]:
    """Return the file, opened for reading and appending, held for this process alone."""
    try:
        file = path.open("a+b")
    except OSError as error:
        raise InputError(Fault(f"cannot be written: {error.strerror or error}", str(path))) from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise InputError(Fault("another run is measuring into it; wait for it or give another -o", str(path))) from None
    return file


def _read(file: IO[bytes], path: Path) -> list[Record]:
    """Return the records; what follows the last line that is whole is cut off the file."""
    file.seek(0)
    content = file.read()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        file.truncate(whole)
    return [_record(line, number, path) for number, line in enumerate(content[:whole].splitlines(), 1)]


def _record(line: bytes, number: int, path: Path) -> Record:
    try:
        record = json.loads(line)
    except ValueError:
        record = None
    if not isinstance(record, dict) or not isinstance(record.get("kind"), str):
        raise InputError(Fault(f"expected a line of a profiling journal; {_FRESH}", str(path), number))
    return record


def _same_run(first: Record, identity: Record, path: Path) -> None:
    """Raise InputError unless the journal was begun for this very run."""
    if first["kind"] != "run" or first.get("format") != FORMAT or not isinstance(first.get("identity"), dict):
        raise InputError(Fault(f"expected a profiling journal of format {FORMAT}; {_FRESH}", str(path), 1))
    before: Record = first["identity"]
    for key in sorted(before.keys() | identity.keys()):
        if before.get(key) != identity.get(key):
            what = f"was measured with {key.replace('_', ' ')} {before.get(key)}, now it is {identity.get(key)}"
            raise InputError(Fault(f"{what}; {_FRESH}", str(path), 1))
