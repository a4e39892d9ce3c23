"""What a request's answer comes to, streamed or whole, in a form that can be compared."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

LOGPROB_TOLERANCE: Final = 1e-5


@dataclass
class ChoiceText:
    """One choice. `logprobs` has, per token, its text and number, then those of its rivals."""

    text: str = ""
    logprobs: list[list[tuple[str, float]]] = field(default_factory=list)
    calls: dict[int, dict[str, str]] = field(default_factory=dict)
    finish_reasons: list[str] = field(default_factory=list)


@dataclass
class Answer:
    """All choices and the usage."""

    choices: dict[int, ChoiceText] = field(default_factory=dict)
    usage: dict[str, int] = field(default_factory=dict)

    def add(self, body: Mapping[str, Any]) -> None:
        """Takes a chunk, or a whole answer."""
        if body.get("usage"):
            self.usage = {
                name: body["usage"][name]
                for name in ("prompt_tokens", "completion_tokens", "total_tokens")
            }
        for piece in body["choices"]:
            choice = self.choices.setdefault(piece["index"], ChoiceText())
            message = piece.get("delta") or piece.get("message") or {}
            choice.text += (message.get("content") or "") + (piece.get("text") or "")
            for position, call in enumerate(message.get("tool_calls") or ()):
                _add_call(choice.calls, call.get("index", position), call["function"])
            choice.logprobs += _logprobs(piece.get("logprobs"))
            if piece.get("finish_reason"):
                choice.finish_reasons.append(piece["finish_reason"])

    @property
    def num_characters(self) -> int:
        return sum(
            len(choice.text) + sum(len(call["arguments"]) for call in choice.calls.values())
            for choice in self.choices.values()
        )


def _add_call(calls: dict[int, dict[str, str]], index: int, function: Mapping[str, str]) -> None:
    call = calls.setdefault(index, {"name": "", "arguments": ""})
    call["name"] += function.get("name") or ""
    call["arguments"] += function.get("arguments") or ""


def _logprobs(lists: Mapping[str, Any] | None) -> list[list[tuple[str, float]]]:
    if not lists:
        return []
    if "content" in lists:
        return [
            [(str(token["bytes"]), token["logprob"]) for token in (entry, *entry["top_logprobs"])]
            for entry in lists["content"] or ()
        ]
    tops = lists["top_logprobs"] or [{}] * len(lists["tokens"])
    return [
        [(f"{token}@{offset}", number), *sorted((top or {}).items())]
        for token, number, offset, top in zip(
            lists["tokens"], lists["token_logprobs"], lists["text_offset"], tops, strict=True
        )
    ]


def differences(reference: Answer, answer: Answer) -> list[str]:
    """How `answer` differs from `reference`, a phrase each; the first word is its kind:
    lost (a part is missing), duplicated (there is more) or wrong.
    """
    found = []
    if reference.choices.keys() != answer.choices.keys():
        found.append(f"lost: choices {sorted(answer.choices)} of {sorted(reference.choices)}")
    for index in reference.choices.keys() & answer.choices.keys():
        expected, got = reference.choices[index], answer.choices[index]
        found += [f"{phrase} (choice {index})" for phrase in _differences(expected, got)]
    if reference.usage != answer.usage:
        found.append(f"wrong: usage {answer.usage}, not {reference.usage}")
    return found


def _differences(expected: ChoiceText, got: ChoiceText) -> list[str]:
    found = []
    if expected.text != got.text:
        found.append(_text_difference("text", expected.text, got.text))
    for index in expected.calls.keys() | got.calls.keys():
        before, now = expected.calls.get(index), got.calls.get(index)
        if before != now:
            found.append(_text_difference(f"call {index}", str(before), str(now)))
    if expected.finish_reasons != got.finish_reasons:
        kind = {-1: "lost", 0: "wrong", 1: "duplicated"}[
            _sign(len(got.finish_reasons) - len(expected.finish_reasons))
        ]
        found.append(f"{kind}: finish reasons {got.finish_reasons}, not {expected.finish_reasons}")
    if len(expected.logprobs) != len(got.logprobs):
        kind = "lost" if len(got.logprobs) < len(expected.logprobs) else "duplicated"
        found.append(f"{kind}: {len(got.logprobs)} logprobs, not {len(expected.logprobs)}")
    else:
        found += _logprob_differences(expected, got)
    return found


def _logprob_differences(expected: ChoiceText, got: ChoiceText) -> list[str]:
    for position, (before, now) in enumerate(zip(expected.logprobs, got.logprobs, strict=True)):
        if [token for token, _ in before] != [token for token, _ in now]:
            return [f"wrong: token {position} is {now}, not {before}"]
        for (_, number), (_, other) in zip(before, now, strict=True):
            if not math.isclose(number, other, rel_tol=0, abs_tol=LOGPROB_TOLERANCE):
                return [f"wrong: logprob of token {position} is {other}, not {number}"]
    return []


def _text_difference(what: str, expected: str, got: str) -> str:
    same = next(
        (i for i, (a, b) in enumerate(zip(expected, got, strict=False)) if a != b),
        min(len(expected), len(got)),
    )
    kind = "wrong"
    if len(got) != len(expected):
        kind = "lost" if len(got) < len(expected) else "duplicated"
    return (
        f"{kind}: {what} of {len(got)} characters, not {len(expected)}, from {same} on "
        f"{got[same : same + 20]!r}, not {expected[same : same + 20]!r}"
    )


def _sign(number: int) -> int:
    return (number > 0) - (number < 0)
