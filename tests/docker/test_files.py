"""Dockerfile, compose file and scripts: linters without a daemon, and guarantees that linters do not check."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from guides import from_guide

from tplr.cli import parse_arguments
from tplr.node.arguments import node_arguments

ROOT = Path(__file__).parents[2]
COMPOSE = yaml.safe_load((ROOT / "docker/compose.yml").read_text())
DOCKERFILE = (ROOT / "docker/Dockerfile").read_text()
NODES = ("miner", "validator", "aggregator")


def lint(name: str, *arguments: str | Path) -> None:
    """Run a linter that is installed beside Python; skips the test without it."""
    program = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if program is None:
        pytest.skip(f"needs {name}")
    done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_dockerfile_passes_its_linter() -> None:
    lint("hadolint", ROOT / "docker/Dockerfile")


def test_the_compose_file_fits_its_schema() -> None:
    lint("check-jsonschema", "--builtin-schema", "vendor.compose-spec", ROOT / "docker/compose.yml")


def test_the_workflow_fits_its_schema() -> None:
    lint("check-jsonschema", "--builtin-schema", "vendor.github-workflows", ROOT / ".github/workflows/ci.yml")


def test_the_shell_scripts_pass_their_linter() -> None:
    lint(
        "shellcheck",
        *sorted((ROOT / "docker").glob("*.sh")),
        *sorted((ROOT / "scripts").glob("*.sh")),
        ROOT / ".ci/run",
    )


def substituted(text: str) -> str:
    """Substitute like compose without any variable: ``${NAME:-default}`` and ``${NAME:?text}``."""
    return re.sub(r"\$\{(\w+):([-?])([^}]*)\}", lambda found: found[3] if found[2] == "-" else "/given", text)


@pytest.mark.parametrize("role", NODES)
def test_each_node_gets_arguments_that_it_knows(role: str) -> None:
    service = COMPOSE["services"][role]
    assert service["profiles"] == [role]
    assert service["entrypoint"] == ["tini", "--", "entrypoint.sh", role]
    options = [one for one in map(substituted, service["command"]) if not one.startswith("--metrics-")]
    parsed = node_arguments(parse_arguments([role, *options]))
    # The node's files are in its volume, and its health check reads its events.
    assert str(parsed.state).startswith("/var/lib/templar/")
    assert f"EVENTS={parsed.events} " in DOCKERFILE
    assert f"{role}:/var/lib/templar" in service["volumes"]


@pytest.mark.parametrize("role", NODES)
def test_of_the_wallet_only_the_hotkey_is_mounted(role: str) -> None:
    binds = [one for one in COMPOSE["services"][role]["volumes"] if isinstance(one, dict)]
    assert all(one["read_only"] for one in binds)
    [wallet] = [one for one in binds if one["target"].startswith("/run/wallets")]
    assert re.fullmatch(r"\$\{HOTKEY_FILE:\?.*\}", wallet["source"])
    assert substituted(wallet["target"]) == "/run/wallets/default/hotkeys/default"
    assert "coldkey" not in "".join(one["target"] for one in binds)


@pytest.mark.parametrize("role", NODES)
def test_nodes_have_no_more_rights_than_they_need(role: str) -> None:
    service = COMPOSE["services"][role]
    assert service["user"].partition(":")[0] not in ("0", "root")
    assert service["cap_drop"] == ["ALL"]
    assert service["read_only"] is True
    assert "privileged" not in service
    assert ("deploy" in service) == (role != "aggregator")  # only a model needs GPUs


def test_the_image_has_every_hparams_file_and_does_not_run_as_root() -> None:
    assert re.search(r"^COPY hparams\*\.json ", DOCKERFILE, re.M)
    assert re.findall(r"^USER (.*)$", DOCKERFILE, re.M) == ["10001"]
    assert "--uid 10001" in DOCKERFILE
    assert "--require-hashes" in DOCKERFILE


def test_what_is_mounted_is_in_the_repository() -> None:
    for service in ("prometheus", "grafana"):
        for volume in COMPOSE["services"][service]["volumes"]:
            if volume.startswith("./"):
                assert (ROOT / "docker" / volume.partition(":")[0]).exists(), volume


FAKE_DOCKER = """#!/bin/sh
[ "$1 $2 $3 $5" = "buildx imagetools inspect --format" ] || exit 9
echo "$4" >>"$ASKED"
echo "$DIGEST"
"""


def test_images_are_pinned_and_renewed(tmp_path: Path) -> None:
    for name in ("docker/Dockerfile", "docker/compose.yml", "scripts/pin_images.sh"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/docker").write_text(FAKE_DOCKER)
    (tmp_path / "bin/docker").chmod(0o755)
    command = from_guide("docs/services.md", "scripts/pin_images.sh").process

    def pin(digest: str) -> int:
        env = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "ASKED": str(tmp_path / "asked"), "DIGEST": digest}
        return subprocess.run(command, cwd=tmp_path, env=env, check=False, capture_output=True).returncode

    images = ["python:3.11-slim", "prom/prometheus:v3.7.3", "grafana/grafana:12.3.0"]
    for digest in (f"sha256:{'0' * 64}", f"sha256:{'1' * 64}"):
        assert pin(digest) == 0
        assert f"ARG BASE={images[0]}@{digest}\n" in (tmp_path / "docker/Dockerfile").read_text()
        services = yaml.safe_load((tmp_path / "docker/compose.yml").read_text())["services"]
        assert [substituted(services[name]["image"]) for name in ("prometheus", "grafana")] == [
            f"{image}@{digest}" for image in images[1:]
        ]
    assert (tmp_path / "asked").read_text().splitlines() == images * 2
    before = (tmp_path / "docker/Dockerfile").read_text()
    assert pin("not found") == 1
    assert (tmp_path / "docker/Dockerfile").read_text() == before
