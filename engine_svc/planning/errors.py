"""What planning refuses or fails requests with, and what ends it; wire errors are made of these."""


class RequestRefused(Exception):
    """A request that the scheduler does not take. The message is a sentence for people."""


class ContextLengthExceeded(RequestRefused):
    """Prompt and max_tokens together are longer than max_model_len."""


class KvCapacityExceeded(RequestRefused):
    """The request could not finish even with the whole KV pool to itself."""


class WaitingQueueFull(RequestRefused):
    """As many requests wait as may; the same request can succeed later."""


class SamplingFailed(Exception):
    """No token could be drawn from a request's logits. The message says why."""


class NoTokenLeft(SamplingFailed):
    """The request's own parameters leave no token possible."""


class ComputeLost(Exception):
    """What computes can compute no further step, whatever that is. The message says why."""


class RankLost(ComputeLost):
    """Another process that computes the same steps has failed, of which was told when it did."""
