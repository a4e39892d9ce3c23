"""The parts of the run, in the order of their worth: what each runs, and for how long at most."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Part:
    """Runs `function` of `module` as a process of its own, with the others of its wave.

    A device that failed in one is whole in the next. Parts that measure are alone in their wave.
    """

    name: str
    module: str
    function: str
    wave: int
    max_seconds: int
    is_rehearsed: bool = True


def _checks(module: str, **functions: str) -> list[Part]:
    """All checks run side by side: most of their time goes into compiling kernels."""
    return [
        Part(name.replace("_", " "), f"tests.gpu.{module}", function, 0, 110)
        for name, function in functions.items()
    ]


PARTS = (
    *_checks("check_rows", rows="check_rows"),
    *_checks(
        "check_attention",
        attention="check_attention",
        attention_of_other_models="check_attention_of_models",
        attention_batch_invariant="check_invariant_attention",
    ),
    *_checks(
        "check_linear", linear="check_linear", linear_batch_invariant="check_invariant_linear"
    ),
    *_checks("check_sampling", sampling="check_sampling"),
    *_checks(
        "check_engine",
        model="check_model",
        engine="check_graphs",
        engine_batch_invariant="check_invariant_engine",
    ),
    Part("model file", "tests.gpu.check_file", "check_file", 0, 110),
    Part("bench bf16", "tests.gpu.bench_engine", "bench_bfloat16", 1, 130),
    Part("bench attention", "tests.gpu.bench_attention", "bench_attention", 2, 60),
    Part("bench batch-invariant", "tests.gpu.bench_engine", "bench_invariant", 3, 70),
    Part("bench fp8", "tests.gpu.bench_engine", "bench_fp8", 4, 70),
    Part("bench 4-bit", "tests.gpu.bench_engine", "bench_4_bit", 5, 80),
    # In a rehearsal these are `make test`'s own.
    Part("unit tests", "tests.gpu.unit_tests", "run_unit_tests", 6, 150, is_rehearsed=False),
)


def part_named(name: str) -> Part:
    return next(part for part in PARTS if part.name == name)
