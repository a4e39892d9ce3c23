"""Which notation a chat template teaches its model for tool calls."""

from typing import Final

# Marks in a template's text; the first that is found decides.
_MARKS: Final = (
    # Qwen3-Coder puts XML, not JSON, into Hermes' tags; newer Mistral models do without JSON, too.
    ("", ("<function=", "[ARGS]")),
    ("HERMES", ("<tool_call>",)),
    ("MISTRAL", ("[TOOL_CALLS]",)),
    ("LLAMA3_JSON", ("<|python_tag|>", '{"name": function name, "parameters": ')),
)


def tool_call_format(source: str, takes_tools: bool) -> str:
    """The name of a ToolCallFormat without its prefix; empty where it is not known.

    A template that takes no tools gets the Hermes form, which tools_as_text.py writes for it.
    """
    if not takes_tools:
        return "HERMES"
    for name, marks in _MARKS:
        if any(mark in source for mark in marks):
            return name
    return ""
