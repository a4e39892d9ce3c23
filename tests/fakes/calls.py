"""Calls of the API as a gateway makes them, for tests that need no HTTP."""

from typing import Any

from gateway.call import Call


def new_call(endpoint: str = "/v1/completions", body: bytes = b"{}", **fields: Any) -> Call:
    return Call(
        **{
            "endpoint": endpoint,
            "body": body,
            "request_id": "id",
            "traceparent": "",
            "tenant": "",
            "seed": 7,
            "started_at": 1e9,
            **fields,
        }
    )
