"""A model's file on the device beside the same on the CPU: prompt, answer, and speed."""

import dataclasses
import time

import torch

from engine_svc.compute.any_executor import AnyExecutor
from engine_svc.compute.device_executor import DeviceExecutor
from engine_svc.compute.executor import Executor
from engine_svc.compute.executor_config import ExecutorConfig
from engine_svc.planning.step import RowStart, RowStep, SamplingParameters, StepPlan
from kernels import select_kernels
from tests.gpu.bare_machine import is_here
from tests.gpu.engine_line import Rows, ids_by_scheduler
from tests.gpu.machine import Machine
from tests.gpu.random_model import triton_config
from tests.gpu.records import Recorder

# Ids that begin a chat of SmolLM2; of another model they are as good as any.
PROMPT = [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 2, 198, 1, 4093, 198]
ANSWER = SamplingParameters(max_tokens=64, temperature=0.0)
# Mean difference of log-probabilities, weights as stored and activations in bfloat16.
CLOSE = 0.05


def check_file(machine: Machine, recorder: Recorder) -> None:
    if machine.model is None:
        recorder.skip("a model's file", "none was given: --model FILE.gguf")
        return
    if not is_here("gguf"):
        recorder.skip("a model's file", "the package gguf is not installed")
        return
    config = ExecutorConfig(
        max_num_seqs=8,
        max_num_batched_tokens=256,
        max_model_len=512,
        kv_memory_bytes=256 << 20,
        dtype="float32",
        cpu_kernels="torch",
    )
    host = Executor.load(machine.model, config, report=lambda line: None)
    kernels = select_kernels(machine.torch_device, triton_config())
    device = DeviceExecutor.load(
        machine.model, config, machine.device(), kernels, report=lambda line: None
    )
    (answer,) = ids_by_scheduler_of(host)
    text = PROMPT + answer
    with recorder.case("log-probabilities of a text, beside the CPU's"):
        of_host, of_device = (_scores(executor, text) for executor in (host, device))
        off = float((of_host - of_device).abs().mean())
        recorder.check("log-probabilities beside the CPU's", off < CLOSE, f"off by {off:.4f}")
    with recorder.case("greedy answers"):
        requests = [(PROMPT, ANSWER)] * 3
        for in_flight in (1, 2):
            ids = ids_by_scheduler(device, requests, in_flight=in_flight, num_batched_tokens=256)
            same = sum(a == b for a, b in zip(ids[0], answer, strict=True)) / len(answer)
            recorder.measure(f"{in_flight} in flight: ids as the CPU's", same)
            recorder.check(f"{in_flight} in flight: all rows the same", ids.count(ids[0]) == 3)
    if machine.is_gpu:
        with recorder.case("speed"):
            rows = Rows(device, [(PROMPT, dataclasses.replace(ANSWER, max_tokens=200))], 200)
            rows.run(in_flight=2)
            started = time.perf_counter()
            rows.run(in_flight=2)
            recorder.measure("one stream", 200 / (time.perf_counter() - started), "tokens/s")


def ids_by_scheduler_of(host: Executor) -> list[list[int]]:
    """The CPU's answer."""
    return ids_by_scheduler(host, [(PROMPT, ANSWER)], in_flight=1, num_batched_tokens=256)


def _scores(executor: AnyExecutor, text: list[int]) -> torch.Tensor:
    """Log-probabilities of all but the first token."""
    asking = dataclasses.replace(ANSWER, prompt_logprobs=True)
    blocks = list(range(-(-(len(text) + 1) // executor.block_size)))
    start = RowStart(0, text, len(text), asking, blocks)
    plan = StepPlan([start], [RowStep(0, 0, len(text), [], True, True)])
    (scored,) = executor.execute(plan).prompt_logprobs
    return torch.tensor([entry.logprob for entry in scored.logprobs])
