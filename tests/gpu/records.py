"""What parts of the run find, a line each: checks, measures with their goals, and what went wrong.

A part's process writes every record at once, as a line of JSON, so that what a part found before it
was killed, or its device failed, is kept.
"""

import json
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from enum import StrEnum

# What the report shows of a traceback, at its end.
_SHOWN_CHARACTERS = 4000
PREFIX = "record: "
# The last note of a part.
DONE = "done"


class Kind(StrEnum):
    """What a record says: that something holds or does not, how much something is, …"""

    CHECK = "check"
    MEASURE = "measure"
    SKIPPED = "skipped"
    FAILED = "failed"
    NOTE = "note"


@dataclass(frozen=True, slots=True)
class Goal:
    """What a measure should be at least, or at most, and its place in the list of goals."""

    text: str
    at_least: float | None = None
    at_most: float | None = None

    def is_met_by(self, value: float) -> bool:
        is_enough = self.at_least is None or value >= self.at_least
        return is_enough and (self.at_most is None or value <= self.at_most)


@dataclass(frozen=True, slots=True)
class Record:
    """`ok` of a check, and of a measure with a goal; seconds since the part began."""

    part: str
    kind: Kind
    name: str
    ok: bool | None = None
    value: float | None = None
    unit: str = ""
    goal: str = ""
    detail: str = ""
    seconds: float = 0.0

    def line(self) -> str:
        return PREFIX + json.dumps(asdict(self))


def read_record(line: str) -> Record | None:
    """Of what a part's process wrote; None for a line that is no record."""
    if not line.startswith(PREFIX):
        return None
    fields = json.loads(line.removeprefix(PREFIX))
    return Record(**(fields | {"kind": Kind(fields["kind"])}))


class Recorder:
    """Takes a part's records. With `is_rehearsal` no measure means anything, so none has a goal."""

    def __init__(self, part: str, write: Callable[[Record], None], is_rehearsal: bool) -> None:
        self.part = part
        self._write = write
        self._is_rehearsal = is_rehearsal
        self._started = time.monotonic()

    def add(self, record: Record) -> None:
        seconds = round(time.monotonic() - self._started, 2)
        self._write(replace(record, part=self.part, seconds=seconds))

    def check(self, name: str, ok: bool, detail: str = "") -> None:
        self.add(Record("", Kind.CHECK, name, bool(ok), detail=detail))

    def measure(self, name: str, value: float, unit: str = "", goal: Goal | None = None) -> None:
        is_judged = goal is not None and not self._is_rehearsal
        ok = goal.is_met_by(value) if goal is not None and is_judged else None
        text = goal.text if goal is not None else ""
        self.add(Record("", Kind.MEASURE, name, ok, float(value), unit, text))

    def note(self, text: str) -> None:
        self.add(Record("", Kind.NOTE, text))

    def skip(self, name: str, reason: str) -> None:
        self.add(Record("", Kind.SKIPPED, name, detail=reason))

    @contextmanager
    def case(self, name: str, *, is_check: bool = False) -> Iterator[None]:
        """What is raised inside is recorded, and the part goes on.

        With `is_check`, it is a check that nothing is.
        """
        try:
            yield
            if is_check:
                self.check(name, True)
        except AssertionError as error:
            where = traceback.format_exc()[-_SHOWN_CHARACTERS:]
            self.add(Record("", Kind.CHECK, name, False, detail=f"{error}\n{where}"))
        except Exception:
            self.add(Record("", Kind.FAILED, name, detail=last_words(traceback.format_exc())))


def last_words(text: str) -> str:
    return text[-_SHOWN_CHARACTERS:]
