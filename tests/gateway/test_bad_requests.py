"""Requests that are wrong get a clear answer in OpenAI's shape: KNOWN_FAULTS 30 and more."""

import json
from typing import Any

import pytest

from protos.wire.errors import InvalidRequest
from tests.fakes.gateway_line import MODEL, GatewayLine, gateway_line
from tests.fakes.valkey import Valkey

pytestmark = pytest.mark.asyncio(loop_scope="module")


USER = {"role": "user", "content": "hi"}
CHAT = {"model": MODEL, "messages": [USER]}
TEMPLATE_REFUSES = InvalidRequest(
    "The chat template refused the messages: roles must alternate.", param="messages"
)


@pytest.fixture
def line(module_line: GatewayLine) -> GatewayLine:
    module_line.reset()
    return module_line


def check_error(response: Any, status: int, param: str | None = None) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    body = response.json()
    assert list(body) == ["error"]
    error: dict[str, Any] = body["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert error["message"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    for leak in ("Traceback", "<class", "object at 0x", ".py", "site-packages", "msgspec"):
        assert leak not in error["message"]
    return error


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": ...}, "messages"),
        ({"messages": {}}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": "hi"}]}, "messages[0].role"),
        ({"messages": [USER, {"content": "hi"}]}, "messages[1].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"temperature": "hot"}, "temperature"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"model": ...}, "model"),
        ({"model": 5}, "model"),
    ],
)
async def test_bug_30_a_bad_chat_is_400_and_names_the_field(
    line: GatewayLine, fields: dict[str, Any], param: str, stream: bool
) -> None:
    body = {**CHAT, "stream": stream, **fields}
    body = {name: value for name, value in body.items() if value is not ...}
    response = await line.client.post("/v1/chat/completions", json=body)
    check_error(response, 400, param)
    assert not line.tokenizer.encoded


@pytest.mark.parametrize("endpoint", ["chat/completions", "completions"])
@pytest.mark.parametrize("text", ["", "{", "nonsense", "[]", '{"model": NaN}', "\ufeff{}"])
async def test_bug_30_bad_json_is_400(line: GatewayLine, endpoint: str, text: str) -> None:
    check_error(await line.client.post(f"/v1/{endpoint}", content=text.encode()), 400)


@pytest.mark.parametrize("endpoint", ["chat", "complete"])
@pytest.mark.parametrize("stream", [False, True])
async def test_bug_30_an_unknown_model_is_404(
    line: GatewayLine, endpoint: str, stream: bool
) -> None:
    response = await line.send(endpoint, model="other", stream=stream)
    assert check_error(response, 404, "model")["code"] == "model_not_found"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages"])
async def test_a_message_that_quotes_the_request_stays_short(line: GatewayLine, path: str) -> None:
    body = {**CHAT, "prompt": "hi", "max_tokens": 1, "model": "m" * (1 << 20)}
    response = await line.client.post(path, json=body)
    assert response.status_code == 404
    assert len(response.content) < 3000


@pytest.mark.parametrize("stream", [False, True])
async def test_bug_30_what_the_template_refuses_is_400(line: GatewayLine, stream: bool) -> None:
    line.tokenizer.error = TEMPLATE_REFUSES
    error = check_error(await line.chat(stream=stream), 400, "messages")
    assert error["message"] == TEMPLATE_REFUSES.message


@pytest.mark.parametrize("stream", [False, True])
async def test_a_fault_of_ours_says_nothing_of_its_cause(line: GatewayLine, stream: bool) -> None:
    line.tokenizer.error = ValueError("secret")  # type: ignore[assignment]
    response = await line.chat(stream=stream)
    assert response.status_code == 500
    assert "secret" not in response.text
    assert response.json()["error"]["type"] == "server_error"


@pytest.mark.parametrize(
    ("path", "method", "status"),
    [
        ("/nowhere", "GET", 404),
        ("/v1/chat/completions/", "POST", 404),
        ("/v1/chat/completions", "GET", 405),
        ("/v1/models", "POST", 405),
        ("/v1/models/other", "GET", 404),
        ("/v1/requests/none", "GET", 404),
        ("/v1/requests/none", "DELETE", 404),
        ("/v1/requests/none", "POST", 405),
    ],
)
async def test_unknown_places_answer_in_the_same_shape(
    line: GatewayLine, path: str, method: str, status: int
) -> None:
    response = await line.client.request(method, path)
    param = "model" if path.startswith("/v1/models/") else None
    check_error(response, status, param)
    assert ("allow" in response.headers) == (status == 405)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (r'"messages": [{"role": "user", "content": "\ud83d"}]', "messages[0].content"),
        (r'"messages": [{"role": "user", "content": "\ude00x"}]', "messages[0].content"),
        (r'"messages": [{"role": "user", "content": "\ud83dx"}]', "messages[0].content"),
        (r'"messages": [{"role": "user", "content": "a", "k": ["\ud83d"]}]', "messages[0].k[0]"),
        (r'"messages": [{"role": "user", "\ud83d": "a"}]', "messages[0]"),
        (r'"stop": "\ud83d"', "stop"),
        (r'"stop": ["a", "\ud83dx"]', "stop[1]"),
        (r'"tools": [{"type": "\ude00x"}]', "tools[0].type"),
        (r'"chat_template_kwargs": {"a": "\ude00x"}', "chat_template_kwargs.a"),
        (r'"ignored": "\ude00x"', "ignored"),
        (b'"messages": [{"role": "user", "content": "\xed\xa0\xbd"}]', "messages[0].content"),
        (b'"messages": [{"role": "user", "content": "\xff"}]', "messages[0].content"),
        (b'"model": "\xff"', "model"),
    ],
)
async def test_what_is_no_unicode_text_is_400_and_names_the_field(
    line: GatewayLine, fields: str | bytes, param: str
) -> None:
    # The last of two fields with one name is taken.
    more = fields.encode() if isinstance(fields, str) else fields
    body = json.dumps(CHAT)[:-1].encode() + b", " + more + b"}"
    response = await line.client.post("/v1/chat/completions", content=body)
    assert check_error(response, 400, param)["code"] == "invalid_string"
    assert not line.tokenizer.encoded


