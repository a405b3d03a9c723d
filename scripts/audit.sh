#!/usr/bin/env bash
# Compare requirements.lock with the known vulnerabilities. If the database can't be reached, it prints a message and
# succeeds; with --require, as in the workflow, it fails.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
scripts/setup.sh dev || exit 2
# In a separate environment, because the tool and its dependencies are not part of the project. --strict: an unknown
# package is a failure.
said=$(timeout 300 .venv/bin/uv tool run --quiet --from pip-audit==2.10.1 pip-audit \
    --strict --disable-pip --require-hashes --requirement requirements.lock 2>&1)
status=$?
if [ $status -eq 0 ]; then
    echo "audit: no known vulnerabilities"
elif grep -q '^Found [0-9]* known vulnerabilit' <<<"$said"; then
    echo "$said" >&2
    exit 1
else
    echo "audit: NOT DONE, the database of vulnerabilities can't be reached ($(tail -n 1 <<<"$said" | cut -c1-120))" >&2
    [ "${1:-}" != --require ]
fi
