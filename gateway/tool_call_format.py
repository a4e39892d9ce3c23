"""How models write tool calls in their text."""

from dataclasses import dataclass
from typing import Final

from protos.tokenizer.v1 import tokenizer_pb2

# The setting's words that name a format.
AUTO: Final = "auto"
NONE: Final = "none"


@dataclass(frozen=True, slots=True)
class CallFormat:
    """`opener` begins a group of calls; `bracket`, if any, follows it; `separator` stands between
    two calls of a group, `closer` after the last. Blanks may stand between all of these.

    `begins_bare`: a call may begin the text without the opener. `arguments_key`: what the model was
    taught to call the arguments.
    """

    opener: str
    bracket: str
    separator: str
    closer: str
    begins_bare: bool
    arguments_key: str


HERMES: Final = CallFormat("<tool_call>", "", "", "</tool_call>", False, "arguments")
LLAMA3_JSON: Final = CallFormat("<|python_tag|>", "", ";", "", True, "parameters")
MISTRAL: Final = CallFormat("[TOOL_CALLS]", "[", ",", "]", False, "arguments")
# For a model of no known format that is held to calling.
BARE_JSON: Final = CallFormat("<|python_tag|>", "", ";", "", True, "arguments")

_BY_NAME: Final = {"hermes": HERMES, "llama3_json": LLAMA3_JSON, "mistral": MISTRAL}
_BY_WIRE: Final = {
    tokenizer_pb2.TOOL_CALL_FORMAT_HERMES: HERMES,
    tokenizer_pb2.TOOL_CALL_FORMAT_LLAMA3_JSON: LLAMA3_JSON,
    tokenizer_pb2.TOOL_CALL_FORMAT_MISTRAL: MISTRAL,
}
SETTINGS: Final = (AUTO, NONE, *_BY_NAME)


def call_format(setting: str, wire: tokenizer_pb2.ToolCallFormat.ValueType) -> CallFormat | None:
    """The format that the setting names, or for "auto" the one that the tokenizer service found.

    None where calls are not looked for.
    """
    return _BY_WIRE.get(wire) if setting == AUTO else _BY_NAME.get(setting)
