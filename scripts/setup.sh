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
# constraints.txt lists all packages of dev. Once they are installed, pip has no versions to choose from.
[[ ",$extras," != *,dev,* ]] || $pip --no-deps --requirement constraints.txt
$pip --constraint constraints.txt --editable ".${extras:+[$extras]}"
# pip would compile on one core. Some packages contain files that are not valid Python.
.venv/bin/python -m compileall -q -j 0 .venv/lib src >/dev/null 2>&1 || true
echo "$wanted" >".venv/installed-${extras:-base}"
