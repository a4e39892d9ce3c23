"""Compiles grammars with llguidance into matchers, off the engine's thread, and keeps them."""

import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Final, Self

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from engine_svc.compute.deep_threads import deep_thread_pool
from engine_svc.compute.grammar_definition import (
    definition_of,
    refusal,
    too_complex,
    writes_json,
)
from engine_svc.planning.step import Grammar
from protos.wire.errors import InvalidRequest, StartupError

_NUM_THREADS: Final = 2
_STACK_BYTES: Final = 512 << 20
_NUM_KEPT: Final = 64
# A first mask takes milliseconds where a grammar is sound; steps wait for every later one.
_MAX_FIRST_MASK_SECONDS: Final = 0.5
# The library's word for a first mask without a token.
_NOTHING_MATCHES: Final = "NoExtensionBias"
# Below the library's own, which let one mask take seconds.
_LIMITS: Final = {
    "initial_lexer_fuel": 300_000,
    "max_grammar_size": 50_000,
    "max_lexer_states": 50_000,
    "step_max_items": 10_000,
    # Its errors go to users, who know their grammar.
    "verbose_errors": False,
}


class GrammarCompiler:
    """Makes matchers for grammars over one tokenizer. Thread-safe. A context manager.

    Copies of a matcher share what its lexer has learnt, so a kept one makes the masks of later
    requests faster.
    """

    def __init__(
        self, tokenizer_json: bytes, eos_token_ids: Sequence[int], vocab_size: int
    ) -> None:
        """`vocab_size` is the model's. StartupError when the library cannot read the tokenizer."""
        text = tokenizer_json.decode()
        try:
            tokenizer = _load_tokenizer(text, list(eos_token_ids), vocab_size)
        except ValueError as error:
            raise StartupError(f"no grammars with this tokenizer: {error}") from error
        self.eos_token_ids = tuple(tokenizer.eos_tokens)
        self.num_mask_words = -(-tokenizer.vocab_size // 32)
        # The tokens that fit inside a JSON string are put together once, for all masks.
        self._json_tokenizer = tokenizer.with_slices(LLTokenizer.json_slices())
        self._tokenizer = tokenizer
        self._limits = LLParserLimits(**_LIMITS)
        self._kept: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()
        self._threads = deep_thread_pool(_NUM_THREADS, _STACK_BYTES, "grammar")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def check(self, grammar: Grammar, output_token_ids: Sequence[int]) -> Future[bool]:
        """Compiles a grammar in the background, for `matcher` to find.

        The result says whether these outputs complete it, so that nothing may follow;
        InvalidRequest when it cannot be enforced, or the outputs do not match it.
        """
        return self._threads.submit(self._check, grammar, list(output_token_ids))

    def matcher(self, grammar: Grammar) -> LLMatcher:
        """A matcher at the beginning of a text, at once where `check` went before.

        Raises InvalidRequest.
        """
        kept = self._find(grammar)
        if kept is None:
            kept = self._threads.submit(self._compile, grammar).result()
        return kept.deep_copy()

    def forget(self, grammar: Grammar) -> None:
        """Drops what is kept of a grammar: a lexer that is full fails every copy."""
        with self._lock:
            self._kept.pop(grammar, None)

    def _find(self, grammar: Grammar) -> LLMatcher | None:
        with self._lock:
            if grammar in self._kept:
                self._kept.move_to_end(grammar)
            return self._kept.get(grammar)

    def _check(self, grammar: Grammar, output_token_ids: list[int]) -> bool:
        kept = self._find(grammar) or self._compile(grammar)
        if not output_token_ids:
            return False
        matcher = kept.deep_copy()
        if not matcher.consume_tokens(output_token_ids):
            raise InvalidRequest(
                "The output so far does not match the grammar.",
                code="invalid_grammar",
                param="output_token_ids",
            )
        return bool(matcher.is_stopped())

    def _compile(self, grammar: Grammar) -> LLMatcher:
        definition = definition_of(grammar)
        tokenizer = self._json_tokenizer if writes_json(grammar) else self._tokenizer
        matcher = LLMatcher(tokenizer, definition, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise refusal(grammar, matcher.get_error())
        first = matcher.deep_copy()
        started = time.thread_time()
        first.compute_bitmask()
        if _NOTHING_MATCHES in first.get_error():
            raise refusal(grammar, "no text can match it")
        if first.is_error() or time.thread_time() - started > _MAX_FIRST_MASK_SECONDS:
            raise too_complex(grammar)
        with self._lock:
            self._kept[grammar] = matcher
            if len(self._kept) > _NUM_KEPT:
                self._kept.popitem(last=False)
        return matcher


def _load_tokenizer(text: str, eos_token_ids: list[int], vocab_size: int) -> LLTokenizer:
    eos = eos_token_ids or None
    try:
        return LLTokenizer(text, n_vocab=vocab_size, eos_token=eos)
    except ValueError:
        # Some tokenizers hold more tokens than their model has logits for.
        return LLTokenizer(text, eos_token=eos)
