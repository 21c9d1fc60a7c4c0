#!/usr/bin/env bash
# Render examples/deployment.toml for every target, and let each target's own program read its files.
#
#   infra/deploy_check.sh [VENV]
#
# SkyPilot gets an environment of its own, in build/skypilot (460 MB, a minute). What is not on this machine is said and
# passed over: kubectl, systemd-analyze. Nothing is started anywhere.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=${1:-.venv}
out=build/deploy-check
sky=build/skypilot
rm -rf "$out"
mkdir -p "$out"

for hub in kubernetes systemd; do
    sed "0,/target = \"kubernetes\"/s//target = \"$hub\"/" examples/deployment.toml >"$out/$hub.toml"
    printf '\n[software]\nprogram = "%s"\n' "$PWD/$venv/bin/atoll" >>"$out/$hub.toml"
    "$venv/bin/atoll" deploy render "$out/$hub.toml" --out "$out/$hub" | tail -n 6
done

"$venv/bin/check-jsonschema" --builtin-schema vendor.compose-spec "$out/kubernetes/desk/compose.yml"
if command -v kubectl >/dev/null; then
    for place in hub hub/services eu eu/services asia asia/services; do
        kubectl kustomize "$out/kubernetes/$place" >"$out/${place/\//-}.yaml"
        echo "deploy-check: kubectl builds $place: $(grep -c '^kind:' "$out/${place/\//-}.yaml") objects"
    done
else
    echo "deploy-check: no kubectl here; kustomizations are checked by the tests alone"
fi
if command -v systemd-analyze >/dev/null; then
    systemd-analyze --man=no verify "$out"/systemd/*/*.service
    echo "deploy-check: systemd takes $(find "$out/systemd" -name '*.service' | wc -l) units"
else
    echo "deploy-check: no systemd-analyze here; units are not checked"
fi
if ! "$sky/bin/python" -c 'import sky' 2>/dev/null; then
    rm -rf "$sky"
    "$venv/bin/python" -m venv "$sky"
    "$sky/bin/python" -m pip install --quiet --disable-pip-version-check skypilot==0.14.1
fi
HOME=$PWD/$out/home "$sky/bin/python" - "$out"/kubernetes/us/*.sky.yaml <<'END'
import sys

import sky

for path in sys.argv[1:]:
    task = sky.Task.from_yaml(path)
    print(f"deploy-check: SkyPilot takes {path.rpartition('/')[2]}: {task.name}")
END
