"""The rules of buf's STANDARD category (buf.build, lint configuration v2), over descriptors.

Each rule takes every file of a module and yields one sentence per breach. `MINIMAL`, `BASIC` and
`STANDARD` hold the names as buf documents them.
"""

import graphlib
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import PurePosixPath

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    MethodDescriptorProto,
    ServiceDescriptorProto,
)

Files = Sequence[FileDescriptorProto]
Rule = Callable[[Files], Iterator[str]]

_PASCAL = re.compile(r"[A-Z][A-Za-z0-9]*")
_LOWER_SNAKE = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
_UPPER_SNAKE = re.compile(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)*")
_VERSION = re.compile(r"v[1-9]\d*((alpha|beta)[1-9]?\d*|p[1-9]\d*(alpha|beta)[1-9]\d*|test.*)?")
# Field numbers in FileDescriptorProto, as paths in its source info.
_SYNTAX_PATH = [12]
_SERVICE_NUMBER, _METHOD_NUMBER = 6, 2


def messages(file: FileDescriptorProto) -> Iterator[DescriptorProto]:
    """Every message of `file`, nested ones included, those that stand for maps left out."""
    waiting = list(file.message_type)
    while waiting:
        message = waiting.pop(0)
        if not message.options.map_entry:
            yield message
        waiting.extend(message.nested_type)


def enums(file: FileDescriptorProto) -> Iterator[EnumDescriptorProto]:
    yield from file.enum_type
    for message in messages(file):
        yield from message.enum_type


def fields(file: FileDescriptorProto) -> Iterator[FieldDescriptorProto]:
    yield from file.extension
    for message in messages(file):
        yield from message.field
        yield from message.extension


def methods(
    file: FileDescriptorProto,
) -> Iterator[tuple[ServiceDescriptorProto, MethodDescriptorProto]]:
    for service in file.service:
        for method in service.method:
            yield service, method


def directory_same_package(files: Files) -> Iterator[str]:
    packages: dict[str, set[str]] = defaultdict(set)
    for file in files:
        packages[str(PurePosixPath(file.name).parent)].add(file.package)
    for directory, found in packages.items():
        if len(found) > 1:
            yield f"{directory} holds several packages: {sorted(found)}"


def package_defined(files: Files) -> Iterator[str]:
    for file in files:
        if not file.package:
            yield f"{file.name} has no package"


def package_directory_match(files: Files) -> Iterator[str]:
    for file in files:
        if file.package and file.package.replace(".", "/") != str(PurePosixPath(file.name).parent):
            yield f"{file.name} does not lie where its package {file.package} says"


def package_same_directory(files: Files) -> Iterator[str]:
    directories: dict[str, set[str]] = defaultdict(set)
    for file in files:
        directories[file.package].add(str(PurePosixPath(file.name).parent))
    for package, found in directories.items():
        if len(found) > 1:
            yield f"package {package} lies in several directories: {sorted(found)}"


def package_no_import_cycle(files: Files) -> Iterator[str]:
    package_of = {file.name: file.package for file in files}
    graph: dict[str, set[str]] = defaultdict(set)
    for file in files:
        imported = {package_of[name] for name in file.dependency if name in package_of}
        graph[file.package] |= imported - {file.package}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        yield f"packages import each other: {error.args[1]}"


def enum_first_value_zero(files: Files) -> Iterator[str]:
    for file in files:
        for enum in enums(file):
            if enum.value[0].number != 0:
                yield f"{enum.name} does not begin with 0"


def enum_no_allow_alias(files: Files) -> Iterator[str]:
    for file in files:
        for enum in enums(file):
            if enum.options.allow_alias:
                yield f"{enum.name} allows aliases"


def enum_pascal_case(files: Files) -> Iterator[str]:
    yield from _misnamed(_PASCAL, (enum.name for file in files for enum in enums(file)))


def enum_value_upper_snake_case(files: Files) -> Iterator[str]:
    values = (value.name for file in files for enum in enums(file) for value in enum.value)
    yield from _misnamed(_UPPER_SNAKE, values)


def field_lower_snake_case(files: Files) -> Iterator[str]:
    yield from _misnamed(_LOWER_SNAKE, (field.name for file in files for field in fields(file)))


def field_not_required(files: Files) -> Iterator[str]:
    for file in files:
        for field in fields(file):
            if field.label == FieldDescriptorProto.LABEL_REQUIRED:
                yield f"{field.name} is required"