@pytest.mark.parametrize("number", ["1e400", "-1e400", "9" * 5000])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ('"messages": [{"role": "user", "content": "a", "k": N}]', "messages[0]"),
        ('"messages": [{"role": "user", "content": N}]', "messages[0]"),
        ('"tools": [{"type": "function", "function": {"name": N}}]', "tools[0]"),
        ('"tools": N', "tools"),
        ('"temperature": N', "temperature"),
        ('"chat_template_kwargs": {"a": N}', "chat_template_kwargs"),
        ('"response_format": {"a": N}', "response_format"),
    ],
)
async def test_a_number_out_of_all_range_is_400_and_names_the_field(
    line: GatewayLine, number: str, fields: str, param: str
) -> None:
    body = json.dumps(CHAT)[:-1] + ", " + fields.replace("N", number) + "}"
    response = await line.client.post("/v1/chat/completions", content=body.encode())
    error = check_error(response, 400, param)
    assert "out of range" in error["message"] and "[...]" not in error["message"]
    assert not line.tokenizer.encoded


async def test_a_surrogate_pair_is_a_character(line: GatewayLine) -> None:
    body = b'{"model": "tiny", "messages": [{"role": "user", "content": "\\ud83d\\ude00"}]}'
    assert (await line.client.post("/v1/chat/completions", content=body)).status_code == 200
    messages = json.loads(line.tokenizer.encoded[0].chat.messages_json)
    assert messages == [{"role": "user", "content": "\N{GRINNING FACE}"}]


@pytest.mark.parametrize("where", ["ignored", "tools", "chat_template_kwargs"])
@pytest.mark.parametrize("brackets", ["[]", "{}"])
async def test_deep_nesting_is_400_even_in_ignored_fields(
    line: GatewayLine, where: str, brackets: str
) -> None:
    opening = "[" if brackets == "[]" else '{"a":'
    deep = opening * 50_000 + "1" + brackets[1] * 50_000
    body = json.dumps(CHAT)[:-1] + f', "{where}": {deep}}}'
    error = check_error(await line.client.post("/v1/chat/completions", content=body.encode()), 400)
    assert error["code"] == "too_deep"


