#!/usr/bin/env bash
# Write requirements.lock: every package of a node with the hashes of its files, at the versions of constraints.txt. The
# image installs these packages with --require-hashes. Run it after a change of pyproject.toml or constraints.txt.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh dev
.venv/bin/uv pip compile pyproject.toml --extra metrics --constraint constraints.txt --generate-hashes --no-annotate \
    --python-version 3.11 --python-platform x86_64-unknown-linux-gnu \
    --custom-compile-command scripts/lock.sh --quiet --output-file requirements.lock
