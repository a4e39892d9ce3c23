"""The gRPC face of the tokenizer: TokenizerService of protos/tokenizer/v1/tokenizer.proto."""

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Final

import grpc

from protos.common.v1 import common_pb2
from protos.tokenizer.v1 import tokenizer_pb2, tokenizer_pb2_grpc
from protos.wire.errors import InvalidRequest, TooLarge
from protos.wire.process_memory import release_free_memory
from tokenizer_svc.prompt_limit import PromptLimit
from tokenizer_svc.rendered_prompt import RenderedPrompt
from tokenizer_svc.template_messages import Render
from tokenizer_svc.template_workers import TemplateWorkers
from tokenizer_svc.text_decoder import TextDecoder
from tokenizer_svc.text_encoder import TextEncoder

# In tokens. Encoding takes hundreds of bytes for each, which the allocator would keep for itself.
_LONG_PROMPT: Final = 100_000


@dataclass(frozen=True, slots=True)
class ServedTokenizer:
    """What others may ask of the tokenizer without encoding anything."""

    model: common_pb2.ModelIdentity
    # A tokenizer.json document.
    tokenizer_json: bytes
    eos_token_ids: tuple[int, ...]
    # In tokens; 0 when unknown.
    context_length: int
    # Fields of GenerationDefaults by name.
    generation_defaults: Mapping[str, float] = field(default_factory=dict)
    tool_call_format: tokenizer_pb2.ToolCallFormat.ValueType = (
        tokenizer_pb2.TOOL_CALL_FORMAT_UNSPECIFIED
    )
    has_reasoning: bool = False


