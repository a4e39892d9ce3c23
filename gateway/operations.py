"""Every operation of the API in one table: what the router serves and /openapi.json tells."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from gateway import answer_schema as answers
from gateway import chat_completions, completions, responses
from gateway.chat_completions import ChatCompletions
from gateway.completions import Completions
from gateway.errors import MESSAGES_PATH
from gateway.health import Health
from gateway.message_schema import MessagesRequest, MessagesToCount
from gateway.messages import Messages
from gateway.models import Models
from gateway.openai_schema import ChatCompletionRequest, CompletionRequest
from gateway.request_events import RequestEvents
from gateway.request_operations import request_operations
from gateway.requests_api import Requests
from gateway.response_schema import ResponseRequest
from gateway.responses import Responses
from gateway.routes import ANY_ERRORS, EVENT_STREAM, JSON, Operation
from gateway.tokenization import (
    DetokenizeAnswer,
    DetokenizeRequest,
    Tokenization,
    TokenizeAnswer,
    TokenizeRequest,
)

_BODY: Final = (*ANY_ERRORS, 404, 413)
# A request id in use, its time over, too many requests, cancelled before an answer.
_GENERATION: Final = (*_BODY, 408, 409, 422, 429, 499)
_STREAMED: Final = (JSON, EVENT_STREAM)


@dataclass(frozen=True)
class Endpoints:
    """The objects whose methods answer."""

    chats: ChatCompletions
    texts: Completions
    messages: Messages
    responses: Responses
    tokenization: Tokenization
    models: Models
    requests: Requests
    events: RequestEvents
    health: Health


def operations(of: Endpoints) -> Sequence[Operation]:
    """The table, in the order in which the router tries it."""
    return (
        *_generation(of),
        *_messages(of),
        *_responses(of),
        *_tokens(of),
        *_models(of),
        *request_operations(of.requests, of.events),
        *_health(of),
    )


def _generation(of: Endpoints) -> Sequence[Operation]:
    return (
        Operation(
            method="POST",
            path=chat_completions.PATH,
            endpoint=of.chats.create,
            summary="Answer a chat, whole or as a stream of chunks",
            tag="Generation",
            body=ChatCompletionRequest,
            answers={200: answers.ChatCompletion},
            media_types=_STREAMED,
            errors=_GENERATION,
        ),
        Operation(
            method="POST",
            path=completions.PATH,
            endpoint=of.texts.create,
            summary="Continue a text, whole or as a stream of chunks",
            tag="Generation",
            body=CompletionRequest,
            answers={200: answers.TextCompletion},
            media_types=_STREAMED,
            errors=_GENERATION,
        ),
    )


def _messages(of: Endpoints) -> Sequence[Operation]:
    return (
        Operation(
            method="POST",
            path=MESSAGES_PATH,
            endpoint=of.messages.create,
            summary="Answer messages as Anthropic's API does, whole or as a stream of events",
            tag="Messages",
            body=MessagesRequest,
            answers={200: answers.MessageAnswer},
            media_types=_STREAMED,
            errors=_GENERATION,
            error_body=answers.MessageErrorAnswer,
        ),
        Operation(
            method="POST",
            path=f"{MESSAGES_PATH}/count_tokens",
            endpoint=of.messages.count_tokens,
            summary="How many tokens messages come to",
            tag="Messages",
            body=MessagesToCount,
            answers={200: answers.MessageTokens},
            errors=_BODY,
            error_body=answers.MessageErrorAnswer,
        ),
    )


def _responses(of: Endpoints) -> Sequence[Operation]:
    one = f"{responses.PATH}/{{response_id:path}}"
    return (
        Operation(
            method="POST",
            path=responses.PATH,
            endpoint=of.responses.create,
            summary="Create a response, whole, as a stream of events, or in the background",
            tag="Responses",
            body=ResponseRequest,
            answers={200: answers.ResponseAnswer},
            media_types=_STREAMED,
            errors=_GENERATION,
        ),
        Operation(
            method="POST",
            path=f"{one}/cancel",
            endpoint=of.responses.cancel,
            summary="Cancel a response that runs in the background",
            tag="Responses",
            answers={200: answers.ResponseAnswer},
            errors=(*ANY_ERRORS, 404),
        ),
        Operation(
            method="GET",
            path=f"{one}/input_items",
            endpoint=of.responses.input_items,
            summary="What a response was asked",
            tag="Responses",
            answers={200: answers.ItemList},
            errors=(*ANY_ERRORS, 404),
            parameters={"order": Literal["asc", "desc"]},
        ),
        Operation(
            method="GET",
            path=one,
            endpoint=of.responses.get,
            summary="A response that is kept, or with `stream` its events",
            tag="Responses",
            answers={200: answers.ResponseAnswer},
            media_types=_STREAMED,
            errors=(*ANY_ERRORS, 404),
            parameters={"stream": bool, "starting_after": int},
        ),
        Operation(
            method="DELETE",
            path=one,
            endpoint=of.responses.delete,
            summary="Forget a response, and end it where it still runs",
            tag="Responses",
            answers={200: answers.Deletion},
            errors=(*ANY_ERRORS, 404),
        ),
    )


def _tokens(of: Endpoints) -> Sequence[Operation]:
    return (
        Operation(
            method="POST",
            path="/tokenize",
            endpoint=of.tokenization.tokenize,
            summary="The token ids of a prompt or a chat",
            tag="Tokens",
            body=TokenizeRequest,
            answers={200: TokenizeAnswer},
            errors=_BODY,
        ),
        Operation(
            method="POST",
            path="/detokenize",
            endpoint=of.tokenization.detokenize,
            summary="The text of token ids",
            tag="Tokens",
            body=DetokenizeRequest,
            answers={200: DetokenizeAnswer},
            errors=_BODY,
        ),
    )


def _models(of: Endpoints) -> Sequence[Operation]:
    return (
        Operation(
            method="GET",
            path="/v1/models",
            endpoint=of.models.list,
            summary="The models that are served",
            tag="Models",
            answers={200: answers.ModelList},
            errors=ANY_ERRORS,
        ),
        Operation(
            method="GET",
            path="/v1/models/{model:path}",
            endpoint=of.models.get,
            summary="One model",
            tag="Models",
            answers={200: answers.ModelAnswer},
            errors=(*ANY_ERRORS, 404),
        ),
    )


def _health(of: Endpoints) -> Sequence[Operation]:
    return (
        Operation(
            method="GET",
            path="/healthz",
            endpoint=of.health.healthz,
            summary="Whether the gateway is alive",
            tag="Health",
            answers={200: answers.HealthAnswer},
            errors=(400, 431, 500),
            needs_no_key=True,
        ),
        Operation(
            method="GET",
            path="/readyz",
            endpoint=of.health.readyz,
            summary="Whether requests can be served, and what is missing",
            tag="Health",
            answers={200: answers.ReadinessAnswer, 503: answers.ReadinessAnswer},
            errors=(400, 431, 500),
            needs_no_key=True,
        ),
        Operation(
            method="GET",
            path="/metrics",
            endpoint=of.health.metrics,
            summary="Counters and gauges for Prometheus",
            tag="Health",
            answers={200: None},
            media_types=("text/plain",),
            errors=ANY_ERRORS,
        ),
        Operation(
            method="GET",
            path="/",
            endpoint=of.health.about,
            summary="What this is",
            tag="Health",
            answers={200: answers.AboutAnswer},
            errors=ANY_ERRORS,
        ),
    )
