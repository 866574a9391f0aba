#!/usr/bin/env bash
# 4,096 workers on 512 nodes. How to start it: docs/train.md
set -euo pipefail
RECIPE=recipes/telechat3_438b/pretrain_4k_report.yaml
SETTINGS=()
TARGET=Ascend
WORKERS=4096
SLOTS=8 # workers of a node
HOSTS=(node{0..511}) # nodes by rank, the first is the master: put your names here; Slurm's are taken as they are
HOSTS_OF_SLURM=yes
[ -n "${RUN_DIR:-}" ] || RUN_DIR=output/telechat3_438b-pretrain_4k_report
SAVE_PATH='' # empty: in RUN_DIR
[ -n "${MASTER_PORT:-}" ] || MASTER_PORT=8118
[ -n "${RESUME:-}" ] || RESUME=''
[ -n "${BIND:-}" ] || BIND=yes
FUSION_FLAGS='--opt_level=2 --fusion_ops_level=0' # plugins.operator_fusion, see docs/fusion.md
for TC3_ROOT in "${TC3_ROOT:-}" "$(dirname "${BASH_SOURCE[0]}")/../.." "${SLURM_SUBMIT_DIR:-}" "$PWD"; do
    # shellcheck source=../script_body.sh
    [ ! -f "$TC3_ROOT/launch/script_body.sh" ] || source "$TC3_ROOT/launch/script_body.sh"
done
echo 'error: no launch/train.py here: start the script from the checkout, or set TC3_ROOT to it' >&2 && exit 2
