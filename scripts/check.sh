#!/usr/bin/env bash
# Lint, format, types, the import contract, the links of the documentation, and known vulnerabilities. Runs all and fails if any does.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh dev || exit 2
status=0
for check in "ruff check ." "ruff format --check ." "pyright" "lint-imports"; do
    echo "== $check"
    .venv/bin/$check || status=1
done
echo "== docs"
scripts/docs.sh "${TMPDIR:-/tmp}/tplr-docs-$$" || status=1
rm -rf "${TMPDIR:-/tmp}/tplr-docs-$$"
echo "== audit"
scripts/audit.sh || status=1
exit $status
