"""How the code reads, as far as a machine can tell (CONTRIBUTING.md)."""

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("protos", "gateway", "tokenizer_svc", "engine_svc", "detok_svc", "kernels", "compose")
MAX_FILE_LINES = 300
MAX_FUNCTION_LINES = 60
# What is longer, and why that reads better than its parts would.
LONG_FUNCTIONS = {
    "compose/cli.py:up": "a flat list of options, each with its help text",
}
LONG_FILES: dict[str, str] = {}
UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX|HACK|raise NotImplementedError)\b")


def python_files(*directories: str) -> list[Path]:
    paths = [path for name in directories for path in (ROOT / name).rglob("*.py")]
    return sorted(path for path in paths if "_pb2" not in path.name)


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


@pytest.mark.parametrize("path", python_files(*PACKAGES, "tests"), ids=relative)
def test_a_file_first_says_its_one_job(path: Path) -> None:
    source = path.read_text()
    # An empty __init__.py only makes its directory a package.
    if source or path.name != "__init__.py":
        assert source.startswith(('"""', 'r"""')), "the first line is no docstring"
        assert ast.get_docstring(ast.parse(source))


@pytest.mark.parametrize("path", python_files(*PACKAGES), ids=relative)
def test_files_and_functions_are_short(path: Path) -> None:
    source = path.read_text()
    if relative(path) not in LONG_FILES:
        assert len(source.splitlines()) <= MAX_FILE_LINES
    too_long = [
        function.name
        for function in functions(ast.parse(source))
        if (function.end_lineno or 0) - function.lineno + 1 > MAX_FUNCTION_LINES
        and f"{relative(path)}:{function.name}" not in LONG_FUNCTIONS
    ]
    assert too_long == []


@pytest.mark.parametrize("path", python_files(*PACKAGES), ids=relative)
def test_nothing_is_left_unfinished(path: Path) -> None:
    assert UNFINISHED.findall(path.read_text()) == []


def test_every_exception_is_still_needed() -> None:
    for name in [*LONG_FILES, *(long.partition(":")[0] for long in LONG_FUNCTIONS)]:
        assert (ROOT / name).is_file()
    for name in LONG_FUNCTIONS:
        path, _, function_name = name.partition(":")
        found = functions(ast.parse((ROOT / path).read_text()))
        lengths = [(f.end_lineno or 0) - f.lineno + 1 for f in found if f.name == function_name]
        assert max(lengths) > MAX_FUNCTION_LINES
    for name in LONG_FILES:
        assert len((ROOT / name).read_text().splitlines()) > MAX_FILE_LINES


def test_no_generated_file_is_committed() -> None:
    if not (ROOT / ".git").exists():
        return
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    assert [name for name in listed.stdout.splitlines() if "_pb2" in name] == []
