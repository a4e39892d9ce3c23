"""The device's sampler, log-probabilities and logit edits, at a model's vocabulary."""

import torch
from torch import Tensor

from kernels import Kernels, select_kernels
from kernels.cpu.backend import CpuKernels
from kernels.reference import ReferenceKernels
from tests.gpu.machine import Machine
from tests.gpu.random_model import triton_config
from tests.gpu.records import Recorder

# temperature, min_p, top_k, top_p
FILTERS = (
    (1.0, 0.0, 0, 1.0),
    (2.0, 0.0, 0, 1.0),
    (1.0, 0.05, 0, 1.0),
    (0.7, 0.0, 20, 1.0),
    (1.3, 0.0, 2000, 1.0),
    (1.0, 0.0, 0, 0.9),
    (2.0, 0.0, 0, 0.9999),
    (1.0, 0.0, 50, 0.8),
    (1.5, 0.01, 0, 0.9),
    (2.0, 0.02, 30, 0.9),
    (0.0, 0.0, 0, 1.0),
    (1.0, 0.0, 0, 0.0),
)


def check_sampling(machine: Machine, recorder: Recorder) -> None:
    kernels = select_kernels(machine.torch_device, triton_config())
    for kind, logits in _kinds_of_logits(machine).items():
        options = _options(len(logits))
        tokens = kernels.sample(*_given(machine, logits, *options)).clone()
        with recorder.case(f"{kind} logits: the tokens of the CPU", is_check=True):
            expected = CpuKernels().sample(logits, *options)
            assert torch.equal(tokens.cpu(), expected), f"{tokens.tolist()}, {expected.tolist()}"
        with recorder.case(f"{kind} logits: the same alone", is_check=True):
            for row in range(0, len(logits), 3):
                alone = (part[row : row + 1] for part in (logits, *options))
                assert torch.equal(kernels.sample(*_given(machine, *alone)), tokens[row : row + 1])
    with recorder.case("rows that cannot be sampled", is_check=True):
        logits = torch.zeros(3, machine.config.vocab_size)
        logits[0, 7], logits[1] = torch.nan, -torch.inf
        tokens = kernels.sample(*_given(machine, logits, *(o[:3] for o in _options(3))))
        assert tokens[:2].tolist() == [-1, -1] and int(tokens[2]) >= 0
    with recorder.case("log-probabilities", is_check=True):
        _logprobs(machine, kernels)
    with recorder.case("masks, biases and penalties", is_check=True):
        _edits(machine, kernels)


def _kinds_of_logits(machine: Machine) -> dict[str, Tensor]:
    size, generator = machine.config.vocab_size, torch.Generator().manual_seed(0)
    n = len(FILTERS)
    ranks = torch.stack([torch.randperm(size, generator=generator) for _ in range(n)]).float() + 1
    normal = torch.randn(n, size, generator=generator)
    kinds = {
        "a model's": -1.5 * ranks.log() + 0.3 * normal,
        "normal": 4 * normal,
        "coarse": (2 * normal).round(),
    }
    return kinds if machine.is_gpu else {"coarse": kinds["coarse"]}


def _options(n: int) -> tuple[Tensor, ...]:
    chosen = [FILTERS[row % len(FILTERS)] for row in range(n)]
    temperature, min_p, top_k, top_p = zip(*chosen, strict=True)
    return (
        *(torch.tensor(temperature), torch.tensor(min_p)),
        *(torch.tensor(top_k), torch.tensor(top_p)),
        *(torch.arange(n) * 2**52 - 2**60, torch.arange(n) * 1000),
    )


def _given(machine: Machine, *tensors: Tensor) -> list[Tensor]:
    return [tensor.to(machine.torch_device) for tensor in tensors]


def _logprobs(machine: Machine, kernels: Kernels) -> None:
    (logits,) = list(_kinds_of_logits(machine).values())[:1]
    chosen = torch.arange(len(logits)) * 7
    expected = ReferenceKernels().token_logprobs(logits, chosen, 20)
    actual = [part.cpu() for part in kernels.token_logprobs(*_given(machine, logits, chosen), 20)]
    assert torch.equal(actual[1], expected[1])
    for values, wanted in ((actual[0], expected[0]), (actual[2], expected[2])):
        # A device's log and exp are off by a few places.
        assert torch.allclose(values, wanted, rtol=1e-5, atol=1e-5)


def _edits(machine: Machine, kernels: Kernels) -> None:
    size, generator = machine.config.vocab_size, torch.Generator().manual_seed(1)
    logits = torch.randn(4, size, generator=generator)
    rows = torch.tensor([2, 0])
    words = -(-size // 32)
    allowed = torch.randint(-(2**31), 2**31, (2, words), generator=generator, dtype=torch.int32)
    token_ids = torch.randint(size, (2, 50), generator=generator, dtype=torch.int32)
    token_ids[:, 10:20] = token_ids[:, :10]
    edits = (
        ("mask_logits", (rows, allowed)),
        ("bias_logits", (torch.tensor([1, 3]), torch.tensor([6, size - 1]), torch.ones(2))),
        (
            "penalize",
            (
                *(rows, token_ids, torch.tensor([5, 1]), torch.tensor([50, 33])),
                *(torch.tensor([1.3, 1.0]), torch.tensor([0.5, 0.2]), torch.tensor([0.1, 0.0])),
            ),
        ),
    )
    on_device = logits.to(machine.torch_device)
    reference = ReferenceKernels()
    for name, arguments in edits:
        getattr(reference, name)(logits, *arguments)
        getattr(kernels, name)(on_device, *_given(machine, *arguments))
    assert torch.allclose(on_device.cpu(), logits, rtol=1e-6, atol=1e-6)
