"""A stub tokenizer service: every UTF-8 byte of the prompt is a token."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from protos.common.v1 import common_pb2
from protos.tokenizer.v1 import tokenizer_pb2, tokenizer_pb2_grpc
from protos.wire.errors import InvalidRequest, TokenlineError
from protos.wire.server import GrpcServer

SERVICE = "protos.tokenizer.v1.TokenizerService"
EOS_TOKEN_IDS = (257,)


class ScriptedTokenizer(tokenizer_pb2_grpc.TokenizerServiceServicer):
    """TokenizerService; a chat is its contents one after the other.

    `error` is raised by Encode when set; `gate` must be set for Encode to answer. `encoded` records
    the requests; `num_cancelled` counts those that were cancelled at the gate. `defaults` are the
    model's own, as are `tool_call_format` and `has_reasoning`; `in_reasoning` is what Encode says
    of every chat.
    """

    def __init__(self, model: common_pb2.ModelIdentity) -> None:
        self.model = model
        self.error: TokenlineError | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self.num_cancelled = 0
        self.encoded: list[tokenizer_pb2.EncodeRequest] = []
        self.defaults = tokenizer_pb2.GenerationDefaults()
        self.tool_call_format = tokenizer_pb2.TOOL_CALL_FORMAT_UNSPECIFIED
        self.has_reasoning = False
        self.in_reasoning = False

    async def Encode(
        self, request: tokenizer_pb2.EncodeRequest, context: Any
    ) -> tokenizer_pb2.EncodeResponse:
        self.encoded.append(request)
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        if self.error is not None:
            raise self.error
        text = request.text.text
        if request.WhichOneof("input") == "chat":
            messages = json.loads(request.chat.messages_json)
            text = "".join(message.get("content") or "" for message in messages)
        token_ids = text.encode()
        strings = [chr(token_id) for token_id in token_ids if request.return_token_strings]
        return tokenizer_pb2.EncodeResponse(
            token_ids=token_ids, token_strings=strings, in_reasoning=self.in_reasoning
        )

    async def Decode(
        self, request: tokenizer_pb2.DecodeRequest, context: Any
    ) -> tokenizer_pb2.DecodeResponse:
        for token_id in request.token_ids:
            if token_id not in range(256):
                raise InvalidRequest(f"No token {token_id}.", param="tokens")
        text = bytes(request.token_ids).decode(errors="replace")
        return tokenizer_pb2.DecodeResponse(text=text)

    async def GetStatus(self, request: Any, context: Any) -> tokenizer_pb2.GetStatusResponse:
        return tokenizer_pb2.GetStatusResponse(
            model=self.model,
            eos_token_ids=EOS_TOKEN_IDS,
            context_length=4096,
            has_chat_template=True,
            generation_defaults=self.defaults,
            tool_call_format=self.tool_call_format,
            has_reasoning=self.has_reasoning,
        )

    async def GetTokenizer(self, request: Any, context: Any) -> Any:
        return tokenizer_pb2.GetTokenizerResponse(model=self.model, eos_token_ids=EOS_TOKEN_IDS)

    @asynccontextmanager
    async def serving(self, port: int = 0) -> AsyncIterator[str]:
        """Serves on loopback and yields host:port."""
        async with GrpcServer("tokenizer_svc", "127.0.0.1", port) as server:
            tokenizer_pb2_grpc.add_TokenizerServiceServicer_to_server(self, server.grpc)
            await server.start([SERVICE])
            yield server.address
