"""How one response of the Responses API is answered: as its events, or whole."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, ClassVar

import msgspec

from gateway.answer_form import AnswerForm
from gateway.chat_choice import ChatReader
from gateway.chat_reducer import TextReading
from gateway.response_builder import ResponseBuilder
from gateway.usage import Usage
from protos.detok.v1 import detok_pb2
from protos.wire.errors import TokenlineError


class GrowingResponse:
    """The one choice of a whole answer."""

    def __init__(self, form: "ResponseForm") -> None:
        self._form = form
        self.finish_reason: str | None = None

    def add(self, output: detok_pb2.Output) -> None:
        self._form.read(output)
        self.finish_reason = self._form.finish_reason


class ResponseForm(AnswerForm[GrowingResponse]):
    """`keep` is awaited when the response is complete, before its end is told."""

    end_of_stream: ClassVar[bytes] = b""

    def __init__(
        self, builder: ResponseBuilder, reading: TextReading, keep: Callable[[], Awaitable[None]]
    ) -> None:
        self._builder = builder
        self._reading = reading
        self._keep = keep
        self._reader = ChatReader(reading, builder.response["id"], in_reasoning=False)
        self._has_begun = False
        self.finish_reason: str | None = None

    def begin(self, *, in_reasoning: bool) -> None:
        self._reader = ChatReader(
            self._reading, self._builder.response["id"], in_reasoning=in_reasoning
        )

    @property
    def response(self) -> dict[str, Any]:
        """The API's object, as far as it has come."""
        return self._builder.response

    def new_choice(self) -> GrowingResponse:
        return GrowingResponse(self)

    def read(self, output: detok_pb2.Output) -> bytes:
        """Events for what came."""
        events = b"" if self._has_begun else self._builder.begin()
        self._has_begun = True
        delta = self._reader.read(output)
        self.finish_reason = delta.finish_reason
        return events + self._builder.add(delta, len(output.token_ids))

    def output_events(self, index: int, output: detok_pb2.Output, usage: Usage) -> bytes:
        return self.read(output)

    async def last_events(self, usage: Usage) -> bytes:
        events = self._builder.finish(self.finish_reason or "stop", usage)
        await self._keep()
        return events + self._builder.last_event()

    def failure_events(self, error: TokenlineError) -> bytes:
        begun = b"" if self._has_begun else self._builder.begin()
        return begun + self._builder.fail(error) + self._builder.last_event()

    async def whole(self, choices: Sequence[GrowingResponse], usage: Usage) -> bytes:
        self._builder.finish(self.finish_reason or "stop", usage)
        await self._keep()
        return msgspec.json.encode(self._builder.response)
