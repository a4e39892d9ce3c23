"""Messages of a chat, checked and made ready for the template."""

import json
from typing import Any

import msgspec
import pytest

from gateway.chat_messages import checked_messages


@pytest.mark.parametrize(
    ("fields", "content"),
    [
        ({"content": [{"type": "refusal", "refusal": "No."}]}, [{"type": "text", "text": "No."}]),
        (
            {"content": [{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "b"}]},
            [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
        ),
        ({"content": None, "refusal": "No."}, "No."),
        ({"content": "yes", "refusal": None}, "yes"),
    ],
)
def test_an_earlier_refusal_is_text_to_the_template(fields: dict[str, Any], content: Any) -> None:
    user = {"role": "user", "content": "hi"}
    messages = [user, {"role": "assistant", **fields}]
    checked = json.loads(checked_messages(msgspec.Raw(json.dumps(messages).encode())))
    assert checked[0] == user
    assert (checked[1]["role"], checked[1]["content"]) == ("assistant", content)
