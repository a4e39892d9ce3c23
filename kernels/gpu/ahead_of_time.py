"""Compiles all that a GPU's engine can launch, with no GPU: `python -m kernels.gpu.ahead_of_time`.

For each device a table says what every kernel takes of registers and shared memory, and what it
spills. A kernel that does not compile, does not fit, or spills where it may not, is a fault, and
the exit code is then 1. Results are kept in `$XDG_CACHE_HOME/tokenline/compiled-kernels.json` until
a kernel's source or Triton changes.
"""

import argparse
import contextlib
import dataclasses
import json
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

import torch
from triton import knobs

from kernels.gpu import (
    activations,
    attention,
    gathers,
    invariant_matmul,
    logit_edits,
    logprobs,
    norms,
    quantised_embedding,
    quantised_linear,
    rope,
    sampling,
)
from kernels.gpu.compilation import DEVICES, Compiled, Device, compile_variant, digest
from kernels.gpu.kv_cache import KvFormat
from kernels.gpu.variant import ModelShapes, Variant

OPS = (
    *(activations, attention, gathers, invariant_matmul, logit_edits),
    *(logprobs, norms, quantised_embedding, quantised_linear, rope, sampling),
)
LLAMA_8B = ModelShapes(4096, 32, 8, 128, 14336, 128256)
MODELS = {
    "SmolLM2-135M": ModelShapes(576, 9, 3, 64, 1536, 49152),
    "Llama-3.1-8B": LLAMA_8B,
    "Qwen3-8B": ModelShapes(4096, 32, 8, 128, 12288, 151936, qk_norm=True),
    "heads of 80": ModelShapes(2560, 32, 32, 80, 6912, 50304),
    "heads of 256": ModelShapes(2048, 8, 1, 256, 16384, 256000),
}


# Results between two writings of the cache.
_WRITTEN_EVERY = 20


@dataclass(frozen=True, slots=True)
class Form:
    """A variant for a device, and what came of it."""

    variant: Variant
    device: Device
    compiled: Compiled

    @property
    def fault(self) -> str:
        """Why the executor cannot use it; empty where it can."""
        compiled = self.compiled
        if compiled.error:
            return compiled.error
        if compiled.shared_bytes > self.device.max_shared_bytes:
            return f"needs more than the {self.device.max_shared_bytes} bytes of shared memory"
        if compiled.spilled and not self.variant.may_spill:
            return "spills"
        return ""


def served_shapes() -> Iterator[ModelShapes]:
    """Of the models above in bfloat16; KV in each format and all in float32 for one of them."""
    yield from MODELS.values()
    for kv_format in (KvFormat.FP8, KvFormat.INT8, KvFormat.FLOAT16):
        yield dataclasses.replace(LLAMA_8B, kv_format=kv_format)
    yield dataclasses.replace(LLAMA_8B, sliding_window=4096)
    yield dataclasses.replace(
        MODELS["SmolLM2-135M"], dtype=torch.float32, kv_format=KvFormat.FLOAT32
    )


def all_variants() -> list[Variant]:
    """What the ops launch for any of the shapes; what several launch alike comes once."""
    found: dict[object, Variant] = {}
    for shapes in served_shapes():
        for op in OPS:
            for variant in op.variants(shapes):
                found.setdefault(_form(variant), variant)
    return list(found.values())


def _form(variant: Variant) -> object:
    return (
        *(variant.kernel.fn, tuple(sorted(variant.signature.items()))),
        tuple(sorted((name, repr(value)) for name, value in variant.constexprs.items())),
        *(variant.num_warps, variant.num_stages, variant.divisible_by_16, variant.devices),
    )


def compile_all(
    num_workers: int,
    cache: Path,
    wanted: str = "",
    report: Callable[[str], None] = lambda line: None,
) -> list[Form]:
    """Every variant whose label has `wanted` in it, for each device that has its types.

    `report` gets a line now and then.
    """
    pairs = {key: pair for key, pair in _pairs().items() if wanted in pair[0].label}
    known = read_cache(cache)
    missing = [key for key in pairs if key not in known]
    try:
        with contextlib.closing(_compile_in_workers(missing, num_workers)) as results:
            for count, (key, compiled) in enumerate(results, start=1):
                known[key] = compiled
                if count % _WRITTEN_EVERY == 0:
                    write_cache(cache, read_cache(cache) | known)
                    report(f"compiled {count} of {len(missing)}")
    finally:
        # What is done stays, should the rest be interrupted.
        if missing:
            write_cache(cache, read_cache(cache) | known)
    if missing and not wanted:
        # Now that all is there, what is of older sources goes.
        write_cache(cache, {key: known[key] for key in pairs})
    return [Form(variant, device, known[key]) for key, (variant, device) in pairs.items()]


