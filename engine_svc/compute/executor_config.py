"""How a model is run: what an executor is told when it loads one."""

from dataclasses import dataclass

from engine_svc.compute.prompt_scoring import MAX_ROWS_AT_ONCE


@dataclass(frozen=True, slots=True)
class ExecutorConfig:
    """0 lets the executor choose, where said."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int = 0  # the model's own
    block_size: int = 16
    kv_memory_bytes: int = 0  # a share of the free memory
    num_threads: int = 0  # OMP_NUM_THREADS, else one per core
    num_local_engines: int = 1  # with which the free memory and the cores are shared
    # "cuda", "cpu", or "auto": the former where there is one.
    device: str = "cpu"
    # As in kernels.KernelConfig: `weights`, `activations`, `kv`, `implementation` on the CPU, and
    # `batch_invariant`.
    dtype: str = "auto"
    activations: str = "auto"
    kv_dtype: str = "auto"
    cpu_kernels: str = "auto"
    batch_invariant: bool = False

    @property
    def max_logit_rows(self) -> int:
        """How many rows of logits are computed at once, at most."""
        return max(self.max_num_seqs, MAX_ROWS_AT_ONCE)
