#!/usr/bin/env bash
# Cuts a release: infra/release.sh 0.3.0 (or `make release VERSION=0.3.0`). Writes the version where it is declared (pyproject.toml)
# and where files that are not code repeat it, closes the changelog's "Unreleased", commits, and tags the commit. Pushes nothing.
set -euo pipefail
cd "$(dirname "$0")/.."

version=${1:-}
[[ $version =~ ^[0-9]+\.[0-9]+\.[0-9]+$ ]] || { echo "release: got '$version', allowed: three numbers, as 0.3.0" >&2; exit 2; }
former=$(sed -n 's/^version = "\(.*\)"$/\1/p' pyproject.toml)
[[ $former != "$version" ]] || { echo "release: pyproject.toml has $version already; name the next one" >&2; exit 2; }
[[ -z $(git status --porcelain) ]] || { echo "release: the work tree has changes; commit them first" >&2; exit 2; }
! git rev-parse -q --verify "refs/tags/v$version" >/dev/null || { echo "release: the tag v$version exists; name the next version" >&2; exit 2; }
awk '/^## Unreleased$/ {open = 1; next} /^## / {open = 0} open && NF {found = 1} END {exit !found}' CHANGELOG.md ||
    { echo 'release: CHANGELOG.md says nothing under "## Unreleased"; write what changed for users' >&2; exit 2; }

quoted=${former//./\\.}
sed -i "s/^version = \"$quoted\"$/version = \"$version\"/" pyproject.toml
sed -i "/^name = \"atoll\"$/{n;s/^version = .*/version = \"$version\"/}" uv.lock
sed -i -E "s/(image: atoll-[a-z]+):$quoted$/\1:$version/" docker-compose.yml
sed -i "s/^## Unreleased$/## Unreleased\n\n## $version · $(date +%F)/" CHANGELOG.md
git commit -qam "release: $version"
git tag -a "v$version" -m "Atoll $version"
echo "release: $former -> $version, tagged v$version; 'git push --follow-tags' publishes it"
