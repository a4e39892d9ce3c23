"""The CPU in the place of a GPU: a device's executor over torch's kernels, and a line of steps.

Torch's kernels know no padding, so it gets a block of its own to be written to.
"""

from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from engine_svc.compute.device_executor import DeviceExecutor
from engine_svc.compute.devices import CudaDevice, Device, HostDevice
from engine_svc.compute.executor_config import ExecutorConfig
from engine_svc.compute.ranks import ONE_RANK, Ranks
from engine_svc.planning.limits import SchedulerConfig
from engine_svc.planning.scheduler import Scheduler
from engine_svc.planning.step import PendingStep, SamplingParameters, StepPlan
from kernels import AttentionPlan, Kernels, KvCache, KvLayer
from kernels.cpu.backend import CpuKernels
from tests.fakes.scheduler_driver import Received, SchedulerDriver

Requests = Sequence[tuple[Sequence[int], SamplingParameters]]


class PaddedCpuKernels(CpuKernels):
    """Torch's kernels with a GPU's rules for padding: slot -1, and sequences of length 0."""

    def allocate_kv(
        self, num_layers: int, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int
    ) -> KvCache:
        self._spare_block = num_blocks
        cache = super().allocate_kv(num_layers, num_blocks + 1, block_size, num_kv_heads, head_dim)
        # Whatever reads a slot before it is written shows; a spare one is read by padding.
        cache.fill_(torch.nan)
        cache[:, :, num_blocks:] = 0
        return cache

    def rope_and_cache(
        self,
        query: Tensor,
        query_positions: Tensor,
        key: Tensor,
        value: Tensor,
        key_positions: Tensor,
        cos_sin_table: Tensor,
        kv_layer: KvLayer,
        slot_mapping: Tensor,
        query_norm: Tensor | None,
        key_norm: Tensor | None,
        eps: float,
    ) -> Tensor:
        spare = self._spare_block * kv_layer.shape[2]
        slots = torch.where(slot_mapping < 0, spare, slot_mapping)
        return super().rope_and_cache(
            *(query, query_positions, key, value, key_positions, cos_sin_table),
            *(kv_layer, slots, query_norm, key_norm, eps),
        )

    def plan_attention(
        self,
        cu_seqlens: Tensor,
        seq_lens: Tensor,
        block_table: Tensor,
        block_size: int,
        rows: Tensor | None = None,
    ) -> AttentionPlan:
        assert rows is not None
        seq_lens, block_table = seq_lens[rows], block_table[rows]
        is_padding = seq_lens == 0
        block_table = torch.where(is_padding[:, None], self._spare_block, block_table)
        return super().plan_attention(cu_seqlens, seq_lens + is_padding, block_table, block_size)


def load_device_executor(
    directory: Path,
    kernels: Kernels | None = None,
    device: Device | None = None,
    *,
    ranks: Ranks = ONE_RANK,
    **overrides: object,
) -> DeviceExecutor:
    """A DeviceExecutor with 8 rows and 4 MiB of KV cache, by torch's CPU kernels unless told."""
    settings: dict[str, object] = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 512,
        "kv_memory_bytes": 4 << 20,
    }
    config = ExecutorConfig(**(settings | overrides))  # type: ignore[arg-type]
    return DeviceExecutor.load(
        directory,
        config,
        device or HostDevice(checks_graphs=False),
        kernels or PaddedCpuKernels(),
        report=lambda line: None,
        ranks=ranks,
    )


def gpu_or_rehearsal() -> Device:
    """A GPU where there is one, else the CPU, where graphs are held to the rules of a capture."""
    if torch.cuda.is_available():
        return CudaDevice(torch.device("cuda", 0))
    return HostDevice(checks_graphs=True)


class StepLine:
    """Runs requests through a scheduler, with as many steps in flight as it plans."""

    def __init__(self, config: SchedulerConfig, launch: Callable[[StepPlan], PendingStep]) -> None:
        self._driver = SchedulerDriver(config, lambda plan: launch(plan).wait())
        self._scheduler: Scheduler = self._driver.scheduler
        self._max_in_flight = config.max_steps_in_flight
        self._launch = launch
        self._in_flight: deque[tuple[StepPlan, PendingStep]] = deque()
        self.most_in_flight = 0
        self.num_steps = 0

    @property
    def num_preemptions(self) -> int:
        return self._scheduler.load.num_preemptions

    def run(self, requests: Requests, *, num_steps_between: int = 0) -> list[Received]:
        """What each request received; the later ones come so many steps after the one before."""
        for key, (prompt, sampling) in enumerate(requests):
            self._driver.add(key, prompt, sampling)
            for _ in range(num_steps_between):
                self._step()
        while self._scheduler.has_requests or self._in_flight:
            assert self.num_steps < 10_000, "requests do not come to an end"
            self._step()
        return [self._driver.received[key] for key in range(len(requests))]

    def _step(self) -> None:
        """As the engine's loop."""
        if not self._scheduler.has_requests and not self._in_flight:
            return
        self.num_steps += 1
        plan = self._scheduler.schedule()
        if plan is not None:
            self._take(self._scheduler.first_starts(plan))
            self._in_flight.append((plan, self._launch(plan)))
            self.most_in_flight = max(self.most_in_flight, len(self._in_flight))
        if plan is None or len(self._in_flight) == self._max_in_flight:
            plan, pending = self._in_flight.popleft()
            self._take(self._scheduler.commit(plan, pending.wait()))

    def _take(self, outputs) -> None:  # type: ignore[no-untyped-def]
        for output in outputs:
            self._driver.received[output.request.key].take(output)
