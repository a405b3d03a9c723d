#!/usr/bin/env bash
# Build the documentation as a searchable site into site/ (or into the given folder). Fails on a broken link and on a
# page that loads anything from another host.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh dev || exit 2
site=$(realpath -m "${1:-site}")
NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --quiet --strict --site-dir "$site"

# For diagrams the theme would fetch a library from another host.
loads='<(script|img|iframe|source|link|video|audio|object|embed)[^>]*(src|srcset|href|data)="?(https?:)?//[^" >]+|class="?mermaid'
styles='(url\(|@import )["'"'"']?(https?:)?//[^)"'"'"' ]+'
if grep -rnoE "$loads" --include='*.html' "$site" || grep -rnoE "$styles" --include='*.css' "$site"; then
    echo "docs: the site would ask other hosts, see above" >&2
    exit 1
fi
