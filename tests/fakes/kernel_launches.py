"""What an engine launches in the interpreter, held against what is compiled ahead of time."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import mangle_type

from kernels.gpu.variant import Variant


class KernelLaunches:
    """Of every kernel that is launched, which one it was, its types and compile-time values."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[object, Mapping[str, str], Mapping[str, Any]]] = {}

    def note(self, kernel: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        named = dict(zip(kernel.arg_names, args, strict=False)) | dict(kwargs)
        types = {
            name: mangle_type(value) for name, value in named.items() if isinstance(value, Tensor)
        }
        values = {name: value for name, value in named.items() if not isinstance(value, Tensor)}
        self._seen.setdefault(f"{kernel.__name__} {types} {values}", (kernel, types, values))

    def not_among(self, variants: Iterable[Variant]) -> list[str]:
        """Those that none of the variants is."""
        variants = list(variants)
        return [
            description
            for description, (kernel, types, values) in self._seen.items()
            if not any(_is(variant, kernel, types, values) for variant in variants)
        ]

    def __len__(self) -> int:
        return len(self._seen)


def _is(
    variant: Variant, kernel: object, types: Mapping[str, str], values: Mapping[str, Any]
) -> bool:
    if variant.kernel is not kernel or variant.num_warps != values.get("num_warps", 4):
        return False
    wanted = {name: kind for name, kind in variant.signature.items() if kind.startswith("*")}
    return wanted == types and all(
        values.get(name) == value for name, value in variant.constexprs.items()
    )


@contextmanager
def noting_launches() -> Iterator[KernelLaunches]:
    launches = KernelLaunches()
    run = InterpretedFunction.run

    def noting(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        launches.note(self, args, kwargs)
        return run(self, *args, grid=grid, warmup=warmup, **kwargs)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(InterpretedFunction, "run", noting)
        yield launches
