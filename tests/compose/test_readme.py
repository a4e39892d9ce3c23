"""The README shows what is really there."""

import re
from pathlib import Path

from compose.model_store import DEFAULT_MODEL
from compose.welcome import example_curl

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
