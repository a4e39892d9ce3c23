"""What the log of a run is kept as: a head, batches of outputs, an end. Any gateway reads them."""

from collections.abc import Iterable
from typing import Final

import msgspec

from protos.common.v1 import common_pb2
from protos.detok.v1 import detok_pb2
from protos.wire.errors import TokenlineError, from_proto, to_proto

_OUTPUTS: Final = b"o"
_HEAD: Final = b"h"
_END: Final = b"e"


class RunHead(msgspec.Struct, frozen=True, kw_only=True):
    """What is known before the first output. in_reasoning: the prompt ends where thoughts begin."""

    num_prompt_tokens: int
    in_reasoning: bool = False


class RunEnd(msgspec.Struct, frozen=True, kw_only=True):
    """How a run ended. error: a serialised protos.common.v1.Error; empty for a plain end."""

    error: bytes = b""

    @property
    def typed_error(self) -> TokenlineError | None:
        return from_proto(common_pb2.Error.FromString(self.error)) if self.error else None


_encode: Final = msgspec.msgpack.Encoder().encode
_head_decoder: Final = msgspec.msgpack.Decoder(RunHead)
_end_decoder: Final = msgspec.msgpack.Decoder(RunEnd)


def end_of(error: TokenlineError | None) -> RunEnd:
    return RunEnd(error=b"" if error is None else to_proto(error).SerializeToString())


def head_batch(head: RunHead) -> bytes:
    return _HEAD + _encode(head)


def end_batch(end: RunEnd) -> bytes:
    return _END + _encode(end)


def outputs_batch(outputs: Iterable[detok_pb2.Output]) -> bytes:
    """`sequence_id` of each output is its choice."""
    return _OUTPUTS + detok_pb2.GenerateResponse(outputs=outputs).SerializeToString()


def read_batch(batch: bytes) -> RunHead | RunEnd | list[detok_pb2.Output]:
    """Raises msgspec.DecodeError or google's DecodeError for what another version wrote."""
    kind, content = batch[:1], batch[1:]
    if kind == _HEAD:
        return _head_decoder.decode(content)
    if kind == _END:
        return _end_decoder.decode(content)
    return list(detok_pb2.GenerateResponse.FromString(content).outputs)
