"""POST /tokenize and /detokenize: prompts to token ids and back, with vLLM's field names."""

from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from gateway.chat_messages import checked_messages, checked_tools
from gateway.errors import json_response
from gateway.field_checks import invalid_value, unsupported_value
from gateway.generation_fields import TokenId
from gateway.lanes import Lanes
from gateway.prompt_size import check_prompt_bytes
from gateway.request_body import decode_body, read_body
from protos.tokenizer.v1 import tokenizer_pb2

_NULL: Final = msgspec.Raw(b"null")


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /tokenize: a `prompt`, or the `messages` of a chat with what belongs to it."""

    model: str | None = None
    prompt: str | None = None
    # By default true for a prompt; a chat's template writes them itself.
    add_special_tokens: bool | None = None
    messages: msgspec.Raw = _NULL
    tools: msgspec.Raw = _NULL
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class TokenizeAnswer(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[TokenId]


class DetokenizeAnswer(msgspec.Struct):
    prompt: str


_tokenize_decoder: Final = msgspec.json.Decoder(TokenizeRequest)
_detokenize_decoder: Final = msgspec.json.Decoder(DetokenizeRequest)


class Tokenization:
    """The endpoints."""

    def __init__(self, lanes: Lanes, max_body_bytes: int) -> None:
        self._lanes = lanes
        self._max_body_bytes = max_body_bytes

    async def tokenize(self, request: Request) -> Response:
        body = decode_body(await read_body(request, self._max_body_bytes), _tokenize_decoder)
        model = self._lanes.model(body.model)
        prompt = _prompt(body, model.max_model_len)
        encoded = await self._lanes.encode(prompt)
        return json_response(
            TokenizeAnswer(
                count=len(encoded.token_ids),
                max_model_len=model.max_model_len,
                tokens=list(encoded.token_ids),
                token_strs=list(encoded.token_strings) if body.return_token_strs else None,
            )
        )

    async def detokenize(self, request: Request) -> Response:
        body = decode_body(await read_body(request, self._max_body_bytes), _detokenize_decoder)
        self._lanes.model(body.model)
        text = await self._lanes.decode(tokenizer_pb2.DecodeRequest(token_ids=body.tokens))
        return json_response(DetokenizeAnswer(prompt=text))


def _prompt(body: TokenizeRequest, max_model_len: int) -> tokenizer_pb2.EncodeRequest:
    has_messages = bytes(body.messages) != b"null"
    if has_messages == (body.prompt is not None):
        raise invalid_value("Give either `prompt` or `messages`.", "prompt")
    if body.prompt is not None:
        check_prompt_bytes(len(body.prompt.encode()), max_model_len, "prompt")
        text = tokenizer_pb2.TextPrompt(
            text=body.prompt, add_special_tokens=body.add_special_tokens is not False
        )
        return tokenizer_pb2.EncodeRequest(
            text=text, return_token_strings=bool(body.return_token_strs)
        )
    if body.add_special_tokens:
        raise unsupported_value("add_special_tokens", (False,))
    continues = bool(body.continue_final_message)
    if continues and body.add_generation_prompt:
        raise invalid_value(
            "`continue_final_message` and `add_generation_prompt` exclude each other.",
            "continue_final_message",
        )
    num_bytes = memoryview(body.messages).nbytes + memoryview(body.tools).nbytes
    check_prompt_bytes(num_bytes, max_model_len, "messages")
    kwargs = body.chat_template_kwargs
    chat = tokenizer_pb2.ChatPrompt(
        messages_json=checked_messages(body.messages),
        tools_json=checked_tools(body.tools),
        template_kwargs_json=msgspec.json.encode(kwargs) if kwargs else b"",
        add_generation_prompt=not continues and body.add_generation_prompt is not False,
        continue_final_message=continues,
    )
    return tokenizer_pb2.EncodeRequest(chat=chat, return_token_strings=bool(body.return_token_strs))
