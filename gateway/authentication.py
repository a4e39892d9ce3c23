"""Lets requests in that carry a known API key, and says whose they are."""

from collections.abc import Container
from dataclasses import replace

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.api_keys import ApiKeys
from gateway.errors import Unauthorized, error_response


class Authentication:
    """ASGI middleware. `keys` None lets everybody in; `open_paths` need no key.

    `browsed_paths` are pages for people: there a browser is asked to ask for the key.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: ApiKeys | None,
        open_paths: Container[str],
        browsed_paths: Container[str],
    ) -> None:
        self._app = app
        self._keys = keys
        self._open_paths = open_paths
        self._browsed_paths = browsed_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._keys is None or scope["type"] != "http" or scope["path"] in self._open_paths:
            await self._app(scope, receive, send)
            return
        try:
            name = self._keys.name_of(Headers(scope=scope))
        except Unauthorized as error:
            response = error_response(error, scope["path"])
            browsed = scope["path"] in self._browsed_paths
            challenge = 'Basic realm="tokenline: the API key is the password"'
            response.headers["www-authenticate"] = challenge if browsed else "Bearer"
            await response(scope, receive, send)
            return
        scope["state"]["identity"] = replace(scope["state"]["identity"], tenant=name)
        await self._app(scope, receive, send)
