"""POST /v1/chat/completions: from the body to a job and the form of its answer."""

from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from gateway.answers import answer
from gateway.call import Call, new_call
from gateway.chat_form import ChatForm
from gateway.chat_job import ModelText, chat_job
from gateway.event_ids import LAST_EVENT_ID
from gateway.job import Job
from gateway.lanes import Lanes
from gateway.openai_schema import ChatCompletionRequest
from gateway.refusals import counts_refusals
from gateway.request_body import decode_body, read_body
from gateway.runs import Runs

PATH: Final = "/v1/chat/completions"

_decoder: Final = msgspec.json.Decoder(ChatCompletionRequest)


class ChatCompletions:
    """The endpoint."""

    def __init__(
        self,
        lanes: Lanes,
        runs: Runs,
        max_body_bytes: int,
        ping_seconds: float,
        model_text: ModelText,
    ) -> None:
        self._lanes = lanes
        self._runs = runs
        self._max_body_bytes = max_body_bytes
        self._ping_seconds = ping_seconds
        self._model_text = model_text

    @counts_refusals(PATH)
    async def create(self, request: Request) -> Response:
        call = new_call(request, PATH, await read_body(request, self._max_body_bytes))
        job, form = await self.prepare(call)
        opened = await self._runs.open(call, job, form, request.headers.get(LAST_EVENT_ID))
        return answer(opened, self._ping_seconds)

    async def prepare(self, call: Call) -> tuple[Job, ChatForm]:
        """Raises InvalidRequest."""
        body = decode_body(call.body, _decoder)
        body.check()
        model = self._lanes.model(body.model)
        job = chat_job(body, call, model, self._model_text, endpoint=PATH)
        return job, ChatForm(call, model, body, job.reading)
