#!/usr/bin/env bash
# Install this project and the named extras into .venv: scripts/setup.sh [localnet|h5|wandb|ray|test|dev ...]
# Does nothing if .venv has them and neither pyproject.toml nor constraints.txt has changed since the installation.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

extras=$(printf '%s\n' "$@" | sort -u | paste -sd, -)
# The path of this clone is part of the stamp: after a move, the paths inside .venv are wrong.
wanted=$(cat pyproject.toml constraints.txt <(pwd) | cksum)
for stamp in ".venv/installed-${extras:-base}" .venv/installed-dev; do # dev contains all other extras
    if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
        exit 0
    fi
done

python=${PYTHON:-python3}
if ! "$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    echo "setup: Python 3.11 or later with venv is required; found $("$python" --version 2>&1 || echo no "$python")." \
        "Install it, or set PYTHON: PYTHON=/path/to/python3.11 $0" >&2
    exit 2
fi
# A .venv without a working pip is incomplete, or belongs to another path.
.venv/bin/python -m pip --version >/dev/null 2>&1 || "$python" -m venv --clear .venv
echo "setup: installing into .venv (one to two minutes, only once) ..." >&2
pip=".venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile"
# uv needs a tenth of pip's time. pip installs PyTorch, because pip's configuration can name an index of CPU builds or a
# folder of wheels, which uv does not read. Where only pip's configuration reaches the packages, pip installs all.
$pip --constraint constraints.txt uv
$pip --constraint constraints.txt --no-deps torch
project=(--constraint constraints.txt --editable ".${extras:+[$extras]}")
.venv/bin/uv pip install --quiet --python .venv/bin/python "${project[@]}" || $pip "${project[@]}"
# Compile what nodes import once. Otherwise a hundred processes of a network would compile it at the same time.
env -u PYTHONDONTWRITEBYTECODE .venv/bin/python - <<'END'
import contextlib, importlib, pkgutil, tplr
for module in pkgutil.walk_packages(tplr.__path__, "tplr.", onerror=lambda _: None):
    if not module.name.endswith("__main__"):
        with contextlib.suppress(ImportError):  # of an extra that is not wanted
            importlib.import_module(module.name)
END
echo "$wanted" >".venv/installed-${extras:-base}"
