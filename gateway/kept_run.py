"""How far one run is written to Redis, and what of it goes out next."""

import time
from collections.abc import Sequence
from typing import Any, Final

from gateway.ledger_keys import LedgerKeys
from gateway.ledger_scripts import APPEND
from gateway.ledger_writer import LIVE_TTL_SECONDS, add_record
from gateway.records import RequestRecord
from gateway.redis_batch import Batch
from gateway.run_store import END, RunSource, StoredCall

# How often what is kept of a live run has its time to live renewed, and is looked after.
_RENEW_SECONDS: Final = 10.0
# Without an idempotency key, what has ended is of use to those only who are just reading it.
_UNKEYED_TTL_SECONDS: Final = 60
# Of one log in one script, and in one round trip. Lua cannot pass on many more entries at once.
_MAX_ENTRIES: Final = 1000
_MAX_BYTES: Final = 1 << 20


class KeptRun:
    """`source` None: only the claim is kept yet, for a run that is about to begin.

    Each round `add_to` a batch, then `take` its replies. What a round wrote that failed is found
    out by the next. After it, `lost` says whether Redis had lost something, `has_more` whether
    there is more to write at once, and `done` that everything is written and nothing will follow.
    """

    def __init__(
        self,
        call: StoredCall,
        keys: LedgerKeys,
        ttl_seconds: int,
        source: RunSource | None = None,
    ) -> None:
        self.call = call
        self.source = source
        self.released: RequestRecord | None = None
        self.lost = False
        self.has_more = False
        self.done = False
        self._keys = keys
        self._ttl_seconds = ttl_seconds
        self._encoded = call.encode()
        self._has_call = False
        # It was written when it was made.
        self._has_claim = True
        self._num_written = 0
        self._rewrites = False
        self._has_end = False
        self._renew_at = 0.0
        # Of the round that is under way: whether what it writes is all, whether it is whole, and
        # where in the batch its commands are.
        self._final = False
        self._whole = False
        self._places: dict[str, int] = {}
        self._num_sent = 0

    @property
    def ending(self) -> bool:
        """What it gives by now is all."""
        return self.released is not None or (self.source is not None and self.source.ended)

    def check(self) -> None:
        """Looks at everything in the next round."""
        self._renew_at = 0.0

    def fence(self) -> None:
        if self.source is not None:
            self.source.fenced()

    def add_to(self, batch: Batch, now: float) -> int:
        """What is to be done now; the bytes of it, about."""
        self._places = {}
        self._final = self.ending
        due = self._final or now >= self._renew_at
        num_bytes = self._add_call(batch, due)
        num_bytes += self._add_claim(batch, due)
        self._whole = True
        if self.source is not None:
            num_bytes += self._add_log(batch, self.source, due)
        if self.released is not None and self._whole:
            add_record(batch, self._keys, self.released, self._ttl_seconds)
        return num_bytes

    def take(self, replies: Sequence[Any], now: float) -> None:
        """Takes note of the round; `replies` are those to the whole batch."""
        there = {part: bool(replies[place]) for part, place in self._places.items()}
        lost = not there.get("call", True) or not there.get("log", True)
        self._has_call = there.get("call", self._has_call)
        if "claim" in there:
            lost = lost or (self._has_claim and not there["claim"])
            # Once it was to be set there is one, even if it is another's.
            self._has_claim = there["claim"] or not self._has_claim
        if "log" in there:
            self._rewrites = not there["log"]
            self._num_written = 0 if self._rewrites else self._num_written + self._num_sent
            ends = self._final and self._whole and self.released is None
            self._has_end = ends and not self._rewrites
        self.lost = lost
        self.has_more = lost or not self._whole
        if not self.has_more and now >= self._renew_at:
            self._renew_at = time.monotonic() + _RENEW_SECONDS
        self.done = self._final and not self.has_more

    def _add_call(self, batch: Batch, due: bool) -> int:
        key = self._keys.call(self.call.request_id)
        if self._has_call and not due:
            return 0
        self._places["call"] = len(batch)
        if self._has_call:
            batch.command("EXPIRE", key, self._ttl)
            return 0
        batch.command("SET", key, self._encoded, "EX", self._ttl)
        return len(self._encoded)

    def _add_claim(self, batch: Batch, due: bool) -> int:
        if not self.call.digest or (self._has_claim and not due):
            return 0
        key = self._keys.claim(self.call.digest)
        self._places["claim"] = len(batch)
        if self._has_claim:
            batch.command("EXPIRE", key, self._ttl)
            return 0
        batch.command("SET", key, self._encoded, "NX", "EX", self._ttl)
        return len(self._encoded)

    def _add_log(self, batch: Batch, source: RunSource, due: bool) -> int:
        length = self._num_written
        entries = [] if self._has_end else source.batches(length)
        if self._final and self.released is None and not self._has_end:
            entries = [*entries, END]
        if not entries and not (due and length):
            return 0
        key = self._keys.log(source.request_id, source.incarnation, source.epoch)
        num_bytes, num_taken = 0, 0
        for entry in entries[:_MAX_ENTRIES]:
            if num_bytes > _MAX_BYTES:
                break
            num_bytes += len(entry)
            num_taken += 1
        self._whole = num_taken == len(entries)
        self._places["log"] = len(batch)
        self._num_sent = num_taken
        batch.script(APPEND, key, -1 if self._rewrites else length, self._ttl, *entries[:num_taken])
        return num_bytes

    @property
    def _ttl(self) -> int:
        if not self._final:
            return LIVE_TTL_SECONDS
        if self.released is not None or self.call.digest:
            return self._ttl_seconds
        return min(self._ttl_seconds, _UNKEYED_TTL_SECONDS)
