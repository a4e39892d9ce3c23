"""The README's tables of fields say of every field what the schema does with it."""

import re
from pathlib import Path

import pytest

from gateway.openai_schema import ChatCompletionRequest, CompletionRequest

README = Path(__file__).resolve().parents[2] / "README.md"
ROW = re.compile(
    r"^\| `(?P<name>\w+)` \| (?P<chat>[^|]+) \| (?P<completions>[^|]+) \|", re.MULTILINE
)
ENDPOINTS = {"chat": ChatCompletionRequest, "completions": CompletionRequest}
# Read and checked, with no effect.
CHECKED_ONLY = {"user", "metadata"}
OPENAI_FIELDS = {
    "chat": """messages model audio frequency_penalty function_call functions logit_bias logprobs
        max_completion_tokens max_tokens metadata modalities n parallel_tool_calls prediction
        presence_penalty prompt_cache_key prompt_cache_retention reasoning_effort response_format
        safety_identifier seed service_tier stop store stream stream_options temperature
        tool_choice tools top_logprobs top_p user verbosity web_search_options""",
    "completions": """model prompt best_of echo frequency_penalty logit_bias logprobs max_tokens n
        presence_penalty seed stop stream stream_options suffix temperature top_p user""",
}


def table(endpoint: str) -> dict[str, str]:
    """What the README says of each field at the endpoint."""
    rows = [(match["name"], match[endpoint].strip()) for match in ROW.finditer(README.read_text())]
    assert len(rows) == len(dict(rows)), "a field is listed twice"
    return dict(rows)


def behaviour(endpoint: str, name: str) -> set[str]:
    """What the README may say of the field."""
    body = ENDPOINTS[endpoint]
    if name not in body.__struct_fields__:
        return {"ignored", "–"}  # noqa: RUF001
    if name in CHECKED_ONLY:
        return {"ignored"}
    return {"400"} if name in body.neutral_values else {"yes"}


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_the_table_and_the_schema_agree(endpoint: str) -> None:
    fields = table(endpoint)
    wrong = {
        name: (said, behaviour(endpoint, name))
        for name, said in fields.items()
        if said not in behaviour(endpoint, name)
    }
    assert wrong == {}
    assert set(ENDPOINTS[endpoint].__struct_fields__) <= set(fields)


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_every_field_of_openai_is_in_the_table(endpoint: str) -> None:
    fields = table(endpoint)
    missing = [name for name in OPENAI_FIELDS[endpoint].split() if fields.get(name, "–") == "–"]  # noqa: RUF001
    assert missing == []


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_every_refused_field_is_read(endpoint: str) -> None:
    body = ENDPOINTS[endpoint]
    assert set(body.neutral_values) <= set(body.__struct_fields__)
