"""/openapi.json and /docs: complete, self-contained, and true of generated requests."""

import re
from collections.abc import Iterator
from typing import Any

import httpx2
import jsonschema
import pytest

from tests.fakes.gateway_line import GatewayLine
from tests.fakes.valkey import Valkey
from tests.fuzz_openapi import fuzz, line_in_a_thread

NUM_CASES = 300


@pytest.fixture(scope="module")
def url(valkey: Valkey) -> Iterator[str]:
    with line_in_a_thread(valkey.url) as running:
        yield running


@pytest.fixture(scope="module")
def document(url: str) -> dict[str, Any]:
    return dict(httpx2.get(f"{url}/openapi.json").json())


def test_every_route_is_described_and_nothing_else(url: str, document: dict[str, Any]) -> None:
    assert document["openapi"] == "3.1.0"
    assert sorted(document["paths"]) == httpx2.get(url).json()["endpoints"]
    for path, methods in document["paths"].items():
        for method in methods:
            response = httpx2.request(method, url + re.sub(r"\{\w+\}", "x", path))
            assert response.status_code != 405
            assert str(response.status_code) in methods[method]["responses"]


def test_every_operation_declares_its_errors(document: dict[str, Any]) -> None:
    for methods in document["paths"].values():
        for operation in methods.values():
            assert operation["summary"] and operation["tags"]
            assert {"200", "400", "431", "500"} <= operation["responses"].keys()
            assert "401" in operation["responses"] or operation["security"] == []
            assert ("requestBody" in operation) == ("413" in operation["responses"])


def test_every_schema_is_a_valid_one_and_every_reference_leads_to_one(
    document: dict[str, Any],
) -> None:
    schemas = document["components"]["schemas"]
    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)
    references = set(re.findall(r"'#/components/schemas/(\w+)'", repr(document)))
    assert references == set(schemas) - (set(schemas) - references)
    assert references <= schemas.keys()


def test_messages_and_unsupported_fields_are_described(document: dict[str, Any]) -> None:
    fields = document["components"]["schemas"]["ChatCompletionRequest"]["properties"]
    assert fields["messages"] == {
        "type": "array",
        "items": {"$ref": "#/components/schemas/Message"},
    }
    assert fields["use_beam_search"]["enum"] == [None, False]


def test_the_page_needs_no_other_host(url: str) -> None:
    response = httpx2.get(f"{url}/docs")
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in response.headers["content-security-policy"]
    assert not re.search(r"(https?:)?//[a-z]", response.text)
    assert 'fetch("openapi.json")' in response.text


def test_generated_requests_are_answered_as_declared(url: str) -> None:
    answers = fuzz(url, NUM_CASES)
    assert sum(answers.values()) >= NUM_CASES * 0.8
    for path in (
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/tokenize",
        "/detokenize",
    ):
        assert any(answer.startswith(f"POST {path} 400") for answer in answers)


async def test_a_key_is_part_of_the_description_only_where_it_is_asked_for(
    line: GatewayLine,
) -> None:
    document = (await line.client.get("/openapi.json")).json()
    assert "security" not in document
    assert set(document["components"]["securitySchemes"]) == {"bearer", "x-api-key"}
