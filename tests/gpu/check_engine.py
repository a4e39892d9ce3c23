"""The engine's executor on the device, end to end: a model of random weights against the reference,
graphs against single ops, and the same tokens however steps are planned."""

import dataclasses

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from engine_svc.compute.decode_graphs import DecodeGraphs
from engine_svc.compute.device_executor import DeviceExecutor
from engine_svc.compute.executor_config import ExecutorConfig
from engine_svc.compute.kv_storage import KvStorage
from engine_svc.compute.loading import load_decoder
from engine_svc.compute.step_tensors import StepInputs
from engine_svc.planning.step import SampledToken, SamplingParameters
from kernels import Kernels, select_kernels
from kernels.reference import ReferenceKernels
from tests.gpu.engine_line import Requests, Rows, ids_by_scheduler, random_prompt
from tests.gpu.machine import Machine
from tests.gpu.random_model import RandomSource, load_random, triton_config
from tests.gpu.records import Recorder

GREEDY = SamplingParameters(max_tokens=64, temperature=0.0)
SEEDED = SamplingParameters(max_tokens=64, seed=3)
FILTERED = SamplingParameters(max_tokens=64, seed=4, top_k=50, top_p=0.9)
ASKING = SamplingParameters(
    max_tokens=64,
    seed=5,
    top_k=20,
    repetition_penalty=1.3,
    frequency_penalty=0.2,
    logit_bias=((3, 1.0),),
    logprobs=True,
    top_logprobs=2,
)
# As wide as the model, with as few layers as have a first, a middle and a last one.
NUM_LAYERS = 3
# Of logits, from float32 arithmetic to float64 of the same weights; and least cosines.
EXACT = 2e-3
COSINES = {"bfloat16": 0.99, "fp8": 0.9}


def check_model(machine: Machine, recorder: Recorder) -> None:
    """Logits of a prompt by the device's kernels and by the reference's, of the same weights."""
    config = machine.shortened(NUM_LAYERS if machine.is_gpu else 2)
    source = RandomSource(machine, config, stored_as_4_bits=False)
    prompt = random_prompt(24 if machine.is_gpu else 9, config.vocab_size, 0)
    with machine.tensors(), torch.inference_mode():
        reference = ReferenceKernels(torch.float32)
        reference.device = machine.torch_device
        expected = _prompt_logits(source, reference, prompt)
    for weights, kv in (("float32", "auto"), ("bfloat16", "auto"), ("fp8", "fp8")):
        name = f"logits beside the reference's, {weights}"
        with recorder.case(name), torch.inference_mode():
            kernels = select_kernels(machine.torch_device, triton_config(weights=weights, kv=kv))
            logits = _prompt_logits(source, kernels, prompt)
            off = float((logits.double() - expected.double()).abs().max())
            least = float(cosine_similarity(logits.double(), expected.double()).min())
            same = float((logits.argmax(-1) == expected.argmax(-1)).double().mean())
            detail = f"off by {off:.2e}, least cosine {least:.5f}, likeliest the same {same:.2f}"
            is_close = off < EXACT if weights == "float32" else least > COSINES[weights]
            recorder.check(name, is_close, detail)


