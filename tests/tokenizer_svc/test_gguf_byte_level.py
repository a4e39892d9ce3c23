"""Byte-level BPE from GGUF: the reference's ids, the named pre-tokenizers, the special tokens."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, pre_tokenizers

from protos.wire.errors import StartupError
from tests.fakes.gguf_files import write_gguf
from tokenizer_svc.gguf_files import load_gguf_file
from tokenizer_svc.gguf_pre_tokenizers import pre_tokenization

DATA = Path(__file__).parent / "data"
SMOLLM2_CASES = json.loads((DATA / "smollm2_ids.json").read_text())["cases"]
LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())


@pytest.fixture(scope="module")
def smollm2(default_model_path: Path) -> Tokenizer:
    return load_gguf_file(default_model_path).tokenizer


@pytest.mark.slow
@pytest.mark.parametrize("case", SMOLLM2_CASES, ids=lambda case: ascii(case["text"][:24]))
def test_smollm2_ids_equal_llama_cpp(smollm2: Tokenizer, case: dict) -> None:
    assert smollm2.encode(case["text"], add_special_tokens=False).ids == case["ids"]


@pytest.mark.slow
@pytest.mark.parametrize("case", SMOLLM2_CASES, ids=lambda case: ascii(case["text"][:24]))
def test_smollm2_decodes_what_it_encoded(smollm2: Tokenizer, case: dict) -> None:
    assert smollm2.decode(case["ids"], skip_special_tokens=False) == case["text"]


@pytest.mark.slow
def test_the_default_model_is_described(default_model_path: Path) -> None:
    files = load_gguf_file(default_model_path)
    assert files.eos_token_ids == (2,)
    assert files.context_length == 8192
    assert files.special_tokens["bos_token"] == "<|im_start|>"
    assert "<|im_start|>" in files.chat_templates["default"]
    assert len(files.tokenizer.encode("Hi").ids) == 1  # this model adds no BOS


def byte_level_file(path: Path, **changes: object) -> Path:
    """Letters for all bytes, four merges, and a control and a user-defined token at the end."""
    tokens = [*LETTERS, "12", "Ġ1", "ab", "abc", "<|end|>", "<tool>"]
    settings = {
        "model": "gpt2",
        "tokens": tokens,
        "types": [1] * (len(tokens) - 2) + [3, 4],
        "merges": ["1 2", "Ġ 1", "a b", "ab c"],
        "pre": "smollm",
        "extra": {"tokenizer.ggml.bos_token_id": 260, "tokenizer.ggml.eos_token_id": 260},
    }
    return write_gguf(path, **{**settings, **changes})


def tokens_of(tokenizer: Tokenizer, text: str) -> list[str]:
    return tokenizer.encode(text, add_special_tokens=False).tokens


def test_smollm_cuts_every_digit_before_gpt2s_pattern(tmp_path: Path) -> None:
    tokenizer = load_gguf_file(byte_level_file(tmp_path / "m.gguf")).tokenizer
    assert tokens_of(tokenizer, "a 12") == ["a", "Ġ", "1", "2"]
    gpt2 = load_gguf_file(byte_level_file(tmp_path / "g.gguf", pre="gpt-2")).tokenizer
    assert tokens_of(gpt2, "a 12") == ["a", "Ġ", "12"]


def test_control_and_user_defined_tokens_keep_their_ids_and_kinds(tmp_path: Path) -> None:
    tokenizer = load_gguf_file(byte_level_file(tmp_path / "m.gguf")).tokenizer
    assert tokens_of(tokenizer, "abc<|end|><tool>") == ["abc", "<|end|>", "<tool>"]
    kinds = {t.content: t.special for t in tokenizer.get_added_tokens_decoder().values()}
    assert kinds == {"<|end|>": True, "<tool>": False}
    assert tokenizer.token_to_id("<|end|>") == 260
    assert tokenizer.get_vocab_size() == 262


@pytest.mark.parametrize(
    ("pre", "flag", "starts_with_bos"),
    [
        ("smollm", None, False),
        ("smollm", True, True),
        ("llama-bpe", None, True),
        ("llama-bpe", False, False),
        ("tekken", None, True),
    ],
)
def test_bos_is_added_where_the_file_or_its_family_says(
    tmp_path: Path, pre: str, flag: bool | None, starts_with_bos: bool
) -> None:
    extra: dict[str, object] = {"tokenizer.ggml.bos_token_id": 260}
    if flag is not None:
        extra["tokenizer.ggml.add_bos_token"] = flag
    path = byte_level_file(tmp_path / "m.gguf", pre=pre, extra=extra)
    ids = load_gguf_file(path).tokenizer.encode("x").ids
    assert (ids[0] == 260) is starts_with_bos
    assert ids.count(260) == int(starts_with_bos)


def test_eos_eot_and_eom_all_end_a_turn(tmp_path: Path) -> None:
    extra = {
        "tokenizer.ggml.eos_token_id": 260,
        "tokenizer.ggml.eot_token_id": 3,
        "tokenizer.ggml.eom_token_id": 5,
    }
    path = byte_level_file(tmp_path / "m.gguf", extra=extra)
    assert load_gguf_file(path).eos_token_ids == (3, 5, 260)


def test_an_unknown_pre_tokenizer_is_named(tmp_path: Path) -> None:
    path = byte_level_file(tmp_path / "m.gguf", pre="martian-bpe")
    with pytest.raises(StartupError, match="'martian-bpe'"):
        load_gguf_file(path)


def test_an_unknown_kind_of_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="'bert'"):
        load_gguf_file(byte_level_file(tmp_path / "m.gguf", model="bert"))


def test_merges_of_unknown_tokens_are_a_startup_error(tmp_path: Path) -> None:
    path = byte_level_file(tmp_path / "m.gguf", merges=["x yz"])
    with pytest.raises(StartupError, match="merges"):
        load_gguf_file(path)


def test_repeated_tokens_do_not_move_other_ids(tmp_path: Path) -> None:
    tokens = [*LETTERS, "", "", "ab", "ab", "<|end|>"]
    path = byte_level_file(
        tmp_path / "m.gguf", tokens=tokens, types=[1] * 260 + [3], merges=["a b"]
    )
    tokenizer = load_gguf_file(path).tokenizer
    assert tokenizer.encode("ab<|end|>", add_special_tokens=False).ids == [258, 260]


@pytest.mark.parametrize(
    ("name", "text", "pieces"),
    [
        ("default", "ab, 1234 c", ["ab", ",", "Ġ", "123", "4", "Ġc"]),
        ("gpt-2", "I'm  12 x", ["I", "'m", "Ġ", "Ġ12", "Ġx"]),
        ("smollm", "v12 x", ["v", "1", "2", "Ġx"]),
        ("llama-bpe", "I'M 12345!\n\nx", ["I", "'M", "Ġ", "123", "45", "!ĊĊ", "x"]),
        ("qwen2", "a1234\n b", ["a", "1", "2", "3", "4", "Ċ", "Ġb"]),
        ("tekken", "camelCase HTTPServer/\n", ["camel", "Case", "ĠHTTPServer", "/Ċ"]),
        ("gpt-4o", "it's 1234", ["it's", "Ġ", "123", "4"]),
        ("falcon", "a+b 1234", ["a", "+", "b", "Ġ", "123", "4"]),
        ("deepseek-coder", "x\n12 y!", ["x", "Ċ", "1", "2", "Ġy", "!"]),
        ("deepseek-v3", "1234(ab 12", ["123", "4", "(ab", "Ġ", "12"]),
    ],
)
def test_each_pre_tokenizer_cuts_as_its_family_does(
    name: str, text: str, pieces: list[str]
) -> None:
    cut = pre_tokenization(name).pre_tokenizer().pre_tokenize_str(text)
    assert [piece for piece, _ in cut] == pieces


def test_named_templates_are_read(tmp_path: Path) -> None:
    templates = [
        {"name": "default", "template": "D"},
        {"name": "tool_use", "template": "T"},
    ]
    path = byte_level_file(tmp_path / "m.gguf", chat_template=templates)
    assert load_gguf_file(path).chat_templates == {"default": "D", "tool_use": "T"}
    path = byte_level_file(tmp_path / "one.gguf", chat_template="only")
    assert load_gguf_file(path).chat_templates == {"default": "only"}
    assert load_gguf_file(byte_level_file(tmp_path / "none.gguf")).chat_templates == {}
