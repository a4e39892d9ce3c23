"""GET /openapi.json and /docs: the description of the API, for programs and for people."""

from collections.abc import Sequence
from importlib import resources
from importlib.metadata import version
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from gateway.openapi import openapi_document
from gateway.routes import JSON, Operation

_HTML: Final = "text/html"
_PAGE_HEADERS: Final = {
    "content-type": f"{_HTML}; charset=utf-8",
    # The page brings all it needs, and asks this server only.
    "content-security-policy": "default-src 'none'; script-src 'unsafe-inline'; "
    "style-src 'unsafe-inline'; connect-src 'self'; base-uri 'none'; frame-ancestors 'none'",
}


class ApiDocs:
    """The endpoints. `others` are all other operations."""

    def __init__(self, others: Sequence[Operation], *, needs_key: bool) -> None:
        self.operations = (
            Operation(
                method="GET",
                path="/openapi.json",
                endpoint=self.document,
                summary="This description, as OpenAPI 3.1",
                tag="Description",
                answers={200: dict},
                errors=(400, 401, 431, 500),
            ),
            Operation(
                method="GET",
                path="/docs",
                endpoint=self.page,
                summary="This description, as a page",
                tag="Description",
                answers={200: None},
                media_types=(_HTML,),
                errors=(400, 401, 431, 500),
            ),
        )
        document = openapi_document(
            (*others, *self.operations), version("tokenline"), needs_key=needs_key
        )
        self._document = msgspec.json.encode(document)
        self._page = resources.files(__package__).joinpath("api_docs.html").read_bytes()

    async def document(self, request: Request) -> Response:
        return Response(self._document, media_type=JSON)

    async def page(self, request: Request) -> Response:
        return Response(self._page, headers=_PAGE_HEADERS)
