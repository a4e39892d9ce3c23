"""Structured output on a real model: answers match their schemas, at a temperature of 1.5."""

from pathlib import Path

import pytest

from engine_svc.planning.request import FinishReason
from tests.fakes.structured_cases import SCHEMAS, StructuredEngine


@pytest.mark.slow
def test_answers_match_their_schemas_unless_they_end_by_length(default_model_path: Path) -> None:
    """`python -m tests.bench structured` does the same with 200 longer answers."""
    with StructuredEngine(default_model_path) as engine:
        answers = engine.run(2 * len(SCHEMAS), max_tokens=96, temperature=1.5).answers
    assert len(answers) == 2 * len(SCHEMAS)
    complete = [answer for answer in answers if answer.reason is FinishReason.STOP]
    assert [answer for answer in complete if answer.problem] == []
    assert {answer.reason for answer in answers} <= {FinishReason.STOP, FinishReason.LENGTH}
    # What ends by length says nothing of its grammar: most must come to their end.
    assert len({answer.name for answer in complete}) > len(SCHEMAS) * 0.7
