#!/usr/bin/env bash
# 256 workers on 32 nodes. How to start it: docs/train.md
set -euo pipefail
RECIPE=recipes/telechat3_105b/pretrain_4k_muon.yaml
SETTINGS=()
TARGET=Ascend
WORKERS=256
SLOTS=8 # workers of a node
HOSTS=(node{0..31}) # nodes by rank, the first is the master: put your names here; Slurm's are taken as they are
HOSTS_OF_SLURM=yes
[ -n "${RUN_DIR:-}" ] || RUN_DIR=output/telechat3_105b-pretrain_4k_muon
SAVE_PATH='' # empty: in RUN_DIR
[ -n "${MASTER_PORT:-}" ] || MASTER_PORT=8118
[ -n "${RESUME:-}" ] || RESUME=''
[ -n "${BIND:-}" ] || BIND=yes
for TC3_ROOT in "${TC3_ROOT:-}" "$(dirname "${BASH_SOURCE[0]}")/../.." "${SLURM_SUBMIT_DIR:-}" "$PWD"; do
    # shellcheck source=../script_body.sh
    [ ! -f "$TC3_ROOT/launch/script_body.sh" ] || source "$TC3_ROOT/launch/script_body.sh"
done
echo 'error: no launch/train.py here: start the script from the checkout, or set TC3_ROOT to it' >&2 && exit 2
