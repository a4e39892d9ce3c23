"""Runs the gateway: `python -m gateway --tokenizer H:P --detok H:P --engine H:P`."""

from gateway.server import serve
from gateway.settings import Settings
from protos.wire.service import run_main

if __name__ == "__main__":
    run_main("gateway", Settings, serve)