class TokenizerService(tokenizer_pb2_grpc.TokenizerServiceServicer):
    """Works in `executor`'s threads; `templates` is None for a model without a chat template.

    Of the requests that encode, `max_running` are in work at once and the others wait: their texts
    take far less memory than what is made of them.
    """

    def __init__(
        self,
        served: ServedTokenizer,
        encoder: TextEncoder,
        decoder: TextDecoder,
        templates: TemplateWorkers | None,
        executor: Executor,
        max_message_bytes: int,
        limit: PromptLimit,
        max_running: int,
    ) -> None:
        self._served = served
        self._encoder = encoder
        self._decoder = decoder
        self._templates = templates
        self._executor = executor
        self._max_message_bytes = max_message_bytes
        self._limit = limit
        self._running = asyncio.Semaphore(max_running)

    async def Encode(
        self,
        request: tokenizer_pb2.EncodeRequest,
        context: grpc.aio.ServicerContext[
            tokenizer_pb2.EncodeRequest, tokenizer_pb2.EncodeResponse
        ],
    ) -> tokenizer_pb2.EncodeResponse:
        """Raises InvalidRequest for a refused chat, TooLarge for ids over the message limit."""
        kind = request.WhichOneof("input")
        if kind == "chat":
            async with self._running:
                return await self._encode_chat(request)
        if kind == "text":
            text = request.text
            self._limit.check_text(text.text, "prompt")
            async with self._running:
                return await self._respond(
                    lambda: self._encoder.encode_text(
                        text.text,
                        text.add_special_tokens,
                        lambda count: self._limit.check_tokens(count, "prompt"),
                    ),
                    request.return_token_strings,
                )
        raise InvalidRequest("The request holds neither a chat nor a text.", param="prompt")

    async def Decode(
        self,
        request: tokenizer_pb2.DecodeRequest,
        context: grpc.aio.ServicerContext[
            tokenizer_pb2.DecodeRequest, tokenizer_pb2.DecodeResponse
        ],
    ) -> tokenizer_pb2.DecodeResponse:
        """Raises InvalidRequest for an id outside the vocabulary, or for too many."""
        self._limit.check_tokens(len(request.token_ids), "tokens")
        text = await asyncio.get_running_loop().run_in_executor(
            self._executor,
            self._decoder.decode,
            list(request.token_ids),
            request.skip_special_tokens,
        )
        return tokenizer_pb2.DecodeResponse(text=text)

    async def GetStatus(
        self,
        request: tokenizer_pb2.GetStatusRequest,
        context: grpc.aio.ServicerContext[
            tokenizer_pb2.GetStatusRequest, tokenizer_pb2.GetStatusResponse
        ],
    ) -> tokenizer_pb2.GetStatusResponse:
        return tokenizer_pb2.GetStatusResponse(
            model=self._served.model,
            eos_token_ids=self._served.eos_token_ids,
            context_length=self._served.context_length,
            has_chat_template=self._templates is not None,
            generation_defaults=_generation_defaults(self._served.generation_defaults),
            tool_call_format=self._served.tool_call_format,
            has_reasoning=self._served.has_reasoning,
        )

    async def GetTokenizer(
        self,
        request: tokenizer_pb2.GetTokenizerRequest,
        context: grpc.aio.ServicerContext[
            tokenizer_pb2.GetTokenizerRequest, tokenizer_pb2.GetTokenizerResponse
        ],
    ) -> tokenizer_pb2.GetTokenizerResponse:
        return tokenizer_pb2.GetTokenizerResponse(
            model=self._served.model,
            tokenizer_json=self._served.tokenizer_json,
            eos_token_ids=self._served.eos_token_ids,
        )

    async def _encode_chat(
        self, request: tokenizer_pb2.EncodeRequest
    ) -> tokenizer_pb2.EncodeResponse:
        prompt = await self._render(request.chat)
        self._limit.check_text(prompt.text, "messages")
        response = await self._respond(
            lambda: self._encoder.encode_prompt(
                prompt, lambda count: self._limit.check_tokens(count, "messages")
            ),
            request.return_token_strings,
        )
        response.in_reasoning = prompt.text.rstrip().endswith("<think>")
        return response

    async def _render(self, chat: tokenizer_pb2.ChatPrompt) -> RenderedPrompt:
        if self._templates is None:
            raise InvalidRequest(
                "This model has no chat template; use /v1/completions, or start the tokenizer "
                "service with --chat-template.",
                code="no_chat_template",
                param="messages",
            )
        return await self._templates.render(
            Render(
                messages_json=chat.messages_json,
                tools_json=chat.tools_json,
                variables_json=chat.template_kwargs_json,
                add_generation_prompt=chat.add_generation_prompt,
                continue_final_message=chat.continue_final_message,
            )
        )

    async def _respond(
        self, encode: Callable[[], list[int]], with_strings: bool
    ) -> tokenizer_pb2.EncodeResponse:
        """Runs `encode` off the event loop, and builds the reply there as well."""

        def work() -> tuple[tokenizer_pb2.EncodeResponse, int]:
            num_tokens = 0
            try:
                token_ids = encode()
                num_tokens = len(token_ids)
                response = tokenizer_pb2.EncodeResponse(token_ids=token_ids)
                if with_strings:
                    response.token_strings.extend(self._decoder.token_strings(token_ids))
            except InvalidRequest:
                # Refused for more tokens than any list is made of.
                num_tokens = _LONG_PROMPT + 1
                raise
            finally:
                if num_tokens > _LONG_PROMPT:
                    release_free_memory()
            return response, response.ByteSize()

        response, size = await asyncio.get_running_loop().run_in_executor(self._executor, work)
        if size > self._max_message_bytes:
            raise TooLarge(
                f"The prompt's {len(response.token_ids)} tokens take {size} bytes, more than the "
                f"{self._max_message_bytes} allowed in a message.",
                param="prompt",
            )
        return response


def _generation_defaults(values: Mapping[str, float]) -> tokenizer_pb2.GenerationDefaults:
    defaults = tokenizer_pb2.GenerationDefaults()
    for name, value in values.items():
        setattr(defaults, name, value)
    return defaults