def is_for(variant: Variant, device: Device) -> bool:
    return variant.needs <= device.types and device.name in (variant.devices or {device.name})


def _pairs() -> dict[str, tuple[Variant, Device]]:
    """Every variant with each device that it is for, by their digest."""
    return {
        digest(variant, device): (variant, device)
        for device in DEVICES
        for variant in all_variants()
        if is_for(variant, device)
    }


def _compile_in_workers(keys: Sequence[str], num_workers: int) -> Iterator[tuple[str, Compiled]]:
    if not keys:
        return
    with tempfile.TemporaryDirectory(prefix="tokenline-") as directory:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(num_workers, context, _start_worker, (directory,)) as workers:
            # Workers begin here, and take this on: an interrupt, which comes to all, is ours alone.
            kept = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                results = workers.map(_compile_one, keys)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, kept)
            yield from zip(keys, results, strict=True)


class _Worker:
    """What a worker process keeps: the variants, which are too tied to modules to be sent."""

    pairs: Mapping[str, tuple[Variant, Device]] = {}


def _start_worker(directory: str) -> None:
    knobs.cache.dir = directory
    _Worker.pairs = _pairs()


def _compile_one(key: str) -> Compiled:
    if key not in _Worker.pairs:
        raise RuntimeError("a kernel's source has changed since this began")
    return compile_variant(*_Worker.pairs[key])


def cache_path() -> Path:
    base = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache"
    return root / "tokenline" / "compiled-kernels.json"


def read_cache(cache: Path) -> dict[str, Compiled]:
    try:
        stored = json.loads(cache.read_text(encoding="utf-8"))
        return {key: Compiled(**fields) for key, fields in stored.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}  # there is none, or it is of another version


def write_cache(cache: Path, known: Mapping[str, Compiled]) -> None:
    cache.parent.mkdir(parents=True, exist_ok=True)
    partial = cache.with_name(f"{cache.name}.{os.getpid()}")
    fields = {key: dataclasses.asdict(compiled) for key, compiled in known.items()}
    partial.write_text(json.dumps(fields), encoding="utf-8")
    partial.replace(cache)


def table(forms: Iterable[Form]) -> str:
    """A line for each form."""
    lines = [f"{'device':7} {'regs':>4} {'spilled':>7} {'shared':>7}  kernel"]
    for form in sorted(forms, key=lambda form: (form.device.name, form.variant.label)):
        compiled = form.compiled
        line = (
            f"{form.device.name:7} {compiled.registers:4} {compiled.spilled:7} "
            f"{compiled.shared_bytes:7}  {form.variant.label}"
        )
        lines.append(f"{line}: {form.fault}" if form.fault else line)
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m kernels.gpu.ahead_of_time", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--only", default="", help="kernels whose label has this in it")
    parser.add_argument(
        "--workers", type=_positive, default=os.cpu_count() or 1, help="processes that compile"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args()
    if knobs.runtime.interpret:
        parser.error("with TRITON_INTERPRET set nothing is compiled")
    cache = cache_path()
    try:
        # Before minutes are spent on what could then not be kept.
        write_cache(cache, read_cache(cache))
        forms = compile_all(arguments.workers, cache, arguments.only, _tell)
    except OSError as error:
        parser.exit(1, f"{parser.prog}: cannot keep what is compiled: {error}\n")
    except BrokenProcessPool:
        parser.exit(1, f"{parser.prog}: a process that compiled was ended\n")
    except KeyboardInterrupt:
        parser.exit(130, f"{parser.prog}: interrupted; what was compiled is kept\n")
    if not forms:
        parser.error(f"--only: no kernel's label has {arguments.only!r} in it")
    if arguments.json:
        print(json.dumps([_described(form) for form in forms]))
    else:
        print(table(forms))
    return 1 if any(form.fault for form in forms) else 0


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def _described(form: Form) -> dict[str, object]:
    return {
        "kernel": form.variant.label,
        "device": form.device.name,
        "may_spill": form.variant.may_spill,
        "fault": form.fault,
        **dataclasses.asdict(form.compiled),
    }


if __name__ == "__main__":
    sys.exit(main())
