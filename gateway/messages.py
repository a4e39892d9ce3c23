"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages API."""

from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from gateway.answers import answer
from gateway.call import Call, new_call
from gateway.chat_job import ModelText, chat_job
from gateway.errors import MESSAGES_PATH, json_response
from gateway.event_ids import LAST_EVENT_ID
from gateway.job import Job
from gateway.lanes import Lanes
from gateway.message_form import MessageForm
from gateway.message_input import chat_request
from gateway.message_schema import MessagesRequest, MessagesToCount
from gateway.refusals import counts_refusals
from gateway.request_body import decode_body, read_body
from gateway.runs import Runs
from protos.tokenizer.v1 import tokenizer_pb2

_PREFIX: Final = "msg_"

_decoder: Final = msgspec.json.Decoder(MessagesRequest)
_count_decoder: Final = msgspec.json.Decoder(MessagesToCount)


class Messages:
    """The endpoints."""

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

    @counts_refusals(MESSAGES_PATH)
    async def create(self, request: Request) -> Response:
        call = new_call(request, MESSAGES_PATH, await read_body(request, self._max_body_bytes))
        job, form = await self.prepare(call)
        opened = await self._runs.open(call, job, form, request.headers.get(LAST_EVENT_ID))
        return answer(opened, self._ping_seconds)

    async def prepare(self, call: Call) -> tuple[Job, MessageForm]:
        """Raises InvalidRequest."""
        body = decode_body(call.body, _decoder)
        chat = chat_request(body)
        chat.check()
        model = self._lanes.model(body.model)
        job = chat_job(chat, call, model, self._model_text, endpoint=MESSAGES_PATH)
        return job, MessageForm(f"{_PREFIX}{call.request_id}", model.name, job.reading)

    async def count_tokens(self, request: Request) -> Response:
        call = new_call(request, MESSAGES_PATH, await read_body(request, self._max_body_bytes))
        body = decode_body(call.body, _count_decoder)
        chat = chat_request(body)
        chat.check()
        model = self._lanes.model(body.model)
        job = chat_job(chat, call, model, self._model_text, endpoint=MESSAGES_PATH)
        [prompt] = job.prompts
        assert isinstance(prompt, tokenizer_pb2.EncodeRequest)
        encoded = await self._lanes.encode(prompt)
        return json_response({"input_tokens": len(encoded.token_ids)})
