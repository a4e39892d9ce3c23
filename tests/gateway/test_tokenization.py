"""/tokenize and /detokenize, in vLLM's words."""

import json
from typing import Any

import pytest

from protos.wire.errors import InvalidRequest
from tests.fakes.gateway_line import MODEL, GatewayLine

pytestmark = pytest.mark.asyncio(loop_scope="module")

USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.fixture
def line(module_line: GatewayLine) -> GatewayLine:
    module_line.reset()
    return module_line


async def tokenized(line: GatewayLine, **body: Any) -> dict[str, Any]:
    response = await line.client.post("/tokenize", json=body)
    assert response.status_code == 200, response.text
    return dict(response.json())


async def test_a_prompt_becomes_tokens(line: GatewayLine) -> None:
    assert await tokenized(line, prompt="aé") == {
        "count": 3,
        "max_model_len": 4096,
        "tokens": [97, 195, 169],
        "token_strs": None,
    }
    assert line.tokenizer.encoded[-1].text.add_special_tokens
    await tokenized(line, model=MODEL, prompt="", add_special_tokens=False)
    assert not line.tokenizer.encoded[-1].text.add_special_tokens


async def test_the_tokens_themselves_come_where_asked_for(line: GatewayLine) -> None:
    answer = await tokenized(line, prompt="ab", return_token_strs=True)
    assert answer["token_strs"] == ["a", "b"]


async def test_a_chat_becomes_tokens(line: GatewayLine) -> None:
    answer = await tokenized(
        line, messages=[USER], tools=[TOOL], chat_template_kwargs={"enable_thinking": False}
    )
    assert answer["tokens"] == [104, 105]
    chat = line.tokenizer.encoded[-1].chat
    assert json.loads(chat.tools_json) == [TOOL]
    assert json.loads(chat.template_kwargs_json) == {"enable_thinking": False}
    assert chat.add_generation_prompt and not chat.continue_final_message


async def test_a_chat_may_go_without_a_generation_prompt_or_continue(line: GatewayLine) -> None:
    await tokenized(line, messages=[USER], add_generation_prompt=False)
    chat = line.tokenizer.encoded[-1].chat
    assert not chat.add_generation_prompt and not chat.continue_final_message
    await tokenized(line, messages=[USER], continue_final_message=True)
    chat = line.tokenizer.encoded[-1].chat
    assert chat.continue_final_message and not chat.add_generation_prompt


async def test_tokens_become_text(line: GatewayLine) -> None:
    response = await line.client.post("/detokenize", json={"tokens": [97, 195, 169]})
    assert response.status_code == 200
    assert response.json() == {"prompt": "aé"}
    response = await line.client.post("/detokenize", json={"tokens": [], "model": MODEL})
    assert response.json() == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [USER]}, 400, "prompt"),
        ("/tokenize", {"prompt": 5}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404, "model"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"messages": [USER], "add_special_tokens": True}, 400, "add_special_tokens"),
        (
            "/tokenize",
            {"messages": [USER], "continue_final_message": True, "add_generation_prompt": True},
            400,
            "continue_final_message",
        ),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": "a"}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens[0]"),
        ("/detokenize", {"tokens": [1 << 40]}, 400, "tokens[0]"),
        ("/detokenize", {"tokens": [97, 1 << 20]}, 400, "tokens"),
        ("/detokenize", {"tokens": [97], "model": "other"}, 404, "model"),
    ],
)
async def test_bad_bodies_name_the_field(
    line: GatewayLine, path: str, body: dict[str, Any], status: int, param: str
) -> None:
    response = await line.client.post(path, json=body)
    assert response.status_code == status, response.text
    assert response.json()["error"]["param"] == param


async def test_what_the_template_refuses_is_400(line: GatewayLine) -> None:
    line.tokenizer.error = InvalidRequest("No.", code="chat_template_error", param="messages")
    response = await line.client.post("/tokenize", json={"messages": [USER]})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "chat_template_error"
