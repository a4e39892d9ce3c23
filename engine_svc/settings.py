"""What an engine can be told at its start."""

from dataclasses import dataclass
from pathlib import Path

from protos.wire.errors import StartupError
from protos.wire.service import check_main
from protos.wire.settings import REQUIRED, parse_size, setting


@dataclass(frozen=True)
class Settings:
    """Flags `--max-num-seqs …`, or `TOKENLINE_ENGINE_MAX_NUM_SEQS` and so on."""

    model: Path = setting(REQUIRED, "The model: a GGUF file or a Hugging Face directory.")
    tokenizer: tuple[str, ...] = setting(
        (),
        "host:port[,host:port…] of the tokenizer service, which structured output needs; without "
        "it, requests with a grammar are refused.",
    )
    host: str = setting("127.0.0.1", "Address to listen on.")
    port: int = setting(8003, "Port to listen on; 0 picks a free one.", minimum=0, maximum=65535)
    max_num_seqs: int = setting(64, "The most sequences that run at once.", minimum=1)
    max_num_batched_tokens: int = setting(
        512,
        "The most tokens computed in one step, so also the largest chunk of a prompt; at least "
        "max-num-seqs. A GPU is kept busy by 2048 and more.",
        minimum=1,
    )
    max_model_len: int = setting(
        0, "The most tokens of one sequence, prompt and output; 0 for the model's own.", minimum=0
    )
    kv_memory: int = setting(
        0,
        "Memory for the KV cache, such as 2GiB, which ranks share; 0 for 30 % of what is free "
        "beside the model, shared among local engines; on a GPU for all of 90 % of its memory that "
        "the model and its largest step leave.",
        parse=parse_size,
    )
    block_size: int = setting(16, "Tokens per KV block.", minimum=1, maximum=256)
    prefix_cache: bool = setting(True, "Reuse the KV of prompts that begin alike.")
    speculation: str = setting(
        "ngram",
        "Guess ahead what repeats earlier text of a sequence, and check several tokens in a step, "
        "where that is faster; answers stay the same.",
        choices=("ngram", "off"),
    )
    max_draft_tokens: int = setting(
        16, "The most tokens guessed ahead in a step for one sequence.", minimum=1, maximum=256
    )
    max_waiting: int = setting(
        1024, "Sequences that may wait; more are refused as overload.", minimum=1
    )
    num_threads: int = setting(
        0,
        "CPU threads that compute; 0 for one per core, shared among local engines.",
        minimum=0,
        maximum=1024,
    )
    num_local_engines: int = setting(
        1, "Engines on this machine, which share its cores and free memory.", minimum=1
    )
    tensor_parallel: int = setting(
        1,
        "Ranks that share the model, its KV cache included: as many CUDA devices of this machine, "
        "or processes on the CPU, which is for tests.",
        minimum=1,
        maximum=64,
    )
    device: str = setting(
        "auto",
        "What computes: auto for a CUDA device where there is one, unless --cpu-kernels are named.",
        choices=("auto", "cpu", "cuda"),
    )
    dtype: str = setting(
        "auto",
        "What linear layers compute with: auto keeps 4- and 8-bit weights as the file has them, "
        "and makes int8 of all others, or bfloat16 on a GPU.",
        choices=("auto", "int8", "fp8", "bfloat16", "float32"),
    )
    activations: str = setting(
        "auto",
        "What activations are rounded to where they are multiplied by int8 or 4-bit weights; int16 "
        "is as good as exact, int8 up to twice as fast for batches and prompts. auto for int8.",
        choices=("auto", "int8", "int16"),
    )
    kv_dtype: str = setting(
        "auto",
        "What keys and values are held in; auto for float16, on a GPU bfloat16, or float32 with "
        "--dtype float32.",
        choices=("auto", "bfloat16", "float16", "float32", "fp8", "int8"),
    )
    cpu_kernels: str = setting(
        "auto",
        "The compiled kernels for an instruction set, or torch's own; auto for the best there is. "
        "triton rehearses a GPU, slowly, with TRITON_INTERPRET=1.",
        choices=("auto", "torch", "portable", "avx2", "avxvnni", "avx512", "amx", "neon", "triton"),
    )
    batch_invariant: bool = setting(
        False,
        "On a GPU too, no sequence's tokens depend on the rest of the batch, at the cost of speed. "
        "On the CPU they never do.",
    )
    stream_interval_ms: int = setting(
        25,
        "Tokens that follow each other more quickly are sent together, so often; the first eight "
        "of an answer and its end at once. 0 sends those of each step alone, and costs speed.",
        minimum=0,
        maximum=1000,
    )
    drain_seconds: float = setting(
        10.0, "How long running sequences may go on after SIGTERM.", minimum=0.0
    )
    step_timeout_seconds: float = setting(
        120.0, "A step that takes longer hangs: the engine then ends with an error.", minimum=1.0
    )
    profile_steps: int = setting(
        0, "Logs after every so many steps where their time went; 0 for never.", minimum=0
    )
    log_level: str = setting("info", "Log level.", choices=("debug", "info", "warning", "error"))

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise StartupError(
                f"--max-num-batched-tokens ({self.max_num_batched_tokens}) must be at least "
                f"--max-num-seqs ({self.max_num_seqs}), so that every sequence gets a token a step"
            )
        if self.device == "cuda" and self.cpu_kernels != "auto":
            raise StartupError(
                f"--cpu-kernels {self.cpu_kernels} are for the CPU, which --device cuda leaves idle"
            )


if __name__ == "__main__":
    check_main("engine_svc", Settings)
