#!/usr/bin/env bash
# Run all tests, the networks of real processes last and alone. Arguments go to pytest, which then runs just what they
# say: scripts/test.sh tests/exchange -k gather
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh test || exit 2
pytest=".venv/bin/python -m pytest"
if [ $# -gt 0 ]; then
    exec $pytest "$@"
fi
# Most tests wait more than they compute: four processes suit two cores, each with one thread for its tensors.
status=0
OMP_NUM_THREADS=1 $pytest -m "not localnet and not long" -n 4 --dist worksteal || status=1
$pytest -m localnet || status=1
exit $status
