"""``scripts/release.sh`` tags exactly the checked commit; building and installing are replaced."""

import os
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]

# Builds two files, and creates environments with a ``tplr`` that fails if ``$BROKEN`` is set.
UV = """#!/bin/bash
echo "$@" >> "$UV_CALLS"
case $1 in
build) mkdir -p dist && touch dist/a.whl dist/a.tar.gz ;;
tool) echo '{}' > dist/sbom.json ;;
venv)
    bin=${!#}/bin && mkdir -p "$bin"
    printf '#!/bin/bash\\n[ "$1" != localnet ] || exit ${BROKEN:-0}\\necho tplr VERSION\\n' > "$bin/tplr"
    printf '#!/bin/bash\\ncat >> "$UV_CALLS"\\n' > "$bin/python"
    chmod +x "$bin"/* ;;
esac
""".replace("VERSION", VERSION)


class Clone:
    """A repository with the release script."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "clone"
        (self.folder / "scripts").mkdir(parents=True)
        for name in ("scripts/release.sh", "pyproject.toml", "README.md"):
            shutil.copy(ROOT / name, self.folder / name)
        (self.folder / ".gitignore").write_text("dist\n")
        self.uv, self.calls = folder / "uv", folder / "calls"
        self.uv.write_text(UV)
        self.uv.chmod(0o755)
        self.git("init", "--quiet")

    def git(self, *words: str) -> str:
        who = ("-c", "user.name=somebody", "-c", "user.email=somebody@example.org")
        done = subprocess.run(["git", *who, *words], cwd=self.folder, check=True, capture_output=True, text=True)
        return done.stdout

    def commit(self, changelog: str) -> None:
        (self.folder / "CHANGELOG.md").write_text(changelog)
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message", "changes")

    def release(self, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        who = {f"GIT_{role}_{what}": "s@example.org" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
        env = {**os.environ, **who, "UV": str(self.uv), "UV_CALLS": str(self.calls), **variables}
        script = self.folder / "scripts" / "release.sh"
        return subprocess.run(["bash", script, *words], env=env, capture_output=True, text=True, check=False)


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path)


def test_a_version_is_tagged_once_when_all_checks_have_passed(clone: Clone) -> None:
    clone.commit(f"## {VERSION}\n")
    assert clone.release(BROKEN="1").returncode == 1
    assert clone.git("tag") == ""
    done = clone.release()
    assert done.returncode == 0, done.stderr
    assert clone.git("tag", "--list", "--format=%(refname:short) %(contents:subject)") == (
        f"v{VERSION} templar {VERSION}\n"
    )
    sums = (clone.folder / "dist" / "SHA256SUMS").read_text()
    assert [line.split()[1] for line in sums.splitlines()] == ["a.tar.gz", "a.whl", "sbom.json"]
    installed = [line for line in clone.calls.read_text().splitlines() if line.startswith("pip install")]
    assert all("--constraint constraints.txt" in line and line.endswith("[localnet]") for line in installed)
    # All imports in the README are tried: in the broken environment, and in two working ones.
    parts = (ROOT / "README.md").read_text().partition("## Use the parts\n")[2].partition("\n## ")[0]
    imports = [line for line in parts.splitlines() if line.startswith("from ")]
    tried = [line for line in clone.calls.read_text().splitlines() if line.startswith("from ")]
    assert (len(imports) > 5, tried) == (True, 3 * imports)
    again = clone.release()
    assert (again.returncode, f"v{VERSION} exists" in again.stderr) == (2, True)


def test_a_dry_run_tags_nothing_and_takes_any_state(clone: Clone) -> None:
    clone.commit("## Unreleased\n")
    (clone.folder / "changed").touch()
    done = clone.release("--no-tag")
    assert done.returncode == 0, done.stderr
    assert clone.git("tag") == ""


@pytest.mark.parametrize(
    ("changelog", "changed", "why"), [("## Unreleased\n", False, "has no section"), ("", True, "commit or remove")]
)
def test_what_is_not_ready_is_refused_before_it_is_built(clone: Clone, changelog: str, changed: bool, why: str) -> None:
    clone.commit(changelog)
    if changed:
        (clone.folder / "changed").touch()
    done = clone.release()
    assert (done.returncode, why in done.stderr) == (2, True)
    assert not clone.calls.exists()