def _prompt_logits(source: RandomSource, kernels: Kernels, prompt: list[int]) -> Tensor:
    """float32 [tokens, vocab], by one step that keeps every token."""
    decoder = load_decoder(source, kernels, len(prompt) + 1, report=lambda line: None)
    num_blocks = -(-len(prompt) // 16)
    storage = KvStorage.allocate(kernels, source.config, num_blocks, 16)
    device = kernels.device
    tokens = torch.tensor(prompt, dtype=torch.int32, device=device)
    places = torch.arange(len(prompt), dtype=torch.int32, device=device)
    ends = torch.tensor([0, len(prompt)], dtype=torch.int32, device=device)
    row = torch.zeros(1, dtype=torch.int32, device=device)
    inputs = StepInputs(
        token_ids=tokens,
        positions=places,
        slot_mapping=places,
        cu_seqlens=ends,
        rows=row,
        kept_indices=places,
        kept_positions=places,
        kept_cu_seqlens=ends,
        kept_rows=row,
        seq_lens=ends[1:].clone(),
        block_table=torch.arange(num_blocks, dtype=torch.int32, device=device)[None],
        keeps_every_token=True,
    )
    return decoder.logits(decoder.forward(inputs, storage), places).clone()


def _executor(machine: Machine, **kernels: object) -> DeviceExecutor:
    is_gpu = machine.is_gpu
    return load_random(
        machine,
        machine.shortened(NUM_LAYERS if is_gpu else 2),
        triton_config(**kernels),
        ExecutorConfig(
            max_num_seqs=16 if is_gpu else 2,
            max_num_batched_tokens=2048 if is_gpu else 24,
            max_model_len=1024 if is_gpu else 48,
            kv_memory_bytes=1 << 30 if is_gpu else 1 << 20,
        ),
    )


def _requests(machine: Machine, count: int) -> Requests:
    vocab_size = machine.config.vocab_size
    kinds = (GREEDY, SEEDED, FILTERED)
    return [
        (
            random_prompt(_length(machine, row), vocab_size, row),
            dataclasses.replace(kinds[row % 3], max_tokens=12 if machine.is_gpu else 2),
        )
        for row in range(count)
    ]


def _length(machine: Machine, row: int) -> int:
    return (5, 40, 300, 17, 64, 129, 1, 33)[row % 8] if machine.is_gpu else (9, 5)[row % 2]


def check_graphs(machine: Machine, recorder: Recorder) -> None:
    """By the quickest kernels: graphs and single ops, one step and two in flight."""
    executor = _executor(machine)
    # Sizes that have a graph, so that both ways compute products of the same shapes.
    for count in (1, 4, 16) if machine.is_gpu else (2,):
        rows = Rows(executor, _requests(machine, count), 12 if machine.is_gpu else 3)
        with recorder.case(f"batch of {count}"):
            captured = rows.run()
            recorder.check(f"{count}: every token is one", _are_tokens(captured))
            with recorder.case(f"{count}: two in flight give the same", is_check=True):
                _assert_same(rows.run(in_flight=2), captured)
            with recorder.case(f"{count}: without graphs the same", is_check=True):
                graphs = executor._graphs
                executor._graphs = DecodeGraphs({})
                try:
                    _assert_same(rows.run(), captured)
                finally:
                    executor._graphs = graphs
    with recorder.case("requests that ask for all", is_check=True):
        asking = [(prompt, ASKING) for prompt, _ in _requests(machine, 2)]
        captured = Rows(executor, asking, 3).run(in_flight=2)
        assert _are_tokens(captured)
        assert all(token.logprobs is not None for tokens in captured for token in tokens)


def check_invariant_engine(machine: Machine, recorder: Recorder) -> None:
    """Batch-invariant mode: the same ids alone, in batches, chunked, preempted, two in flight."""
    for wanted in ({}, {"kv": "fp8"}) if machine.is_gpu else ({},):
        kind = ", ".join(f"{key} {value}" for key, value in wanted.items()) or "bfloat16"
        with recorder.case(f"load, {kind}"):
            executor = _executor(machine, batch_invariant=True, **wanted)
            _check_invariance(machine, recorder, executor, kind)


def _check_invariance(
    machine: Machine, recorder: Recorder, executor: DeviceExecutor, kind: str
) -> None:
    requests = _requests(machine, 8 if machine.is_gpu else 2)
    large = 512 if machine.is_gpu else 24
    alone = [
        ids_by_scheduler(executor, [request], in_flight=1, num_batched_tokens=large)[0]
        for request in requests
    ]
    ways = {
        "in a batch": {"in_flight": 1, "num_batched_tokens": large},
        "two in flight": {"in_flight": 2, "num_batched_tokens": large},
        "in chunks, coming one after the other": {
            "in_flight": 2,
            "num_batched_tokens": 24 if machine.is_gpu else 8,
            "num_steps_between": 2,
        },
    }
    if machine.is_gpu:
        # The longest needs 20 blocks; all together over 40.
        ways["with few blocks"] = {"in_flight": 2, "num_batched_tokens": large, "num_blocks": 24}
    for name, way in ways.items():
        with recorder.case(f"{kind}, {name}: the ids of each alone", is_check=True):
            together = ids_by_scheduler(executor, requests, **way)
            different = [row for row, ids in enumerate(together) if ids != alone[row]]
            assert not different, f"requests {different} differ"
    with recorder.case(f"{kind}, without graphs: the ids of each alone", is_check=True):
        graphs = executor._graphs
        executor._graphs = DecodeGraphs({})
        try:
            together = ids_by_scheduler(executor, requests, in_flight=2, num_batched_tokens=large)
        finally:
            executor._graphs = graphs
        assert together == alone


def _are_tokens(sampled: list[list[SampledToken]]) -> bool:
    return all(token.error is None for tokens in sampled for token in tokens)


def _assert_same(actual: list[list[SampledToken]], expected: list[list[SampledToken]]) -> None:
    for row, (tokens, wanted) in enumerate(zip(actual, expected, strict=True)):
        ids, wanted_ids = ([token.token_id for token in some] for some in (tokens, wanted))
        assert ids == wanted_ids, f"row {row}: {ids} is not {wanted_ids}"
