"""Packed weights on disk: found again, shared, and never believed when they are damaged."""

import errno
import hashlib
import os
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kernels.cpu import packed_file, weight_store
from kernels.cpu.weight_store import open_store

DESCRIPTION = {"identity": "1", "weights": "auto", "layout": "a"}
MATRICES = {f"key {i}": np.arange(i * 1000 + 1, dtype=np.uint32).view(np.uint8) for i in range(4)}


class Loads:
    """Loads the matrices as an engine does, and says what came of it."""

    def __init__(self, model: Path) -> None:
        self.model = model
        self.lines: list[str] = []
        self.num_packed = 0

    def __call__(self, description: dict[str, str] = DESCRIPTION) -> list[np.ndarray]:
        self.lines.clear()
        self.num_packed = 0
        store = open_store(self.model, description, 20_000, self.lines.append, smallest_file=0)
        pieces = [store.matrix(key, len(m), self.fill(m)) for key, m in MATRICES.items()]
        store.finish()
        result = [piece.data for piece in pieces]
        for data, matrix in zip(result, MATRICES.values(), strict=True):
            assert np.array_equal(data, matrix)
            assert data.ctypes.data % 64 == 0
        return result

    def fill(self, matrix: np.ndarray) -> Callable[[np.ndarray], None]:
        def fill(data: np.ndarray) -> None:
            self.num_packed += 1
            data[:] = matrix

        return fill

    @property
    def files(self) -> list[Path]:
        return sorted(path for path in self.model.parent.iterdir() if path != self.model)


@pytest.fixture(autouse=True)
def user_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    return tmp_path / "user" / "tokenline" / "packed"


@pytest.fixture
def loads(tmp_path: Path) -> Loads:
    model = tmp_path / "models" / "m[1].gguf"
    model.parent.mkdir()
    model.write_bytes(b"")
    return Loads(model)


def test_the_second_load_maps_what_the_first_has_written(loads: Loads) -> None:
    written = loads()
    (path,) = loads.files
    assert path.name == ".m[1].gguf.tokenline-auto.packed"
    assert loads.num_packed == 4
    assert loads.lines == [f"packed weights are kept in {path}"]
    result = loads()
    assert (loads.num_packed, loads.lines) == (0, [])
    for data in (*written, *result):
        assert not data.flags.writeable, "both are mapped from the file"
    assert loads.files == [path]


@pytest.mark.parametrize("name", ["identity", "layout"])
def test_weights_of_another_state_of_the_model_or_library_are_replaced(
    loads: Loads, name: str
) -> None:
    loads()
    loads(DESCRIPTION | {name: "other"})
    assert loads.num_packed == 4
    assert len(loads.lines) == 2
    assert f"is not used: it is of another {name}" in loads.lines[0]
    loads(DESCRIPTION | {name: "other"})
    assert loads.num_packed == 0
    assert len(loads.files) == 1


def test_each_type_of_weights_has_its_own_file(loads: Loads) -> None:
    for description in (DESCRIPTION, DESCRIPTION | {"weights": "int8"}) * 2:
        loads(description)
    assert (loads.num_packed, len(loads.files)) == (0, 2)


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[:20],
        lambda content: content[:4096],
        lambda content: content[:-1],
        lambda content: content + b"x",
        lambda content: b"GGUF" + content[4:],
        lambda content: content[:8] + b"\x7f" + content[9:],
        lambda content: content[:130] + bytes([content[130] ^ 1]) + content[131:],
        lambda content: content[:16] + b"\0" * 24 + content[40:],
        lambda content: content[:-3] + b"9" + content[-2:],
        lambda content: bytes(len(content)),
    ],
)
def test_a_damaged_file_is_replaced(loads: Loads, damage: Callable[[bytes], bytes]) -> None:
    loads()
    (path,) = loads.files
    path.write_bytes(damage(path.read_bytes()))
    loads()
    assert loads.num_packed == 4
    assert loads.lines[0].startswith(f"{path} is not used: ")
    loads()
    assert (loads.num_packed, loads.lines) == (0, [])


@pytest.mark.parametrize(
    "table",
    [
        *(b"", b"{", b"[]", b"{}", b'{"matrices": [], "description": 1}'),
        *(b'{"matrices": [["a"]], "description": {}}', b'{"matrices": 3, "description": {}}'),
        *(
            b'{"matrices": [["a", %s]], "description": {}}' % place
            for place in (
                *(b"0, 1, 0", b"64, 1000000, 0", b"64, -1, 0", b"65, 8, 0", b'"64", 8, 0'),
                *(b"64.0, 8, 0", b"64, 8", b'64, 8, "0"'),
            )
        ),
    ],
)
def test_a_table_is_not_believed_for_its_checksum(loads: Loads, table: bytes) -> None:
    loads()
    (path,) = loads.files
    content = path.read_bytes()[:4096]
    digest = hashlib.sha256(table).digest()
    header = content[:16] + struct.pack("<QQ", len(content), len(table)) + digest
    path.write_bytes(header + content[len(header) :] + table)
    loads()
    assert loads.lines[0] == f"{path} is not used: its table is damaged"


