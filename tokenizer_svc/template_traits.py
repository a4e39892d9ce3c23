"""What a chat template takes and writes, found by rendering small chats through it.

Templates do not declare what they understand, and a wrong guess gives a wrong prompt without an
error (a list printed as Python writes it, JSON quoted twice), so each trait is tried once at start.
"""

from dataclasses import dataclass
from typing import Any, Final

from tokenizer_svc.chat_refused import ChatRefused
from tokenizer_svc.chat_template import ChatTemplate
from tokenizer_svc.control_texts import ControlTexts

_QUESTION: Final = "first-probe"
_ANSWER: Final = "second-probe"
_CALL_ID: Final = "callid123"  # nine letters and digits, as Mistral's templates demand


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    """`takes_parts`: a message's content may be a list of parts, `takes_text`: it may be a string.

    `takes_null_content`: content may be null beside tool calls. `takes_argument_text`: a call's
    arguments may be the JSON text that the API carries, rather than the object it holds.
    `takes_developer`: the role `developer` means something to it. `takes_tools`: it shows the tools
    there are, `takes_calls`: it shows the calls in a history. `turn_end`: the control text that
    follows an answer, or None.
    """

    takes_parts: bool = False
    takes_text: bool = True
    takes_null_content: bool = False
    takes_argument_text: bool = True
    takes_developer: bool = False
    takes_tools: bool = False
    takes_calls: bool = False
    turn_end: str | None = None


def template_traits(
    source: str, template: ChatTemplate, control_texts: ControlTexts
) -> TemplateTraits:
    """Tries `template`, whose text is `source`."""
    takes_text = _shows(template, [_user(_QUESTION)], _QUESTION)
    takes_parts = _shows(
        template, [_user([{"type": "text", "text": _QUESTION}])], _QUESTION, never="'type'"
    )
    question = _user(_QUESTION if takes_text or not takes_parts else _parts(_QUESTION))
    text, parsed = '{"needle": 7}', {"needle": 7}
    # Some templates write tool calls only where there is no content, or none that is null.
    contents = ("", None)

    def shows_call(arguments: Any, content: str | None, expected: str) -> bool:
        return _shows(template, [question, _calls(arguments, content)], expected, never="None")

    argument_text = any(shows_call(text, content, text) for content in contents)
    argument_object = any(shows_call(parsed, content, '"needle"') for content in contents)
    null_content = any(shows_call(value, None, "needle") for value in (text, parsed))
    return TemplateTraits(
        takes_parts=takes_parts,
        takes_text=takes_text or not takes_parts,
        takes_null_content=null_content,
        takes_argument_text=argument_text or not argument_object,
        takes_developer="developer" in source,
        takes_tools=_takes_tools(template, question),
        takes_calls=argument_text or argument_object or null_content,
        turn_end=_turn_end(template, question, control_texts),
    )


def _turn_end(
    template: ChatTemplate, question: dict[str, Any], control_texts: ControlTexts
) -> str | None:
    answer = _ANSWER if isinstance(question["content"], str) else _parts(_ANSWER)
    text = _rendered(template, [question, {"role": "assistant", "content": answer}])
    if text is None or _ANSWER not in text:
        return None
    return control_texts.first_in(text.rpartition(_ANSWER)[2].lstrip())


def _takes_tools(template: ChatTemplate, question: dict[str, Any]) -> bool:
    with_tools = _rendered(template, [question], [_tool()])
    return with_tools is not None and with_tools != _rendered(template, [question])


def _shows(
    template: ChatTemplate,
    messages: list[dict[str, Any]],
    expected: str,
    *,
    never: str = "\0",
) -> bool:
    text = _rendered(template, messages)
    return text is not None and expected in text and never not in text


def _rendered(
    template: ChatTemplate, messages: list[dict[str, Any]], tools: list[Any] | None = None
) -> str | None:
    try:
        return template.render(messages, tools=tools)
    except ChatRefused:
        return None


def _user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def _parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def _tool() -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    function = {"name": "probe", "description": "Probes.", "parameters": parameters}
    return {"type": "function", "function": function}


def _calls(arguments: Any, content: str | None) -> dict[str, Any]:
    function = {"name": "search", "arguments": arguments}
    call = {"id": _CALL_ID, "type": "function", "function": function}
    return {"role": "assistant", "content": content, "tool_calls": [call]}
