"""What differs between the two edges that carry a multiplexed stream: their message classes.

Both `protos.engine.v1` and `protos.detok.v1` have Submit, Abort, Output, GenerateRequest and
GenerateResponse of the same shape; an adapter builds them and merges outputs of one sequence.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from protos.common.v1 import common_pb2
from protos.detok.v1 import detok_pb2
from protos.engine.v1 import engine_pb2
from protos.wire.errors import Unavailable, to_proto

SubmitT = TypeVar("SubmitT", engine_pb2.Submit, detok_pb2.Submit)
OutputT = TypeVar("OutputT", engine_pb2.Output, detok_pb2.Output)


@dataclass(frozen=True, slots=True)
class StreamAdapter(Generic[SubmitT, OutputT]):
    """Builders for one edge.

    `merge(pending, new)` adds to `pending` what `new`, a later output of the same sequence, holds.
    """

    submit_request: Callable[[SubmitT], Any]
    abort_request: Callable[[int], Any]
    make_output: Callable[[int, common_pb2.Finish], OutputT]
    merge: Callable[[OutputT, OutputT], None]
    make_response: Callable[[Sequence[OutputT]], Any]


def lost_finish(lost_code: str, *, was_sent: bool) -> common_pb2.Finish:
    """The finish of a sequence whose connection broke, made at the calling end.

    `lost_code` is such as engine_lost. A sequence that was never sent has engine_unreachable, since
    it cannot be what the server was lost by.
    """
    error = (
        Unavailable(
            "A service was lost while it worked on this request; try again.", code=lost_code
        )
        if was_sent
        else Unavailable(
            "A service that this request needs cannot be reached; try again.",
            code=f"{lost_code.removesuffix('_lost')}_unreachable",
        )
    )
    return common_pb2.Finish(reason=common_pb2.FINISH_REASON_ERROR, error=to_proto(error))


def engine_adapter(
    load: Callable[[], common_pb2.EngineLoad] = common_pb2.EngineLoad,
) -> StreamAdapter[engine_pb2.Submit, engine_pb2.Output]:
    """The edge detok → engine. A server passes `load`, which each response carries."""

    def make_response(outputs: Sequence[engine_pb2.Output]) -> engine_pb2.GenerateResponse:
        return engine_pb2.GenerateResponse(outputs=outputs, load=load())

    return StreamAdapter(
        submit_request=lambda submit: engine_pb2.GenerateRequest(submit=submit),
        abort_request=lambda sequence_id: engine_pb2.GenerateRequest(
            abort=engine_pb2.Abort(sequence_id=sequence_id)
        ),
        make_output=lambda sequence_id, finish: engine_pb2.Output(
            sequence_id=sequence_id, finish=finish
        ),
        merge=engine_pb2.Output.MergeFrom,
        make_response=make_response,
    )


def detok_adapter(
    loads: Callable[[], Sequence[detok_pb2.EngineLoadReport]] = tuple,
) -> StreamAdapter[detok_pb2.Submit, detok_pb2.Output]:
    """The edge gateway → detok. A server passes `loads`, the reports that each response carries."""

    def make_response(outputs: Sequence[detok_pb2.Output]) -> detok_pb2.GenerateResponse:
        return detok_pb2.GenerateResponse(outputs=outputs, engine_loads=loads())

    return StreamAdapter(
        submit_request=lambda submit: detok_pb2.GenerateRequest(submit=submit),
        abort_request=lambda sequence_id: detok_pb2.GenerateRequest(
            abort=detok_pb2.Abort(sequence_id=sequence_id)
        ),
        make_output=lambda sequence_id, finish: detok_pb2.Output(
            sequence_id=sequence_id, finish=finish
        ),
        merge=_merge_text,
        make_response=make_response,
    )


def _merge_text(pending: detok_pb2.Output, new: detok_pb2.Output) -> None:
    # MergeFrom joins lists but replaces strings.
    text = pending.text + new.text
    pending.MergeFrom(new)
    pending.text = text
