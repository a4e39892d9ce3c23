"""Structured output: the grammar that each field becomes, and what is refused."""

import json
from typing import Any

import pytest

from gateway.response_format import MAX_GRAMMAR_CHARACTERS, MAX_PATTERN_CHARACTERS, MAX_SCHEMA_DEPTH
from protos.wire.errors import InvalidRequest
from tests.fakes.gateway_line import GatewayLine
from tests.fakes.scripted_detok import DetokScript, output

pytestmark = pytest.mark.asyncio(loop_scope="module")

SCHEMA = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"$ref": "#/$defs/A"}}}


@pytest.fixture
def line(module_line: GatewayLine) -> GatewayLine:
    module_line.reset()
    return module_line


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth - 1):
        schema = {"not": schema}
    return schema


@pytest.mark.parametrize("endpoint", ["chat", "complete"])
@pytest.mark.parametrize(
    ("fields", "form", "value"),
    [
        ({"response_format": {"type": "json_object"}}, "json_schema", {"type": "object"}),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
                }
            },
            "json_schema",
            SCHEMA,
        ),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", SCHEMA),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, "json_schema", SCHEMA),
        ({"structured_outputs": {"json_object": True}}, "json_schema", {"type": "object"}),
        ({"structured_outputs": {"regex": "[a-z]+"}}, "regex", "[a-z]+"),
        ({"structured_outputs": {"choice": ["yes", "no."]}}, "regex", r"(yes|no\.)"),
        ({"structured_outputs": {"choice": ["a/b [1]"]}}, "regex", r"a\/b \[1\]"),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, "grammar", 'start: "a"'),
        ({"guided_json": {}}, "json_schema", {}),
        ({"guided_regex": "a|b"}, "regex", "a|b"),
        ({"guided_choice": ["é"]}, "regex", "é"),
        ({"guided_grammar": 'root ::= "a"'}, "grammar", 'root ::= "a"'),
    ],
)
async def test_every_structure_becomes_a_grammar_of_the_record(
    line: GatewayLine, endpoint: str, fields: dict[str, Any], form: str, value: Any
) -> None:
    assert (await line.send(endpoint, **fields)).status_code == 200
    grammar = line.detok.submitted[0].record.sampling.grammar
    assert grammar.WhichOneof("form") == form
    found = getattr(grammar, form)
    assert (json.loads(found) if form == "json_schema" else found) == value


async def test_the_order_of_properties_is_kept(line: GatewayLine) -> None:
    await line.chat(structured_outputs={"json": SCHEMA})
    schema = json.loads(line.detok.submitted[0].record.sampling.grammar.json_schema)
    assert list(schema["properties"]) == ["b", "a"]


async def test_plain_text_has_no_grammar(line: GatewayLine) -> None:
    await line.chat(response_format={"type": "text"})
    await line.chat(response_format=None, structured_outputs=None, guided_json=None)
    assert not any(submit.record.sampling.HasField("grammar") for submit in line.detok.submitted)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
            "response_format.json_schema.name",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a b", "schema": {}},
                }
            },
            "response_format.json_schema.name",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": nested(MAX_SCHEMA_DEPTH + 1)},
                }
            },
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json": "no"}}, "structured_outputs.json"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
        (
            {"structured_outputs": {"regex": "a" * (MAX_PATTERN_CHARACTERS + 1)}},
            "structured_outputs.regex",
        ),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": ["a"] * 1025}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs.choice"),
        (
            {"structured_outputs": {"json": {"title": "a" * MAX_GRAMMAR_CHARACTERS}}},
            "structured_outputs.json",
        ),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
        (
            {"response_format": {"type": "json_object"}, "guided_regex": "a"},
            "guided_regex",
        ),
        ({"guided_choice": "a"}, "guided_choice"),
    ],
)
async def test_what_is_wrong_with_a_structure_is_named(
    line: GatewayLine, fields: dict[str, Any], param: str
) -> None:
    response = await line.chat(**fields)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert not line.detok.submitted


async def test_a_schema_of_the_greatest_depth_is_taken(line: GatewayLine) -> None:
    response = await line.chat(structured_outputs={"json": nested(MAX_SCHEMA_DEPTH)})
    assert response.status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"guided_json": {}}, "guided_json"),
    ],
)
async def test_what_the_engine_cannot_enforce_is_400_and_names_the_clients_field(
    line: GatewayLine, stream: bool, fields: dict[str, Any], param: str
) -> None:
    error = InvalidRequest("`minContains` is not supported.", code="bad_schema", param="grammar")
    line.detok.script = DetokScript([output(num_tokens=0, error=error)])
    response = await line.chat(stream=stream, **fields)
    assert response.status_code == 400
    found = response.json()["error"]
    assert found["param"] == param
    assert "minContains" in found["message"]
