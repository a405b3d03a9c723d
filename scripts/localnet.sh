#!/usr/bin/env bash
# A whole network on this machine, training a real model: scripts/localnet.sh --miners 3 --windows 20
# Paths in the arguments, and runs/, are relative to the caller's working directory.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
"$root/scripts/setup.sh" localnet
exec "$root/.venv/bin/python" -m tplr.cli localnet "$@"
