#!/bin/sh
# Health check of a node's container: healthy while it has written an event within MAX_SILENCE_SECONDS (default: 3600).
# A node may emit events only at the end of a window, so this is above two of the longest ones (23 minutes); a
# container that holds after a wrong configuration emits none.
set -eu
events=${EVENTS:-/var/lib/templar/events.jsonl}
[ -f "$events" ] && [ $(($(date +%s) - $(stat -c %Y "$events"))) -le "${MAX_SILENCE_SECONDS:-3600}" ]
