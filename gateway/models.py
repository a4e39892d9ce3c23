"""GET /v1/models and /v1/models/{id}: the one model that the line serves."""

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from gateway.errors import json_response
from gateway.lanes import Lanes, LineModel


class Models:
    """The endpoints."""

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self._created = int(time.time())

    async def list(self, request: Request) -> Response:
        """All models: none while the line is not ready."""
        models = [self._lanes.model()] if self._lanes.ready else []
        data = [self._describe(model) for model in models]
        return json_response({"object": "list", "data": data})

    async def get(self, request: Request) -> Response:
        return json_response(self._describe(self._lanes.model(request.path_params["model"])))

    def _describe(self, model: LineModel) -> dict[str, Any]:
        return {
            "id": model.name,
            "object": "model",
            "created": self._created,
            "owned_by": "tokenline",
            "max_model_len": model.max_model_len,
        }
