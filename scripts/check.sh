#!/usr/bin/env bash
# Lint, format, types and the import contract. Runs all four and fails if any does.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh dev || exit 2
status=0
for check in "ruff check ." "ruff format --check ." "pyright" "lint-imports"; do
    echo "== $check"
    .venv/bin/$check || status=1
done
exit $status
