"""The gateway's parts put together, and the routes that lead to them."""

from contextlib import AsyncExitStack
from types import TracebackType
from typing import Final, Self

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from gateway import chat_completions, completions
from gateway.admission import Admission
from gateway.admission_metrics import waiting_metrics
from gateway.api_docs import ApiDocs
from gateway.api_keys import ApiKeys
from gateway.authentication import Authentication
from gateway.chat_completions import ChatCompletions
from gateway.chat_job import ModelText
from gateway.completions import Completions
from gateway.edge import Edge
from gateway.engine_places import EnginePlaces
from gateway.errors import MESSAGES_PATH, answer_http_exception, answer_typed_error
from gateway.health import Health
from gateway.lanes import Lanes
from gateway.ledger import Ledger
from gateway.messages import Messages
from gateway.metrics import Metrics
from gateway.models import Models
from gateway.operations import Endpoints, operations
from gateway.pipeline import Pipeline
from gateway.queue_bounds import QueueBounds
from gateway.redis_client import AnyRedis
from gateway.request_events import RequestEvents
from gateway.requests_api import Requests
from gateway.response_store import ResponseStore
from gateway.responses import PATH as RESPONSES_PATH
from gateway.responses import Responses
from gateway.runs import Runs
from gateway.settings import Settings
from gateway.tokenization import Tokenization
from gateway.waiting_room import WaitingRoom
from protos.wire.errors import TokenlineError

# Those who check on this process have no key.
_OPEN_PATHS: Final = frozenset({"/healthz", "/readyz"})
_METRICS_PATH: Final = "/metrics"
# Pages that people open in a browser.
_BROWSED_PATHS: Final = frozenset({"/", "/docs", "/openapi.json"})


class Gateway:
    """An async context manager: inside it, `app` serves. Construct it on the running loop.

    `owner` names this incarnation of the gateway.
    """

    def __init__(self, settings: Settings, redis: AnyRedis, owner: str) -> None:
        self.metrics = Metrics()
        self.lanes = Lanes(
            settings.tokenizer, settings.detok, settings.engine, settings.recovery_seconds
        )
        self.ledger = Ledger(
            redis,
            settings.redis_prefix,
            settings.record_ttl_seconds,
            live_records=lambda: self.admission.records(),
            on_cancel=lambda request_id, incarnation: self.admission.cancel(
                request_id, incarnation
            ),
            owner=owner,
        )
        self.waiting_room = self._make_waiting_room(settings)
        self.metrics.add_source(lambda: waiting_metrics(self.waiting_room))
        self.admission = Admission(
            owner,
            settings.max_live_requests,
            self.waiting_room,
            self.metrics,
            self.ledger.save,
        )
        self.metrics.watch(
            self.admission.records,
            self.lanes.engine_loads,
            lambda: (self.ledger.available, self.ledger.num_dropped),
        )
        self._stack = AsyncExitStack()
        self.app = self._make_app(settings, redis)

    async def __aenter__(self) -> Self:
        await self._stack.enter_async_context(self.ledger)
        await self._stack.enter_async_context(self.lanes)
        self._stack.push_async_callback(self.runs.close)
        self._stack.push_async_callback(self._responses.close)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._stack.aclose()

    def _make_waiting_room(self, settings: Settings) -> WaitingRoom:
        places = EnginePlaces(self.lanes.ready_engines)
        bounds = QueueBounds(places, settings.max_queued_requests, settings.max_queued_tokens)
        room = WaitingRoom(
            places,
            bounds,
            num_sampled=lambda: self.metrics.completion_tokens,
            recovery_seconds=settings.recovery_seconds,
        )
        self.lanes.on_loads = room.look_soon
        return room

    def _make_app(self, settings: Settings, redis: AnyRedis) -> Starlette:
        self.runs = Runs(Pipeline(self.lanes, self.admission, self.metrics), self.ledger)
        limits = (settings.max_body_bytes, settings.ping_seconds)
        model_text = ModelText(settings.tool_call_format, settings.reasoning)
        requests = Requests(self.admission, self.ledger)
        events = RequestEvents(self.runs, settings.ping_seconds)
        store = ResponseStore(redis, settings.redis_prefix, settings.response_ttl_seconds)
        responses = Responses(self.lanes, self.runs, *limits, model_text, store, requests)
        self._responses = responses
        chats = ChatCompletions(self.lanes, self.runs, *limits, model_text)
        texts = Completions(self.lanes, self.runs, *limits)
        messages = Messages(self.lanes, self.runs, *limits, model_text)
        self.runs.endpoints = {
            chat_completions.PATH: chats.prepare,
            completions.PATH: texts.prepare,
            MESSAGES_PATH: messages.prepare,
            RESPONSES_PATH: responses.prepare,
        }
        described = operations(
            Endpoints(
                chats=chats,
                texts=texts,
                tokenization=Tokenization(self.lanes, settings.max_body_bytes),
                models=Models(self.lanes),
                messages=messages,
                responses=responses,
                requests=requests,
                events=events,
                health=Health(self.lanes, self.admission, self.ledger, self.metrics),
            )
        )
        docs = ApiDocs(described, needs_key=settings.api_keys is not None)
        app = Starlette(
            routes=[operation.route() for operation in (*described, *docs.operations)],
            middleware=self._middleware(settings),
            exception_handlers={
                TokenlineError: answer_typed_error,
                HTTPException: answer_http_exception,
            },
        )
        app.router.redirect_slashes = False
        return app

    def _middleware(self, settings: Settings) -> list[Middleware]:
        """From the outside in: browsers ask for CORS before they show a key."""
        open_paths = _OPEN_PATHS | ({_METRICS_PATH} if settings.public_metrics else set())
        keys = ApiKeys(settings.api_keys) if settings.api_keys is not None else None
        cors = Middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after", "retry-after-ms"],
        )
        return [
            Middleware(Edge, metrics=self.metrics),
            *([cors] if settings.cors_origins else []),
            Middleware(
                Authentication, keys=keys, open_paths=open_paths, browsed_paths=_BROWSED_PATHS
            ),
        ]
