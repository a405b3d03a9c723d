#!/usr/bin/env bash
# Pin the base images: write the current digests of their tags into docker/Dockerfile and docker/compose.yml. Queries
# the registries through docker buildx. Run it again to update the digests.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

pin() { # FILE NAME:TAG[@DIGEST]
    local name=${2%@*} digest
    digest=$(docker buildx imagetools inspect "$name" --format '{{.Manifest.Digest}}')
    if ! [[ $digest =~ ^sha256:[0-9a-f]{64}$ ]]; then
        echo "pin_images: no digest of $name: $digest" >&2
        exit 1
    fi
    sed -i "s|$2|$name@$digest|" "$1"
    echo "$name@$digest"
}

pin docker/Dockerfile "$(sed -n 's/^ARG BASE=//p' docker/Dockerfile)"
mapfile -t images < <(sed -n 's/.*_IMAGE:-\([^}]*\)}.*/\1/p' docker/compose.yml)
for image in "${images[@]}"; do
    pin docker/compose.yml "$image"
done
