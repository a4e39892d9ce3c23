"""Turns the JSON of a chat into the text of a prompt: read, suit, protect, render."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tokenizer_svc.chat_json import Chat, private_use_in, read_chat
from tokenizer_svc.chat_messages import suited_messages
from tokenizer_svc.chat_refused import ChatRefused
from tokenizer_svc.chat_template import ChatTemplate
from tokenizer_svc.continued_message import cut_at_marker, with_marker
from tokenizer_svc.control_texts import ControlTexts
from tokenizer_svc.rendered_prompt import RenderedPrompt
from tokenizer_svc.stand_ins import StandIns, private_use_characters
from tokenizer_svc.template_traits import TemplateTraits, template_traits
from tokenizer_svc.tool_call_format import tool_call_format
from tokenizer_svc.tools_as_text import with_calls, with_tools


@dataclass(frozen=True, slots=True)
class _TriedTemplate:
    source: str
    template: ChatTemplate
    traits: TemplateTraits
    private_use: set[str]


class PromptRenderer:
    """The model's templates, tried out. `templates` is TokenizerFiles.chat_templates.

    The constructor raises ChatRefused when a template does not compile.
    """

    def __init__(
        self,
        templates: Mapping[str, str],
        special_tokens: Mapping[str, str],
        control_texts: Iterable[str],
        max_output_characters: int,
    ) -> None:
        self._control_texts = ControlTexts(control_texts)
        self._templates = {}
        for name, source in templates.items():
            template = ChatTemplate(source, special_tokens, max_output_characters)
            traits = template_traits(source, template, self._control_texts)
            private_use = private_use_characters(source + "".join(special_tokens.values()))
            self._templates[name] = _TriedTemplate(source, template, traits, private_use)

    @property
    def turn_ends(self) -> set[str]:
        """The control texts that the templates write after an answer."""
        ends = (tried.traits.turn_end for tried in self._templates.values())
        return {end for end in ends if end is not None}

    @property
    def tool_call_format(self) -> str:
        """A name of ToolCallFormat without its prefix; empty where it is not known."""
        tried = self._choose(has_tools=True)
        return tool_call_format(tried.source, tried.traits.takes_tools)

    def render(
        self,
        messages_json: bytes,
        tools_json: bytes = b"",
        variables_json: bytes = b"",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> RenderedPrompt:
        """Renders the chat; raises ChatRefused."""
        if add_generation_prompt and continue_final_message:
            raise ChatRefused(
                "continue_final_message and add_generation_prompt exclude each other.",
                param="continue_final_message",
            )
        chat = read_chat(messages_json, tools_json, variables_json)
        tried = self._choose(has_tools=chat.tools is not None)
        taken = private_use_in(chat.tools, "tools")
        chat = _with_tools_taken(chat, tried.traits)
        messages = suited_messages(chat.messages, tried.traits)
        stand_ins = StandIns(
            self._control_texts,
            tried.private_use
            | private_use_in(messages, "messages")
            | taken
            | private_use_in(chat.variables, "chat_template_kwargs"),
        )
        protected = [_protected(message, stand_ins) for message in messages]
        marker = stand_ins.reserve() if continue_final_message else None
        if marker is not None:
            protected[-1] = with_marker(protected[-1], marker)
        tools = stand_ins.protect(chat.tools)
        variables = stand_ins.protect(chat.variables)
        try:
            text = tried.template.render(
                protected,
                tools=tools,
                variables=variables,
                add_generation_prompt=add_generation_prompt,
                stand_ins=stand_ins.originals,
            )
        except ChatRefused as refusal:
            message = stand_ins.restore(refusal.message)
            raise ChatRefused(message, param=refusal.param, code=refusal.code) from refusal
        if marker is not None:
            text = cut_at_marker(text, marker)
        return RenderedPrompt(text, stand_ins.originals)

    def _choose(self, *, has_tools: bool) -> _TriedTemplate:
        """ "tool_use" for a chat with tools where there is one, else "default", else the first."""
        names = ("tool_use", "default") if has_tools else ("default",)
        for name in names:
            if name in self._templates:
                return self._templates[name]
        return next(iter(self._templates.values()))


def _with_tools_taken(chat: Chat, traits: TemplateTraits) -> Chat:
    """`chat` with what a template of `traits` does not take of tools written as text."""
    messages, tools = chat.messages, chat.tools
    as_text = tools is not None and not traits.takes_tools
    # A template that knows calls but no list of tools would write them in another form than ours.
    if as_text or not traits.takes_calls:
        messages = with_calls(messages)
    if tools is not None and as_text:
        messages, tools = with_tools(messages, tools), None
    return replace(chat, messages=messages, tools=tools)


def _protected(message: dict[str, Any], stand_ins: StandIns) -> dict[str, Any]:
    protected: dict[str, Any] = stand_ins.protect(message)
    # Checked to be one of a few words, with which templates may build a control token.
    return {**protected, "role": message["role"]}
