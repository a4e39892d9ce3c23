"""/v1/responses: create, also in the background; retrieve, cancel, delete, list the input."""

import asyncio
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from gateway.answers import answer
from gateway.background_responses import BackgroundResponses
from gateway.call import Call, new_call
from gateway.chat_job import ModelText, chat_job
from gateway.errors import json_response
from gateway.event_ids import LAST_EVENT_ID
from gateway.field_checks import invalid_value
from gateway.followed_response import FollowedResponse
from gateway.identity import Identity
from gateway.job import Job
from gateway.lanes import Lanes
from gateway.refusals import counts_refusals
from gateway.request_body import decode_body, read_body
from gateway.requests_api import Requests
from gateway.response_builder import ResponseBuilder
from gateway.response_form import ResponseForm
from gateway.response_input import input_items, messages_of
from gateway.response_job import chat_request, new_response
from gateway.response_schema import ResponseRequest
from gateway.response_store import ResponseStore, StoredResponse
from gateway.runs import Runs
from protos.wire.errors import Conflict, InvalidRequest, NotFound, Unavailable

PATH: Final = "/v1/responses"
_PREFIX: Final = "resp_"
# How long a cancel waits for the response to end.
_CANCEL_SECONDS: Final = 2.0
_CANCEL_POLL_SECONDS: Final = 0.02

_decoder: Final = msgspec.json.Decoder(ResponseRequest)


