"""The effect of every parameter on what a real line answers, with a model that speaks nonsense."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.fakes.running_line import RunningLine, running_line
from tests.fakes.tiny_models import VOCAB_SIZE, write_tiny_llama
from tests.fakes.tiny_tokenizers import IM_END, IM_START, byte_level

pytestmark = pytest.mark.slow

MODEL = "tiny-llama"
LETTERS = "abcdefghijklmnopqrstuvwxyz"
TOKENIZER = byte_level()
PROMPT = "once upon a time"


def ids(text: str) -> list[int]:
    return list(TOKENIZER.encode(text).ids)


# Every token is one letter, so that texts and tokens are the same thing.
READABLE = {"allowed_token_ids": ids(LETTERS), "temperature": 0, "max_tokens": 24}


# What the model itself asks for where a request is silent.
GENERATION_CONFIG = {"eos_token_id": IM_END, "temperature": 0.0, "max_new_tokens": 12}


@pytest.fixture(scope="module")
def tiny_line(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningLine]:
    directory = tmp_path_factory.mktemp("parameters")
    model = write_tiny_llama(directory / MODEL)
    (model / "generation_config.json").write_text(json.dumps(GENERATION_CONFIG))
    arguments = ("--model", str(model), "--max-num-seqs", "8", "--kv-memory", "16MiB")
    with running_line(directory, *arguments) as started:
        yield started


@pytest.fixture(scope="module")
def client(tiny_line: RunningLine) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=tiny_line.url, timeout=60) as opened:
        yield opened


class Line:
    """Sends bodies to the line and takes its answers apart."""

    def __init__(self, client: httpx.Client) -> None:
        self._client = client

    def send(self, **fields: Any) -> httpx.Response:
        body = {"model": MODEL, "prompt": PROMPT, **READABLE, **fields}
        body = {name: value for name, value in body.items() if value is not None}
        return self._client.post("/v1/completions", json=body)

    def answer(self, **fields: Any) -> dict[str, Any]:
        response = self.send(**fields)
        assert response.status_code == 200, response.text
        body: dict[str, Any] = response.json()
        return body

    def choice(self, **fields: Any) -> dict[str, Any]:
        (choice,) = self.answer(**fields)["choices"]
        made: dict[str, Any] = choice
        return made

    def text(self, **fields: Any) -> str:
        return str(self.choice(**fields)["text"])

    def chat(self, **fields: Any) -> dict[str, Any]:
        response = self._client.post("/v1/chat/completions", json={"model": MODEL, **fields})
        assert response.status_code == 200, response.text
        body: dict[str, Any] = response.json()
        return body


@pytest.fixture(scope="module")
def line(client: httpx.Client) -> Line:
    return Line(client)


@pytest.fixture(scope="module")
def plain(line: Line) -> str:
    """What the line says when nothing else is asked for."""
    text = line.text()
    assert len(text) == 24
    return text


def test_only_allowed_tokens_are_sampled(line: Line, plain: str) -> None:
    assert set(plain) <= set(LETTERS)
    assert set(line.text(allowed_token_ids=ids("xyz"), temperature=2)) <= set("xyz")


def test_a_bias_makes_a_token_certain_or_impossible(line: Line, plain: str) -> None:
    (letter,) = ids("q")
    assert line.text(logit_bias={str(letter): 100}) == "q" * 24
    (first,) = ids(plain[0])
    banned = line.text(logit_bias={str(first): -100})
    assert plain[0] not in banned


def test_bug_45_a_bias_outside_the_vocabulary_hurts_nobody(line: Line, plain: str) -> None:
    for biases in ({str(VOCAB_SIZE): 5}, {"-1": 5}, {"abc": 5}, {"5": 101}, {"5": "x"}):
        response = line.send(logit_bias=biases)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "logit_bias"
        assert line.text() == plain
    for accepted in ({}, {str(VOCAB_SIZE - 1): -100}):
        assert line.text(logit_bias=accepted) == plain


def test_bad_words_do_not_appear(line: Line, plain: str) -> None:
    word = plain[3:5]
    text = line.text(bad_words=[word])
    assert word not in text
    # The word is banned, not its letters.
    assert text[: plain.index(word) + 1] == plain[: plain.index(word) + 1]


def test_a_stop_token_ends_the_answer(line: Line, plain: str) -> None:
    choice = line.choice(stop_token_ids=ids(plain[4]))
    assert choice["text"] == plain[: plain.index(plain[4])]
    assert choice["finish_reason"] == "stop"


def test_a_stop_string_shows_where_it_is_asked_for(line: Line, plain: str) -> None:
    end = plain.index(plain[4:6])
    assert line.text(stop=plain[4:6]) == plain[:end]
    assert line.text(stop=plain[4:6], include_stop_str_in_output=True) == plain[: end + 2]


def test_min_tokens_holds_off_every_way_to_stop(line: Line, plain: str) -> None:
    eos_at_once = {"allowed_token_ids": [*ids(LETTERS), IM_END], "logit_bias": {str(IM_END): 100}}
    answer = line.answer(**eos_at_once)
    assert answer["choices"][0]["text"] == ""
    assert answer["usage"]["completion_tokens"] == 1
    answer = line.answer(**eos_at_once, min_tokens=6)
    assert len(answer["choices"][0]["text"]) == 6
    assert answer["usage"]["completion_tokens"] == 7
    # A stop token is masked until then, so another is sampled in its place.
    (first,) = ids(plain[0])
    assert len(line.text(stop_token_ids=[first], min_tokens=6)) >= 6
    assert plain[0] not in line.text(stop_token_ids=[first], min_tokens=6)[:6]
    # A stop string is not masked but passed over.
    text = line.text(stop=sorted(set(plain)), min_tokens=6)
    assert text == plain[:6]


def test_eos_can_be_ignored(line: Line) -> None:
    only_eos = {"allowed_token_ids": [IM_END], "max_tokens": 9}
    answer = line.answer(**only_eos)
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == 1
    answer = line.answer(**only_eos, ignore_eos=True)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 9


def test_control_tokens_show_where_they_are_asked_for(line: Line) -> None:
    only_control = {"allowed_token_ids": [IM_START], "max_tokens": 2}
    assert line.text(**only_control) == ""
    assert line.text(**only_control, skip_special_tokens=False) == "<|im_start|>" * 2
    eos = line.choice(allowed_token_ids=[IM_END], skip_special_tokens=False)
    assert (eos["text"], eos["finish_reason"]) == ("", "stop")


@pytest.mark.parametrize("name", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_penalties_make_for_variety(line: Line, plain: str, name: str) -> None:
    value = 10 if name == "repetition_penalty" else 2
    assert len(set(line.text(**{name: value}))) > len(set(plain))


@pytest.mark.parametrize("fields", [{"top_k": 1}, {"top_p": 0}, {"min_p": 1}])
def test_what_leaves_the_likeliest_token_only_is_greedy(
    line: Line, plain: str, fields: dict[str, Any]
) -> None:
    assert line.text(temperature=1.5, **fields) == plain


def test_a_seed_repeats_its_choices(line: Line) -> None:
    first = line.answer(temperature=1, seed=5, n=3)["choices"]
    assert len({choice["text"] for choice in first}) == 3
    assert line.answer(temperature=1, seed=5, n=3)["choices"] == first
    assert line.text(temperature=1, seed=5) == first[0]["text"]
    assert line.text(temperature=1, seed=6) != first[0]["text"]


def test_the_models_own_config_speaks_where_the_request_is_silent(line: Line, plain: str) -> None:
    silent = line.answer(temperature=None, max_tokens=None)
    assert silent["choices"][0]["text"] == plain[:12]
    assert silent["choices"][0]["finish_reason"] == "length"
    assert line.text(temperature=1, seed=5, max_tokens=None) != plain[:12]


def test_best_of_returns_the_likeliest_of_its_choices(line: Line) -> None:
    drawn = line.answer(temperature=1, seed=5, n=4, logprobs=0)["choices"]
    best = max(drawn, key=lambda choice: sum(choice["logprobs"]["token_logprobs"]))
    answer = line.answer(temperature=1, seed=5, best_of=4)
    assert [choice["text"] for choice in answer["choices"]] == [best["text"]]
    assert answer["usage"]["completion_tokens"] == 4 * 24


def test_prompts_of_every_kind_are_the_same_prompt(line: Line, plain: str) -> None:
    for prompt in ([PROMPT], ids(PROMPT), [ids(PROMPT)]):
        assert line.text(prompt=prompt) == plain
    texts = [choice["text"] for choice in line.answer(prompt=["x", PROMPT], n=2)["choices"]]
    assert texts[0] == texts[1] != plain
    assert texts[2:] == [plain, plain]


def test_a_salt_keeps_cached_prompts_apart(line: Line) -> None:
    def num_cached(**fields: Any) -> int:
        usage = line.answer(prompt="salted " * 8, **fields)["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert num_cached() == 0
    assert num_cached() > 0
    assert num_cached(cache_salt="other") == 0
    assert num_cached(cache_salt="other") > 0


def test_a_chat_goes_on_where_its_last_message_ends(line: Line) -> None:
    rendered = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nonce upon"
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "once upon"},
    ]
    answer = line.chat(messages=messages, continue_final_message=True, **READABLE)
    assert answer["choices"][0]["message"]["content"] == line.text(prompt=rendered)
    assert answer["usage"]["prompt_tokens"] == len(ids(rendered))


def test_a_chat_may_end_without_the_header_of_an_answer(line: Line) -> None:
    rendered = "<|im_start|>user\nhi<|im_end|>\n"
    messages = [{"role": "user", "content": "hi"}]
    for fields, prompt in [
        ({}, rendered + "<|im_start|>assistant\n"),
        ({"add_generation_prompt": False}, rendered),
    ]:
        answer = line.chat(messages=messages, **fields, **READABLE)
        assert answer["usage"]["prompt_tokens"] == len(ids(prompt))
        assert answer["choices"][0]["message"]["content"] == line.text(prompt=prompt)


def test_echo_shows_the_prompt(line: Line, plain: str) -> None:
    assert line.text(echo=True) == PROMPT + plain
    assert line.text(prompt=ids(PROMPT), echo=True) == PROMPT + plain
    choice = line.choice(echo=True, max_tokens=0)
    assert (choice["text"], choice["finish_reason"]) == (PROMPT, "length")


def test_echoed_log_probabilities_are_those_of_generating(line: Line, plain: str) -> None:
    generated = line.choice(logprobs=3)["logprobs"]
    echoed = line.choice(prompt=PROMPT + plain, echo=True, max_tokens=0, logprobs=3)["logprobs"]
    assert echoed["tokens"] == list(PROMPT + plain)
    assert echoed["text_offset"] == list(range(len(PROMPT + plain)))
    assert echoed["token_logprobs"][0] is None and echoed["top_logprobs"][0] is None
    of_answer = echoed["token_logprobs"][len(PROMPT) :]
    assert of_answer == pytest.approx(generated["token_logprobs"], abs=1e-3)
    tops = echoed["top_logprobs"][len(PROMPT) :]
    for found, expected in zip(tops, generated["top_logprobs"], strict=True):
        assert found == pytest.approx(expected, abs=1e-3)


def test_prompt_log_probabilities_name_every_token(line: Line) -> None:
    # Twice: what is asked of a cached prompt is computed all the same.
    for _ in range(2):
        first, *rest = line.choice(prompt_logprobs=2)["prompt_logprobs"]
        assert first is None
        for token_id, letter, entries in zip(ids(PROMPT)[1:], PROMPT[1:], rest, strict=True):
            own = entries[str(token_id)]
            assert own["decoded_token"] == letter
            assert len(entries) == (2 if own["rank"] else 3)
            ranked = [entry for entry in entries.values() if entry["rank"]]
            best, second = sorted(ranked, key=lambda entry: entry["rank"])
            assert (best["rank"], second["rank"]) == (1, 2)
            assert 0 >= best["logprob"] >= second["logprob"] >= own["logprob"] or own["rank"]
    chat = line.chat(messages=[{"role": "user", "content": "hi"}], prompt_logprobs=0, max_tokens=1)
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
