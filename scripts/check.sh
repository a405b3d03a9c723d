#!/usr/bin/env bash
# Lint, format, types, the import contract, the links of the documentation, and known vulnerabilities. Runs all checks
# and fails if any check fails.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
scripts/setup.sh dev || exit 2
status=0
# pyright takes longest, on one core; the site and the checks that wait for the network run on the other core.
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
scripts/docs.sh "$logs/site" >"$logs/docs" 2>&1 &
site=$!
scripts/audit.sh >"$logs/audit" 2>&1 &
audit=$!
for check in "ruff check ." "ruff format --check ." "pyright" "lint-imports"; do
    echo "== $check"
    # shellcheck disable=SC2086 # split into the words of the command line
    .venv/bin/$check || status=1
done
echo "== docs"
wait "$site" || status=1
cat "$logs/docs"
echo "== audit"
wait "$audit" || status=1
cat "$logs/audit"
exit $status
