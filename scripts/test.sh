#!/usr/bin/env bash
# Run the tests; the networks of real processes run last and alone.
#   scripts/test.sh                           # all but the long tests
#   scripts/test.sh --long                    # all, and then those that take more than a minute each
#   scripts/test.sh tests/exchange -k gather  # other arguments go to pytest
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh test || exit 2
pytest=".venv/bin/python -m pytest"
long=
if [ "${1:-}" = --long ]; then
    long=yes
    shift
fi
if [ $# -gt 0 ]; then
    exec $pytest "$@"
fi
# Most tests wait more than they compute: four processes suit two cores, each with one thread for its tensors.
status=0
OMP_NUM_THREADS=1 $pytest -m "not localnet and not long" -n 4 --dist worksteal || status=1
$pytest -m "localnet and not long" || status=1
if [ -n "$long" ]; then
    $pytest -m long || status=1
fi
exit $status
