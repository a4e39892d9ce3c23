"""SentencePiece-style BPE from GGUF: the ids of SentencePiece itself."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from protos.wire.errors import StartupError
from tests.fakes.gguf_files import write_gguf
from tokenizer_svc.gguf_files import load_gguf_file
from tokenizer_svc.gguf_sentencepiece import merges_by_score
from tokenizer_svc.gguf_vocabulary import GgufVocabulary, TokenType

REFERENCE = json.loads((Path(__file__).parent / "data" / "sentencepiece_ids.json").read_text())
PIECES = REFERENCE["pieces"]
CASES = REFERENCE["cases"]
SPECIAL_IDS = {
    "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}


def sentencepiece_file(path: Path, **extra: object) -> Path:
    return write_gguf(
        path,
        model="llama",
        tokens=[text for text, _, _ in PIECES],
        scores=[score for _, score, _ in PIECES],
        types=[kind for _, _, kind in PIECES],
        extra={**SPECIAL_IDS, **extra},
    )


@pytest.fixture(scope="module")
def prefixed(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = sentencepiece_file(tmp_path_factory.mktemp("sp") / "prefixed.gguf")
    return load_gguf_file(path).tokenizer


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("sp") / "plain.gguf"
    extra = {"tokenizer.ggml.add_space_prefix": False}
    return load_gguf_file(sentencepiece_file(path, **extra)).tokenizer


@pytest.mark.parametrize("case", CASES, ids=lambda case: ascii(case["text"][:24]))
def test_ids_equal_sentencepiece(plain: Tokenizer, case: dict) -> None:
    assert plain.encode(case["text"], add_special_tokens=False).ids == case["plain"]


@pytest.mark.parametrize(
    "case",
    # After a user-defined piece llama.cpp and Hugging Face put a blank, SentencePiece does not.
    [case for case in CASES if "\n\n" not in case["text"]],
    ids=lambda case: ascii(case["text"][:24]),
)
def test_ids_with_a_blank_in_front_equal_sentencepiece(prefixed: Tokenizer, case: dict) -> None:
    assert prefixed.encode(case["text"], add_special_tokens=False).ids == case["prefixed"]


@settings(deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_any_text_comes_back_from_its_ids(plain: Tokenizer, text: str) -> None:
    # U+2581 is the blank's own spelling, so it alone cannot come back.
    text = text.replace("▁", "")
    ids = plain.encode(text, add_special_tokens=False).ids
    assert plain.decode(ids, skip_special_tokens=False) == text


def test_bos_is_added_unless_the_file_says_no(prefixed: Tokenizer, tmp_path: Path) -> None:
    assert prefixed.encode("a").ids[0] == 1
    path = sentencepiece_file(tmp_path / "m.gguf", **{"tokenizer.ggml.add_bos_token": False})
    assert load_gguf_file(path).tokenizer.encode("a").ids[0] != 1


def test_special_ids_left_unsaid_are_sentencepieces_own(tmp_path: Path) -> None:
    tokens = ["<unk>", "<s>", "</s>", "▁", "a"]
    path = write_gguf(
        tmp_path / "m.gguf", model="llama", tokens=tokens, scores=[0.0] * 5, types=[2, 3, 3, 1, 1]
    )
    files = load_gguf_file(path)
    assert files.eos_token_ids == (2,)
    assert files.tokenizer.encode("a").ids == [1, 3, 4]


def test_control_tokens_are_special_and_user_defined_ones_are_not(plain: Tokenizer) -> None:
    kinds = {t.content: t.special for t in plain.get_added_tokens_decoder().values()}
    assert kinds == {
        "<unk>": True, "<s>": True, "</s>": True, "<turn>": True, "<tool>": False, "\n\n": False,
    }  # fmt: skip
    ids = plain.encode("a<turn>b<tool>\n\n", add_special_tokens=False).ids
    assert [ids.count(token_id) for token_id in (3, 4, 5)] == [1, 1, 1]


def test_equal_scores_grow_a_run_from_its_left() -> None:
    tokens = ["▁", "▁▁", "▁▁▁"]
    vocabulary = GgufVocabulary(tokens, [TokenType.NORMAL] * 3, {})
    assert list(merges_by_score(vocabulary, [0.0, -1.0, -1.0])) == [
        ("▁▁", "▁"),
        ("▁", "▁▁"),
        ("▁", "▁"),
    ]


def test_control_tokens_are_never_made_by_merging() -> None:
    tokens = ["<", "/s>", "</s>"]
    types = [TokenType.NORMAL, TokenType.NORMAL, TokenType.CONTROL]
    assert list(merges_by_score(GgufVocabulary(tokens, types, {}), [-1.0, -2.0, 0.0])) == []


def test_missing_scores_are_a_startup_error(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", model="llama", tokens=["a"], types=[1])
    with pytest.raises(StartupError, match="scores"):
        load_gguf_file(path)
