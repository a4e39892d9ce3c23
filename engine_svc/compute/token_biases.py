"""Biases and bans on single tokens: logit_bias, bad_words, and the end before min_tokens.

A ban is a bias of -inf. Most biases are known when a row starts and lie in one flat table, from
which a step selects those of its rows; only words of several tokens hang on what a row holds.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine_svc.planning.step import SamplingParameters

# By the token that comes just before the last: the tokens before the last, and the last.
_Words = Mapping[int, Sequence[tuple[list[int], int]]]

_ALWAYS = np.iinfo(np.int64).max


class TokenBiases(NamedTuple):
    """What to add to which logits of a step. A pair of row and token comes once, or with -inf."""

    rows: Tensor  # int64 [e]: places in the step
    token_ids: Tensor  # int64 [e]
    biases: Tensor  # float32 [e]


class TokenBiasRows:
    """The biases of each row. `token_ids` [rows, longest] and `prompt_lens` [rows] are the batch's.

    Ids at or beyond `vocab_size` have no logit and are left out.
    """

    def __init__(self, token_ids: np.ndarray, prompt_lens: np.ndarray, vocab_size: int) -> None:
        self._token_ids = token_ids
        self._prompt_lens = prompt_lens
        self._vocab_size = vocab_size
        # Flat, one entry per bias. It holds while its row has fewer than `until` tokens.
        self._rows = np.empty(0, np.int64)
        self._biased_ids = np.empty(0, np.int64)
        self._biases = np.empty(0, np.float32)
        self._until = np.empty(0, np.int64)
        self._words: dict[int, _Words] = {}

    def start(self, row: int, sampling: SamplingParameters) -> bool:
        """Replaces what is known of `row`; returns whether it has any bias."""
        entries = self._entries(row, sampling)
        kept = self._rows != row
        if entries or not kept.all():
            ids, biases, until = zip(*entries, strict=True) if entries else ((), (), ())
            rows = np.full(len(ids), row, np.int64)
            self._rows = np.concatenate([self._rows[kept], rows])
            self._biased_ids = np.concatenate([self._biased_ids[kept], np.array(ids, np.int64)])
            self._biases = np.concatenate([self._biases[kept], np.array(biases, np.float32)])
            self._until = np.concatenate([self._until[kept], np.array(until, np.int64)])
        self._words.pop(row, None)
        words = _words_by_token_before_last(sampling)
        if words:
            self._words[row] = words
        return bool(entries or words)

    def _entries(self, row: int, sampling: SamplingParameters) -> list[tuple[int, float, int]]:
        """(token id, bias, until) of all that is known from the start."""
        sums: defaultdict[int, float] = defaultdict(float)
        for token_id, bias in sampling.logit_bias:
            sums[token_id] += bias
        entries = [(token_id, bias, _ALWAYS) for token_id, bias in sums.items()]
        banned = {word[0] for word in sampling.bad_words if len(word) == 1}
        entries += [(token_id, -np.inf, _ALWAYS) for token_id in banned]
        if sampling.min_tokens:
            until = int(self._prompt_lens[row]) + sampling.min_tokens
            ends = sampling.eos_token_ids | sampling.stop_token_ids
            entries += [(end, -np.inf, until) for end in ends if end < self._vocab_size]
        return entries

    def select(self, rows: np.ndarray, seq_lens: np.ndarray) -> TokenBiases:
        """The biases on the next token of `rows`, which hold `seq_lens` tokens; both int64 [s].

        A row may come several times in a run, for what comes next after each of its drafts.
        """
        num_places = np.bincount(rows, minlength=len(self._prompt_lens))
        first_places = np.zeros_like(num_places)
        first_places[rows[::-1]] = np.arange(len(rows))[::-1]
        entries = np.repeat(np.arange(len(self._rows)), num_places[self._rows])
        firsts = np.searchsorted(entries, np.arange(len(self._rows)))
        places = first_places[self._rows[entries]] + np.arange(len(entries)) - firsts[entries]
        holds = seq_lens[places] < self._until[entries]
        places, entries = places[holds], entries[holds]
        ids, biases = self._biased_ids[entries], self._biases[entries]
        completed = self._words_to_complete(rows, seq_lens)
        if completed:
            more_places, more_ids = np.array(completed, np.int64).T
            places = np.concatenate([places, more_places])
            ids = np.concatenate([ids, more_ids])
            biases = np.concatenate([biases, np.full(len(completed), -np.inf, np.float32)])
        return TokenBiases(
            torch.from_numpy(places), torch.from_numpy(ids), torch.from_numpy(biases)
        )

    def _words_to_complete(self, rows: np.ndarray, seq_lens: np.ndarray) -> list[tuple[int, int]]:
        """(place, token id) of each token that would complete a word of several tokens."""
        completed: list[tuple[int, int]] = []
        if not self._words:
            return completed
        for place, (row, end) in enumerate(zip(rows.tolist(), seq_lens.tolist(), strict=True)):
            words = self._words.get(row)
            begin = int(self._prompt_lens[row])
            if words is None or end == begin:
                continue
            latest = int(self._token_ids[row, end - 1])
            for tokens, last in words.get(latest, ()):
                # The prompt does not count: a word may begin at the first output.
                first = end - len(tokens)
                if first >= begin and self._token_ids[row, first:end].tolist() == tokens:
                    completed.append((place, last))
        return completed


def _words_by_token_before_last(sampling: SamplingParameters) -> _Words:
    words: defaultdict[int, list[tuple[list[int], int]]] = defaultdict(list)
    for word in sampling.bad_words:
        if len(word) > 1:
            words[word[-2]].append((list(word[:-1]), word[-1]))
    return dict(words)
