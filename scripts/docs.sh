#!/usr/bin/env bash
# Build the documentation as a searchable site into site/ (or into the folder given). Fails on a broken link.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh dev || exit 2
NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --quiet --strict --site-dir "$(realpath -m "${1:-site}")"
