"""What the tests of the tokenizer service share: real chat templates and their control tokens."""

from dataclasses import dataclass
from pathlib import Path

import pytest

TEMPLATES = Path(__file__).parent / "data" / "templates"


@dataclass(frozen=True)
class Family:
    """A model family's template, and the control tokens it writes."""

    name: str
    template: str
    control: tuple[str, ...]
    special_tokens: dict[str, str]
    ordinary: tuple[str, ...] = ()


def _family(name: str, control: str, bos: str = "", eos: str = "", ordinary: str = "") -> Family:
    special = {"bos_token": bos, "eos_token": eos}
    return Family(
        name,
        (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8"),
        tuple(control.split()),
        {key: text for key, text in special.items() if text},
        tuple(ordinary.split()),
    )


FAMILIES = (
    _family("smollm2", "<|endoftext|> <|im_start|> <|im_end|>", "<|im_start|>", "<|im_end|>"),
    _family(
        "llama3_1",
        "<|begin_of_text|> <|eot_id|> <|start_header_id|> <|end_header_id|> <|eom_id|>",
        "<|begin_of_text|>",
        "<|eot_id|>",
    ),
    _family(
        "qwen3",
        "<|endoftext|> <|im_start|> <|im_end|>",
        eos="<|im_end|>",
        ordinary="<think> </think> <tool_call> </tool_call> <tool_response> </tool_response>",
    ),
    _family("gemma3", "<bos> <eos> <unk> <start_of_turn> <end_of_turn>", "<bos>", "<end_of_turn>"),
    _family(
        "deepseek_v3",
        "<\uff5cbegin▁of▁sentence\uff5c> <\uff5cend▁of▁sentence\uff5c> <\uff5cUser\uff5c> "
        "<\uff5cAssistant\uff5c> <\uff5ctool▁calls▁begin\uff5c> <\uff5ctool▁call▁begin\uff5c> "
        "<\uff5ctool▁sep\uff5c> <\uff5ctool▁call▁end\uff5c> <\uff5ctool▁calls▁end\uff5c> "
        "<\uff5ctool▁outputs▁begin\uff5c> <\uff5ctool▁output▁begin\uff5c> "
        "<\uff5ctool▁output▁end\uff5c> <\uff5ctool▁outputs▁end\uff5c>",
        "<\uff5cbegin▁of▁sentence\uff5c>",
        "<\uff5cend▁of▁sentence\uff5c>",
    ),
)


@pytest.fixture(params=FAMILIES, ids=lambda family: family.name)
def family(request: pytest.FixtureRequest) -> Family:
    found: Family = request.param
    return found
