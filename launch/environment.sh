# Sourced by launch/quickstart and tests/run: a virtual environment with everything pinned, made once.
# shellcheck shell=bash

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV=$ROOT/.venv
NEEDED_GIB=6

say() { printf '== %s\n' "$*" >&2; }
fail() {
    printf 'error: %s\n' "$*" >&2
    exit 2
}

# Print the first Python 3.10 to 3.12 on PATH ($PYTHON overrides).
find_python() {
    local candidate
    for candidate in ${PYTHON:-python3.11 python3.12 python3.10 python3}; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 13))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    fail "no Python 3.10, 3.11 or 3.12 found (MindSpore 2.9.0 has wheels for these): apt-get install python3, or set PYTHON=/path/to/python3.11"
}

# Everything that an installation needs and pip cannot bring.
check_host() {
    local python=$1 tool free
    for tool in g++ make; do
        command -v "$tool" >/dev/null || fail "$tool is not installed; MindFormers compiles its dataset helper with it: apt-get install g++ make"
    done
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "$python cannot make virtual environments: apt-get install python3-venv"
    "$python" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")))' ||
        fail "the headers of $python (Python.h) are missing: apt-get install python3-dev"
    free=$(df -Pk "$ROOT" | awk 'NR == 2 { print int($4 / 1048576) }')
    [ "$free" -ge "$NEEDED_GIB" ] || fail "$free GiB free in $ROOT, $NEEDED_GIB are needed for MindSpore and its dependencies"
}

# Make .venv, or bring it up to date when the pins have changed; nothing to do otherwise.
ensure_environment() {
    local python wanted stamp=$VENV/.installed
    wanted=$(cat "$ROOT/constraints.txt" "$ROOT/setup.cfg" | sha256sum)
    if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
        return
    fi
    python=$(find_python) || exit 2
    check_host "$python"
    exec 9>"$ROOT/.venv.lock"
    flock 9
    if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
        install_into_venv "$python"
        printf '%s\n' "$wanted" >"$stamp"
    fi
    flock -u 9
}

install_into_venv() {
    local quiet=(-q)
    [ -t 2 ] && quiet=()
    say "1/4 virtual environment in .venv ($1)"
    [ -x "$VENV/bin/python" ] || "$1" -m venv "$VENV" || fail "could not create $VENV"
    say "2/4 installing the packages pinned in constraints.txt (about 4 GB on disk, once)"
    "$VENV/bin/python" -m pip install --disable-pip-version-check "${quiet[@]}" -c "$ROOT/constraints.txt" -e "${ROOT}[dev]" ||
        fail "pip could not install the packages; its own message is above"
    say "3/4 compiling MindFormers' dataset helper"
    (cd "$ROOT" && "$VENV/bin/python" -m launch.workers.dataset_helpers) || fail "MindFormers' dataset helper does not compile; see above"
    say "4/4 compiling the CPU kernels of sharded graphs"
    # only recipes that shard on CPU need them, and these compile them when they start
    (cd "$ROOT" && "$VENV/bin/python" -m plugins.semi_auto_cpu.build) || say "they do not compile here, see above; everything else works"
}
