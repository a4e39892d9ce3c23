"""A model's chat template, compiled once and rendered in Jinja's immutable sandbox.

The template is text from a model file, so it is not trusted. The sandbox keeps it from Python's
internals; the process around it (template_worker.py) bounds its time and memory. The extras are
those of Hugging Face's transformers, whose apply_chat_template defines the dialect.
"""

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError, UndefinedError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tokenizer_svc.chat_refused import ChatRefused

_CODE = "chat_template_error"


class _RaisedByTemplate(TemplateError):
    """What `raise_exception` raises: the template's author speaks to the user."""


class _GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}` marks answers for training; here it is its content."""

    tags = {"generation"}  # noqa: RUF012 (as the base class declares it)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class ChatTemplate:
    """One template. `special_tokens` are variables every rendering sees, such as `bos_token`.

    The constructor raises ChatRefused when the text is no valid template.
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], max_output_characters: int
    ) -> None:
        self._special_tokens = special_tokens
        self._max_output_characters = max_output_characters
        self._ascii_escapes: dict[str, str] = {}
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[LoopControlExtension, _GenerationBlock],
        )
        environment.filters["tojson"] = self._to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise ChatRefused(f"line {error.lineno}: {error.message}", code=_CODE) from error
        except (TemplateError, RecursionError, MemoryError) as error:
            raise ChatRefused("it is too deep or too large", code=_CODE) from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] | None = None,
        variables: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = False,
        stand_ins: Mapping[str, str] | None = None,
    ) -> str:
        """The prompt; `stand_ins` are the characters of stand_ins.py that the strings hold.

        Raises ChatRefused when the template refuses, fails or writes too much.
        """
        self._ascii_escapes = {
            stand_in: stand_in if original.isascii() else _escaped(original)
            for stand_in, original in (stand_ins or {}).items()
        }
        context = {
            **self._special_tokens,
            "documents": None,
            **(variables or {}),
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._bounded_output(context)
        except _RaisedByTemplate as error:
            raise ChatRefused(
                f"The model's chat template refuses these messages: {error.message}", code=_CODE
            ) from error
        except UndefinedError as error:
            raise ChatRefused(
                f"The model's chat template cannot render these messages: {error.message}",
                code=_CODE,
            ) from error
        except SecurityError as error:
            raise ChatRefused(
                "The model's chat template does something that is not allowed.", code=_CODE
            ) from error
        except (RecursionError, MemoryError, OverflowError) as error:
            raise ChatRefused(
                "The model's chat template needs too much memory for these messages.", code=_CODE
            ) from error
        except ChatRefused:
            raise
        except Exception as error:  # a template can raise anything: TypeError, KeyError, …
            raise ChatRefused(
                "The model's chat template cannot render these messages; a field that it reads "
                "may be missing, null or of another type.",
                code=_CODE,
            ) from error

    def _bounded_output(self, variables: dict[str, Any]) -> str:
        """Renders without Template.generate, which rewrites tracebacks that nobody sees."""
        pieces = []
        room = self._max_output_characters
        context = self._template.new_context(variables)
        for piece in self._template.root_render_func(context):
            pieces.append(piece)
            room -= len(piece)
            if room < 0:
                raise ChatRefused(
                    "The rendered chat is longer than the "
                    f"{self._max_output_characters} characters allowed."
                )
        return "".join(pieces)

    def _to_json(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """As transformers': unlike Jinja's own, it does not escape HTML's characters."""
        text = json.dumps(
            value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys
        )
        if not ensure_ascii:
            return text
        # By hand, since a stand-in must come through as the character it stands for would.
        return re.sub(
            r"[^\x00-\x7f]",
            lambda match: self._ascii_escapes.get(match[0]) or _escaped(match[0]),
            text,
        )


def _escaped(character: str) -> str:
    return json.dumps(character)[1:-1]


def _raise_exception(message: str) -> NoReturn:
    raise _RaisedByTemplate(str(message))


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
