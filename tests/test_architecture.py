"""Who may import whom. What is not listed here is forbidden."""

import ast
import graphlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("protos", "gateway", "tokenizer_svc", "engine_svc", "detok_svc", "kernels", "compose")
DIRECTORIES = {*PACKAGES, "tests"}
FILES = {
    *("pyproject.toml", "setup.py", "Makefile"),
    *("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "LICENSE"),
}
# What tools leave in a checkout; .gitignore keeps it out of the repository.
LEFTOVERS = {"build", "dist", "tokenline.egg-info", "__pycache__"}

GRPC = {"grpc", "google"}


@dataclass(frozen=True)
class Allowed:
    """What the modules of a part may import: parts of the project, and other distributions."""

    own: frozenset[str]
    others: frozenset[str]


def allowed(own: set[str], others: set[str]) -> Allowed:
    return Allowed(frozenset(own), frozenset(others))


# The longest matching name rules.
TABLE: Mapping[str, Allowed] = {
    "protos": allowed({"protos"}, GRPC | {"grpc_health", "grpc_reflection", "uvloop"}),
    "protos.generate": allowed(set(), {"grpc_tools"}),
    "gateway": allowed(
        {"gateway", "protos"},
        GRPC
        | {
            "grpc_health",
            "httptools",
            "msgspec",
            "prometheus_client",
            "redis",
            "starlette",
            "uvicorn",
        },
    ),
    "tokenizer_svc": allowed(
        {"tokenizer_svc", "protos"}, GRPC | {"gguf", "jinja2", "msgspec", "numpy", "tokenizers"}
    ),
    "detok_svc": allowed({"detok_svc", "protos"}, GRPC | {"msgspec", "tokenizers"}),
    "engine_svc": allowed({"engine_svc", "protos"}, GRPC | {"psutil"}),
    "engine_svc.planning": allowed({"engine_svc.planning"}, set()),
    "engine_svc.compute": allowed(
        # A model that cannot be loaded is a StartupError, as everywhere.
        {"engine_svc.compute", "engine_svc.planning", "kernels", "protos.wire.errors"},
        {"gguf", "llguidance", "numpy", "psutil", "safetensors", "torch"},
    ),
    "kernels": allowed({"kernels"}, {"numpy", "torch", "triton"}),
    "compose": allowed({"compose"}, {"httpx2", "huggingface_hub", "psutil", "rich", "typer"}),
    "setup": allowed({"protos.generate"}, {"setuptools"}),
}

# What is imported only where it is used, and why.
LATE_IMPORTS = {
    "kernels.gpu.selection": "a CPU's engine neither needs triton nor waits for it to be imported"
}


@dataclass(frozen=True)
class Import:
    """One imported module, as `importer:line` asked for it."""

    importer: str
    line: int
    target: str

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.target}"


def module_name(path: Path, root: Path = ROOT) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def product_files() -> dict[str, Path]:
    paths = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    paths.append(ROOT / "setup.py")
    return {module_name(path): path for path in paths if "_pb2" not in path.name}


