"""Wrong settings of all services are said in one line, before any of them starts."""

import os
import sys
from collections.abc import Mapping

import pytest

from compose.errors import CommandError
from compose.settings_check import require_good_settings
from compose.supervisor import ServiceSpec

REFUSES = "import sys; sys.exit('{}: cannot start: --port: bad; --host: worse')"


def spec(name: str, code: str = "") -> ServiceSpec:
    check = (sys.executable, "-c", code)
    return ServiceSpec(name, ("/nowhere/program",), "127.0.0.1:1", settings_check=check)


def environment(**added: str) -> Mapping[str, str]:
    inherited = {key: text for key, text in os.environ.items() if not key.startswith("TOKENLINE_")}
    return {**inherited, **added}


def complaint(*specs: ServiceSpec, **added: str) -> str:
    with pytest.raises(CommandError) as error:
        require_good_settings(specs, environment(**added))
    return str(error.value)


def test_good_settings_are_no_error() -> None:
    specs = [spec("gateway"), spec("engine_svc-1"), spec("engine_svc-2")]
    redis = ServiceSpec("redis", ("/nowhere/program",), "127.0.0.1:1")
    require_good_settings([*specs, redis], environment(TOKENLINE_ENGINE_DTYPE="float32"))


def test_the_faults_of_all_services_are_one_line_and_replicas_speak_once() -> None:
    found = complaint(
        spec("gateway", REFUSES.format("gateway")),
        spec("tokenizer_svc"),
        spec("engine_svc-1", REFUSES.format("engine_svc")),
        spec("engine_svc-2", REFUSES.format("engine_svc")),
    )
    assert found == (
        "wrong settings: gateway: --port: bad; --host: worse; "
        "engine_svc: --port: bad; --host: worse"
    )


def test_a_check_that_breaks_is_a_fault() -> None:
    assert "ValueError: odd" in complaint(spec("gateway", "raise ValueError('odd')"))
    assert "exit code 3" in complaint(spec("gateway", "raise SystemExit(3)"))


def test_a_setting_of_no_service_is_named_with_the_service_that_was_meant() -> None:
    found = complaint(spec("engine_svc"), spec("gateway"), TOKENLINE_ENGNE_DTYPE="float32")
    assert found == (
        "wrong settings: unknown setting TOKENLINE_ENGNE_DTYPE, "
        "did you mean TOKENLINE_ENGINE_DTYPE?"
    )


def test_a_setting_that_is_like_none_names_the_beginnings() -> None:
    found = complaint(spec("engine_svc"), spec("gateway"), TOKENLINE_PORT="1")
    assert found.endswith("settings begin with TOKENLINE_ENGINE_, TOKENLINE_GATEWAY_")
