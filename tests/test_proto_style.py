"""The .proto files follow buf's STANDARD rules; and each rule can fail."""

import importlib.resources
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet

from tests.proto_rules import STANDARD, Files, comment_rpc

ROOT = Path(__file__).resolve().parent.parent
RULES = {**STANDARD, "COMMENT_RPC": comment_rpc}
HEAD = 'syntax = "proto3";\npackage a.v1;\n'

# For each rule, files that break it (and may break others).
BREACHES: dict[str, dict[str, str]] = {
    "DIRECTORY_SAME_PACKAGE": {
        "a/v1/x.proto": HEAD,
        "a/v1/y.proto": 'syntax = "proto3";\npackage b.v1;\n',
    },
    "PACKAGE_DEFINED": {"a/v1/x.proto": 'syntax = "proto3";\n'},
    "PACKAGE_DIRECTORY_MATCH": {"b/v1/x.proto": HEAD},
    "PACKAGE_NO_IMPORT_CYCLE": {
        "a/v1/x.proto": HEAD + 'import "b/v1/y.proto";\nmessage M { b.v1.N n = 1; }\n',
        "a/v1/z.proto": HEAD + "message Z {}\n",
        "b/v1/y.proto": 'syntax = "proto3";\npackage b.v1;\nimport "a/v1/z.proto";\n'
        "message N { a.v1.Z z = 1; }\n",
    },
    "PACKAGE_SAME_DIRECTORY": {"a/v1/x.proto": HEAD, "b/v1/y.proto": HEAD},
    "ENUM_FIRST_VALUE_ZERO": {
        "a/v1/x.proto": 'syntax = "proto2";\npackage a.v1;\nenum E { E_ONE = 1; }\n'
    },
    "ENUM_NO_ALLOW_ALIAS": {
        "a/v1/x.proto": HEAD + "enum E { option allow_alias = true; E_A = 0; E_B = 0; }\n"
    },
    "ENUM_PASCAL_CASE": {"a/v1/x.proto": HEAD + "enum my_enum { MY_ENUM_A = 0; }\n"},
    "ENUM_VALUE_UPPER_SNAKE_CASE": {"a/v1/x.proto": HEAD + "enum E { e_a = 0; }\n"},
    "FIELD_LOWER_SNAKE_CASE": {"a/v1/x.proto": HEAD + "message M { bool isIt = 1; }\n"},
    "FIELD_NOT_REQUIRED": {
        "a/v1/x.proto": 'syntax = "proto2";\npackage a.v1;\nmessage M { required bool ok = 1; }\n'
    },
    "IMPORT_NO_PUBLIC": {
        "a/v1/x.proto": HEAD + 'import public "a/v1/y.proto";\n',
        "a/v1/y.proto": HEAD + "message M {}\n",
    },
    "IMPORT_USED": {
        "a/v1/x.proto": HEAD + 'import "a/v1/y.proto";\nmessage N {}\n',
        "a/v1/y.proto": HEAD + "message M {}\n",
    },
    "MESSAGE_PASCAL_CASE": {"a/v1/x.proto": HEAD + "message M { message inner {} }\n"},
    "ONEOF_LOWER_SNAKE_CASE": {
        "a/v1/x.proto": HEAD + "message M { oneof myChoice { bool a = 1; } }\n"
    },
    "PACKAGE_LOWER_SNAKE_CASE": {"A/v1/x.proto": 'syntax = "proto3";\npackage A.v1;\n'},
    "RPC_PASCAL_CASE": {
        "a/v1/x.proto": HEAD + "message M {}\nservice S { rpc do_it(M) returns (M); }\n"
    },
    "SERVICE_PASCAL_CASE": {"a/v1/x.proto": HEAD + "service my_service {}\n"},
    "SYNTAX_SPECIFIED": {"a/v1/x.proto": "package a.v1;\n"},
    "ENUM_VALUE_PREFIX": {"a/v1/x.proto": HEAD + "enum MyKind { KIND_A = 0; }\n"},
    "ENUM_ZERO_VALUE_SUFFIX": {"a/v1/x.proto": HEAD + "enum E { E_NONE = 0; }\n"},
    "FILE_LOWER_SNAKE_CASE": {"a/v1/MyFile.proto": HEAD},
    "PACKAGE_VERSION_SUFFIX": {"a/x.proto": 'syntax = "proto3";\npackage a;\n'},
    "PROTOVALIDATE": {
        "a/v1/x.proto": HEAD + 'import "buf/validate/validate.proto";\n',
        "buf/validate/validate.proto": 'syntax = "proto3";\npackage buf.validate;\n',
    },
    "RPC_REQUEST_RESPONSE_UNIQUE": {
        "a/v1/x.proto": HEAD + "message M {}\nservice S { rpc Do(M) returns (M); }\n"
    },
    "RPC_REQUEST_STANDARD_NAME": {
        "a/v1/x.proto": HEAD + "message M {}\nservice S { rpc Do(M) returns (M); }\n"
    },
    "RPC_RESPONSE_STANDARD_NAME": {
        "a/v1/x.proto": HEAD + "message M {}\nservice S { rpc Do(M) returns (M); }\n"
    },
    "SERVICE_SUFFIX": {"a/v1/x.proto": HEAD + "service Things {}\n"},
    "COMMENT_RPC": {"a/v1/x.proto": HEAD + "message M {}\nservice S { rpc Do(M) returns (M); }\n"},
}
SAME_OPTIONS = {
    "PACKAGE_SAME_CSHARP_NAMESPACE": 'csharp_namespace = "N"',
    "PACKAGE_SAME_GO_PACKAGE": 'go_package = "example.com/n"',
    "PACKAGE_SAME_JAVA_MULTIPLE_FILES": "java_multiple_files = true",
    "PACKAGE_SAME_JAVA_PACKAGE": 'java_package = "n"',
    "PACKAGE_SAME_PHP_NAMESPACE": 'php_namespace = "N"',
    "PACKAGE_SAME_RUBY_PACKAGE": 'ruby_package = "N"',
    "PACKAGE_SAME_SWIFT_PREFIX": 'swift_prefix = "N"',
}
BREACHES |= {
    rule: {"a/v1/x.proto": HEAD, "a/v1/y.proto": f"{HEAD}option {option};\n"}
    for rule, option in SAME_OPTIONS.items()
}