def imports_of(module: str, source: str, modules: set[str]) -> Iterator[Import]:
    """Every import of `source`; `from package import module` counts as one of the module."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(module, node.lineno, alias.name)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                is_module = full in modules or full.endswith(("_pb2", "_pb2_grpc"))
                yield Import(module, node.lineno, full if is_module else str(node.module))


def rule_for(module: str) -> Allowed:
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        name = ".".join(parts[:length])
        if name in TABLE:
            return TABLE[name]
    raise AssertionError(f"{module} belongs to no part of the house")


def is_inside(module: str, part: str) -> bool:
    return module == part or module.startswith(part + ".")


def is_allowed(found: Import) -> bool:
    top = found.target.partition(".")[0]
    rule = rule_for(found.importer)
    if top in PACKAGES:
        return any(is_inside(found.target, part) for part in rule.own)
    return top in sys.stdlib_module_names or top in rule.others


def hidden_imports(module: str, source: str) -> Iterator[str]:
    """Imports that are not absolute, at the top of the file, and written as such."""

    def visit(node: ast.AST, depth: int) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import | ast.ImportFrom):
                if depth:
                    yield f"{module}:{child.lineno} imports inside a function or class"
                if isinstance(child, ast.ImportFrom) and child.level:
                    yield f"{module}:{child.lineno} imports relatively"
            if isinstance(child, ast.Call) and ast.unparse(child.func) in (
                "__import__",
                "import_module",
                "importlib.import_module",
            ):
                yield f"{module}:{child.lineno} imports by name"
            inner = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            yield from visit(child, depth + inner)

    yield from visit(ast.parse(source), 0)


def import_cycle(graph: Mapping[str, set[str]]) -> list[str]:
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


@pytest.fixture(scope="module")
def sources() -> dict[str, str]:
    return {module: path.read_text() for module, path in product_files().items()}


@pytest.fixture(scope="module")
def imports(sources: dict[str, str]) -> list[Import]:
    return [
        found
        for module, source in sources.items()
        for found in imports_of(module, source, set(sources))
    ]


def test_every_import_is_in_the_table(imports: list[Import]) -> None:
    assert imports
    assert [str(found) for found in imports if not is_allowed(found)] == []


def test_no_import_is_hidden(sources: dict[str, str]) -> None:
    found = {module: list(hidden_imports(module, source)) for module, source in sources.items()}
    assert {module for module, texts in found.items() if texts} == LATE_IMPORTS.keys()
    assert [len(found[module]) for module in LATE_IMPORTS] == [1]


def test_no_modules_import_each_other(imports: list[Import], sources: dict[str, str]) -> None:
    graph: dict[str, set[str]] = {module: set() for module in sources}
    for found in imports:
        if found.target in sources and found.target != found.importer:
            graph[found.importer].add(found.target)
    assert import_cycle(graph) == []


def test_the_top_level_is_as_designed() -> None:
    visible = [path for path in ROOT.iterdir() if not path.name.startswith(".")]
    directories = {path.name for path in visible if path.is_dir()} - LEFTOVERS
    files = {path.name for path in visible if path.is_file()} - LEFTOVERS
    assert directories == DIRECTORIES
    assert files <= FILES


@pytest.mark.parametrize(
    ("importer", "target"),
    [
        ("gateway.app", "torch"),
        ("gateway.app", "engine_svc.service"),
        ("detok_svc.service", "gateway.app"),
        ("detok_svc.service", "redis"),
        ("tokenizer_svc.service", "starlette"),
        ("detok_svc.text_stream", "jinja2"),
        ("engine_svc.service", "torch"),
        ("engine_svc.service", "kernels"),
        ("engine_svc.planning.scheduler", "torch"),
        ("engine_svc.planning.scheduler", "grpc"),
        ("engine_svc.planning.scheduler", "protos.common.v1.common_pb2"),
        ("engine_svc.planning.scheduler", "engine_svc.compute.executor"),
        ("engine_svc.compute.executor", "grpc"),
        ("kernels.cpu.linear", "engine_svc.planning.request"),
        ("compose.commands", "torch"),
        ("compose.commands", "grpc"),
        ("compose.commands", "gateway.app"),
        ("protos.wire.server", "gateway.app"),
    ],
)
def test_the_table_forbids(importer: str, target: str) -> None:
    assert not is_allowed(Import(importer, 1, target))


def test_hidden_imports_are_found() -> None:
    source = (
        "from . import x\n"
        "def f():\n    import os\n"
        "class C:\n    def g(self):\n        if True:\n            from a import b\n"
        "m = importlib.import_module('z')\n"
    )
    assert len(list(hidden_imports("m", source))) == 4


def test_a_cycle_is_found() -> None:
    assert import_cycle({"a": {"b"}, "b": {"c"}, "c": {"a"}})
    assert not import_cycle({"a": {"b", "c"}, "b": {"c"}})
