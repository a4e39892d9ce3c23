"""The OpenAPI 3.1 document of the gateway, made from its operations and their types."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final

import msgspec

from gateway.chat_messages import Message
from gateway.response_format import ResponseFormat, StructuredOutputs
from gateway.routes import EVENT_STREAM, JSON, Operation
from gateway.tools import Tool

_REFERENCE: Final = "#/components/schemas/{name}"
# Parts of bodies that are typed loosely and checked later, with what they are checked to be.
_FIELDS_CHECKED_LATER: Final[Mapping[str, Any]] = {
    "messages": list[Message],
    "tools": list[Tool] | None,
    "response_format": ResponseFormat | None,
    "structured_outputs": StructuredOutputs | None,
}
_EVENT: Final[dict[str, Any]] = {
    "description": "One server-sent event of the stream; `data` is JSON, or `[DONE]` at the end.",
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
}
_NAMES_OF_STATUSES: Final = {499: "Client closed request"}


def openapi_document(
    operations: Sequence[Operation], version: str, *, needs_key: bool
) -> dict[str, Any]:
    """The document, ready to be written as JSON. needs_key: whether API keys are asked for."""
    bodies = {operation.body: _described(operation.body) for operation in operations}
    answers = [answer for operation in operations for answer in operation.answers.values()]
    errors = [operation.error_body for operation in operations]
    kinds = [kind for kind in {*bodies.values(), *answers, *errors} if kind is not None]
    schemas, components = msgspec.json.schema_components(kinds, ref_template=_REFERENCE)
    by_kind = dict(zip(kinds, schemas, strict=True))
    for kind in bodies:
        _narrow_unsupported_fields(components, kind)
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        body = bodies[operation.body]
        described = _operation(operation, by_kind, by_kind[body] if body is not None else None)
        paths.setdefault(operation.template, {})[operation.method.lower()] = described
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "Tokenline", "version": version},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }
    if needs_key:
        document["security"] = [{"bearer": []}, {"x-api-key": []}]
    return document


def _operation(
    operation: Operation, by_kind: Mapping[Any, dict[str, Any]], body: dict[str, Any] | None
) -> dict[str, Any]:
    described: dict[str, Any] = {
        "operationId": f"{operation.method.lower()}{operation.template}",
        "summary": operation.summary,
        "tags": [operation.tag],
        "responses": dict(_responses(operation, by_kind)),
    }
    parameters = [*_path_parameters(operation.template), *_query_parameters(operation)]
    if parameters:
        described["parameters"] = parameters
    if body is not None:
        described["requestBody"] = {"required": True, "content": {JSON: {"schema": body}}}
    if operation.needs_no_key:
        described["security"] = []
    return described


def _responses(
    operation: Operation, by_kind: Mapping[Any, dict[str, Any]]
) -> Iterator[tuple[str, dict[str, Any]]]:
    for status, kind in operation.answers.items():
        media_types = operation.media_types if status == HTTPStatus.OK else (JSON,)
        content = {
            media_type: {"schema": _answer_schema(media_type, by_kind.get(kind))}
            for media_type in media_types
        }
        yield str(status), {"description": _phrase(status), "content": content}
    errors = {"schema": by_kind[operation.error_body]}
    for status in operation.errors:
        if status not in operation.answers:
            yield str(status), {"description": _phrase(status), "content": {JSON: errors}}


def _answer_schema(media_type: str, of_json: dict[str, Any] | None) -> dict[str, Any]:
    if media_type == JSON and of_json is not None:
        return of_json
    return _EVENT if media_type == EVENT_STREAM else {"type": "string"}


def _path_parameters(template: str) -> Iterable[dict[str, Any]]:
    for part in template.split("{")[1:]:
        yield {
            "name": part.partition("}")[0],
            "in": "path",
            "required": True,
            "schema": {"type": "string", "minLength": 1},
        }


def _query_parameters(operation: Operation) -> Iterable[dict[str, Any]]:
    for name, kind in operation.parameters.items():
        yield {"name": name, "in": "query", "schema": msgspec.json.schema(kind)}


def _described(kind: Any) -> Any:
    """`kind`, with the fields that are checked later typed as what they are checked to be."""
    if kind is None:
        return kind
    fields: list[tuple[Any, ...]] = []
    for field in msgspec.structs.fields(kind):
        is_loose = field.type in (msgspec.Raw, Any)
        type_ = _FIELDS_CHECKED_LATER.get(field.name, Any) if is_loose else field.type
        if field.required:
            fields.append((field.name, type_))
        else:
            default = None if field.type is msgspec.Raw else field.default
            fields.append((field.name, type_, default))
    made = msgspec.defstruct(kind.__name__, fields, kw_only=True)
    made.__doc__ = kind.__doc__
    return made


def _narrow_unsupported_fields(components: dict[str, Any], kind: Any) -> None:
    """Fields that are refused unless they ask for nothing have only those values."""
    for name, neutral in getattr(kind, "neutral_values", {}).items():
        properties = components[kind.__name__]["properties"]
        if name in properties:
            properties[name] = {"enum": [None, *neutral], "description": "Not supported."}


def _phrase(status: int) -> str:
    return _NAMES_OF_STATUSES.get(status) or HTTPStatus(status).phrase
