"""Logits that are finite, but over a temperature exceed float32."""

import torch
from torch import Tensor

# temperature, min_p, top_k, top_p
FILTERS = [
    (2e-5, 0.0, 0, 1.0),
    (1e-5, 0.5, 0, 1.0),
    (2e-5, 0.0, 3, 1.0),
    (1e-5, 0.0, 0, 0.9),
    (2e-5, 0.1, 5, 0.5),
]


def huge_logits(vocab_size: int) -> tuple[Tensor, list[int]]:
    """Rows [n, vocab_size], of at least 8 tokens, and the one that each must give: its first of the
    likeliest, which no noise makes up for."""
    spread = torch.rand(3, vocab_size, generator=torch.Generator().manual_seed(7))
    rows = torch.cat([spread * 1e38, -(1 + spread) * 1e38, torch.full((1, vocab_size), -3.4e38)])
    likeliest = [2, vocab_size - 1, 5, 4, vocab_size - 2, 1, 0]
    for row, token_id in enumerate(likeliest[:3]):
        rows[row, token_id] = 3e38
    for row, token_id in enumerate(likeliest[3:6], start=3):
        rows[row, token_id] = -9e37
    return rows, likeliest