def import_no_public(files: Files) -> Iterator[str]:
    for file in files:
        for index in file.public_dependency:
            yield f"{file.name} imports {file.dependency[index]} publicly"


def import_no_weak(files: Files) -> Iterator[str]:
    for file in files:
        for index in file.weak_dependency:
            yield f"{file.name} imports {file.dependency[index]} weakly"


def import_used(files: Files) -> Iterator[str]:
    by_name = {file.name: file for file in files}
    for file in files:
        used = {field.type_name for field in fields(file)}
        for message in messages(file):
            used |= {field.type_name for nested in message.nested_type for field in nested.field}
        for _, method in methods(file):
            used |= {method.input_type, method.output_type}
        for name in file.dependency:
            if name in by_name and not any(_declares(by_name[name], kind) for kind in used):
                yield f"{file.name} does not use {name}"


def message_pascal_case(files: Files) -> Iterator[str]:
    yield from _misnamed(_PASCAL, (message.name for file in files for message in messages(file)))


def oneof_lower_snake_case(files: Files) -> Iterator[str]:
    names = (one.name for file in files for message in messages(file) for one in message.oneof_decl)
    # The compiler names the oneof of an `optional` field itself.
    yield from _misnamed(_LOWER_SNAKE, (name for name in names if not name.startswith("_")))


def package_lower_snake_case(files: Files) -> Iterator[str]:
    parts = (part for file in files if file.package for part in file.package.split("."))
    yield from _misnamed(_LOWER_SNAKE, parts)


def same_option(option: str) -> Rule:
    """The files of a package agree on one of the options that name things in other languages."""

    def rule(files: Files) -> Iterator[str]:
        found: dict[str, set[object]] = defaultdict(set)
        for file in files:
            found[file.package].add(getattr(file.options, option))
        for package, values in found.items():
            if len(values) > 1:
                yield f"package {package} disagrees on {option}: {sorted(map(str, values))}"

    return rule


def rpc_pascal_case(files: Files) -> Iterator[str]:
    yield from _misnamed(_PASCAL, (method.name for file in files for _, method in methods(file)))


def service_pascal_case(files: Files) -> Iterator[str]:
    yield from _misnamed(_PASCAL, (service.name for file in files for service in file.service))


def syntax_specified(files: Files) -> Iterator[str]:
    for file in files:
        if not any(location.path == _SYNTAX_PATH for location in file.source_code_info.location):
            yield f"{file.name} does not say its syntax"


def enum_value_prefix(files: Files) -> Iterator[str]:
    for file in files:
        for enum in enums(file):
            prefix = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", enum.name).upper() + "_"
            for value in enum.value:
                if not value.name.startswith(prefix):
                    yield f"{value.name} does not begin with {prefix}"


def enum_zero_value_suffix(files: Files) -> Iterator[str]:
    for file in files:
        for enum in enums(file):
            for value in enum.value:
                if value.number == 0 and not value.name.endswith("_UNSPECIFIED"):
                    yield f"{value.name} does not end with _UNSPECIFIED"


def file_lower_snake_case(files: Files) -> Iterator[str]:
    yield from _misnamed(_LOWER_SNAKE, (PurePosixPath(file.name).stem for file in files))


def package_version_suffix(files: Files) -> Iterator[str]:
    for file in files:
        if not _VERSION.fullmatch(file.package.rpartition(".")[2]):
            yield f"package {file.package} does not end with a version"


def protovalidate(files: Files) -> Iterator[str]:
    """buf checks protovalidate's annotations; here there are none, so none can be wrong."""
    for file in files:
        if any(name.startswith("buf/validate/") for name in file.dependency):
            yield f"{file.name} has protovalidate annotations, which nothing here can check"


def rpc_request_response_unique(files: Files) -> Iterator[str]:
    used: dict[str, list[str]] = defaultdict(list)
    for file in files:
        for service, method in methods(file):
            for kind in (method.input_type, method.output_type):
                used[kind].append(f"{service.name}.{method.name}")
    for kind, callers in used.items():
        if len(callers) > 1:
            yield f"{kind} is used more than once: {callers}"


def rpc_request_standard_name(files: Files) -> Iterator[str]:
    for file in files:
        for service, method in methods(file):
            yield from _nonstandard(service, method, method.input_type, "Request")


def rpc_response_standard_name(files: Files) -> Iterator[str]:
    for file in files:
        for service, method in methods(file):
            yield from _nonstandard(service, method, method.output_type, "Response")