async def test_many_brackets_are_not_deep(line: GatewayLine) -> None:
    text = '[{"\\"' * 20
    assert (
        await line.chat(messages=[{"role": "user", "content": text}] * 10, ignored=[[]] * 500)
    ).status_code == 200


async def test_a_body_over_the_limit_is_413(valkey: Valkey, redis_prefix: str) -> None:
    async with gateway_line(valkey.url, redis_prefix=redis_prefix, max_body_bytes=1000) as line:
        response = await line.chat(messages=[{"role": "user", "content": "x" * 1000}])
        assert check_error(response, 413)["code"] == "body_too_large"

        async def unannounced() -> Any:
            for _ in range(20):
                yield b" " * 100

        response = await line.client.post("/v1/completions", content=unannounced())
        assert check_error(response, 413)["code"] == "body_too_large"
        assert (await line.chat()).status_code == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_p": -0.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"min_p": 1.1}, "min_p"),
        ({"seed": 1 << 63}, "seed"),
        ({"seed": -(1 << 63) - 1}, "seed"),
        ({"seed": "x"}, "seed"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": -2.1}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop[1]"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": [1]}, "stop[0]"),
        ({"stream": "yes"}, "stream"),
        ({"logprobs": 3}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"tools": {}}, "tools"),
        ({"tools": [{"type": "code"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"stream": True, "stream_options": 1}, "stream_options"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]},
         "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
         "messages[0].content[0].type"),
        ({"messages": [{"role": "assistant", "content": None}]}, "messages[0].content"),
    ],
)  # fmt: skip
async def test_values_out_of_range_are_named(
    line: GatewayLine, fields: dict[str, Any], param: str
) -> None:
    check_error(await line.chat(**fields), 400, param)


UNSUPPORTED: list[tuple[str, str, Any, list[Any]]] = [
    ("chat", "functions", [{"name": "f"}], [[]]),
    ("chat", "function_call", {"name": "f"}, ["auto", "none"]),
    ("chat", "modalities", ["text", "audio"], [["text"]]),
    ("chat", "audio", {"voice": "x"}, [None]),
    ("chat", "chat_template", "{{ 1 }}", [None]),
    ("chat", "web_search_options", {}, [None]),
    ("complete", "suffix", "x", [None, ""]),
    ("complete", "use_beam_search", True, [False]),
    ("complete", "use_beam_search", 0, []),
    ("complete", "truncate_prompt_tokens", 5, [None]),
    ("chat", "echo", True, [False]),
]


@pytest.mark.parametrize(("endpoint", "field", "refused", "neutral"), UNSUPPORTED)
async def test_fields_without_effect_are_refused_unless_they_ask_for_nothing(
    line: GatewayLine, endpoint: str, field: str, refused: Any, neutral: list[Any]
) -> None:
    error = check_error(await line.send(endpoint, **{field: refused}), 400, field)
    assert f"`{field}`" in error["message"]
    for value in neutral:
        assert (await line.send(endpoint, **{field: value})).status_code == 200


async def test_unknown_fields_and_those_of_bookkeeping_are_ignored(line: GatewayLine) -> None:
    response = await line.chat(
        user="u",
        metadata={"a": "b"},
        service_tier="auto",
        store=True,
        safety_identifier="s",
        prompt_cache_key="k",
        never_heard_of={"deep": [1, {"x": None}]},
    )
    assert response.status_code == 200


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("/v1/chat/completions", "messages"),
        ("/v1/responses", "input"),
        ("/tokenize", "messages"),
    ],
)
async def test_too_many_messages_are_400(line: GatewayLine, path: str, param: str) -> None:
    body = {"model": MODEL, param: [{"role": "user", "content": ""}] * 10_001}
    error = check_error(await line.client.post(path, json=body), 400, param)
    assert "length <= 10000" in error["message"]
    assert not line.tokenizer.encoded


async def test_too_many_messages_of_anthropics_are_400(line: GatewayLine) -> None:
    body = {"model": MODEL, "max_tokens": 1, "messages": [USER] * 10_001}
    response = await line.client.post("/v1/messages", json=body)
    assert response.status_code == 400
    assert "length <= 10000" in response.json()["error"]["message"]
