#!/usr/bin/env bash
# Run the tests: networks of real processes beside tests that only compute, and then all others.
#   scripts/test.sh                           # all but the long tests
#   scripts/test.sh --long                    # all, and then the long ones
#   scripts/test.sh tests/exchange -k gather  # other arguments go to pytest
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
scripts/setup.sh test || exit 2
pytest=(.venv/bin/python -m pytest)
unset PYTHONDONTWRITEBYTECODE # otherwise each of a hundred processes would compile this project
long=
if [ "${1:-}" = --long ]; then
    long=yes
    shift
fi
if [ $# -gt 0 ]; then
    exec "${pytest[@]}" "$@"
fi
status=0
# Files of the tests are kept in memory if there is enough: nodes sync every file that they save, so the disk would
# dominate the time. The files are kept after a failure.
free=$(awk '/^MemAvailable/ {print int($2 / 1048576)}' /proc/meminfo 2>/dev/null || echo 0)
room=$(df --output=avail -BG /dev/shm 2>/dev/null | tail -1 | tr -dc 0-9)
own=
if [ -z "${TMPDIR:-}" ] && [ "${free:-0}" -ge 12 ] && [ "${room:-0}" -ge 6 ]; then
    TMPDIR=$(mktemp -d /dev/shm/tplr-tests-XXXXXX)
    export TMPDIR
    own=$TMPDIR
fi
running=
server=
compiling=
sockets=$(mktemp -d /tmp/tplr-tests-XXXXXX) # a path of a socket must be short
# shellcheck disable=SC2329 # the trap calls it
finish() {
    [ -z "$running" ] || kill "$running" 2>/dev/null # a background job ignores Ctrl-C
    [ -z "$compiling" ] || kill "$compiling" 2>/dev/null
    [ -z "$server" ] || kill "$server" 2>/dev/null
    rm -rf "$sockets"
    if [ -n "$own" ] && [ "$status" = 0 ]; then
        rm -rf "$own"
    elif [ -n "$own" ]; then
        echo "files of the failed tests: $own" >&2
    fi
}
trap finish EXIT
# Networks run one at a time and often wait. Beside them, tests that only compute run at the lowest priority: no clock
# and no other process waits for them.
computing=(tests/localnet/test_{scenarios,attackers,simulation}.py
    tests/{training,scoring,compress,planner,page,scale})
# On Linux the processes of the tests, and those of the commands that they run, are forks of one that has imported the
# large libraries.
forked=popen
if [ "$(uname)" = Linux ]; then
    export FORKED_PYTHON="$sockets/python"
    OMP_NUM_THREADS=1 .venv/bin/python tests/support/forked_python.py --serve "$FORKED_PYTHON" $$ &
    server=$!
    forked="popen//python=.venv/bin/python tests/support/forked_python.py --at $FORKED_PYTHON"
fi
networks=$(mktemp)
# Only their files: to find them, pytest would import all others.
mapfile -t marked < <(grep -rl --include="test_*.py" "mark.localnet" tests)
"${pytest[@]}" -m "localnet and not long" "${marked[@]}" >"$networks" 2>&1 &
running=$!
# Each process has one tensor thread, and runs a file as a whole, so that its fixtures are made once.
export OMP_NUM_THREADS=1
parallel=(-m "not localnet and not long" --dist loadfile --no-loadscope-reorder)
# pytest compiles the others once: six processes that begin together would each compile all of them.
if [ -n "$server" ]; then
    nice -n 19 .venv/bin/python tests/support/forked_python.py --at "$FORKED_PYTHON" -m pytest --collect-only \
        "${computing[@]/#/--ignore=}" >/dev/null 2>&1 & # what is wrong with it, the last run says
    compiling=$!
fi
nice -n 19 "${pytest[@]}" "${parallel[@]}" --tx "2*$forked" "${computing[@]}" || status=1
wait "$running" || status=1
running=
[ -z "$compiling" ] || wait "$compiling"
compiling=
cat "$networks"
rm -f "$networks"
# Many of the others wait: six processes keep two cores busy, and four do not.
"${pytest[@]}" "${parallel[@]}" --tx "6*$forked" "${computing[@]/#/--ignore=}" || status=1
unset OMP_NUM_THREADS
if [ -n "$long" ]; then
    "${pytest[@]}" -m long || status=1
fi
exit $status
