"""`tokenline pull ORG/NAME` fetches what is served of a hub repository, and nothing else."""

import errno
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from rich.console import Console

from compose.errors import CommandError
from compose.hub_download import Listing, RemoteFile, choose_files, download
from compose.package_download import run_pip
from tests.fakes.file_server import FileServer, StoredFile

REVISION = "0123456789abcdef0123456789abcdef01234567"
HF_FILES = {
    "config.json": b"{}",
    "tokenizer.json": b'{"model": {}}',
    "chat_template.jinja": b"{{ messages }}",
    "model.safetensors": b"weights" * 100,
    "consolidated.safetensors": b"weights" * 100,
    "pytorch_model.bin": b"pickles",
    "README.md": b"# words",
    "onnx/model.onnx": b"another layout",
}


def hub_files(repository: str, contents: Mapping[str, bytes]) -> dict[str, StoredFile]:
    """What the hub answers for one repository."""
    siblings = [{"rfilename": name, "size": len(data)} for name, data in contents.items()]
    info = {"id": repository, "modelId": repository, "sha": REVISION, "siblings": siblings}
    answers = {
        f"/api/models/{repository}": StoredFile(json.dumps(info).encode(), "application/json")
    }
    for name, data in contents.items():
        headers = {"etag": f'"{hashlib.sha1(data).hexdigest()}"', "x-repo-commit": REVISION}
        answers[f"/{repository}/resolve/{REVISION}/{name}"] = StoredFile(data, headers=headers)
    return answers


@pytest.fixture
def hub() -> Iterator[FileServer]:
    missing = StoredFile(b"", headers={"x-error-code": "RepoNotFound"}, status=404)
    gated = StoredFile(b"", headers={"x-error-code": "GatedRepo"}, status=403)
    gguf = {"a-Q8_0.gguf": b"GGUF" + b"8" * 99, "a-Q4_K_M.gguf": b"GGUF" + b"4" * 50}
    files = {
        **hub_files("acme/tiny", HF_FILES),
        **hub_files("acme/tiny-gguf", gguf),
        "/api/models/acme/missing": missing,
        "/api/models/acme/gated": gated,
    }
    with FileServer(files) as server:
        yield server


def run_cli(hub_url: str, cache: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **{name: text for name, text in os.environ.items() if not name.startswith("HF_")},
        "HF_ENDPOINT": hub_url,
        "HF_HOME": str(cache / "hf"),
        "XDG_CACHE_HOME": str(cache),
    }
    command = [str(Path(sys.executable).with_name("tokenline")), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


def names_below(directory: Path) -> list[str]:
    return sorted(
        str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()
    )


def test_a_directory_is_pulled_without_what_is_not_served(hub: FileServer, tmp_path: Path) -> None:
    result = run_cli(hub.url, tmp_path, "pull", "acme/tiny")
    assert result.returncode == 0, result.stderr
    pulled = tmp_path / "tokenline" / "models" / "acme" / "tiny"
    assert str(pulled) in result.stdout
    assert names_below(pulled) == [
        "chat_template.jinja",
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert (pulled / "model.safetensors").read_bytes() == HF_FILES["model.safetensors"]


def test_what_is_here_is_not_pulled_again(hub: FileServer, tmp_path: Path) -> None:
    for _ in range(2):
        assert run_cli(hub.url, tmp_path, "pull", "acme/tiny").returncode == 0
    assert hub.num_gets[f"/acme/tiny/resolve/{REVISION}/model.safetensors"] == 1


def test_of_several_gguf_files_one_is_pulled(hub: FileServer, tmp_path: Path) -> None:
    directory = tmp_path / "tokenline" / "models" / "acme" / "tiny-gguf"
    assert run_cli(hub.url, tmp_path, "pull", "acme/tiny-gguf").returncode == 0
    assert names_below(directory) == ["a-Q4_K_M.gguf"]
    chosen = run_cli(hub.url, tmp_path, "pull", "acme/tiny-gguf:a-Q8_0.gguf")
    assert chosen.returncode == 0, chosen.stderr
    assert names_below(directory) == ["a-Q4_K_M.gguf", "a-Q8_0.gguf"]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("acme/missing", "has no model acme/missing"),
        ("acme/gated", "HF_TOKEN"),
        ("acme/tiny-gguf:b.gguf", "a-Q8_0.gguf"),
        ("not-a-repository", "nothing is known by the name 'not-a-repository': name SmolLM2"),
        ("", "ORG/NAME or ORG/NAME:FILE.gguf"),
    ],
)
def test_a_refused_pull_says_why_in_one_line(
    source: str, words: str, hub: FileServer, tmp_path: Path
) -> None:
    result = run_cli(hub.url, tmp_path, "pull", source)
    assert result.returncode == 1
    assert words in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_without_a_hub_the_error_names_the_setting(hub: FileServer, tmp_path: Path) -> None:
    result = run_cli("http://127.0.0.1:9", tmp_path, "pull", "acme/tiny")
    assert result.returncode == 1
    assert "HF_ENDPOINT" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_full_disk_is_said_to_be_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("compose.hub_download.huggingface_hub.hf_hub_download", full)
    with pytest.raises(CommandError, match="no space is left in"):
        download(listing("m.gguf"), [RemoteFile("m.gguf", 1)], tmp_path, Console(quiet=True))


def test_a_full_disk_of_pip_is_said_to_be_full(tmp_path: Path) -> None:
    cause = f"ERROR: Could not install: [Errno 28] {os.strerror(errno.ENOSPC)}"
    command = (sys.executable, "-c", f"print({cause!r}); raise SystemExit(1)")
    with pytest.raises(CommandError, match=r"cannot fetch m\.gguf: no space is left in"):
        run_pip(command, tmp_path / "m.gguf", lambda *_: None)


def listing(*names: str) -> Listing:
    return Listing("acme/m", "main", tuple(RemoteFile(name, 1) for name in names))


def test_the_usual_gguf_file_is_the_small_and_good_one() -> None:
    files = ("m-f16.gguf", "m.Q8_0.gguf", "m.q4_k_m.gguf", "m.Q2_K.gguf")
    assert choose_files(listing(*files), "")[0].name == "m.q4_k_m.gguf"
    # "F16" in BF16 and "Q4_1" in IQ4_1 are other formats.
    assert choose_files(listing("m-IQ4_1.gguf", "m-Q8_0.gguf"), "")[0].name == "m-Q8_0.gguf"


def test_parts_of_a_split_gguf_are_not_taken_for_models() -> None:
    with pytest.raises(CommandError, match="cannot be served"):
        choose_files(listing("m-00001-of-00002.gguf", "m-00002-of-00002.gguf"), "")


def test_a_repository_without_weights_is_refused() -> None:
    with pytest.raises(CommandError, match="no safetensors"):
        choose_files(listing("config.json", "tokenizer.json", "pytorch_model.bin"), "")
