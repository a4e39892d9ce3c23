"""An executor of several ranks: this process is rank 0, the others compute the same steps."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Final, NamedTuple

import torch

from engine_svc.compute.any_executor import (
    AnyExecutor,
    config_of_ranks,
    device_of_rank,
    load_executor,
)
from engine_svc.compute.executor import num_threads_of
from engine_svc.compute.executor_config import ExecutorConfig
from engine_svc.compute.grammar_compiler import GrammarCompiler
from engine_svc.compute.model.sharded_source import shard_of
from engine_svc.compute.model.weights import open_source
from engine_svc.compute.parallel_grammars import SendingGrammarRows
from engine_svc.compute.parallel_messages import RankJob, RankState, SentPlan
from engine_svc.compute.parallel_processes import RankProcesses
from engine_svc.compute.ranks import RankPlace, join_ranks, meeting_place
from engine_svc.planning.errors import ComputeLost, RankLost
from engine_svc.planning.step import PendingStep, StepPlan, StepResult
from engine_svc.planning.step_profile import StepProfile
from protos.wire.errors import StartupError

# How long an error of ours waits for the news that it comes from another rank.
_PATIENCE_SECONDS: Final = 2.0


class ParallelExecutor:
    """Sends each plan to the other ranks and computes it with them. Used by one thread.

    After an error the ranks may not be at one any more: whatever it is, it is a ComputeLost.
    """

    def __init__(
        self, executor: AnyExecutor, processes: RankProcesses, num_threads: int, stack: ExitStack
    ) -> None:
        self._executor = executor
        self._processes = processes
        self._num_threads = num_threads
        self._stack = stack

    @classmethod
    def load(
        cls,
        model: Path,
        config: ExecutorConfig,
        num_ranks: int,
        report: Callable[[str], None],
        on_loss: Callable[[str, bool], None],
    ) -> "ParallelExecutor":
        """Starts the other ranks, and loads an HF directory or a GGUF file with them.

        StartupError says in one line what is wrong, also if it is so for another rank only. When a
        rank fails, `on_loss` is called on another thread, as by `RankProcesses`: this one may wait
        for a device that waits for that rank.
        """
        config = config_of_ranks(config, num_ranks)
        # What cannot be is said before anything is started.
        shard_of(open_source(model), 0, num_ranks)
        with ExitStack() as stack, meeting_place() as listener:
            processes = stack.enter_context(RankProcesses(on_loss))
            place = RankPlace(0, num_ranks, listener.getsockname()[1])
            processes.start(RankJob(place, model, config))
            try:
                processes.wait_for(RankState.READY)
                device = device_of_rank(config, 0)
                if device.type == "cuda":
                    torch.cuda.set_device(device)
                ranks = join_ranks(place, device, listener, sums_in_order=config.batch_invariant)
                if device.type == "cpu":
                    # NCCL would wait for graphs to be gone, and ends with the process.
                    stack.callback(ranks.leave)
                stack.callback(processes.ask_to_end)

                def check_and_report(line: str) -> None:
                    processes.check()
                    report(line)

                report(f"{num_ranks} ranks, of which this is the first")
                executor = load_executor(model, config, check_and_report, ranks)
                processes.wait_for(RankState.LOADED)
            except Exception as error:
                # Where another rank has failed, that is why.
                failure = processes.failure(_PATIENCE_SECONDS)
                if failure and not isinstance(error, StartupError):
                    raise StartupError(failure) from error
                raise
            num_threads = num_threads_of(config, num_ranks)
            return cls(executor, processes, num_threads, stack.pop_all())

    @property
    def num_blocks(self) -> int:
        return self._executor.num_blocks

    @property
    def block_size(self) -> int:
        return self._executor.block_size

    @property
    def vocab_size(self) -> int:
        return self._executor.vocab_size

    @property
    def max_model_len(self) -> int:
        return self._executor.max_model_len

    @property
    def max_steps_in_flight(self) -> int:
        return self._executor.max_steps_in_flight

    @property
    def rank_pids(self) -> list[int]:
        """The processes of the other ranks, in their order."""
        return self._processes.pids

    def follow_grammars(self, compiler: GrammarCompiler) -> None:
        """Once, before the first step: rows may have grammars from now on."""
        self._executor.follow(SendingGrammarRows(compiler, self._num_threads, self._processes.send))

    def profile_into(self, profile: StepProfile) -> None:
        self._executor.profile_into(profile)

    def launch(self, plan: StepPlan) -> "ParallelStep":
        try:
            self._processes.send(SentPlan.of(plan))
            return ParallelStep(self._executor.launch(plan), self._processes)
        except Exception as error:
            raise _lost(self._processes, error) from error

    def execute(self, plan: StepPlan) -> StepResult:
        return self.launch(plan).wait()

    def close(self) -> None:
        """Ends the other ranks."""
        self._stack.close()


class ParallelStep(NamedTuple):
    """A step of all ranks."""

    own: PendingStep
    processes: RankProcesses

    def wait(self) -> StepResult:
        try:
            return self.own.wait()
        except Exception as error:
            raise _lost(self.processes, error) from error


def _lost(processes: RankProcesses, error: Exception) -> ComputeLost:
    failure = processes.failure(_PATIENCE_SECONDS)
    return RankLost(failure) if failure else ComputeLost(f"rank 0 failed: {error}")
