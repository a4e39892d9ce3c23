"""Twenty schemas of the kinds that clients send, and a run that generates under them in batches."""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import jsonschema

from engine_svc.compute.executor import Executor, ExecutorConfig
from engine_svc.compute.grammar_compiler import GrammarCompiler
from engine_svc.compute.grammar_rows import GrammarRows
from engine_svc.planning.limits import SchedulerConfig
from engine_svc.planning.request import FinishReason, Request
from engine_svc.planning.scheduler import Scheduler
from engine_svc.planning.step import Grammar, GrammarForm, SamplingParameters
from tokenizer_svc.tokenizer_source import load_tokenizer_files

BATCH_SIZE = 16
STRING, INTEGER, NUMBER, BOOLEAN, NULL = (
    {"type": name} for name in ("string", "integer", "number", "boolean", "null")
)


def record(required: Sequence[str] = (), **properties: Any) -> dict[str, Any]:
    """A closed object; all of its properties are required unless said."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(required or properties),
        "additionalProperties": False,
    }


def array(items: Any, **bounds: Any) -> dict[str, Any]:
    return {"type": "array", "items": items, **bounds}


def enum(*values: Any) -> dict[str, Any]:
    return {"enum": list(values)}


def text(**bounds: Any) -> dict[str, Any]:
    return {"type": "string", **bounds}


SCHEMAS: dict[str, Any] = {
    "flat": record(name=text(maxLength=30), age=INTEGER, member=BOOLEAN),
    "free strings": record(title=STRING, summary=STRING),
    "optional": record(["id"], id=INTEGER, note=text(maxLength=20), score=NUMBER),
    "nested": record(
        user=record(id=INTEGER, address=record(city=text(maxLength=20), street=record(no=INTEGER)))
    ),
    "enums": record(colour=enum("red", "green", "blue"), size=enum(1, 2.5, None, "XL", True)),
    "constant": record(version=enum("1.0"), kind={"const": {"a": [1, "b"]}}),
    "nullable": record(value={"type": ["string", "null"], "maxLength": 10}, other=NULL),
    "any of": record(item={"anyOf": [INTEGER, text(maxLength=12), array(BOOLEAN, maxItems=3)]}),
    "tagged union": {
        "oneOf": [
            record(kind={"const": "cat"}, lives={"type": "integer", "minimum": 1, "maximum": 9}),
            record(kind={"const": "dog"}, breed=text(minLength=3, maxLength=15)),
        ]
    },
    "all of": {
        "type": "object",
        "allOf": [
            {"properties": {"a": INTEGER}, "required": ["a"]},
            {"properties": {"b": text(maxLength=8)}, "required": ["b"]},
        ],
        "maxProperties": 3,
    },
    "references": {
        "$defs": {"point": record(x=NUMBER, y=NUMBER)},
        **record(start={"$ref": "#/$defs/point"}, end={"$ref": "#/$defs/point"}),
    },
    "recursive": {
        "$defs": {
            "tree": record(
                value=text(maxLength=6), children=array({"$ref": "#/$defs/tree"}, maxItems=2)
            )
        },
        "$ref": "#/$defs/tree",
    },
    "bounded array": array(
        {"type": "integer", "minimum": -5, "maximum": 250}, minItems=3, maxItems=8
    ),
    "tuple": {
        "type": "array",
        "prefixItems": [text(maxLength=5), INTEGER, enum("x", "y")],
        "items": False,
        "minItems": 3,
    },
    "array of objects": array(
        record(sku=text(pattern="^[A-Z]{2}[0-9]{3}$"), n=INTEGER), minItems=2, maxItems=4
    ),
    "patterns": record(
        code=text(pattern="^[A-Z]{3}-[0-9]{4}$"),
        day=text(pattern="^20[0-9]{2}-(0[1-9]|1[0-2])-[0-2][1-8]$"),
        host=text(pattern="^([a-z]{1,6}\\.){1,2}(org|net)$"),
    ),
    "formats": record(id=text(format="uuid"), address=text(format="ipv4")),
    "numbers": record(
        share={"type": "number", "minimum": 0, "maximum": 1},
        step={"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 1000},
        below={"type": "number", "exclusiveMaximum": 0},
    ),
    "unicode": record(
        größe=enum("klein", "groß", "日本", "🦜"),
        名前=text(pattern="^[ぁ-ん]{2,6}$"),
        é=text(maxLength=4),
    ),
    "map": {
        "type": "object",
        "patternProperties": {"^k_[a-z]{1,4}$": {"type": "integer", "minimum": 0}},
        "additionalProperties": False,
        "minProperties": 1,
        "maxProperties": 3,
    },
}


@dataclass(frozen=True)
class StructuredAnswer:
    name: str
    text: str
    reason: FinishReason

    @property
    def problem(self) -> str:
        """Why the text is not what its schema asks for; empty when it is."""
        schema = SCHEMAS[self.name]
        validator = jsonschema.Draft202012Validator(
            schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
        )
        try:
            validator.validate(json.loads(self.text))
        except ValueError as error:
            return f"no JSON: {error}"
        except jsonschema.ValidationError as error:
            return error.message
        return ""


@dataclass
class StructuredRun:
    """All answers, and the seconds of every step with as many rows as fit."""

    answers: list[StructuredAnswer] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    # Of these, what grammars took.
    mask_seconds: list[float] = field(default_factory=list)

    @property
    def mask_share(self) -> float:
        return sum(self.mask_seconds) / sum(self.step_seconds)


class StructuredEngine:
    """Scheduler and executor in a plain loop, with grammars over the model's own tokenizer.

    A context manager.
    """

    def __init__(self, model: Path) -> None:
        files = load_tokenizer_files(model)
        self._tokenizer = files.tokenizer
        self._eos_token_ids = frozenset(files.eos_token_ids)
        config = ExecutorConfig(BATCH_SIZE, 512, max_model_len=1024, kv_memory_bytes=512 << 20)
        self._executor = Executor.load(model, config, report=lambda line: None)
        self._compiler = GrammarCompiler(
            files.tokenizer.to_str().encode(), files.eos_token_ids, self._executor.vocab_size
        )
        self._executor.follow_grammars(self._compiler)
        self._clock = _GrammarClock(self._executor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._compiler.__exit__(None, None, None)

    def run(self, num_generations: int, max_tokens: int, temperature: float) -> StructuredRun:
        """Generates under each schema in turn, `BATCH_SIZE` at a time."""
        scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=BATCH_SIZE,
                max_num_batched_tokens=512,
                max_model_len=self._executor.max_model_len,
                max_waiting=num_generations,
                num_blocks=self._executor.num_blocks,
                block_size=self._executor.block_size,
            )
        )
        for request in self._requests(num_generations, max_tokens, temperature):
            scheduler.add(request)
        run = StructuredRun()
        while scheduler.has_requests:
            plan = scheduler.schedule()
            self._clock.seconds = 0.0
            started = time.perf_counter()
            result = self._executor.execute(plan)
            if len(plan.steps) == BATCH_SIZE and not plan.starts:
                run.step_seconds.append(time.perf_counter() - started)
                run.mask_seconds.append(self._clock.seconds)
            for output in scheduler.commit(plan, result):
                if output.finish is not None:
                    run.answers.append(self._answer(output.request, output.finish.reason))
        return run

    def _requests(
        self, num_generations: int, max_tokens: int, temperature: float
    ) -> Iterator[Request]:
        names = list(SCHEMAS)
        for number in range(num_generations):
            name = names[number % len(names)]
            schema_text = json.dumps(SCHEMAS[name])
            prompt = (
                "<|im_start|>user\nAnswer with JSON about something of your choice, "
                f"as number {number}.<|im_end|>\n<|im_start|>assistant\n"
            )
            ids = self._tokenizer.encode(prompt, add_special_tokens=False).ids
            grammar = Grammar(GrammarForm.JSON_SCHEMA, schema_text)
            self._compiler.check(grammar, []).result(30)
            sampling = SamplingParameters(
                max_tokens=max_tokens,
                temperature=temperature,
                seed=number,
                eos_token_ids=self._eos_token_ids,
                grammar=grammar,
            )
            yield Request((number, name), ids, len(ids), sampling)

    def _answer(self, request: Request, reason: FinishReason) -> StructuredAnswer:
        assert isinstance(request.key, tuple)
        answer = self._tokenizer.decode(list(request.output_token_ids), skip_special_tokens=True)
        return StructuredAnswer(request.key[1], answer, reason)


class _GrammarClock:
    """Adds up the time that an executor's steps spend on grammars."""

    def __init__(self, executor: Executor) -> None:
        self.seconds = 0.0
        grammars = executor._grammars
        assert isinstance(grammars, GrammarRows)
        kernels = executor._sampler._kernels
        for owner, name in ((grammars, "mask"), (grammars, "accept"), (kernels, "mask_logits")):
            setattr(owner, name, self._timed(getattr(owner, name)))

    def _timed(self, function: Any) -> Any:
        def timed(*arguments: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*arguments)
            finally:
                self.seconds += time.perf_counter() - started

        return timed