class Responses:
    """The endpoints. `close` ends what still runs in the background."""

    def __init__(
        self,
        lanes: Lanes,
        runs: Runs,
        max_body_bytes: int,
        ping_seconds: float,
        model_text: ModelText,
        store: ResponseStore,
        requests: Requests,
    ) -> None:
        self._lanes = lanes
        self._runs = runs
        self._max_body_bytes = max_body_bytes
        self._ping_seconds = ping_seconds
        self._model_text = model_text
        self._store = store
        self._requests = requests
        self._background = BackgroundResponses(runs, store, ping_seconds)

    async def close(self) -> None:
        await self._background.close()

    @counts_refusals(PATH)
    async def create(self, request: Request) -> Response:
        call = new_call(request, PATH, await read_body(request, self._max_body_bytes))
        job, form, stored = await self._prepare(call)
        if stored.response["background"]:
            return await self._begin_in_background(call, job, form, stored)
        opened = await self._runs.open(call, job, form, request.headers.get(LAST_EVENT_ID))
        return answer(opened, self._ping_seconds)

    async def prepare(self, call: Call) -> tuple[Job, ResponseForm]:
        """Raises InvalidRequest, and NotFound for what the response is to go on with."""
        job, form, _ = await self._prepare(call)
        return job, form

    async def _prepare(self, call: Call) -> tuple[Job, ResponseForm, StoredResponse]:
        """The job, its form, and the response as it is kept before there is anything of it."""
        body = decode_body(call.body, _decoder)
        body.check()
        response_id = f"{_PREFIX}{call.request_id}"
        items = input_items(body.input, response_id)
        messages = [*await self._earlier(body, call.tenant), *messages_of(items)]
        chat = chat_request(body, messages)
        try:
            chat.check()
            model = self._lanes.model(body.model)
            job = chat_job(chat, call, model, self._model_text, endpoint=PATH)
        except InvalidRequest as error:
            raise _in_our_terms(error) from error
        job = replace(
            job,
            prompt_param="input",
            max_tokens_param="max_output_tokens",
            is_detached=bool(body.background),
        )
        stored = StoredResponse(
            response=new_response(body, chat, response_id, call.created),
            input_items=items,
            messages=messages,
            request_id=call.request_id,
            has_events=bool(body.background and body.stream),
        )
        builder = ResponseBuilder(stored.response)
        keep = partial(self._keep, body, call.tenant, stored)
        return job, ResponseForm(builder, job.reading, keep), stored

    async def get(self, request: Request) -> Response:
        """The response as it is now, or with `stream` its events from the first or a later one."""
        tenant, stored = await self._find(request)
        if request.query_params.get("stream", "").lower() not in ("true", "1"):
            return json_response(stored.response)
        if not stored.has_events:
            raise invalid_value(
                "Only a response that was created with `background` and `stream` has events to "
                "stream.",
                "stream",
            )
        after = request.query_params.get("starting_after", "-1")
        if not after.removeprefix("-").isdecimal() or len(after) > 10:
            raise invalid_value("`starting_after` must be an event's number.", "starting_after")
        return self._followed(tenant, stored, max(0, int(after) + 1))

    async def cancel(self, request: Request) -> Response:
        """Cancels a response that runs in the background; of one that has ended, says how."""
        tenant, stored = await self._find(request)
        if not stored.response["background"]:
            raise InvalidRequest(
                "Only a response that was created with `background` can be cancelled; closing the "
                "connection ends others.",
                code="not_in_background",
            )
        if stored.is_live:
            with suppress(NotFound):
                await self._requests.cancel_by_id(stored.request_id, tenant)
        deadline = time.monotonic() + _CANCEL_SECONDS
        while stored.is_live and time.monotonic() < deadline:
            await asyncio.sleep(_CANCEL_POLL_SECONDS)
            stored = await self._store.find(tenant, stored.response["id"])
        return json_response(stored.response)

    async def delete(self, request: Request) -> Response:
        tenant, stored = await self._find(request)
        response_id = stored.response["id"]
        if stored.is_live:
            with suppress(NotFound):
                await self._requests.cancel_by_id(stored.request_id, tenant)
        await self._store.delete(tenant, response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    async def input_items(self, request: Request) -> Response:
        """What the response was asked, newest first, as in OpenAI's API."""
        _, stored = await self._find(request)
        data = stored.input_items
        if request.query_params.get("order", "desc") != "asc":
            data = data[::-1]
        return json_response(
            {
                "object": "list",
                "data": data,
                "first_id": data[0]["id"] if data else None,
                "last_id": data[-1]["id"] if data else None,
                "has_more": False,
            }
        )

    async def _find(self, request: Request) -> tuple[str, StoredResponse]:
        identity: Identity = request.state.identity
        tenant, response_id = identity.tenant, request.path_params["response_id"]
        stored = await self._store.find(tenant, response_id)
        if stored.is_live and stored.response["background"]:
            await self._background.look_after(tenant, stored)
        return tenant, stored

    async def _earlier(self, body: ResponseRequest, tenant: str) -> list[dict[str, Any]]:
        """The chat that this response goes on with."""
        if body.background and body.store is False:
            raise invalid_value("`background` needs `store`.", "background")
        if body.previous_response_id is None:
            return []
        param = "previous_response_id"
        previous = await self._store.find(tenant, body.previous_response_id, param)
        if previous.is_live:
            raise Conflict(
                f"The response `{body.previous_response_id}` is not complete yet.",
                code="response_in_progress",
                param=param,
            )
        return previous.messages

    async def _keep(self, body: ResponseRequest, tenant: str, stored: StoredResponse) -> None:
        """Keeps a response that is complete. Only who asked for it is told that it cannot be."""
        if body.store is False:
            return
        answered = messages_of(stored.response["output"], "output")
        try:
            await self._store.save(
                tenant,
                msgspec.structs.replace(stored, messages=[*stored.messages, *answered]),
            )
        except Unavailable:
            if body.store or body.background:
                raise
            stored.response["store"] = False

    async def _begin_in_background(
        self, call: Call, job: Job, form: ResponseForm, stored: StoredResponse
    ) -> Response:
        if call.key_digest:
            raise InvalidRequest(
                "Idempotency-Key cannot be combined with `background`.",
                code="invalid_value",
                param="idempotency-key",
            )
        await self._store.save(call.tenant, stored)
        body = msgspec.json.encode(stored.response)
        opened = await self._runs.open(call, job, form)
        self._background.begin(opened, form, call.tenant, stored)
        if job.streams:
            return self._followed(call.tenant, stored, 0)
        return Response(body, media_type="application/json")

    def _followed(self, tenant: str, stored: StoredResponse, start: int) -> Response:
        return FollowedResponse(
            self._store, tenant, stored.response["id"], start, self._ping_seconds
        )


def _in_our_terms(error: InvalidRequest) -> InvalidRequest:
    """An error about the chat, with the field of this API that it comes from."""
    names = {
        "messages": "input",
        "response_format": "text.format",
        "max_completion_tokens": "max_output_tokens",
    }
    param = names.get(error.param.partition("[")[0].partition(".")[0])
    if param is None:
        return error
    message = error.message.replace(f"`{error.param}`", f"`{param}`")
    return InvalidRequest(message, code=error.code, param=param)
