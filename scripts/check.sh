#!/usr/bin/env bash
# Lint, format, types, the import contract, the links of the documentation, and known vulnerabilities. Runs all and fails if any does.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
scripts/setup.sh dev || exit 2
status=0
# pyright and the site take half a minute each, on a core each.
docs=$(mktemp -d)
trap 'rm -rf "$docs"' EXIT
scripts/docs.sh "$docs/site" >"$docs/log" 2>&1 &
site=$!
for check in "ruff check ." "ruff format --check ." "pyright" "lint-imports"; do
    echo "== $check"
    # shellcheck disable=SC2086 # its words are the command line
    .venv/bin/$check || status=1
done
echo "== docs"
wait "$site" || status=1
cat "$docs/log"
echo "== audit"
scripts/audit.sh || status=1
exit $status
