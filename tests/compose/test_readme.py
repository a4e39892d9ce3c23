"""The README shows what is really there."""

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, cast
from unittest.mock import MagicMock

from compose.embedded_redis import server_executable
from compose.model_store import DEFAULT_MODEL
from compose.welcome import example_curl
from gateway.operations import operations

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def test_the_curl_is_the_one_that_the_launcher_prints() -> None:
    assert example_curl("http://127.0.0.1:8000", DEFAULT_MODEL.name) in README


def test_its_two_commands_are_targets() -> None:
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    blocks = re.findall(r"```sh\n(make \w+)\n```", README)
    assert blocks == ["make up", "make test"]
    assert {block.removeprefix("make ") for block in blocks} <= set(targets)


def test_files_and_folders_that_it_names_exist() -> None:
    tree = re.findall(r"^(\w+)/ ", README, flags=re.MULTILINE)
    assert {"protos", "gateway", "compose", "tests"} <= set(tree)
    links = re.findall(r"\]\((\w[\w./]*)\)", README)
    assert all((ROOT / name).exists() for name in [*tree, *links])


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=60)


def test_the_commands_that_start_each_service_have_good_settings() -> None:
    commands = re.findall(r"^python -m (\w+) +(--.*)$", README, flags=re.MULTILINE)
    services = [service for service, _ in commands]
    assert services == ["tokenizer_svc", "engine_svc", "detok_svc", "gateway"]
    for service, flags in commands:
        result = run("-m", f"{service}.settings", *shlex.split(flags))
        assert result.returncode == 0, result.stderr


def test_the_server_that_it_starts_by_hand_is_the_embedded_one() -> None:
    (code,) = re.findall(r"python -c '(.*)'\)", README)
    assert run("-c", code).stdout.strip() == str(server_executable())


def test_every_endpoint_is_listed() -> None:
    paths = {without_names(one.template) for one in operations(cast(Any, MagicMock()))} - {"/"}
    listed = without_names(README).replace("…/", "/v1/responses/")
    assert {path for path in paths if path not in listed} == set()


def without_names(path: str) -> str:
    """`/v1/requests/{id}` and its like, with the parameters left out."""
    return re.sub(r"/\{\w+\}", "", path)
