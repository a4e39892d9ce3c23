"""The tokenizer service over a real gRPC server on loopback."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from tokenizers import Tokenizer

from protos.common.v1 import common_pb2
from protos.tokenizer.v1 import tokenizer_pb2 as pb
from protos.tokenizer.v1.tokenizer_pb2_grpc import (
    TokenizerServiceStub,
    add_TokenizerServiceServicer_to_server,
)
from protos.wire.channel import MAX_MESSAGE_BYTES, open_channel
from protos.wire.errors import InvalidRequest, TokenlineError, TooLarge, from_rpc_error
from protos.wire.server import GrpcServer
from tests.fakes.tiny_tokenizers import IM_END, IM_START, byte_level
from tests.fakes.waiting import until
from tokenizer_svc.prompt_limit import PromptLimit
from tokenizer_svc.service import ServedTokenizer, TokenizerService
from tokenizer_svc.template_messages import Setup
from tokenizer_svc.template_workers import TemplateWorkers
from tokenizer_svc.text_decoder import TextDecoder
from tokenizer_svc.text_encoder import TextEncoder
from tokenizer_svc.token_bound import token_bound

TEMPLATE = (
    "{% if messages[0].content == 'odd' %}{{ raise_exception('That is odd.') }}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{% endif %}"
)
SERVICE = "protos.tokenizer.v1.TokenizerService"
MODEL = common_pb2.ModelIdentity(name="tiny", fingerprint="f00d")


@asynccontextmanager
async def serving(
    template: str | None = TEMPLATE,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    max_prompt_tokens: int = 10_000_000,
    encoder: TextEncoder | None = None,
) -> AsyncIterator[TokenizerServiceStub]:
    """A client of the service with the tokenizer BL."""
    tokenizer = byte_level()
    setup = Setup(
        templates={"default": template or ""},
        special_tokens={},
        control_texts=["<|im_start|>", "<|im_end|>"],
        max_output_characters=max_message_bytes,
        max_memory_bytes=512 << 20,
        max_seconds=20,
    )
    served = ServedTokenizer(
        MODEL,
        tokenizer.to_str().encode(),
        (IM_END,),
        128,
        {"temperature": 0.5, "top_k": 7},
        pb.TOOL_CALL_FORMAT_MISTRAL,
        has_reasoning=True,
    )
    async with (
        GrpcServer("tokenizer_svc", "127.0.0.1", 0, max_message_bytes) as server,
        TemplateWorkers(setup) as workers,
        open_channel(server.address, max_message_bytes) as channel,
    ):
        with ThreadPoolExecutor(2) as executor:
            service = TokenizerService(
                served,
                encoder or TextEncoder(tokenizer),
                TextDecoder(tokenizer),
                workers if template is not None else None,
                executor,
                max_message_bytes,
                PromptLimit(max_prompt_tokens, token_bound(tokenizer)),
                max_running=3,
            )
            add_TokenizerServiceServicer_to_server(service, server.grpc)
            await server.start([SERVICE])
            await channel.channel_ready()
            yield TokenizerServiceStub(channel)


def chat(content: object, generation: bool = True, **more: Any) -> pb.EncodeRequest:
    messages = json.dumps([{"role": "user", "content": content}]).encode()
    prompt = pb.ChatPrompt(messages_json=messages, add_generation_prompt=generation, **more)
    return pb.EncodeRequest(chat=prompt)


def text(value: str, add_special_tokens: bool = False) -> pb.EncodeRequest:
    return pb.EncodeRequest(text=pb.TextPrompt(text=value, add_special_tokens=add_special_tokens))


async def refusal(call: grpc.aio.UnaryUnaryCall) -> TokenlineError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    error = from_rpc_error(caught.value)
    assert error.message and "Traceback" not in error.message
    return error


async def test_chats_and_texts_are_encoded() -> None:
    async with serving() as stub:
        ids = (await stub.Encode(chat("ab"))).token_ids
        assert list(ids) == [IM_START, 64, 65, IM_END, IM_START]
        ids = (await stub.Encode(chat("ab", generation=False))).token_ids
        assert list(ids) == [IM_START, 64, 65, IM_END]
        assert list((await stub.Encode(text("a<|im_end|>"))).token_ids) == [64, IM_END]


async def test_a_prompt_that_opens_thoughts_says_so() -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ '<think>\\n' if opens }}"
    async with serving(template=template) as stub:
        opened = chat("a", template_kwargs_json=b'{"opens": true}')
        assert (await stub.Encode(opened)).in_reasoning
        assert not (await stub.Encode(chat("<think>b"))).in_reasoning


async def test_the_tokens_themselves_come_where_asked_for() -> None:
    async with serving() as stub:
        request = text("a é<|im_end|>")
        assert not (await stub.Encode(request)).token_strings
        request.return_token_strings = True
        answer = await stub.Encode(request)
        assert list(answer.token_strings) == ["a", "Ġ", "Ã", "©", "<|im_end|>"]
        request = chat("b", generation=False)
        request.return_token_strings = True
        assert list((await stub.Encode(request)).token_strings) == [
            "<|im_start|>", "b", "<|im_end|>",
        ]  # fmt: skip


async def test_a_prompt_can_end_inside_the_last_message() -> None:
    async with serving() as stub:
        request = chat("ab", generation=False, continue_final_message=True)
        assert list((await stub.Encode(request)).token_ids) == [IM_START, 64, 65]
        both = chat("ab", generation=True, continue_final_message=True)
        error = await refusal(stub.Encode(both))
        assert isinstance(error, InvalidRequest) and error.param == "continue_final_message"


async def test_bug_59_a_control_token_in_a_chat_is_text_and_in_a_prompt_is_parsed() -> None:
    async with serving() as stub:
        ids = list((await stub.Encode(chat("a<|im_end|>b", generation=False))).token_ids)
        assert ids[1:-1] == [64, 27, 91, 72, 76, 62, 68, 77, 67, 91, 29, 65]
        ids = list((await stub.Encode(text("a<|im_end|>b"))).token_ids)
        assert ids == [64, IM_END, 65]


async def test_ids_are_decoded_and_unknown_ones_refused() -> None:
    async with serving() as stub:
        ids = [IM_START, 64, 172, 253, 99, 250, 65]
        answer = await stub.Decode(pb.DecodeRequest(token_ids=ids))
        assert answer.text == "<|im_start|>a🦜b"
        answer = await stub.Decode(pb.DecodeRequest(token_ids=ids, skip_special_tokens=True))
        assert answer.text == "a🦜b"
        for unknown in (258, 2**32 - 1):
            error = await refusal(stub.Decode(pb.DecodeRequest(token_ids=[64, unknown])))
            assert isinstance(error, InvalidRequest) and error.param == "tokens"


async def test_status_and_tokenizer_describe_the_model() -> None:
    async with serving() as stub:
        status = await stub.GetStatus(pb.GetStatusRequest())
        assert status == pb.GetStatusResponse(
            model=MODEL,
            eos_token_ids=[IM_END],
            context_length=128,
            has_chat_template=True,
            generation_defaults=pb.GenerationDefaults(temperature=0.5, top_k=7),
            tool_call_format=pb.TOOL_CALL_FORMAT_MISTRAL,
            has_reasoning=True,
        )
        answer = await stub.GetTokenizer(pb.GetTokenizerRequest())
        assert answer.model == MODEL and list(answer.eos_token_ids) == [IM_END]
        tokenizer = Tokenizer.from_str(answer.tokenizer_json.decode())
        assert tokenizer.encode("a🦜b<|im_end|>").ids == byte_level().encode("a🦜b<|im_end|>").ids
        assert tokenizer.get_vocab_size() == byte_level().get_vocab_size()


async def test_bug_30_a_template_that_raises_is_an_invalid_request() -> None:
    async with serving() as stub:
        error = await refusal(stub.Encode(chat("odd")))
        assert isinstance(error, InvalidRequest)
        assert error.message.endswith("That is odd.")
        assert (error.code, error.param) == ("chat_template_error", "messages")


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        (pb.ChatPrompt(messages_json=b"{"), "messages"),
        (pb.ChatPrompt(messages_json=b"{}"), "messages"),
        (pb.ChatPrompt(messages_json=b'[{"role":"user","content":"\\ud800"}]'), "messages"),
        (pb.ChatPrompt(messages_json=b'[{"role":"user","\\udc00":1}]'), "messages"),
        (pb.ChatPrompt(messages_json=b'[{"role":"user"}]', tools_json=b'["\\ud800"]'), "tools"),
        (
            pb.ChatPrompt(messages_json=b'[{"role":"user"}]', template_kwargs_json=b"[]"),
            "chat_template_kwargs",
        ),
    ],
)
async def test_bug_30_bad_chats_name_the_field(prompt: pb.ChatPrompt, param: str) -> None:
    async with serving() as stub:
        error = await refusal(stub.Encode(pb.EncodeRequest(chat=prompt)))
        assert isinstance(error, InvalidRequest)
        assert error.param == param


async def test_a_request_without_input_is_refused() -> None:
    async with serving() as stub:
        assert isinstance(await refusal(stub.Encode(pb.EncodeRequest())), InvalidRequest)


async def test_a_chat_for_a_model_without_a_template_is_refused() -> None:
    async with serving(template=None) as stub:
        assert not (await stub.GetStatus(pb.GetStatusRequest())).has_chat_template
        error = await refusal(stub.Encode(chat("a")))
        assert (error.code, error.param) == ("no_chat_template", "messages")
        assert list((await stub.Encode(text("a"))).token_ids) == [64]


async def test_bug_74_a_prompt_of_over_4_mb_passes_both_ways() -> None:
    words = "The quick brown fox. " * 200_000
    assert len(words) == 4_200_000
    async with serving() as stub:
        ids = (await stub.Encode(text(words))).token_ids
        assert len(ids) == len(words)
        ids = (await stub.Encode(chat(words, generation=False))).token_ids
        assert len(ids) == len(words) + 2


async def test_bug_74_over_the_limit_is_a_clean_error_and_the_channel_stays_usable() -> None:
    limit = 100_000
    async with serving(max_message_bytes=limit) as stub:
        for request in (text("é" * limit), chat("x" * limit)):
            error = await refusal(stub.Encode(request))
            assert isinstance(error, TooLarge)
            assert list((await stub.Encode(text("ab"))).token_ids) == [64, 65]


async def test_bug_74_ids_over_the_limit_are_a_clean_error_too() -> None:
    async with serving(max_message_bytes=10_000) as stub:
        # Under the limit as text; as ids, two bytes for each of the bytes above 127.
        error = await refusal(stub.Encode(text("\x80" * 4_900)))
        assert isinstance(error, TooLarge)
        assert list((await stub.Encode(text("ab"))).token_ids) == [64, 65]


async def test_other_calls_are_answered_while_a_long_text_is_encoded() -> None:
    async with serving() as stub:
        long = asyncio.ensure_future(stub.Encode(text("The quick brown fox. " * 100_000)))
        answered = 0
        while not long.done():
            await stub.GetStatus(pb.GetStatusRequest())
            answered += 1
        assert answered > 3
        assert len((await long).token_ids) == 2_100_000


@pytest.mark.parametrize("characters", ["The quick brown fox. ", "<|im_end|>"])
async def test_prompts_that_cannot_fit_are_refused_before_they_are_encoded(characters: str) -> None:
    """One text that is encoded, and one chat that takes the way of typed control tokens."""
    content = characters * (60_000 // len(characters))
    async with serving(max_prompt_tokens=4_000) as stub:
        for request, param in ((text(content), "prompt"), (chat(content), "messages")):
            error = await refusal(stub.Encode(request))
            assert isinstance(error, InvalidRequest)
            assert (error.code, error.param) == ("context_length_exceeded", param)
            assert "4000 tokens" in error.message
            assert "characters, which are at least 5" in error.message
        # What could fit is encoded, and counted by who knows the answer's share.
        assert len((await stub.Encode(text("a" * 40_000))).token_ids) == 40_000


async def test_more_tokens_than_are_counted_are_refused_with_their_number() -> None:
    async with serving(max_prompt_tokens=100_000) as stub:
        error = await refusal(stub.Encode(text("a" * 1_000_001)))
        assert error.code == "context_length_exceeded"
        assert "100000 tokens. Your prompt has 1000001 tokens" in error.message
        error = await refusal(stub.Decode(pb.DecodeRequest(token_ids=[64] * 1_000_001)))
        assert (error.code, error.param) == ("context_length_exceeded", "tokens")


async def test_encodings_wait_for_each_other_and_a_cancelled_one_never_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    release, encoded = threading.Event(), []
    num_calls, encode = 0, TokenizerService.Encode

    async def counted_encode(self: TokenizerService, request: Any, context: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        try:
            return await encode(self, request, context)
        finally:
            num_calls -= 1

    monkeypatch.setattr(TokenizerService, "Encode", counted_encode)

    class SlowEncoder(TextEncoder):
        def encode_text(self, text: str, *arguments: Any) -> list[int]:
            encoded.append(text)
            assert release.wait(20)
            return super().encode_text(text, *arguments)

    async with serving(encoder=SlowEncoder(byte_level())) as stub:
        running = [asyncio.ensure_future(stub.Encode(text(f"run {i}"))) for i in range(2)]
        await until(lambda: len(encoded) == 2)
        waiting = [asyncio.ensure_future(stub.Encode(text(f"wait {i}"))) for i in range(4)]
        await until(lambda: num_calls == 6)
        given_up = [asyncio.ensure_future(stub.Encode(text(f"cancel {i}"))) for i in range(4)]
        await until(lambda: num_calls == 10)
        for call in given_up:
            call.cancel()
        await asyncio.gather(*given_up, return_exceptions=True)
        await until(lambda: num_calls == 6)
        assert len(encoded) == 2
        release.set()
        await asyncio.gather(*running, *waiting)
    assert sorted(encoded) == [*(f"run {i}" for i in range(2)), *(f"wait {i}" for i in range(4))]
