"""Runs the gateway: `python -m gateway --tokenizer H:P --detok H:P --engine H:P`."""

import asyncio

import uvloop

from gateway.server import serve
from gateway.settings import Settings
from protos.wire.service import run_main

if __name__ == "__main__":
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    run_main("gateway", Settings, serve)
