"""The gate: requests wait for their grammars, and each ends once, however it ends."""

import asyncio
import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future

import pytest

from engine_svc.grammar_gate import GrammarGate
from engine_svc.messages import wire_error
from engine_svc.planning.request import Finish, FinishReason, Request, RequestOutput
from engine_svc.planning.step import Grammar, GrammarForm, SamplingParameters
from protos.wire.errors import InternalError, InvalidRequest, Overloaded, Unavailable
from tests.fakes.waiting import until

GRAMMAR = Grammar(GrammarForm.REGEX, "a+")
EOS = 9


class HandCompiler:
    """Compiles when the test says so."""

    def __init__(self) -> None:
        self.asked: list[tuple[Grammar, list[int]]] = []
        self.futures: list[Future[bool]] = []

    def check(self, grammar: Grammar, output_token_ids: Sequence[int]) -> Future[bool]:
        self.asked.append((grammar, list(output_token_ids)))
        self.futures.append(Future())
        return self.futures[-1]


class Line:
    """A gate with what lies before and behind it."""

    def __init__(self, has_compiler: bool = True) -> None:
        self.compiler = HandCompiler()
        self.submitted: list[Request] = []
        self.delivered: list[RequestOutput] = []
        compiler = self.compiler if has_compiler else None
        self.gate = GrammarGate(compiler, self.submitted.append, self.delivered.extend)

    async def finish(self) -> Finish:
        await until(lambda: self.delivered, "a finish")
        (output,) = self.delivered
        assert output.finish is output.request.finish
        assert output.finish is not None
        assert self.submitted == []
        return output.finish


def request(grammar: Grammar | None = GRAMMAR, outputs: Sequence[int] = ()) -> Request:
    sampling = SamplingParameters(max_tokens=5, grammar=grammar, eos_token_ids=frozenset({EOS}))
    return Request("key", [1, 2, *outputs], 2, sampling)


def test_without_a_grammar_a_request_passes_at_once() -> None:
    line = Line(has_compiler=False)
    plain = request(grammar=None)
    line.gate.admit(plain)
    assert line.submitted == [plain]


def test_without_a_compiler_a_grammar_is_refused() -> None:
    line = Line(has_compiler=False)
    with pytest.raises(InvalidRequest, match="without a tokenizer service") as caught:
        line.gate.admit(request())
    assert (caught.value.code, caught.value.param) == ("grammars_unavailable", "grammar")


async def test_a_request_passes_once_its_grammar_is_compiled() -> None:
    line = Line()
    held = request(outputs=[3, 4])
    line.gate.admit(held)
    assert line.submitted == []
    assert line.compiler.asked == [(GRAMMAR, [3, 4])]
    line.compiler.futures[0].set_result(False)
    await until(lambda: line.submitted == [held], "the submit")
    assert line.delivered == []
    assert not line.gate.abort("key")


async def test_what_the_compiler_refuses_ends_with_its_error() -> None:
    line = Line()
    line.gate.admit(request())
    refusal = InvalidRequest("No.", code="invalid_grammar", param="grammar")
    line.compiler.futures[0].set_exception(refusal)
    assert await line.finish() == Finish(FinishReason.ERROR, error=refusal)


async def test_a_failure_of_the_compiler_is_logged_and_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    line = Line()
    line.gate.admit(request())
    line.compiler.futures[0].set_exception(ZeroDivisionError("inside"))
    with caplog.at_level(logging.ERROR):
        finish = await line.finish()
    assert finish.error is not None
    assert isinstance(wire_error(finish.error), InternalError)
    assert "inside" in caplog.text


async def test_a_record_that_completes_its_grammar_has_stopped() -> None:
    line = Line()
    line.gate.admit(request(outputs=[3]))
    line.compiler.futures[0].set_result(True)
    assert await line.finish() == Finish(FinishReason.STOP)


def test_a_record_that_ends_in_eos_is_left_to_the_scheduler() -> None:
    line = Line()
    ended = request(outputs=[3, EOS])
    line.gate.admit(ended)
    assert line.submitted == [ended]


async def test_an_abort_ends_a_held_request() -> None:
    line = Line()
    line.gate.admit(request())
    await asyncio.sleep(0)
    assert line.gate.abort("key")
    assert not line.gate.abort("key")
    assert await line.finish() == Finish(FinishReason.CANCELLED)
    await until(line.compiler.futures[0].cancelled, "the compilation to be called off")


async def test_all_held_requests_can_be_failed() -> None:
    line = Line()
    line.gate.admit(request())
    error = Unavailable("Going.", code="engine_draining")
    line.gate.fail_all(error)
    assert await line.finish() == Finish(FinishReason.ERROR, error=error)


async def test_too_many_held_requests_are_overload() -> None:
    line = Line()
    with pytest.raises(Overloaded):
        for index in range(1000):
            held = request()
            held.key = index
            line.gate.admit(held)
    line.gate.fail_all(Unavailable("Going."))


async def test_a_deadline_that_comes_while_the_grammar_is_compiled_ends_the_request() -> None:
    line = Line()
    held = request()
    held.deadline = time.monotonic() + 0.02
    line.gate.admit(held)
    assert await line.finish() == Finish(FinishReason.TIMEOUT)
    assert line.compiler.futures[0].cancelled()
