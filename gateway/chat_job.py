"""From a chat's body to its job, with how its choices' text is to be read."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec

from gateway.call import Call
from gateway.chat_messages import checked_messages
from gateway.chat_reducer import TextReading
from gateway.field_checks import invalid_value
from gateway.job import Job, job_from
from gateway.lanes import LineModel
from gateway.openai_schema import ChatCompletionRequest
from gateway.prompt_size import check_prompt_bytes
from gateway.reasoning import CLOSER, OPENER
from gateway.tool_call_format import AUTO, BARE_JSON, CallFormat, call_format
from gateway.tool_grammar import tool_grammar
from gateway.tools import ToolUse, checked_tool_use
from protos.common.v1 import common_pb2
from protos.tokenizer.v1 import tokenizer_pb2

_THINKING_SWITCH: Final = "enable_thinking"


@dataclass(frozen=True, slots=True)
class ModelText:
    """How the model writes what is not plain answer: by the settings, else by its template."""

    tool_call_format: str = AUTO
    reasoning: str = "auto"

    def call_format(self, model: LineModel) -> CallFormat | None:
        return call_format(self.tool_call_format, model.tool_call_format)

    def has_reasoning(self, model: LineModel) -> bool:
        return model.has_reasoning if self.reasoning == "auto" else self.reasoning == "on"


def chat_job(
    body: ChatCompletionRequest,
    call: Call,
    model: LineModel,
    model_text: ModelText,
    *,
    endpoint: str,
) -> Job:
    """What a body, which has passed its own `check`, asks for. Raises InvalidRequest."""
    num_bytes = memoryview(body.messages).nbytes + memoryview(body.tools).nbytes
    check_prompt_bytes(num_bytes, model.max_model_len, "messages")
    tool_use = checked_tool_use(body.tools, body.tool_choice, body.parallel_tool_calls)
    has_reasoning = model_text.has_reasoning(model)
    form = model_text.call_format(model) if tool_use.tools else None
    if tool_use.must_call and form is None:
        form = BARE_JSON
    job = job_from(body, call, model, endpoint=endpoint, prompts=(), prompt_param="messages")
    grammar, grammar_param = _grammar(job, tool_use, form)
    is_held = grammar is not None
    kwargs = body.chat_template_kwargs or {}
    if is_held and has_reasoning:
        # What must match a grammar from its first token on leaves no room for thoughts.
        kwargs = {_THINKING_SWITCH: False, **kwargs}
    if grammar is not None:
        job.sampling.grammar.CopyFrom(grammar)
    reading = TextReading(
        has_reasoning=has_reasoning and not is_held,
        call_format=form,
        tool_names=frozenset(tool.name for tool in tool_use.tools),
        max_calls=tool_use.max_calls,
        begins_bare=is_held and form is not None and bool(form.bracket),
    )
    return replace(
        job,
        prompts=(_prompt(body, tool_use, kwargs),),
        grammar_param=grammar_param,
        shown_control_tokens=_shown_control_tokens(reading),
        reading=reading,
    )


def _grammar(
    job: Job, tool_use: ToolUse, form: CallFormat | None
) -> tuple[common_pb2.Grammar | None, str]:
    """What the text must match, and the field that says so."""
    structure = job.sampling.grammar if job.sampling.HasField("grammar") else None
    if form is None:
        return structure, job.grammar_param
    if structure is None:
        if not tool_use.must_call:
            return None, ""
        return tool_grammar(form, tool_use.tools, tool_use.max_calls), "tools"
    if tool_use.must_call or not structure.json_schema:
        raise invalid_value(
            f"`{job.grammar_param}` cannot be combined with "
            + ("a `tool_choice` that demands a call." if tool_use.must_call else "`tools`."),
            job.grammar_param,
        )
    grammar = tool_grammar(form, tool_use.tools, tool_use.max_calls, structure.json_schema)
    return grammar, job.grammar_param


def _shown_control_tokens(reading: TextReading) -> tuple[str, ...]:
    """The control tokens that reading needs to see; some tokenizers have them as plain tokens."""
    shown = (OPENER, CLOSER) if reading.has_reasoning else ()
    if reading.call_format is None:
        return shown
    form = reading.call_format
    return (*shown, form.opener, *([form.closer] if form.closer else []))


def _prompt(
    body: ChatCompletionRequest, tool_use: ToolUse, template_kwargs: Mapping[str, Any]
) -> tokenizer_pb2.EncodeRequest:
    return tokenizer_pb2.EncodeRequest(
        chat=tokenizer_pb2.ChatPrompt(
            messages_json=checked_messages(body.messages),
            tools_json=tool_use.tools_json,
            template_kwargs_json=msgspec.json.encode(template_kwargs) if template_kwargs else b"",
            add_generation_prompt=body.adds_generation_prompt,
            continue_final_message=bool(body.continue_final_message),
        )
    )
