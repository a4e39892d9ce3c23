"""The requests that this gateway generates, each in a task of its own, whoever reads along."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from gateway.errors import ClientDisconnected, as_typed
from gateway.job import Job
from gateway.output_log import OutputLog
from gateway.pipeline import Pipeline
from protos.wire.errors import TokenlineError


class Run:
    """One request being generated: its job, and the log that it fills."""

    def __init__(self, job: Job, log: OutputLog, pipeline: Pipeline) -> None:
        self.job = job
        self.log = log
        self._pipeline = pipeline
        self.task = asyncio.create_task(self._work())

    @contextmanager
    def being_read(self) -> Iterator[None]:
        """While the client whose request it is reads; its leaving early ends the run."""
        try:
            yield
        finally:
            if not self.log.ended:
                self.task.cancel()

    async def _work(self) -> None:
        # Told to those who read along when the client leaves whose request it is.
        error: TokenlineError | None = ClientDisconnected()
        try:
            await self._pipeline.run(self.job, self.log)
            error = None
        except TokenlineError as failure:
            error = failure
        except Exception as failure:
            error = as_typed(failure)
        finally:
            self.log.end(error)


class Runs:
    """Owner of the runs of this gateway."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._runs: set[Run] = set()

    def begin(self, job: Job) -> Run:
        """A new run. Nobody can come back to a whole answer, so that nothing of it is retained."""
        run = Run(job, OutputLog(job.num_sequences, retains=job.streams), self._pipeline)
        self._runs.add(run)
        run.task.add_done_callback(lambda task: self._runs.discard(run))
        return run

    def note_refusal(self, endpoint: str) -> None:
        """A request of `endpoint` was wrong before there was a job to run."""
        self._pipeline.note_refusal(endpoint)

    async def close(self) -> None:
        """Ends what still runs."""
        tasks = [run.task for run in self._runs]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
