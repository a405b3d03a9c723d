#!/bin/sh
# Health check of a node's container: healthy while it has written an event within MAX_SILENCE_SECONDS (default: 900).
# A node emits events in every window; a container that holds after a wrong configuration emits none.
set -eu
events=${EVENTS:-/var/lib/templar/events.jsonl}
[ -f "$events" ] && [ $(($(date +%s) - $(stat -c %Y "$events"))) -le "${MAX_SILENCE_SECONDS:-900}" ]
