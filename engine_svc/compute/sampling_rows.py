"""What each row asks of the sampler, set when the row starts and gathered for a step at once.

A step pays for an option only when one of its rows asks for it.
"""

from dataclasses import dataclass, replace
from enum import IntFlag
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine_svc.compute.token_biases import TokenBiases, TokenBiasRows
from engine_svc.planning.step import SamplingParameters

_BITS_PER_WORD = 32


class TokenMask(NamedTuple):
    """The only tokens that some rows of a step may sample."""

    rows: Tensor  # int64 [m]: places in the step, distinct
    allowed: Tensor  # int32 [m, ceil(vocab_size / 32)]: bit t mod 32 of word t div 32


class Penalties(NamedTuple):
    """The penalised rows of a step, `m` of them; the arguments of `Kernels.penalize`."""

    rows: Tensor  # int64 [m]: places in the step
    token_ids: Tensor  # int32 [m, most tokens of any], arbitrary beyond seq_lens
    prompt_lens: Tensor  # int64 [m]
    seq_lens: Tensor  # int64 [m]
    repetition: Tensor  # float32 [m], as the next two
    presence: Tensor
    frequency: Tensor


class WantedLogprobs(NamedTuple):
    """The rows of a step that ask for log-probabilities, `m` of them."""

    rows: Tensor  # int64 [m]: places in the step
    num_top: list[int]  # [m]


@dataclass(frozen=True, slots=True)
class SamplingInputs:
    """What the sampler must know of `s` rows, in the order of their logits."""

    temperature: Tensor  # float32 [s], as the next two
    min_p: Tensor
    top_p: Tensor
    top_k: Tensor  # int64 [s]; 0 is off
    seeds: Tensor  # int64 [s]
    positions: Tensor  # int64 [s]: of the token to sample
    masks: tuple[TokenMask, ...] = ()
    biases: TokenBiases | None = None
    penalties: Penalties | None = None
    logprobs: WantedLogprobs | None = None


class _Option(IntFlag):
    MASK = 1
    BIASES = 2
    PENALTIES = 4
    LOGPROBS = 8


