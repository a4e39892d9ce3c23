"""How the code reads, as far as a machine can tell (CONTRIBUTING.md)."""

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("protos", "gateway", "tokenizer_svc", "engine_svc", "detok_svc", "kernels", "compose")
MAX_FILE_LINES = 300
MAX_FUNCTION_LINES = 60
# What is longer, and why that reads better than its parts would.
LONG_FUNCTIONS = {
    "compose/commands.py:up": "a flat list of options, each with its help text",
}
LONG_FILES: dict[str, str] = {}
UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX|HACK|raise NotImplementedError)\b")


def python_files(*directories: str) -> list[Path]:
    paths = [path for name in directories for path in (ROOT / name).rglob("*.py")]
    return sorted(path for path in paths if "_pb2" not in path.name)


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def num_lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def length_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (function.end_lineno or 0) - function.lineno + 1


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def says_its_job(source: str) -> bool:
    return source.startswith(('"""', 'r"""')) and bool(ast.get_docstring(ast.parse(source)))


def test_each_file_first_says_its_one_job() -> None:
    silent = [
        relative(path)
        for path in python_files(*PACKAGES, "tests")
        # An empty __init__.py only makes its directory a package.
        if not says_its_job(path.read_text()) and (path.name != "__init__.py" or path.read_text())
    ]
    assert silent == []


def test_files_are_short() -> None:
    lengths = {relative(path): num_lines(path) for path in python_files(*PACKAGES)}
    too_long = {name for name, length in lengths.items() if length > MAX_FILE_LINES}
    assert too_long - LONG_FILES.keys() == set()


def test_functions_are_short() -> None:
    too_long = {
        f"{relative(path)}:{function.name}"
        for path in python_files(*PACKAGES)
        for function in functions(ast.parse(path.read_text()))
        if length_of(function) > MAX_FUNCTION_LINES
    }
    assert too_long - LONG_FUNCTIONS.keys() == set()


def test_nothing_is_left_unfinished() -> None:
    found = [
        f"{relative(path)}: {match}"
        for path in python_files(*PACKAGES)
        for match in UNFINISHED.findall(path.read_text())
    ]
    assert found == []


def test_the_rules_find_breaches() -> None:
    assert not says_its_job("import os\n")
    assert not says_its_job("# words\n")
    assert UNFINISHED.search("x = 1  # TO" + "DO later")
    (function,) = functions(ast.parse("def f():\n" + "    x = 1\n" * MAX_FUNCTION_LINES))
    assert length_of(function) > MAX_FUNCTION_LINES


def test_every_exception_is_still_needed() -> None:
    for name in LONG_FUNCTIONS:
        path, _, function_name = name.partition(":")
        found = functions(ast.parse((ROOT / path).read_text()))
        lengths = [length_of(function) for function in found if function.name == function_name]
        assert max(lengths) > MAX_FUNCTION_LINES
    for name in LONG_FILES:
        assert num_lines(ROOT / name) > MAX_FILE_LINES


def test_no_generated_file_is_committed() -> None:
    if not (ROOT / ".git").exists():
        return
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    assert [name for name in listed.stdout.splitlines() if "_pb2" in name] == []
