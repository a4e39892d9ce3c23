"""The same engine without the line: scheduler and executor in a plain loop. Jobs come on stdin."""

import json
import sys
import time
from pathlib import Path

from engine_svc.__main__ import load, scheduler_config
from engine_svc.compute.executor import Executor
from engine_svc.planning.ngram_drafter import drafter_for
from engine_svc.planning.request import Request
from engine_svc.planning.scheduler import Scheduler
from engine_svc.planning.step import SamplingParameters
from engine_svc.settings import Settings


def generate(settings: Settings, executor: Executor, prompts: list[list[int]], count: int) -> float:
    """Generates `count` greedy tokens for all prompts at once; returns tokens/s."""
    config = scheduler_config(settings, executor)
    scheduler = Scheduler(config, drafter_for(config))
    started = time.perf_counter()
    for index, prompt in enumerate(prompts):
        sampling = SamplingParameters(max_tokens=count, temperature=0.0)
        scheduler.add(Request(index, prompt, len(prompt), sampling))
    num_tokens = 0
    while scheduler.has_requests:
        plan = scheduler.schedule()
        step_started = time.perf_counter()
        result = executor.execute(plan)
        outputs = scheduler.commit(plan, result, time.perf_counter() - step_started)
        num_tokens += sum(len(output.token_ids) for output in outputs)
    return num_tokens / (time.perf_counter() - started)


def main() -> None:
    settings = Settings(model=Path(sys.argv[1]), max_num_seqs=int(sys.argv[2]), kv_memory=1 << 30)
    executor = load(settings)
    for line in sys.stdin:
        job = json.loads(line)
        rate = generate(settings, executor, job["prompts"], job["max_tokens"])
        sys.stdout.write(json.dumps({"tokens_per_second": rate}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
