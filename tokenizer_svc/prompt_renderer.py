"""Turns the JSON of a chat into the text of a prompt: read, suit, protect, render."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizer_svc.chat_json import private_use_in, read_chat
from tokenizer_svc.chat_messages import suited_messages
from tokenizer_svc.chat_refused import ChatRefused
from tokenizer_svc.chat_template import ChatTemplate
from tokenizer_svc.control_texts import ControlTexts
from tokenizer_svc.rendered_prompt import RenderedPrompt
from tokenizer_svc.stand_ins import StandIns, private_use_characters
from tokenizer_svc.template_traits import TemplateTraits, template_traits


@dataclass(frozen=True, slots=True)
class _TriedTemplate:
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
            self._templates[name] = _TriedTemplate(template, traits, private_use)

    @property
    def turn_ends(self) -> set[str]:
        """The control texts that the templates write after an answer."""
        ends = (tried.traits.turn_end for tried in self._templates.values())
        return {end for end in ends if end is not None}

    def render(
        self,
        messages_json: bytes,
        tools_json: bytes = b"",
        variables_json: bytes = b"",
        add_generation_prompt: bool = True,
    ) -> RenderedPrompt:
        """Renders the chat; raises ChatRefused."""
        chat = read_chat(messages_json, tools_json, variables_json)
        tried = self._choose(has_tools=chat.tools is not None)
        messages = suited_messages(chat.messages, tried.traits)
        stand_ins = StandIns(
            self._control_texts,
            tried.private_use
            | private_use_in(messages, "messages")
            | private_use_in(chat.tools, "tools")
            | private_use_in(chat.variables, "chat_template_kwargs"),
        )
        protected = [_protected(message, stand_ins) for message in messages]
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
        return RenderedPrompt(text, stand_ins.originals)

    def _choose(self, *, has_tools: bool) -> _TriedTemplate:
        """ "tool_use" for a chat with tools where there is one, else "default", else the first."""
        names = ("tool_use", "default") if has_tools else ("default",)
        for name in names:
            if name in self._templates:
                return self._templates[name]
        return next(iter(self._templates.values()))


def _protected(message: dict[str, Any], stand_ins: StandIns) -> dict[str, Any]:
    protected: dict[str, Any] = stand_ins.protect(message)
    # Checked to be one of a few words, with which templates may build a control token.
    return {**protected, "role": message["role"]}
