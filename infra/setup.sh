#!/usr/bin/env bash
# Make a virtual environment exactly as uv.lock says.
#
#   infra/setup.sh [FOLDER]          FOLDER defaults to .venv
#
# Needs Python 3.11 or newer and nothing else. The standard library makes two environments: build/bootstrap, where pip
# puts one pinned, hash-checked tool (infra/bootstrap.txt), and FOLDER, which that tool fills from the lock.
#
#   PYTHON=python3.12   which interpreter to use; otherwise the first on the path that is new enough
#   UV=/path/to/uv      use this one and fetch nothing by pip (machines without an index; UV_OFFLINE=1 uses the cache)
#
# Certificates: pip honours PIP_CERT, the lock's tool SSL_CERT_FILE and the system's store. Mirrors: PIP_INDEX_URL for
# pip; the lock names its own files.
set -euo pipefail
cd "$(dirname "$0")/.."

folder=${1:-.venv}
bootstrap=build/bootstrap
export UV_PROJECT_ENVIRONMENT=$folder UV_PYTHON_DOWNLOADS=never
export UV_SYSTEM_CERTS=${UV_SYSTEM_CERTS:-true} UV_HTTP_TIMEOUT=${UV_HTTP_TIMEOUT:-120} UV_HTTP_RETRIES=${UV_HTTP_RETRIES:-6}
export PIP_DISABLE_PIP_VERSION_CHECK=1
unset VIRTUAL_ENV

new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null </dev/null
}

find_python() {
    local candidate
    if [ -n "${PYTHON:-}" ] && ! new_enough "$PYTHON"; then
        echo "setup: PYTHON=$PYTHON is no Python 3.11 or newer" >&2
        return 1
    fi
    for candidate in ${PYTHON:-} python3 python3.13 python3.12 python3.11 python; do
        if new_enough "$candidate"; then
            "$candidate" -c 'import sys; print(sys.executable)'
            return
        fi
    done
    echo "setup: no Python 3.11 or newer found; install one or name it: make setup PYTHON=/path/to/python" >&2
    return 1
}

fetch_uv() {
    local stamp=$bootstrap/installed.txt
    if cmp -s infra/bootstrap.txt "$stamp" && "$bootstrap/bin/uv" --version >/dev/null 2>&1; then
        return
    fi
    rm -rf "$bootstrap"
    if ! "$python" -m venv "$bootstrap"; then
        echo "setup: this Python cannot make environments with pip; on Debian and Ubuntu install python3-venv" >&2
        return 1
    fi
    "$bootstrap/bin/python" -m pip install --quiet --require-hashes --only-binary :all: -r infra/bootstrap.txt
    cp infra/bootstrap.txt "$stamp"
}

SECONDS=0
python=$(find_python)
echo "setup: $folder with $("$python" --version) from uv.lock"
if [ -n "${UV:-}" ]; then
    uv=$UV
else
    fetch_uv
    uv=$bootstrap/bin/uv
fi
if ! new_enough "$folder/bin/python"; then
    "$python" -m venv --clear --without-pip "$folder"
fi
"$uv" sync --frozen --quiet --extra dev --python "$folder/bin/python" </dev/null
touch "$folder/.in-step-with-the-lock"
echo "setup: done in ${SECONDS} s"
