#!/usr/bin/env bash
# 1 worker on 1 node. How to start it: docs/train.md
set -euo pipefail
RECIPE=recipes/mini/pretrain_muon.yaml
SETTINGS=()
TARGET=CPU
WORKERS=1
SLOTS=1 # workers of a node
HOSTS=(127.0.0.1)
HOSTS_OF_SLURM=no
[ -n "${RUN_DIR:-}" ] || RUN_DIR=output/mini-pretrain_muon
SAVE_PATH='' # empty: in RUN_DIR
[ -n "${MASTER_PORT:-}" ] || MASTER_PORT=8118
[ -n "${RESUME:-}" ] || RESUME=''
[ -n "${BIND:-}" ] || BIND=yes
for TC3_ROOT in "${TC3_ROOT:-}" "$(dirname "${BASH_SOURCE[0]}")/../.." "${SLURM_SUBMIT_DIR:-}" "$PWD"; do
    # shellcheck source=../script_body.sh
    [ ! -f "$TC3_ROOT/launch/script_body.sh" ] || source "$TC3_ROOT/launch/script_body.sh"
done
echo 'error: no launch/train.py here: start the script from the checkout, or set TC3_ROOT to it' >&2 && exit 2
