"""The names of what the ledger keeps in Redis. Every key has a time to live."""


class LedgerKeys:
    """All names begin with `prefix`.

    `live` is a sorted set of live request ids by the unix time at which they lapse; `channel`
    carries `incarnation id` for each cancel. A gateway that dies leaves records that lapse.
    """

    def __init__(self, prefix: str) -> None:
        self.live = f"{prefix}requests"
        self.channel = f"{prefix}cancel"
        self._prefix = prefix

    def record(self, request_id: str) -> str:
        """A hash: the record."""
        return f"{self._prefix}request:{request_id}"

    def cancel(self, request_id: str) -> str:
        """A string, the durable flag: the incarnation to cancel, or `*` for any."""
        return f"{self._prefix}cancel:{request_id}"

    def call(self, request_id: str) -> str:
        """A string, a stored call: what the run can be begun anew from."""
        return f"{self._prefix}request:{request_id}:call"

    def log(self, request_id: str, incarnation: str, epoch: int) -> str:
        """A list: the batches that one owner wrote, and an empty entry once that is all."""
        return f"{self._prefix}request:{request_id}:tokens:{incarnation}:{epoch}"

    def claim(self, digest: str) -> str:
        """A string, a stored call: the request that has an idempotency key."""
        return f"{self._prefix}idempotency:{digest}"

    def gateway(self, owner: str) -> str:
        """A string that is there while that incarnation of a gateway lives."""
        return f"{self._prefix}gateway:{owner}"
