#!/usr/bin/env bash
# A whole network on this machine, training a real model: scripts/localnet.sh --miners 3 --windows 20
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh
exec .venv/bin/tplr localnet "$@"
