"""What a capture of a CUDA graph forbids, held against ops that run on the CPU.

A graph is a list of kernels with their arguments as they were when it was captured. So the host may
not look at a result in the middle, no shape may depend on data, and what is read and written must
have its place before: an op that waits for the device, or makes memory, fails here, as it fails or
goes unnoticed there. What kernels do inside is their own matter.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Whose frames are the inside of a kernel: of the interpreter that runs it on the CPU.
_KERNEL_PACKAGE = "triton"
# Ways to the host that no op stands behind.
_TO_THE_HOST = frozenset({"tolist", "numpy", "__array__", "item", "cpu", "__bool__", "__index__"})
# Tagged as nothing, yet their result's size is in their data.
_SIZED_BY_DATA = frozenset({"aten::repeat_interleave", "aten::bincount", "aten::masked_select"})
_MOVES = frozenset({"aten::_to_copy", "aten::_pin_memory", "aten::to"})


class CaptureError(RuntimeError):
    """An op that no graph can hold."""


class RepeatedRun:
    """A graph that is none: the ops run again."""

    def __init__(self, run: Callable[[], None]) -> None:
        self.replay = run
        run()


class RehearsedGraph:
    """Ops that are held to the rules of a capture, when they are captured and in each replay.

    CaptureError for an op that breaks one, or when a replay calls other ops than the capture did,
    or the same ones on tensors of other shapes or with other numbers: a graph would not.
    """

    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run
        self._calls = self._watch()

    def replay(self) -> None:
        calls = self._watch()
        for captured, called in zip(self._calls, calls, strict=False):
            if captured != called:
                raise CaptureError(f"captured as {captured}, but in the replay it is {called}")
        if len(calls) != len(self._calls):
            raise CaptureError(f"{len(self._calls)} ops were captured, the replay has {len(calls)}")

    def _watch(self) -> list[str]:
        with CaptureRules() as rules:
            self._run()
        return rules.calls


class CaptureRules:
    """Inside, torch's ops on the CPU are held to the rules of a capture: see CaptureError.

    With `allows_memory` an op may make memory, as in a step that runs op by op. `calls` are those
    that were seen, with the shapes of their tensors and their numbers.
    """

    def __init__(self, *, allows_memory: bool = False) -> None:
        self.calls: list[str] = []
        self._methods = _Methods()
        self._ops = _Ops(self.calls, allows_memory)

    def __enter__(self) -> Self:
        self._methods.__enter__()
        self._ops.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._ops.__exit__(kind, error, traceback)
        self._methods.__exit__(kind, error, traceback)


class _Methods(TorchFunctionMode):
    """Sees what never becomes an op."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = getattr(function, "__name__", "")
        if name in _TO_THE_HOST and not _is_inside_kernel():
            raise CaptureError(f"Tensor.{name} waits for the device")
        return function(*args, **(kwargs or {}))


class _Ops(TorchDispatchMode):
    def __init__(self, calls: list[str], allows_memory: bool) -> None:
        super().__init__()
        self._calls = calls
        self._allows_memory = allows_memory

    def __torch_dispatch__(
        self,
        function: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if _is_inside_kernel():
            return function(*args, **kwargs)
        inputs = tree_leaves((args, dict(kwargs)))
        _check_call(function, args, inputs)
        result = function(*args, **kwargs)
        if not self._allows_memory:
            _check_memory(function, inputs, tree_leaves(result))
        self._calls.append(f"{function}({', '.join(map(_describe, inputs))})")
        return result


def _is_inside_kernel() -> bool:
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] == _KERNEL_PACKAGE:
            return True
        frame = frame.f_back
    return False


def _check_call(function: Any, args: Sequence[Any], inputs: Sequence[Any]) -> None:
    name = function._schema.name
    if torch.Tag.data_dependent_output in function.tags:
        raise CaptureError(f"{name} waits for the device")
    by_mask = name in ("aten::index", "aten::index_put", "aten::index_put_") and any(
        isinstance(value, Tensor) and value.dtype in (torch.bool, torch.uint8)
        for value in tree_leaves(args[1])
    )
    if by_mask or name in _SIZED_BY_DATA or _is_sized_by_data(function, name):
        raise CaptureError(f"the size of what {name} makes depends on data")
    if name in _MOVES:
        raise CaptureError(f"{name} makes memory, or waits for the device")


def _is_sized_by_data(function: Any, name: str) -> bool:
    return torch.Tag.dynamic_output_shape in function.tags and name != "aten::index"


def _check_memory(function: Any, inputs: Sequence[Any], results: Sequence[Any]) -> None:
    known = {_memory_of(value) for value in inputs if isinstance(value, Tensor)}
    for value in results:
        if isinstance(value, Tensor) and value.numel() and _memory_of(value) not in known:
            raise CaptureError(f"{function} makes memory: {_describe(value)}")


def _memory_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return repr(value)