def service_suffix(files: Files) -> Iterator[str]:
    for file in files:
        for service in file.service:
            if not service.name.endswith("Service"):
                yield f"{service.name} does not end with Service"


def comment_rpc(files: Files) -> Iterator[str]:
    """Of buf's COMMENTS category."""
    for file in files:
        comments = {
            tuple(location.path): location.leading_comments
            for location in file.source_code_info.location
        }
        for i, service in enumerate(file.service):
            for j, method in enumerate(service.method):
                if not comments.get((_SERVICE_NUMBER, i, _METHOD_NUMBER, j), "").strip():
                    yield f"{service.name}.{method.name} has no comment"


def _misnamed(pattern: re.Pattern[str], names: Iterator[str]) -> Iterator[str]:
    for name in names:
        if not pattern.fullmatch(name):
            yield f"{name} is not written as {pattern.pattern}"


def _declares(file: FileDescriptorProto, type_name: str) -> bool:
    package = f".{file.package}." if file.package else "."
    top = type_name.removeprefix(package).split(".")[0]
    names = {message.name for message in file.message_type} | {e.name for e in file.enum_type}
    return type_name.startswith(package) and top in names


def _nonstandard(
    service: ServiceDescriptorProto, method: MethodDescriptorProto, type_name: str, suffix: str
) -> Iterator[str]:
    name = type_name.rpartition(".")[2]
    if name not in (f"{method.name}{suffix}", f"{service.name}{method.name}{suffix}"):
        yield f"{service.name}.{method.name} uses {name}, not {method.name}{suffix}"


MINIMAL: dict[str, Rule] = {
    "DIRECTORY_SAME_PACKAGE": directory_same_package,
    "PACKAGE_DEFINED": package_defined,
    "PACKAGE_DIRECTORY_MATCH": package_directory_match,
    "PACKAGE_NO_IMPORT_CYCLE": package_no_import_cycle,
    "PACKAGE_SAME_DIRECTORY": package_same_directory,
}
BASIC: dict[str, Rule] = {
    "ENUM_FIRST_VALUE_ZERO": enum_first_value_zero,
    "ENUM_NO_ALLOW_ALIAS": enum_no_allow_alias,
    "ENUM_PASCAL_CASE": enum_pascal_case,
    "ENUM_VALUE_UPPER_SNAKE_CASE": enum_value_upper_snake_case,
    "FIELD_LOWER_SNAKE_CASE": field_lower_snake_case,
    "FIELD_NOT_REQUIRED": field_not_required,
    "IMPORT_NO_PUBLIC": import_no_public,
    "IMPORT_NO_WEAK": import_no_weak,
    "IMPORT_USED": import_used,
    "MESSAGE_PASCAL_CASE": message_pascal_case,
    "ONEOF_LOWER_SNAKE_CASE": oneof_lower_snake_case,
    "PACKAGE_LOWER_SNAKE_CASE": package_lower_snake_case,
    "PACKAGE_SAME_CSHARP_NAMESPACE": same_option("csharp_namespace"),
    "PACKAGE_SAME_GO_PACKAGE": same_option("go_package"),
    "PACKAGE_SAME_JAVA_MULTIPLE_FILES": same_option("java_multiple_files"),
    "PACKAGE_SAME_JAVA_PACKAGE": same_option("java_package"),
    "PACKAGE_SAME_PHP_NAMESPACE": same_option("php_namespace"),
    "PACKAGE_SAME_RUBY_PACKAGE": same_option("ruby_package"),
    "PACKAGE_SAME_SWIFT_PREFIX": same_option("swift_prefix"),
    "RPC_PASCAL_CASE": rpc_pascal_case,
    "SERVICE_PASCAL_CASE": service_pascal_case,
    "SYNTAX_SPECIFIED": syntax_specified,
}
STANDARD: dict[str, Rule] = {
    **MINIMAL,
    **BASIC,
    "ENUM_VALUE_PREFIX": enum_value_prefix,
    "ENUM_ZERO_VALUE_SUFFIX": enum_zero_value_suffix,
    "FILE_LOWER_SNAKE_CASE": file_lower_snake_case,
    "PACKAGE_VERSION_SUFFIX": package_version_suffix,
    "PROTOVALIDATE": protovalidate,
    "RPC_REQUEST_RESPONSE_UNIQUE": rpc_request_response_unique,
    "RPC_REQUEST_STANDARD_NAME": rpc_request_standard_name,
    "RPC_RESPONSE_STANDARD_NAME": rpc_response_standard_name,
    "SERVICE_SUFFIX": service_suffix,
}
