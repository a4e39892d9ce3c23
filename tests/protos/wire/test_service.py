"""Each service's settings can be checked without the service."""

import os
import subprocess
import sys

import pytest

HEAVY = {"torch", "starlette", "redis", "tokenizers", "jinja2", "kernels"}


def check(service: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {key: text for key, text in os.environ.items() if not key.startswith("TOKENLINE_")}
    return subprocess.run(
        [sys.executable, "-P", "-m", f"{service}.settings", *arguments],
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("service", ["gateway", "tokenizer_svc", "detok_svc", "engine_svc"])
def test_a_check_names_every_fault_and_starts_nothing(service: str) -> None:
    name = service.removesuffix("_svc").upper()
    result = check(service, **{f"TOKENLINE_{name}_PORT": "-1", f"TOKENLINE_{name}_BOGUS": "1"})
    assert result.returncode == 78
    assert result.stderr.startswith(f"{service}: cannot start: ")
    assert f"TOKENLINE_{name}_PORT: must be at least 0, got -1" in result.stderr
    assert f"unknown setting TOKENLINE_{name}_BOGUS" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_good_settings_pass_in_silence() -> None:
    result = check("engine_svc", "--model", "m.gguf", "--dtype", "bfloat16")
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


@pytest.mark.parametrize("service", ["gateway", "tokenizer_svc", "detok_svc", "engine_svc"])
def test_settings_load_nothing_heavy(service: str) -> None:
    code = f"import sys, {service}.settings; print(*sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert HEAVY & {name.partition(".")[0] for name in result.stdout.split()} == set()
