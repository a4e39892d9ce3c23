"""Fetches the serialised tokenizer from the tokenizer service, for those who turn ids to text."""

import asyncio
import logging
from collections.abc import Sequence
from typing import Final

import grpc

from protos.tokenizer.v1 import tokenizer_pb2, tokenizer_pb2_grpc
from protos.wire.channel import open_channel
from protos.wire.errors import from_rpc_error

logger = logging.getLogger(__name__)

_CALL_SECONDS: Final = 30.0
_FIRST_BACKOFF_SECONDS: Final = 0.1
_LAST_BACKOFF_SECONDS: Final = 2.0


async def fetch_tokenizer(addresses: Sequence[str]) -> tokenizer_pb2.GetTokenizerResponse:
    """The tokenizer, from the first of `addresses` (host:port) that gives it.

    Asks with back-off until one does: services may start in any order.
    """
    backoff = _FIRST_BACKOFF_SECONDS
    while True:
        for address in addresses:
            async with open_channel(address) as channel:
                stub = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
                try:
                    return await stub.GetTokenizer(
                        tokenizer_pb2.GetTokenizerRequest(), timeout=_CALL_SECONDS
                    )
                except grpc.aio.AioRpcError as error:
                    logger.info(
                        "no tokenizer from %s yet: %s", address, from_rpc_error(error).message
                    )
        await asyncio.sleep(backoff)
        backoff = min(2 * backoff, _LAST_BACKOFF_SECONDS)
