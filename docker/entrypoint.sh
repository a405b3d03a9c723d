#!/bin/sh
# Runs a node in a container: entrypoint.sh miner|validator|aggregator [OPTION ...], or any other command of tplr.
#
#   MORE_OPTIONS   more options, appended to the arguments, split at spaces
#   GPUS           processes of the node, one for each GPU; default: all GPUs that the container sees
#   HOLD_STATUSES  exit statuses, such as "2 4", after which the container stays without a node until it is stopped: a
#                  restart policy would start a misconfigured node again and again. Default: none
#   RETRY_SECONDS  pause before exit status 3 (an external service is down). Default: 60
set -eu

command=${1:-miner}
[ $# -eq 0 ] || shift
: "${TPLR:=tplr}"

case $command in
miner | validator | aggregator) ;;
*) exec "$TPLR" "$command" "$@" ;;
esac

# shellcheck disable=SC2086
set -- "$@" ${MORE_OPTIONS:-}
if [ -z "${GPUS:-}" ]; then
    GPUS=$(nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU' || true)
fi
if [ "$command" != aggregator ] && [ "${GPUS:-0}" -gt 1 ]; then
    set -- --ranks "$GPUS" "$@"
fi

stopped=
node=
trap 'stopped=yes; [ -z "$node" ] || kill -TERM "$node" 2>/dev/null || true' TERM INT
"$TPLR" "$command" "$@" &
node=$!
[ -z "$stopped" ] || kill -TERM "$node" # the signal came before the node was started

status=0
wait "$node" || status=$?
if [ -n "$stopped" ]; then # the signal ended the first wait, not the node's exit
    status=0
    wait "$node" || status=$?
    exit "$status"
fi

# A pause that a signal ends at once.
pause() {
    sleep "$1" &
    node=$!
    wait "$node" || true
}

for held in ${HOLD_STATUSES:-}; do
    if [ "$status" = "$held" ]; then
        echo "entrypoint: exit status $status: correct what is listed above, then restart this container" >&2
        while [ -z "$stopped" ]; do
            pause 3600
        done
    fi
done
if [ "$status" = 3 ] && [ -z "$stopped" ]; then
    pause "${RETRY_SECONDS:-60}"
fi
exit "$status"
