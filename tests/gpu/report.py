"""What the run found: a JSON file that is up to date at any time, and a table for people."""

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from tests.gpu.records import DONE, Kind, Record

# Measures of the two modes of which the second costs something, by the end of their names.
_QUICKEST, _INVARIANT = "bench bf16", "bench batch-invariant"
_SECONDS, _RATE = ": on the device", ": tokens per second"
_WIDTH = 78


class Report:
    """Records of all parts, in the order in which they came; used by several threads."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._records: list[Record] = []
        self._lock = threading.Lock()
        self._started = time.monotonic()

    @property
    def has_failures(self) -> bool:
        return any(map(_is_failure, self._records)) or not self._records

    def add(self, record: Record) -> None:
        with self._lock:
            self._records.append(record)
            # Should the disk be full, the rest is still to be heard; the last writing tells.
            with suppress(OSError):
                self._write()
        if _is_failure(record):
            print(f"FAILED {record.part}: {record.name}\n{record.detail}", flush=True)
        elif record.kind is Kind.NOTE and record.name == DONE:
            print(f"{record.part}: done after {record.seconds:.1f} s", flush=True)

    def write(self) -> None:
        with self._lock:
            self._write()

    def _write(self) -> None:
        content = {
            "seconds": round(time.monotonic() - self._started, 1),
            "goals": [
                {"goal": goal, "met": all(bool(record.ok) for record in records)}
                for goal, records in self._goals().items()
            ],
            "costs_of_batch_invariance": dict(self._costs()),
            "records": [asdict(record) for record in self._records],
        }
        partial = self._path.with_name(self._path.name + ".partial")
        partial.write_text(json.dumps(content, indent=1, ensure_ascii=False), encoding="utf-8")
        os.replace(partial, self._path)

    def _goals(self) -> dict[str, list[Record]]:
        goals: dict[str, list[Record]] = {}
        for record in self._records:
            if record.goal and record.ok is not None:
                goals.setdefault(record.goal, []).append(record)
        return goals

    def _costs(self) -> Iterator[tuple[str, float]]:
        """How many times as long batch-invariant mode takes."""
        values = {(record.part, record.name): record.value for record in self._records}
        for (part, name), value in values.items():
            other = values.get((_QUICKEST, name))
            if part != _INVARIANT or not value or not other:
                continue
            if name.endswith(_SECONDS):
                yield name.removesuffix(_SECONDS), value / other
            elif name.endswith(_RATE):
                yield name.removesuffix(_RATE), other / value

    def text(self) -> str:
        """Parts, what was measured, what failed, and last the goals."""
        lines = [*self._parts(), "", *self._measures(), ""]
        lines += [
            f"{'batch-invariant, ' + name:{_WIDTH}} {cost:.2f} times as long"
            for name, cost in self._costs()
        ]
        failures = [record for record in self._records if _is_failure(record)]
        lines += ["", f"{len(failures)} failed:" if failures else "nothing failed"]
        lines += [f"  {record.part}: {record.name}" for record in failures]
        for goal, records in self._goals().items():
            lines += ["", f"{'MET   ' if all(r.ok for r in records) else 'MISSED'} {goal}"]
            for record in records:
                mark = "met" if record.ok else "missed"
                name = f"  {record.part}: {record.name}"
                lines.append(f"{name:{_WIDTH}} {_number(record):>10}  {mark}")
        return "\n".join(lines)

    def _parts(self) -> Iterator[str]:
        for part in dict.fromkeys(record.part for record in self._records):
            own = [record for record in self._records if record.part == part]
            checks = [record for record in own if record.kind is Kind.CHECK]
            passed = sum(bool(record.ok) for record in checks)
            seconds = max(record.seconds for record in own)
            yield f"{part:30} {seconds:7.1f} s  {passed} of {len(checks)} checks"
            for record in own:
                if record.kind is Kind.SKIPPED:
                    yield f"  left out: {record.name}: {record.detail}"

    def _measures(self) -> Iterator[str]:
        for record in self._records:
            if record.kind is Kind.MEASURE:
                name = f"{record.part}: {record.name}"
                yield f"{name:{_WIDTH}} {_number(record):>10} {record.unit}"


def _number(record: Record) -> str:
    value = record.value or 0.0
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _is_failure(record: Record) -> bool:
    return record.kind is Kind.FAILED or (record.kind is Kind.CHECK and not record.ok)
