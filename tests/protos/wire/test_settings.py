"""Settings come from flags and the environment, and everything wrong is said at once."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from protos.wire.errors import StartupError
from protos.wire.settings import REQUIRED, format_size, load_settings, parse_size, setting


@dataclass(frozen=True)
class Settings:
    model: Path = setting(REQUIRED, "The model.")
    port: int = setting(8000, "The port.", minimum=0, maximum=65535)
    memory: int | None = setting(None, "Bytes.", parse=parse_size)
    chunk: int = setting(512 << 20, "Bytes.", parse=parse_size)
    tokenizer: tuple[str, ...] = setting(("127.0.0.1:1",), "Addresses.")
    prefix_cache: bool = setting(True, "Reuse prefixes.")
    dtype: str = setting("float32", "Number format.", choices=("float32", "bfloat16"))
    seconds: float = setting(1.5, "A time.", minimum=0)


def load(*arguments: str, **environment: str) -> Settings:
    return load_settings(Settings, "engine_svc", arguments, environment)


def test_flags_win_over_the_environment_and_the_environment_over_defaults() -> None:
    settings = load(
        "--model=m.gguf",
        "--port",
        "1",
        TOKENLINE_ENGINE_PORT="2",
        TOKENLINE_ENGINE_MEMORY="1.5GiB",
        TOKENLINE_ENGINE_PREFIX_CACHE="off",
    )
    assert settings == Settings(model=Path("m.gguf"), port=1, memory=3 << 29, prefix_cache=False)


def test_several_addresses_are_split() -> None:
    assert load("--model=m", "--tokenizer", "a:1, b:2").tokenizer == ("a:1", "b:2")


def test_every_problem_is_reported_at_once() -> None:
    with pytest.raises(StartupError) as error:
        load(
            "--prot",
            "1",
            "--port",
            "70000",
            "--dtype",
            "float8",
            "--tokenizer",
            "nowhere",
            TOKENLINE_ENGINE_MEMORI="1",
            TOKENLINE_GATEWAY_ANYTHING="not ours",
        )
    message = str(error.value)
    for part in (
        "unknown setting --prot, did you mean --port?",
        "--port: must be at most 65535, got 70000",
        "--dtype: expected one of float32, bfloat16, got 'float8'",
        "--tokenizer: expected host:port, got 'nowhere'",
        "unknown setting TOKENLINE_ENGINE_MEMORI, did you mean TOKENLINE_ENGINE_MEMORY?",
        "--model (or TOKENLINE_ENGINE_MODEL) is required",
    ):
        assert part in message
    assert "GATEWAY" not in message


@pytest.mark.parametrize(
    ("flag", "told"),
    [
        ("--port", "--port needs a value"),
        ("--prefix-cache", "--prefix-cache needs a value: true or false"),
        ("--dtype", "--dtype needs a value: one of float32, bfloat16"),
    ],
)
def test_a_flag_without_a_value_is_an_error(flag: str, told: str) -> None:
    with pytest.raises(StartupError, match=f"^{told}$"):
        load("--model=m", flag)


def test_a_number_that_is_none_is_named() -> None:
    with pytest.raises(StartupError, match="--port: expected a number, got 'x'"):
        load("--model=m", "--port=x")


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "1e999"])
def test_a_time_that_is_not_finite_is_refused(text: str) -> None:
    """NaN is neither below a minimum nor above a maximum."""
    with pytest.raises(StartupError, match=f"--seconds: expected a number, got '{text}'"):
        load("--model=m", f"--seconds={text}")
    assert load("--model=m", "--seconds=2e1").seconds == 20.0


def test_help_lists_settings_with_their_environment_names(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        load("--help")
    assert ended.value.code == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    for name, text, help_text in (
        ("MODEL", "required", "The model."),
        ("PORT", "default 8000", "The port."),
        ("MEMORY", "default: none", "Bytes."),
        ("CHUNK", "default 512MiB", "Bytes."),
        ("TOKENIZER", "default 127.0.0.1:1", "Addresses."),
        ("PREFIX_CACHE", "default true", "Reuse prefixes. true or false."),
        ("DTYPE", "default float32", "Number format. One of float32, bfloat16."),
    ):
        flag = "--" + name.lower().replace("_", "-")
        at = lines.index(f"{flag}, TOKENLINE_ENGINE_{name} ({text})")
        assert lines[at + 1] == help_text


def test_only_a_name_that_is_close_is_suggested() -> None:
    with pytest.raises(StartupError) as error:
        load("--model=m", "--bogus", TOKENLINE_ENGINE_BOGUS="1")
    assert str(error.value) == "unknown setting TOKENLINE_ENGINE_BOGUS; unknown setting --bogus"


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0"), (1500, "1500"), (512 << 20, "512MiB"), (1 << 40, "1024GiB")]
)
def test_sizes_are_written_as_they_are_read(size: int, text: str) -> None:
    assert format_size(size) == text
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(("--memory=banana",), "got 'banana'"), (("--prefix-cache=2",), "got '2'")],
)
def test_a_value_that_cannot_be_read_is_named(arguments: tuple[str, ...], words: str) -> None:
    with pytest.raises(StartupError, match=words):
        load("--model=m", *arguments)


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("4096", 4096), ("512MiB", 512 << 20), ("2 GB", 2 * 10**9), ("1.5k", 1500)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "MiB", "-1", "1TiB", "1e9"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="expected a size"):
        parse_size(text)
