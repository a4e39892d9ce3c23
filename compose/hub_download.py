"""Fetches what is needed of a Hugging Face repository: one GGUF file, or a directory's files."""

import fnmatch
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpx2
import huggingface_hub
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)
from rich.console import Console

from compose.errors import CommandError, is_out_of_space, out_of_space

# What the services read (configuration, tokenizer, chat template, weights), and nothing else.
_NEEDED: Final = ("*.json", "*.jinja", "*.safetensors")
# The same weights a second time, in another layout.
_DUPLICATES: Final = ("consolidated*.safetensors",)
# Which of several GGUF files to take: small and good first.
_GGUF_PREFERENCE: Final = ("Q4_K_M", "Q4_1", "Q4_0", "Q5_K_M", "Q8_0", "BF16", "F16", "F32")
_GGUF_PART = re.compile(r"-\d{5}-of-\d{5}\.gguf$", re.IGNORECASE)


@dataclass(frozen=True)
class RemoteFile:
    """A file at the top of a repository; `size` in bytes."""

    name: str
    size: int


@dataclass(frozen=True)
class Listing:
    """The files of a repository at one commit."""

    repository: str
    revision: str
    files: tuple[RemoteFile, ...]


def list_files(repository: str) -> Listing:
    """Asks the hub (HF_ENDPOINT where set) for the files of `repository`; raises CommandError."""
    try:
        info = huggingface_hub.HfApi().model_info(repository, files_metadata=True)
    except GatedRepoError as error:
        raise CommandError(
            f"{repository} is gated: accept its terms on the hub, then set HF_TOKEN"
        ) from error
    except RepositoryNotFoundError as error:
        raise CommandError(
            f"the hub has no model {repository} (or it is private: then set HF_TOKEN)"
        ) from error
    except (HfHubHTTPError, httpx2.HTTPError, OSError) as error:
        raise CommandError(_unreachable(repository, error)) from error
    files = tuple(
        RemoteFile(sibling.rfilename, sibling.size or 0)
        for sibling in info.siblings or ()
        # Sub folders hold other layouts of the same weights.
        if "/" not in sibling.rfilename
    )
    return Listing(repository, info.sha or "main", files)


def choose_files(listing: Listing, file_name: str) -> list[RemoteFile]:
    """The files to fetch: one GGUF where the repository has them, else what an HF directory needs.

    `file_name` picks the GGUF file; empty takes the usual one. Raises CommandError.
    """
    gguf = [
        file
        for file in listing.files
        if file.name.endswith(".gguf") and not _GGUF_PART.search(file.name)
    ]
    if file_name:
        for file in gguf:
            if file.name == file_name:
                return [file]
        others = ", ".join(file.name for file in gguf) or "no GGUF file"
        raise CommandError(f"{listing.repository} has no {file_name}; it has {others}")
    if gguf:
        return [min(gguf, key=_gguf_rank)]
    chosen = [
        file
        for file in listing.files
        if any(fnmatch.fnmatch(file.name, pattern) for pattern in _NEEDED)
        and not any(fnmatch.fnmatch(file.name, pattern) for pattern in _DUPLICATES)
    ]
    names = {file.name for file in chosen}
    if not {"config.json", "tokenizer.json"} <= names:
        raise CommandError(
            f"{listing.repository} cannot be served: it has no GGUF file, and lacks config.json "
            "or tokenizer.json"
        )
    if not any(name.endswith(".safetensors") for name in names):
        raise CommandError(f"{listing.repository} cannot be served: it has no safetensors weights")
    return chosen


def download(
    listing: Listing, files: Sequence[RemoteFile], directory: Path, console: Console
) -> None:
    """Fetches `files` into `directory`; what an earlier, broken call left there is continued.

    Raises CommandError.
    """
    total = sum(file.size for file in files)
    console.print(
        f"fetching {len(files)} file{'s' if len(files) > 1 else ''} "
        f"({total / 1e6:,.1f} MB) of {listing.repository}"
    )
    for file in files:
        try:
            huggingface_hub.hf_hub_download(
                listing.repository, file.name, revision=listing.revision, local_dir=directory
            )
        except (HfHubHTTPError, LocalEntryNotFoundError, httpx2.HTTPError, OSError) as error:
            if is_out_of_space(error):
                raise out_of_space(listing.repository, directory) from error
            raise CommandError(_unreachable(listing.repository, error)) from error


def _gguf_rank(file: RemoteFile) -> tuple[int, str]:
    upper = file.name.upper()
    for rank, label in enumerate(_GGUF_PREFERENCE):
        if re.search(rf"(?<![A-Z0-9]){label}(?![A-Z0-9])", upper):
            return rank, file.name
    return len(_GGUF_PREFERENCE), file.name


def _unreachable(repository: str, error: Exception) -> str:
    cause = (str(error).splitlines() or [type(error).__name__])[0]
    return (
        f"cannot fetch {repository} from the hub: {cause} (check the network and HF_ENDPOINT; "
        "what has arrived is kept, so the same command continues)"
    )
