"""Speaks to a gateway's HTTP API on behalf of the commands."""

import json
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self
from urllib.parse import urlsplit

import httpx2

from compose.errors import CommandError
from compose.own_command import own_command

_DATA: Final = "data:"
_CONNECT_SECONDS: Final = 5.0


@dataclass(frozen=True)
class AnswerPart:
    """What one event of a streamed answer brought; `completion_tokens` only at the end."""

    text: str = ""
    finish_reason: str = ""
    completion_tokens: int | None = None


@dataclass(frozen=True)
class ServedModel:
    """`max_model_len`: the most tokens of a prompt and its answer together, where that is told."""

    name: str
    max_model_len: int | None


@dataclass(frozen=True)
class LiveRequest:
    """A request that runs now; `created` is in unix seconds, `engine` empty before it has one."""

    request_id: str
    state: str
    created: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    engine: str


class GatewayClient:
    """A connection to one gateway. Every failure is raised as CommandError.

    `api_key` is sent with each request where there is one.
    """

    def __init__(self, url: str, api_key: str = "") -> None:
        self._url = _base_url(url)
        # No read limit: the first token of a long prompt can take its time.
        timeout = httpx2.Timeout(None, connect=_CONNECT_SECONDS)
        headers = {"authorization": f"Bearer {_checked_key(api_key)}"} if api_key else {}
        self._http = httpx2.Client(base_url=self._url, timeout=timeout, headers=headers)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._http.close()

    @property
    def url(self) -> str:
        """Where the gateway is, without the path of its API."""
        return self._url

    def model(self) -> ServedModel:
        """The first model that the gateway serves."""
        with self._request("GET", "/v1/models") as answer:
            models = answer.json()["data"]
            if not models:
                raise CommandError(f"the line at {self._url} is not ready: it serves no model yet")
            return ServedModel(str(models[0]["id"]), models[0].get("max_model_len"))

    def live_requests(self) -> list[LiveRequest]:
        """The requests that run now, on any gateway of the line."""
        with self._request("GET", "/v1/requests") as answer:
            return [_live_request(record) for record in answer.json()["data"]]

    def stream_chat(
        self, model: str, messages: Sequence[Mapping[str, str]], parameters: Mapping[str, Any]
    ) -> Generator[AnswerPart, None, None]:
        """Streams the answer to `messages`. Closing the iterator cancels the request."""
        body = {
            "model": model,
            "messages": list(messages),
            "stream": True,
            "stream_options": {"include_usage": True},
            **parameters,
        }
        with self._request("POST", "/v1/chat/completions", body) as answer:
            for line in answer.iter_lines():
                if not line.startswith(_DATA):
                    continue
                data = line.removeprefix(_DATA).strip()
                if data == "[DONE]":
                    return
                yield _answer_part(json.loads(data))
        raise CommandError("the answer broke off: the gateway closed the connection")

    @contextmanager
    def _request(
        self, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> Iterator[httpx2.Response]:
        try:
            with self._http.stream(method, path, json=body) as answer:
                if body is None or answer.is_error:
                    answer.read()
                if answer.status_code == httpx2.codes.UNAUTHORIZED:
                    raise CommandError(
                        f"{_error_text(answer)} Give a key with --api-key or TOKENLINE_API_KEY"
                    )
                if answer.is_error:
                    raise CommandError(_error_text(answer))
                yield answer
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            raise CommandError(
                f"nothing answers at {self._url} ({str(error) or type(error).__name__}): start a "
                f"line with `{own_command()} up`, or name another place with --url"
            ) from error
        except httpx2.HTTPError as error:
            raise CommandError(f"the connection to {self._url} broke: {error}") from error
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise CommandError(
                f"{self._url} does not answer as a gateway does ({type(error).__name__}: {error})"
            ) from error


def _base_url(url: str) -> str:
    """`url` with a scheme and without the path of the API; raises CommandError."""
    whole = url if "://" in url else f"http://{url}"
    try:
        parts = urlsplit(whole)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_url = False
    if not is_url or any(character.isspace() for character in url):
        raise CommandError(f"--url: expected a URL such as http://127.0.0.1:8000, got {url!r}")
    return whole.rstrip("/").removesuffix("/v1")


def _checked_key(api_key: str) -> str:
    """`api_key` if a header can carry it; raises CommandError, which does not show it."""
    if not (api_key.isascii() and api_key.isprintable()) or api_key != api_key.strip():
        raise CommandError("--api-key: a key has neither white space around it nor odd characters")
    return api_key


def _live_request(record: Mapping[str, Any]) -> LiveRequest:
    return LiveRequest(
        request_id=record["id"],
        state=record["state"],
        created=float(record["created"]),
        num_prompt_tokens=record["num_prompt_tokens"],
        num_cached_tokens=record["num_cached_tokens"],
        num_output_tokens=record["num_output_tokens"],
        engine=record["engine"] or "",
    )


def _answer_part(event: Mapping[str, Any]) -> AnswerPart:
    if "error" in event:
        raise CommandError(f"the answer broke off: {event['error']['message']}")
    usage = event.get("usage") or {}
    choices = event.get("choices") or []
    if not choices:
        return AnswerPart(completion_tokens=usage.get("completion_tokens"))
    return AnswerPart(
        text=choices[0].get("delta", {}).get("content") or "",
        finish_reason=choices[0].get("finish_reason") or "",
        completion_tokens=usage.get("completion_tokens"),
    )


def _error_text(answer: httpx2.Response) -> str:
    try:
        return f"the gateway refused: {answer.json()['error']['message']}"
    except (ValueError, KeyError, TypeError):
        return f"the gateway answered with status {answer.status_code}"
