"""Holds a request back until its grammar is compiled, away from the engine's thread."""

import asyncio
import logging
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from typing import Final, Protocol

from engine_svc.planning.request import Finish, FinishReason, Request, RequestOutput
from engine_svc.planning.step import Grammar
from protos.wire.errors import InvalidRequest, Overloaded, TokenlineError

logger = logging.getLogger(__name__)

_MAX_SECONDS: Final = 10.0
_MAX_HELD: Final = 256


class Compiler(Protocol):
    """What compute offers (engine_svc/compute/grammar_compiler.py)."""

    def check(self, grammar: Grammar, output_token_ids: Sequence[int]) -> Future[bool]:
        """Whether the outputs complete the grammar; InvalidRequest if it cannot be enforced."""


class GrammarGate:
    """Passes requests on to `submit`, those with a grammar once it is known to be enforceable.

    Without a compiler those are refused. A request that ends here gets its finish by `deliver`.
    """

    def __init__(
        self,
        compiler: Compiler | None,
        submit: Callable[[Request], None],
        deliver: Callable[[list[RequestOutput]], None],
    ) -> None:
        self._compiler = compiler
        self._submit = submit
        self._deliver = deliver
        self._held: dict[Hashable, tuple[Request, asyncio.Task[None]]] = {}

    def admit(self, request: Request) -> None:
        """Raises InvalidRequest without a compiler, Overloaded when too many wait for it."""
        grammar = request.sampling.grammar
        if grammar is None or _has_ended(request):
            self._submit(request)
            return
        if self._compiler is None:
            raise InvalidRequest(
                "This engine enforces no grammars: it was started without a tokenizer service.",
                code="grammars_unavailable",
                param="grammar",
            )
        if len(self._held) >= _MAX_HELD:
            raise Overloaded("Too many grammars wait to be compiled.", code="queue_full")
        compiled = self._compiler.check(grammar, request.output_token_ids)
        task = asyncio.create_task(self._pass_on(request, compiled))
        self._held[request.key] = request, task

    def abort(self, key: Hashable) -> bool:
        """Ends a request that is held with CANCELLED; False for any other."""
        return self._end(key, Finish(FinishReason.CANCELLED))

    def fail_all(self, error: Exception) -> None:
        """Ends every request that is held with `error`."""
        for key in list(self._held):
            self._end(key, Finish(FinishReason.ERROR, error=error))

    async def _pass_on(self, request: Request, compiled: Future[bool]) -> None:
        finish = Finish(FinishReason.STOP)
        seconds_left = request.deadline - time.monotonic()
        try:
            seconds = min(seconds_left, _MAX_SECONDS)
            # Not wait_for: Python 3.11's loses a cancel that comes together with the result.
            async with asyncio.timeout(seconds):
                is_complete = await asyncio.wrap_future(compiled)
            if not is_complete:
                self._submit(request)
                return
        except TimeoutError:
            if seconds_left < _MAX_SECONDS:
                finish = Finish(FinishReason.TIMEOUT)
            else:
                message = f"The grammar took longer than {_MAX_SECONDS:g} s to compile."
                refused = InvalidRequest(message, code="grammar_too_complex", param="grammar")
                finish = Finish(FinishReason.ERROR, error=refused)
        except TokenlineError as error:
            finish = Finish(FinishReason.ERROR, error=error)
        except Exception as error:
            logger.exception("a grammar could not be compiled")
            finish = Finish(FinishReason.ERROR, error=error)
        finally:
            # Whoever ended the request took it out, and cancelled this task.
            self._held.pop(request.key, None)
        self._finish(request, finish)

    def _end(self, key: Hashable, finish: Finish) -> bool:
        if key not in self._held:
            return False
        request, task = self._held.pop(key)
        task.cancel()
        self._finish(request, finish)
        return True

    def _finish(self, request: Request, finish: Finish) -> None:
        request.finish = finish
        self._deliver([RequestOutput(request, finish=finish)])


def _has_ended(request: Request) -> bool:
    """Whether the record's last token is an EOS: its text was complete."""
    outputs = request.output_token_ids
    return bool(outputs) and outputs[-1] in request.sampling.eos_token_ids