def compile_files(root: Path, names: list[str], output: Path) -> Files:
    """The descriptors of the files `names` under `root`, with their source info."""
    well_known = importlib.resources.files("grpc_tools") / "_proto"
    command = [
        *(sys.executable, "-m", "grpc_tools.protoc", f"-I{root}", f"-I{well_known}"),
        *("--include_source_info", f"--descriptor_set_out={output}", *names),
    ]
    subprocess.run(command, check=True, capture_output=True, cwd=root)
    return FileDescriptorSet.FromString(output.read_bytes()).file


def write_and_compile(files: Mapping[str, str], directory: Path) -> Files:
    for name, text in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return compile_files(directory, list(files), directory / "set.binpb")


@pytest.fixture(scope="module")
def project_files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    names = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "protos").rglob("*.proto"))
    assert names
    return compile_files(ROOT, names, tmp_path_factory.mktemp("protos") / "set.binpb")


@pytest.mark.parametrize("rule", RULES)
def test_the_protos_follow_the_rule(rule: str, project_files: Files) -> None:
    assert list(RULES[rule](project_files)) == []


@pytest.mark.parametrize("rule", BREACHES)
def test_the_rule_finds_a_breach(rule: str, tmp_path: Path) -> None:
    assert list(RULES[rule](write_and_compile(BREACHES[rule], tmp_path)))


def test_the_rule_against_weak_imports_finds_one() -> None:
    # The compiler itself refuses to write such a file today.
    file = FileDescriptorProto(name="x.proto", dependency=["y.proto"], weak_dependency=[0])
    assert list(RULES["IMPORT_NO_WEAK"]([file]))


def test_every_rule_has_a_breach_that_proves_it() -> None:
    assert set(BREACHES) | {"IMPORT_NO_WEAK"} == set(RULES)