def test_a_link_and_a_file_of_another_user_are_not_followed(
    loads: Loads, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads()
    (path,) = loads.files
    moved = path.rename(path.with_name("moved"))
    path.symlink_to(moved)
    loads()
    assert loads.num_packed == 4
    assert not path.is_symlink()
    if os.geteuid() == 0:
        os.chown(path, 1, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    loads()
    assert "not a file of this user" in loads.lines[0]


def test_what_a_file_lacks_is_packed_and_the_file_written_again(
    loads: Loads, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads()
    monkeypatch.setitem(MATRICES, "new", np.ones(100, np.uint8))
    loads()
    assert loads.num_packed == 1
    assert "lacks some weights" in loads.lines[0]
    loads()
    assert loads.num_packed == 5
    loads()
    assert loads.num_packed == 0


def test_engines_that_start_at_once_write_one_file_and_share_it(loads: Loads) -> None:
    engines = [Loads(loads.model) for _ in range(4)]
    start = threading.Barrier(4)

    def run(engine: Loads) -> None:
        start.wait()
        engine()

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(run, engines))
    assert sorted(engine.num_packed for engine in engines) == [0, 0, 0, 4]
    assert len(loads.files) == 1


def test_what_a_killed_writer_leaves_is_written_over(loads: Loads) -> None:
    script = (
        "import sys, numpy as np; from pathlib import Path\n"
        "from kernels.cpu.weight_store import open_store\n"
        f"store = open_store(Path(sys.argv[1]), {DESCRIPTION!r}, 0, print, smallest_file=0)\n"
        "store.matrix('key 0', 100, lambda data: None); print('holds', flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(loads.model)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as writer:
        assert writer.stdout is not None and writer.stdout.readline() == "holds\n"
        (unfinished,) = loads.files
        assert unfinished.name.endswith(".packed.unfinished")
        writer.send_signal(signal.SIGKILL)
    loads()
    assert loads.num_packed == 4
    loads()
    assert (loads.num_packed, len(loads.files)) == (0, 1)


def test_a_writer_that_does_not_finish_is_not_waited_for_for_ever(
    loads: Loads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_store, "_LONGEST_WAIT_SECONDS", 0.0)
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc")
    slow = open_store(loads.model, DESCRIPTION, 0, print, smallest_file=0)
    loads()
    assert loads.num_packed == 4
    assert len(loads.lines) == 1 and "not kept on disk" in loads.lines[0]
    slow.abandon()
    assert loads.files == []


@pytest.fixture
def read_only(loads: Loads, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The model's directory cannot be written to, by the superuser either."""
    system_open = os.open

    def open_elsewhere(path: Any, flags: int, *arguments: Any) -> int:
        if flags & os.O_CREAT and Path(path).parent == loads.model.parent:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)
        return system_open(path, flags, *arguments)

    monkeypatch.setattr(os, "open", open_elsewhere)
    yield


@pytest.mark.usefixtures("read_only")
def test_beside_a_read_only_model_the_user_s_cache_is_used(loads: Loads, user_cache: Path) -> None:
    loads()
    (path,) = user_cache.iterdir()
    assert loads.lines == [f"packed weights are kept in {path}"]
    loads()
    assert (loads.num_packed, loads.files) == (0, [])


@pytest.mark.usefixtures("read_only")
def test_no_place_for_the_file_is_one_line(loads: Loads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc")
    loads()
    assert loads.num_packed == 4
    assert len(loads.lines) == 1 and "not kept on disk: /proc" in loads.lines[0]


def test_a_disk_without_room_is_not_filled(loads: Loads) -> None:
    store = open_store(loads.model, DESCRIPTION, 1 << 60, loads.lines.append)
    store.finish()
    assert len(loads.lines) == 1 and os.strerror(errno.ENOSPC) in loads.lines[0]
    assert loads.files == []


@pytest.mark.parametrize("call", ["pwrite", "fsync"])
def test_a_disk_that_fills_up_meanwhile_is_one_line(
    loads: Loads, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def full(*arguments: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, call, full)
    loads()
    assert len(loads.lines) == 1 and os.strerror(errno.ENOSPC) in loads.lines[0]
    assert loads.files == []


def test_matrices_larger_than_what_is_written_at_once(
    loads: Loads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_file, "_BLOCK_BYTES", 4096)
    loads()
    result = loads()
    assert loads.num_packed == 0
    assert max(len(data) for data in result) > 2 * 4096


def test_a_load_that_failed_keeps_nothing(loads: Loads) -> None:
    store = open_store(loads.model, DESCRIPTION, 0, loads.lines.append, smallest_file=0)
    store.matrix("key 0", 100, lambda data: None)
    store.abandon()
    assert (loads.files, loads.lines) == ([], [])


def test_little_is_not_kept(loads: Loads) -> None:
    store = open_store(loads.model, DESCRIPTION, 1000, loads.lines.append)
    store.matrix("key 0", 100, lambda data: None)
    store.finish()
    assert (loads.files, loads.lines) == ([], [])


def test_files_of_older_states_and_of_models_gone_are_removed(loads: Loads) -> None:
    gone = Loads(loads.model.with_name("gone.gguf"))
    gone()
    loads(DESCRIPTION | {"weights": "int8"})
    loads(DESCRIPTION | {"weights": "float32", "identity": "2"})
    loads(DESCRIPTION | {"identity": "2"})
    assert [path.name for path in loads.files] == [
        ".m[1].gguf.tokenline-auto.packed",
        ".m[1].gguf.tokenline-float32.packed",
    ]
