"""Claims runs, finds what is left of them in Redis, and takes over those whose gateway is gone."""

from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from gateway.ledger_keys import LedgerKeys
from gateway.ledger_scripts import GIVE_BACK, REPLACE, TAKE_OVER
from gateway.ledger_writer import LIVE_TTL_SECONDS
from gateway.liveness import is_earlier_incarnation
from gateway.records import RequestRecord
from gateway.redis_batch import Batch
from gateway.redis_client import AnyRedis
from gateway.run_store import END, StoredCall, StoredRun

# A claim whose gateway never came to keep it lapses after this long.
_CLAIM_TTL_SECONDS: Final = 10
# How many owners back a log is looked for, when the last ones died before they wrote anything.
_MAX_EPOCHS_BACK: Final = 5

_decode_call: Final = msgspec.msgpack.Decoder(StoredCall).decode


class RunFinder:
    """Every method raises one of FAILURES, or msgspec.MsgspecError for what another version wrote.

    `is_here(incarnation)`: whether this gateway has that request now.
    """

    def __init__(
        self, redis: AnyRedis, keys: LedgerKeys, owner: str, is_here: Callable[[str], bool]
    ) -> None:
        self._redis = redis
        self._keys = keys
        self._owner = owner
        self._is_here = is_here

    async def claim(self, call: StoredCall) -> tuple[StoredCall, bool]:
        """Whose the key is, and whether it has just become `call`'s."""
        key = self._keys.claim(call.digest)
        encoded = call.encode()
        while True:
            batch = Batch(self._redis)
            batch.command("SET", key, encoded, "NX", "EX", _CLAIM_TTL_SECONDS)
            batch.command("GET", key, binary=True)
            _, found = await batch.execute()
            if found == encoded:
                return call, True
            if found is None:
                # It lapsed in between.
                continue
            held = _decode_call(found)
            if not await self._was_left(held):
                return held, False
            batch = Batch(self._redis)
            batch.script(REPLACE, key, found, encoded, _CLAIM_TTL_SECONDS)
            (replaced,) = await batch.execute()
            if replaced:
                return call, True

    async def unclaim(self, call: StoredCall) -> bool:
        """Whether there was such a claim."""
        batch = Batch(self._redis)
        batch.script(REPLACE, self._keys.claim(call.digest), call.encode(), "", 0)
        batch.script(REPLACE, self._keys.call(call.request_id), call.encode(), "", 0)
        replaced, _ = await batch.execute()
        return bool(replaced)

    async def find(self, request_id: str, claimed: StoredCall | None) -> StoredRun | None:
        batch = Batch(self._redis)
        batch.command("HGETALL", self._keys.record(request_id))
        batch.command("GET", self._keys.call(request_id), binary=True)
        fields, found = await batch.execute()
        calls = [_decode_call(found)] if found is not None else []
        # Another request may have had the id since: what there is under it is not the claim's then.
        is_reused = claimed is not None and (
            fields.get("incarnation", claimed.incarnation) != claimed.incarnation
        )
        if is_reused:
            fields, calls = {}, []
        calls += [claimed] if claimed is not None else []
        incarnation = fields.get("incarnation") or (calls[0].incarnation if calls else "")
        call = next((call for call in calls if call.incarnation == incarnation), None)
        if call is None:
            return None
        epoch = int(fields.get("epoch", 1))
        owner = fields.get("owner") or call.owner
        batch = Batch(self._redis)
        batch.command("EXISTS", self._keys.gateway(owner))
        log = self._keys.log(request_id, incarnation, epoch)
        batch.command("LRANGE", log, 0, -1, binary=True)
        exists, entries = await batch.execute()
        alive = fields.get("released") != "True" and self._lives(owner, incarnation, exists)
        if not alive and not entries:
            entries = await self._earlier_log(request_id, incarnation, epoch)
        ended = bool(entries) and entries[-1] == END
        if is_reused and not (alive or ended):
            return None
        return StoredRun(
            request_id=request_id,
            incarnation=incarnation,
            epoch=epoch,
            owner=owner,
            record=record_of(fields),
            call=call.call,
            digest=call.digest,
            body_digest=call.body_digest,
            batches=entries[:-1] if ended else entries,
            owner_alive=alive,
            ended=ended,
        )

    async def batches(
        self, request_id: str, incarnation: str, epoch: int, start: int
    ) -> list[bytes]:
        batch = Batch(self._redis)
        key = self._keys.log(request_id, incarnation, epoch)
        batch.command("LRANGE", key, start, -1, binary=True)
        (entries,) = await batch.execute()
        return [entry for entry in entries if entry != END]

    async def is_lost(self, record: RequestRecord) -> bool:
        """Whether nobody has the request of a live record any more."""
        batch = Batch(self._redis)
        batch.command("EXISTS", self._keys.gateway(record.owner))
        (exists,) = await batch.execute()
        return record.released or not self._lives(record.owner, record.incarnation, exists)

    async def take_over(
        self, request_id: str, incarnation: str, epoch: int, owner: str, attempt: str
    ) -> int | None:
        batch = Batch(self._redis)
        batch.script(
            TAKE_OVER,
            self._keys.record(request_id),
            *(request_id, incarnation, epoch, owner, self._owner, attempt, LIVE_TTL_SECONDS),
        )
        (taken,) = await batch.execute()
        return int(taken) or None

    async def give_back(self, request_id: str, attempt: str) -> bool:
        """Undoes an attempt to take over whose reply was lost; whether it had succeeded."""
        batch = Batch(self._redis)
        batch.script(GIVE_BACK, self._keys.record(request_id), attempt)
        (given_back,) = await batch.execute()
        return bool(given_back)

    def _lives(self, owner: str, incarnation: str, exists: bool) -> bool:
        if owner == self._owner:
            return self._is_here(incarnation)
        return bool(exists) and not is_earlier_incarnation(owner, self._owner)

    async def _was_left(self, held: StoredCall) -> bool:
        """Whether we made that claim without ever knowing, since the reply was lost."""
        if held.owner != self._owner or self._is_here(held.incarnation):
            return False
        batch = Batch(self._redis)
        batch.command("HGET", self._keys.record(held.request_id), "incarnation")
        # Its log stays under its own name, whoever has used the request's id since.
        batch.command("EXISTS", self._keys.log(held.request_id, held.incarnation, 1))
        incarnation, has_log = await batch.execute()
        return bool(incarnation != held.incarnation) and not has_log

    async def _earlier_log(self, request_id: str, incarnation: str, epoch: int) -> list[bytes]:
        """Of the last owner that wrote anything."""
        batch = Batch(self._redis)
        for earlier in range(epoch - 1, max(0, epoch - 1 - _MAX_EPOCHS_BACK), -1):
            log = self._keys.log(request_id, incarnation, earlier)
            batch.command("LRANGE", log, 0, -1, binary=True)
        return next((entries for entries in await batch.execute() if entries), [])


def record_of(fields: Mapping[str, str]) -> RequestRecord | None:
    """The record that a hash holds; None when all it has is an owner yet."""
    return RequestRecord.from_hash(fields) if "state" in fields else None
