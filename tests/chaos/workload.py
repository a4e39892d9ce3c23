"""The requests of a chaos run: mixed, seeded, and the same in every round."""

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

CHAT: Final = "/v1/chat/completions"
TEXT: Final = "/v1/completions"

# Arrivals are spread over this long, so that a fault meets requests in every stage.
_ARRIVAL_SECONDS: Final = 1.2
_MIN_TOKENS, _MAX_TOKENS = 64, 200
_NUM_LONG_WORDS: Final = 700
_WORDS: Final = (
    "the quick brown fox jumps over lazy dog it's late def add first second return sum user "
    "system assistant model tool name search Straße naïve café мир 你好 世界 tabs blanks 12:34"
)
_SCHEMA: Final = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 20, "maxLength": 60},
        "kind": {"enum": ["plain", "sharp", "heavy"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99999},
        "tags": {"type": "array", "items": {"enum": ["x", "y", "z"]}, "minItems": 3, "maxItems": 9},
    },
    "required": ["name", "kind", "count", "tags"],
    "additionalProperties": False,
}
_TOOL: Final = {
    "type": "function",
    "function": {
        "name": "search",
        "parameters": {
            "type": "object",
            "properties": {
                "query": {"type": "string", "minLength": 20, "maxLength": 60},
                "limit": {"type": "integer", "minimum": 1, "maximum": 50},
            },
            "required": ["query", "limit"],
            "additionalProperties": False,
        },
    },
}


@dataclass(frozen=True)
class Request:
    """One request. `stops_at_own_text`: it is given a stop string out of its own answer.

    start_seconds: when it is sent, after its round's beginning.
    """

    number: int
    kind: str
    path: str
    body: Mapping[str, Any]
    start_seconds: float
    stops_at_own_text: bool = False

    @property
    def streams(self) -> bool:
        return bool(self.body.get("stream"))

    @property
    def name(self) -> str:
        return f"{self.number:02} ({self.kind})"


@dataclass
class Kind:
    """What the requests of one kind have in their bodies, besides prompt, length and seed."""

    name: str
    path: str
    fields: dict[str, Any] = field(default_factory=dict)
    is_long: bool = False
    is_whole: bool = False
    stops_at_own_text: bool = False


_GREEDY: Final = {"temperature": 0}
_PENALTIES: Final = {
    "presence_penalty": 0.4,
    "frequency_penalty": 0.3,
    "repetition_penalty": 1.1,
}
_NARROW: Final = {"temperature": 0.9, "top_p": 0.9, "top_k": 40}
_USAGE: Final = {"stream_options": {"include_usage": True}}
_FORMAT: Final = {
    "response_format": {
        "type": "json_schema",
        "json_schema": {"name": "thing", "schema": _SCHEMA, "strict": True},
    },
    "ignore_eos": False,
}
_CALLS: Final = {"tools": [_TOOL], "tool_choice": "required", "ignore_eos": False}
KINDS: Final = (
    Kind("greedy chat", CHAT, {**_GREEDY, **_USAGE}),
    Kind("seeded chat", CHAT, {**_NARROW, **_USAGE}),
    Kind("penalties", TEXT, {**_NARROW, **_PENALTIES, **_USAGE}),
    Kind("stop string", TEXT, {**_NARROW, **_USAGE}, stops_at_own_text=True),
    Kind("chat logprobs", CHAT, {**_NARROW, "logprobs": True, "top_logprobs": 2, **_USAGE}),
    Kind("text logprobs", TEXT, {**_GREEDY, **_PENALTIES, "logprobs": 2, **_USAGE}),
    Kind("two choices", CHAT, {"n": 2, **_NARROW, **_USAGE}),
    Kind("json schema", CHAT, {**_FORMAT, **_USAGE}),
    Kind("long prompt", TEXT, {**_GREEDY, **_USAGE}, is_long=True),
    Kind("whole chat", CHAT, {**_NARROW}, is_whole=True),
    Kind(
        "two choices, stop string, logprobs",
        TEXT,
        {"n": 2, **_NARROW, "logprobs": 2, "include_stop_str_in_output": True, **_USAGE},
        stops_at_own_text=True,
    ),
    Kind("tool call", CHAT, {**_CALLS, **_USAGE}),
    Kind("long chat, no usage", CHAT, {**_NARROW}, is_long=True),
    Kind(
        "whole, stop string, logprobs",
        TEXT,
        {**_NARROW, "logprobs": 2},
        is_whole=True,
        stops_at_own_text=True,
    ),
)


def make_workload(model: str, num_requests: int, seed: int) -> list[Request]:
    """The requests, of each kind in turn. Stop strings are still missing (`with_own_stop`)."""
    source = random.Random(seed)
    return [
        _request(KINDS[number % len(KINDS)], number, model, source)
        for number in range(num_requests)
    ]


def _request(kind: Kind, number: int, model: str, source: random.Random) -> Request:
    prompt = " ".join(source.choices(_WORDS.split(), k=_NUM_LONG_WORDS if kind.is_long else 12))
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": source.randint(_MIN_TOKENS, _MAX_TOKENS),
        "seed": source.getrandbits(40),
        "ignore_eos": True,
        **kind.fields,
    }
    if kind.path == CHAT:
        body["messages"] = [
            {"role": "system", "content": "You say what comes to mind."},
            {"role": "user", "content": prompt},
        ]
    else:
        body["prompt"] = prompt
    if not kind.is_whole:
        body["stream"] = True
    # The first half comes at once.
    start = 0.0 if number % 2 == 0 else source.uniform(0.0, _ARRIVAL_SECONDS)
    return Request(number, kind.name, kind.path, body, start, kind.stops_at_own_text)


def with_own_stop(request: Request, text: str) -> Request:
    """The request with stop strings, one of which occurs late in `text`, its answer without."""
    found = late_text(text)
    stops = ["never to be seen\n", *found]
    return replace(request, body={**request.body, "stop": stops}, stops_at_own_text=False)


def late_text(text: str) -> Sequence[str]:
    """A few characters that first occur in the second half of `text`; empty if there are none."""
    for match in re.finditer(r"[\x20-\x7e]{3,6}", text):
        if match.start() > len(text) // 2 and text.find(match.group()) == match.start():
            return [match.group()]
    return []
