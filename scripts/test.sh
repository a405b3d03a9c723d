#!/usr/bin/env bash
# Run the tests; networks of real processes run first, one at a time.
#   scripts/test.sh                           # all but the long tests
#   scripts/test.sh --long                    # all, and then the long ones
#   scripts/test.sh tests/exchange -k gather  # other arguments go to pytest
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
scripts/setup.sh test || exit 2
pytest=".venv/bin/python -m pytest"
unset PYTHONDONTWRITEBYTECODE # otherwise each of a hundred processes would compile this project
long=
if [ "${1:-}" = --long ]; then
    long=yes
    shift
fi
if [ $# -gt 0 ]; then
    exec $pytest "$@"
fi
status=0
# Files of the tests are kept in memory if there is enough: nodes sync every file that they save, so the disk would
# dominate the time. The files are kept after a failure.
free=$(awk '/^MemAvailable/ {print int($2 / 1048576)}' /proc/meminfo 2>/dev/null || echo 0)
room=$(df --output=avail -BG /dev/shm 2>/dev/null | tail -1 | tr -dc 0-9)
if [ -z "${TMPDIR:-}" ] && [ "${free:-0}" -ge 12 ] && [ "${room:-0}" -ge 6 ]; then
    TMPDIR=$(mktemp -d /dev/shm/tplr-tests-XXXXXX)
    export TMPDIR
    trap '[ "$status" = 0 ] && rm -rf "$TMPDIR" || echo "files of the failed tests: $TMPDIR" >&2' EXIT
fi
# The first process compiles all test modules, which the others then only load.
$pytest -m "localnet and not long" || status=1
# Many tests wait: six processes, each with one tensor thread, keep two cores busy, and four do not.
OMP_NUM_THREADS=1 $pytest -m "not localnet and not long" -n 6 --dist worksteal || status=1
if [ -n "$long" ]; then
    $pytest -m long || status=1
fi
exit $status
