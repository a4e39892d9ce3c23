"""Ends a prompt inside its last message, so that the answer goes on with that message.

The end is found by a marker behind the message's text, as transformers' apply_chat_template does
with `continue_final_message`: text searched for itself may stand in the prompt more than once.
"""

from typing import Any, Final

from tokenizer_svc.chat_refused import ChatRefused

_PARAM: Final = "continue_final_message"


def with_marker(message: dict[str, Any], marker: str) -> dict[str, Any]:
    """`message` with `marker` and a space behind its text.

    Raises ChatRefused when it has no text.
    """
    content = message.get("content")
    mark = f"{marker} "
    if isinstance(content, str):
        return {**message, "content": content + mark}
    if isinstance(content, list) and content:
        *before, last = content
        return {**message, "content": [*before, {**last, "text": last["text"] + mark}]}
    raise ChatRefused("The last message has no text that could be continued.", param=_PARAM)


def cut_at_marker(prompt: str, marker: str) -> str:
    """`prompt` up to the end of the marked message's text.

    Raises ChatRefused when the marker is not in it.
    """
    before, found, after = prompt.rpartition(marker)
    if not found:
        raise ChatRefused(
            "The model's chat template does not show the last message's text, so it cannot be "
            "continued.",
            param=_PARAM,
        )
    # The space is gone: the template trims messages, and would have trimmed this one's end.
    return before if after.startswith(" ") else before.rstrip()
