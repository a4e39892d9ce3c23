"""POST /v1/chat/completions: from the body to a job and the form of its answer."""

from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from gateway.answers import answer
from gateway.chat_form import ChatForm
from gateway.chat_job import ModelText, chat_job
from gateway.identity import checked_identity
from gateway.lanes import Lanes
from gateway.openai_schema import ChatCompletionRequest
from gateway.pipeline import Pipeline
from gateway.refusals import counts_refusals
from gateway.request_body import decode_body, read_body

PATH: Final = "/v1/chat/completions"

_decoder: Final = msgspec.json.Decoder(ChatCompletionRequest)


class ChatCompletions:
    """The endpoint."""

    def __init__(
        self,
        lanes: Lanes,
        pipeline: Pipeline,
        max_body_bytes: int,
        ping_seconds: float,
        model_text: ModelText,
    ) -> None:
        self._lanes = lanes
        self._pipeline = pipeline
        self._max_body_bytes = max_body_bytes
        self._ping_seconds = ping_seconds
        self._model_text = model_text

    @counts_refusals(PATH)
    async def create(self, request: Request) -> Response:
        identity = checked_identity(request)
        body = decode_body(await read_body(request, self._max_body_bytes), _decoder)
        body.check()
        model = self._lanes.model(body.model)
        job, reading = chat_job(body, identity, model, self._model_text, endpoint=PATH)
        form = ChatForm(job.request_id, model, body, reading)
        return answer(self._pipeline, job, form, self._ping_seconds)
