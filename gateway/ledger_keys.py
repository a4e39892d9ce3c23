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
