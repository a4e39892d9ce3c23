"""The sampler's ops of `Kernels` on the native library: see native/sampling.cpp.

Python's part of a call is a few microseconds, so tensors go over as addresses as they are; only
what is not laid out as the library reads it is copied.
"""

import ctypes
from operator import is_

import torch
from torch import Tensor


class NativeSampling:
    """The sampler's methods, for a backend to inherit. Calls share one pool, so one at a time."""

    def __init__(self, library: ctypes.CDLL, pool: int) -> None:
        """`pool` is what the library's tl_pool_new returned; it is not deleted here."""
        self._library = library
        self._pool = pool
        # What `sample` was last given, and what the library was told of it. While the same rows go
        # on, their tensors are the same, and asking torch anything costs more than the call: a
        # model's weights have just gone through the caches, and torch's own code is in none.
        self._given: tuple[Tensor, ...] = ()
        self._told: tuple[int, ...] = ()

    def mask_logits(self, logits: Tensor, rows: Tensor, allowed: Tensor) -> None:
        rows, allowed = _read(rows, torch.int64), _read(allowed, torch.int32)
        self._library.tl_mask_logits(
            self._pool,
            *_written_rows(logits),
            logits.shape[1],
            len(rows),
            rows.data_ptr(),
            allowed.data_ptr(),
        )

    def bias_logits(self, logits: Tensor, rows: Tensor, token_ids: Tensor, biases: Tensor) -> None:
        rows, token_ids = _read(rows, torch.int64), _read(token_ids, torch.int64)
        biases = _read(biases, torch.float32)
        self._library.tl_bias_logits(
            *_written_rows(logits),
            len(biases),
            rows.data_ptr(),
            token_ids.data_ptr(),
            biases.data_ptr(),
        )

    def penalize(
        self,
        logits: Tensor,
        rows: Tensor,
        token_ids: Tensor,
        prompt_lens: Tensor,
        seq_lens: Tensor,
        repetition: Tensor,
        presence: Tensor,
        frequency: Tensor,
    ) -> None:
        token_ids = _read(token_ids, torch.int32)
        integers = [_read(each, torch.int64) for each in (rows, prompt_lens, seq_lens)]
        penalties = [_read(each, torch.float32) for each in (repetition, presence, frequency)]
        rows_address, *lens = (each.data_ptr() for each in integers)
        self._library.tl_penalize(
            self._pool,
            *_written_rows(logits),
            logits.shape[1],
            len(rows),
            rows_address,
            token_ids.data_ptr(),
            token_ids.shape[1],
            *lens,
            *(each.data_ptr() for each in penalties),
        )

    def sample(
        self,
        logits: Tensor,
        temperature: Tensor,
        min_p: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        seeds: Tensor,
        positions: Tensor,
        out: Tensor | None = None,
    ) -> Tensor:
        if out is None:
            out = torch.empty(logits.shape[0], dtype=torch.int64)
        given = (logits, temperature, min_p, top_k, top_p, seeds, positions, out)
        if len(self._given) == len(given) and all(map(is_, given, self._given)):
            self._library.tl_sample(self._pool, *self._told)
            return out
        read = (
            _read_rows(logits),
            *(_read(each, torch.float32) for each in (temperature, min_p)),
            *(_read(top_k, torch.int64), _read(top_p, torch.float32)),
            *(_read(each, torch.int64) for each in (seeds, positions)),
            out,
        )
        address, *addresses = (each.data_ptr() for each in read)
        num_rows, vocab_size = logits.shape
        told = (address, read[0].stride(0), vocab_size, num_rows, *addresses)
        # What was copied holds what there was; only the tensors themselves can be read anew.
        is_own = all(map(is_, given, read))
        self._given, self._told = (given, told) if is_own else ((), ())
        self._library.tl_sample(self._pool, *told)
        return out

    def token_logprobs(
        self, logits: Tensor, chosen: Tensor, num_top: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        logits, chosen = _read_rows(logits), _read(chosen, torch.int64)
        num_rows, vocab_size = logits.shape
        num_top = min(num_top, vocab_size)
        chosen_logprobs = torch.empty(num_rows)
        top_ids = torch.empty((num_rows, num_top), dtype=torch.int64)
        top_logprobs = torch.empty((num_rows, num_top))
        self._library.tl_token_logprobs(
            self._pool,
            logits.data_ptr(),
            logits.stride(0),
            vocab_size,
            num_rows,
            chosen.data_ptr(),
            num_top,
            chosen_logprobs.data_ptr(),
            top_ids.data_ptr(),
            top_logprobs.data_ptr(),
        )
        return chosen_logprobs, top_ids, top_logprobs


def _read(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    assert tensor.dtype == dtype
    return tensor.contiguous()


def _read_rows(logits: Tensor) -> Tensor:
    assert logits.dtype == torch.float32
    # A stride between rows may be anything, 0 too.
    return logits if logits.stride(1) == 1 else logits.contiguous()


def _written_rows(logits: Tensor) -> tuple[int, int]:
    """Address and stride of rows that are changed in place."""
    assert logits.dtype == torch.float32
    assert logits.stride(1) == 1 or logits.shape[1] == 1
    return logits.data_ptr(), logits.stride(0)
