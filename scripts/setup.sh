#!/usr/bin/env bash
# Make .venv with this project and the named extras in it: scripts/setup.sh [test|dev|wandb ...]
# Does nothing if that was done before and neither pyproject.toml nor constraints.txt has changed since.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

extras=$(printf '%s\n' "$@" | sort -u | paste -sd, -)
# A clone that was moved has a .venv full of old paths: where it lies is part of what was installed.
wanted=$(cat pyproject.toml constraints.txt <(pwd) | cksum)
for stamp in ".venv/installed-${extras:-base}" .venv/installed-dev; do # dev holds all the others
    if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
        exit 0
    fi
done

python=${PYTHON:-python3}
if ! "$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    echo "setup: need Python 3.11 or later with venv; found $("$python" --version 2>&1 || echo no "$python")." \
        "Install it, or name one: PYTHON=/path/to/python3.11 $0" >&2
    exit 2
fi
# Without its pip a .venv was interrupted in the making, or its clone was moved.
.venv/bin/python -m pip --version >/dev/null 2>&1 || "$python" -m venv --clear .venv
echo "setup: installing into .venv (a minute or two, once) ..." >&2
.venv/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
    --editable ".${extras:+[$extras]}"
echo "$wanted" >".venv/installed-${extras:-base}"
