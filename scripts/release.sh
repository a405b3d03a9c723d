#!/usr/bin/env bash
# Build, check and tag a release of the version in pyproject.toml: scripts/release.sh [--no-tag]
#
# Writes sdist, wheel, sbom.json (CycloneDX) and SHA256SUMS into dist/, and checks them in a fresh environment with a
# network of real processes. Publishing is a separate step: push the tag, and upload dist/.
#
# UV: the uv to use; default: the one on PATH, else the one in .venv, which is installed if needed. It installs cached
# packages in seconds, at the versions of constraints.txt.
# PYTHON: interpreter of the fresh environments; default: python3.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
version=$("$python" -c 'import tomllib; print(tomllib.load(open("pyproject.toml", "rb"))["project"]["version"])')

if [ "${1:-}" != --no-tag ]; then
    [ -z "$(git status --porcelain)" ] || { echo "release: commit or remove your changes first" >&2; exit 2; }
    ! git rev-parse --quiet --verify "refs/tags/v$version" >/dev/null || {
        echo "release: v$version exists: raise the version in pyproject.toml" >&2
        exit 2
    }
    grep -q "^## $version\b" CHANGELOG.md || {
        echo "release: CHANGELOG.md has no section '## $version': rename 'Unreleased'" >&2
        exit 2
    }
fi

uv=${UV:-$(command -v uv || true)}
if [ -z "$uv" ]; then
    scripts/setup.sh dev
    uv=$PWD/.venv/bin/uv
fi
rm -rf dist build
"$uv" build --quiet --out-dir dist
"$uv" tool run --quiet --from cyclonedx-bom==7.5.0 cyclonedx-py requirements requirements.lock --of JSON -o dist/sbom.json

imports=$(sed -n '/^## Use the parts/,/^## /{/^from /p}' README.md)
[ -n "$imports" ] || { echo "release: README.md has no imports under 'Use the parts'" >&2; exit 2; }
fresh=$(mktemp -d)
trap 'rm -rf "$fresh"' EXIT
for file in dist/*.whl dist/*.tar.gz; do
    echo "== ${file##*/} in a fresh environment"
    "$uv" venv --quiet --clear --python "$python" "$fresh/venv"
    "$uv" pip install --quiet --python "$fresh/venv/bin/python" --constraint constraints.txt "$PWD/${file}[localnet]"
    (
        cd "$fresh" # outside the source tree
        unset PYTHONPATH
        [ "$(venv/bin/tplr --version)" = "tplr $version" ]
        venv/bin/python <<<"$imports"
        venv/bin/tplr localnet --miners 1 --windows 4 --run-dir "$fresh/run-${file##*.}" --keep results
    )
done

(cd dist && sha256sum -- * >SHA256SUMS)
if [ "${1:-}" != --no-tag ]; then
    git tag --annotate "v$version" --message "templar $version"
    echo "release: tagged v$version; push it with: git push origin v$version"
fi
