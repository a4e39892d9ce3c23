"""Watches the tokenizer service for another model."""

import asyncio
import logging
from collections.abc import Sequence
from typing import Final

import grpc

from protos.tokenizer.v1 import tokenizer_pb2, tokenizer_pb2_grpc
from protos.wire.channel import open_channel

logger = logging.getLogger(__name__)

_CALL_SECONDS: Final = 30.0


async def watch_fingerprint(
    addresses: Sequence[str], fingerprint: str, interval_seconds: float
) -> None:
    """Logs each change of the tokenizer service to a model other than `fingerprint`; never returns.

    Nothing else is done about it: the gateway compares fingerprints and stops using what differs.
    """
    seen = dict.fromkeys(addresses, fingerprint)
    while True:
        await asyncio.sleep(interval_seconds)
        for address in addresses:
            async with open_channel(address) as channel:
                stub = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
                try:
                    status = await stub.GetStatus(
                        tokenizer_pb2.GetStatusRequest(), timeout=_CALL_SECONDS
                    )
                except grpc.aio.AioRpcError:
                    # Decoding needs the tokenizer service no more; the gateway sees its absence.
                    continue
            if status.model.fingerprint != seen[address]:
                seen[address] = status.model.fingerprint
                logger.warning(
                    "the tokenizer service at %s now serves model %s (fingerprint %s); this "
                    "service goes on decoding for fingerprint %s until it is restarted",
                    address,
                    status.model.name,
                    status.model.fingerprint,
                    fingerprint,
                )
