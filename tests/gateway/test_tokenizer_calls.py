"""Calls to tokenizers that are lost, hung, silent or slow."""

import asyncio

import pytest

from protos.tokenizer.v1 import tokenizer_pb2
from protos.wire.errors import InternalError, InvalidRequest, TokenlineError, Unavailable
from tests.fakes.engine_script import Script
from tests.fakes.fleet import Fleet, fleet
from tests.fakes.waiting import until

TEXT = tokenizer_pb2.EncodeRequest(text=tokenizer_pb2.TextPrompt(text="hi"))


def num_encoded(line: Fleet) -> list[int]:
    return [len(replica.service.encoded) for replica in line.tokenizers]


async def test_a_call_waits_for_the_only_tokenizer_to_come_back() -> None:
    async with fleet(Script()) as line:
        await line.tokenizers[0].stop()
        await until(lambda: not line.lanes.ready)
        call = asyncio.create_task(line.lanes.encode(TEXT))
        text = asyncio.create_task(line.lanes.decode(tokenizer_pb2.DecodeRequest(token_ids=b"yo")))
        await line.tokenizers[0].start()
        assert list((await call).token_ids) == list(b"hi")
        assert await text == "yo"


async def test_a_call_whose_tokenizer_is_lost_is_made_again() -> None:
    async with fleet(Script()) as line:
        tokenizer = line.tokenizers[0].service
        tokenizer.gate.clear()
        call = asyncio.create_task(line.lanes.encode(TEXT))
        await until(lambda: num_encoded(line) == [1])
        await line.tokenizers[0].stop()
        tokenizer.gate.set()
        await line.tokenizers[0].start()
        assert list((await call).token_ids) == list(b"hi")
        assert num_encoded(line) == [2]


async def test_a_call_goes_to_another_tokenizer_at_once() -> None:
    async with fleet(Script(), num_tokenizers=2) as line:
        await line.tokenizers[0].stop()
        for _ in range(4):
            await line.lanes.encode(TEXT)
        assert num_encoded(line) == [0, 4]


async def test_a_silent_tokenizer_is_hedged_and_the_loser_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gateway.tokenizer_calls._HEDGE_SECONDS", 0.05)
    async with fleet(Script(), num_tokenizers=3) as line:
        for replica in line.tokenizers:
            replica.service.gate.clear()
        call = asyncio.create_task(line.lanes.encode(TEXT))
        await until(lambda: sum(num_encoded(line)) == 2)
        await asyncio.sleep(0.2)
        # Two at a time, however long they take.
        assert sorted(num_encoded(line)) == [0, 1, 1]
        asked = [replica.service for replica in line.tokenizers if replica.service.encoded]
        asked[1].gate.set()
        assert list((await call).token_ids) == list(b"hi")
        await until(lambda: asked[0].num_cancelled == 1)


async def test_an_only_tokenizer_may_take_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.tokenizer_calls._HEDGE_SECONDS", 0.05)
    async with fleet(Script()) as line:
        tokenizer = line.tokenizers[0].service
        tokenizer.gate.clear()
        call = asyncio.create_task(line.lanes.encode(TEXT))
        await until(lambda: num_encoded(line) == [1])
        await asyncio.sleep(0.2)
        tokenizer.gate.set()
        await call
        assert num_encoded(line) == [1]


@pytest.mark.parametrize("error", [InvalidRequest("No."), InternalError("Broken.")])
async def test_an_error_of_the_request_is_the_answer(error: TokenlineError) -> None:
    async with fleet(Script(), num_tokenizers=2) as line:
        for replica in line.tokenizers:
            replica.service.error = error
        with pytest.raises(type(error), match=str(error)):
            await line.lanes.encode(TEXT)
        assert sum(num_encoded(line)) == 1


async def test_a_request_that_ends_tokenizers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.tokenizer_calls._LAST_BACKOFF_SECONDS", 0.05)
    async with fleet(Script(), num_tokenizers=2) as line:
        for replica in line.tokenizers:
            replica.service.error = Unavailable("As if it had crashed.")
        with pytest.raises(Unavailable, match="change the request") as caught:
            await line.lanes.encode(TEXT)
        assert caught.value.code == "tokenizer_lost"
        assert sum(num_encoded(line)) >= 5


async def test_a_call_waits_only_so_long_and_says_what_to_do() -> None:
    async with fleet(Script(), recovery_seconds=0.3) as line:
        await line.tokenizers[0].stop()
        await until(lambda: not line.lanes.ready)
        with pytest.raises(Unavailable, match=r"within 0\.3 seconds; try again"):
            await line.lanes.encode(TEXT)


async def test_a_call_that_is_cancelled_leaves_nothing_behind() -> None:
    async with fleet(Script()) as line:
        tokenizer = line.tokenizers[0].service
        tokenizer.gate.clear()
        call = asyncio.create_task(line.lanes.encode(TEXT))
        await until(lambda: num_encoded(line) == [1])
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await until(lambda: tokenizer.num_cancelled == 1)


async def test_an_engine_that_restarts_keeps_no_prompt_from_being_read() -> None:
    async with fleet(Script()) as line:
        await line.engines[0].stop()
        await until(lambda: not line.lanes.ready)
        assert list((await line.lanes.encode(TEXT)).token_ids) == list(b"hi")
