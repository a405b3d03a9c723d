#!/usr/bin/env bash
# Compare requirements.lock with the known vulnerabilities. Where their database can't be reached, says so and succeeds;
# with --require, as in the workflow, that is a failure.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
scripts/setup.sh dev || exit 2
# Of its own environment: the tool and its dependencies are none of ours. --strict: an unknown package is no success.
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
