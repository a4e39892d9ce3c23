"""The template workers of the service: starts them, hands them chats, replaces those that die."""

import asyncio
import signal
import sys
from asyncio.subprocess import PIPE, Process
from types import TracebackType
from typing import Self, TypeVar

import msgspec

from protos.wire.errors import InternalError, InvalidRequest, StartupError
from tokenizer_svc.rendered_prompt import RenderedPrompt
from tokenizer_svc.template_messages import Render, Rendered, Setup, SetupDone, encode, receive

AnswerT = TypeVar("AnswerT")


class TemplateWorkers:
    """A fixed number of template worker processes. Use as an async context manager.

    Entering it raises StartupError when a template does not compile.
    """

    def __init__(self, setup: Setup, num_workers: int = 1) -> None:
        self._setup = setup
        self._workers = [_Worker(setup) for _ in range(num_workers)]
        self._idle: asyncio.Queue[_Worker] = asyncio.Queue()
        self._renderings: set[asyncio.Task[Rendered]] = set()
        # The control texts that the templates write after an answer.
        self.turn_ends: frozenset[str] = frozenset()
        # How the model writes tool calls: SetupDone.tool_call_format.
        self.tool_call_format = ""

    async def __aenter__(self) -> Self:
        try:
            for worker in self._workers:
                done = await worker.start()
                if done.error:
                    raise StartupError(f"the model's chat template cannot be used: {done.error}")
                self.turn_ends = frozenset(done.turn_ends)
                self.tool_call_format = done.tool_call_format
                self._idle.put_nowait(worker)
        except BaseException as error:
            await self.__aexit__(None, None, None)
            if isinstance(error, InvalidRequest | InternalError):
                raise StartupError(f"the model's chat template cannot be used: {error}") from error
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for rendering in self._renderings:
            rendering.cancel()
        await asyncio.gather(*self._renderings, return_exceptions=True)
        await asyncio.gather(*(worker.stop() for worker in self._workers))

    async def render(self, render: Render) -> RenderedPrompt:
        """The prompt of a chat, from the first worker that is free.

        Raises InvalidRequest when the chat is refused or too much for the limits.
        """
        # A caller that gives up while it waits is not rendered for.
        worker = await self._idle.get()
        # A task of its own: a caller that gives up must not leave a worker's answer unread.
        task = asyncio.create_task(self._render(worker, render))
        self._renderings.add(task)
        task.add_done_callback(self._renderings.discard)
        rendered = await asyncio.shield(task)
        if rendered.refusal:
            raise InvalidRequest(rendered.refusal, code=rendered.code, param=rendered.param)
        return RenderedPrompt(rendered.text, rendered.stand_ins)

    async def _render(self, worker: "_Worker", render: Render) -> Rendered:
        try:
            try:
                return await worker.render(render)
            except InternalError:
                # It may have been killed while idle; a second death is this chat's doing.
                return await worker.render(render)
        finally:
            self._idle.put_nowait(worker)


class _Worker:
    """One worker process, started again on the next chat after it died."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._process: Process | None = None

    async def start(self) -> SetupDone:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tokenizer_svc.template_worker", stdin=PIPE, stdout=PIPE
        )
        return await self._exchange(self._process, self._setup, SetupDone)

    async def render(self, render: Render) -> Rendered:
        if self._process is None:
            await self.start()
        assert self._process is not None
        return await self._exchange(self._process, render, Rendered)

    async def stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.returncode is None:
            process.kill()
        await process.wait()

    async def _exchange(
        self, process: Process, message: msgspec.Struct, answer: type[AnswerT]
    ) -> AnswerT:
        assert process.stdin is not None and process.stdout is not None
        try:
            # uvloop closes the pipe of a process that has ended, and has another error for it.
            if process.stdin.is_closing():
                raise BrokenPipeError
            process.stdin.write(encode(message))
            await process.stdin.drain()
            return await receive(process.stdout, answer)
        except (asyncio.IncompleteReadError, ConnectionError):
            self._process = None
            raise self._death(await process.wait()) from None
        except asyncio.CancelledError:
            await self.stop()
            raise

    def _death(self, status: int) -> InvalidRequest | InternalError:
        if status == -signal.SIGALRM:
            return InvalidRequest(
                "The model's chat template takes longer than the "
                f"{self._setup.max_seconds:g} s allowed for these messages.",
                code="chat_template_error",
                param="messages",
            )
        return InternalError(f"A template worker ended with status {status}.")
