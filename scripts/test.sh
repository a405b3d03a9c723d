#!/usr/bin/env bash
# Run the tests; arguments go to pytest: scripts/test.sh tests/exchange -k gather
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh test
exec .venv/bin/python -m pytest "$@"