class SamplingRows:
    """The sampling parameters of each row.

    `token_ids` int32 [rows, longest] and `prompt_lens` int64 [rows] are the batch's own arrays.
    With `tokens_on_device` penalties come with empty `token_ids`, for that of the device.
    """

    def __init__(
        self,
        token_ids: np.ndarray,
        prompt_lens: np.ndarray,
        vocab_size: int,
        *,
        tokens_on_device: bool = False,
    ) -> None:
        num_rows = len(prompt_lens)
        self._token_ids = token_ids
        self._prompt_lens = prompt_lens
        self._vocab_size = vocab_size
        self._tokens_on_device = tokens_on_device
        self._options = np.zeros(num_rows, np.uint8)
        self._filters = np.zeros((3, num_rows), np.float32)
        self._top_k = np.zeros(num_rows, np.int64)
        self._seeds = np.zeros(num_rows, np.int64)
        self._penalties = np.zeros((3, num_rows), np.float32)
        self._num_top_logprobs = np.zeros(num_rows, np.int64)
        # zeros() takes memory only where it is written.
        self._allowed = np.zeros((num_rows, -(-vocab_size // _BITS_PER_WORD)), np.int32)
        self._biases = TokenBiasRows(token_ids, prompt_lens, vocab_size)
        # Of the last step, for the next one with the same rows.
        self._gathered_rows: bytes | None = b""
        self._positions = np.zeros(num_rows, np.int64)
        self._gathered = self._gather_filters(np.empty(0, np.int64))
        self._gathered_options = self._options[:0]
        self._asked = 0

    def start(self, row: int, sampling: SamplingParameters) -> None:
        """Takes over a row's parameters; its tokens and prompt length are in the arrays already."""
        self._gathered_rows = None
        self._filters[:, row] = sampling.temperature, sampling.min_p, sampling.top_p
        self._top_k[row] = sampling.top_k
        self._seeds[row] = sampling.seed
        penalties = (
            sampling.repetition_penalty,
            sampling.presence_penalty,
            sampling.frequency_penalty,
        )
        self._penalties[:, row] = penalties
        self._num_top_logprobs[row] = sampling.top_logprobs
        options = _Option(0)
        if sampling.allowed_token_ids:
            self._allowed[row] = _bits(sampling.allowed_token_ids, self._vocab_size)
            options |= _Option.MASK
        if self._biases.start(row, sampling):
            options |= _Option.BIASES
        if penalties != (1.0, 0.0, 0.0):
            options |= _Option.PENALTIES
        if sampling.logprobs:
            options |= _Option.LOGPROBS
        self._options[row] = options

    def gather(self, rows: np.ndarray, seq_lens: np.ndarray) -> SamplingInputs:
        """The inputs of `rows`, which hold `seq_lens` tokens; both int64 [s].

        Their tensors may change with the next call.
        """
        key = rows.tobytes()
        if key != self._gathered_rows:
            self._gathered_rows, self._gathered = key, self._gather_filters(rows)
            self._gathered_options = self._options[rows]
            self._asked = int(np.bitwise_or.reduce(self._gathered_options))
        self._positions[: len(rows)] = seq_lens
        options, asked = self._gathered_options, self._asked
        if not asked:
            return self._gathered
        return replace(
            self._gathered,
            masks=(self._mask(rows, options),) if asked & _Option.MASK else (),
            biases=self._biases.select(rows, seq_lens) if asked & _Option.BIASES else None,
            penalties=(
                self._gather_penalties(rows, seq_lens, options)
                if asked & _Option.PENALTIES
                else None
            ),
            logprobs=self._wanted_logprobs(rows, options) if asked & _Option.LOGPROBS else None,
        )

    def _gather_filters(self, rows: np.ndarray) -> SamplingInputs:
        """What stays as it is while the same rows go on, with `_positions` for positions."""
        if len(rows) > len(self._positions):
            self._positions = np.zeros(len(rows), np.int64)
        temperature, min_p, top_p = torch.from_numpy(self._filters.take(rows, axis=1))
        return SamplingInputs(
            temperature=temperature,
            min_p=min_p,
            top_p=top_p,
            top_k=torch.from_numpy(self._top_k[rows]),
            seeds=torch.from_numpy(self._seeds[rows]),
            positions=torch.from_numpy(self._positions[: len(rows)]),
        )

    def _mask(self, rows: np.ndarray, options: np.ndarray) -> TokenMask:
        places = np.flatnonzero(options & _Option.MASK)
        return TokenMask(torch.from_numpy(places), torch.from_numpy(self._allowed[rows[places]]))

    def _gather_penalties(
        self, rows: np.ndarray, seq_lens: np.ndarray, options: np.ndarray
    ) -> Penalties:
        places = np.flatnonzero(options & _Option.PENALTIES)
        rows, seq_lens = rows[places], seq_lens[places]
        longest = 0 if self._tokens_on_device else int(seq_lens.max())
        return Penalties(
            torch.from_numpy(places),
            torch.from_numpy(self._token_ids[rows, :longest]),
            torch.from_numpy(self._prompt_lens[rows]),
            torch.from_numpy(seq_lens),
            *torch.from_numpy(self._penalties[:, rows]),
        )

    def _wanted_logprobs(self, rows: np.ndarray, options: np.ndarray) -> WantedLogprobs:
        places = np.flatnonzero(options & _Option.LOGPROBS)
        return WantedLogprobs(
            torch.from_numpy(places), self._num_top_logprobs[rows[places]].tolist()
        )


def _bits(token_ids: frozenset[int], vocab_size: int) -> np.ndarray:
    """A row of `TokenMask.allowed`."""
    allowed = np.zeros(-(-vocab_size // _BITS_PER_WORD) * _BITS_PER_WORD, np.bool_)
    allowed[list(token_ids)] = True
    return np.packbits(allowed, bitorder="little").view(np.int32)
