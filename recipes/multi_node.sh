#!/usr/bin/env bash
# One export by ranks on several machines, started by torchrun. Run it on every machine, with its own NODE_RANK:
#
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=first-machine WORKSPACE=/shared/ws \
#     bash recipes/multi_node.sh --model /shared/model --out /shared/ckpt --quant int4
#
# WORKSPACE, --model and --out are directories that all machines see. The ranks hand over through files in WORKSPACE
# (nothing large crosses the network between them); MASTER_ADDR is where they meet, and the interface that leads there is
# the one they use. All ranks of all machines form one tensor-parallel group: NNODES x NPROC_PER_NODE must suit the model
# (modelexport --model DIR --dry-run lists the sizes that do). If one dies, all end at once; the same command resumes.
#
# A recipe goes the same way: add --recipe recipes/llama.yaml.
set -euo pipefail

: "${NNODES:?how many machines there are}"
: "${NODE_RANK:?which one this is: 0 to NNODES - 1}"
: "${MASTER_ADDR:?name or address of machine 0}"
: "${WORKSPACE:?a directory that all machines see}"
ranks=${NPROC_PER_NODE:-4}

mkdir -p "$WORKSPACE"
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE} # ranks that wait must not take the cores of those that work
exec "${PYTHON:-python}" -m torch.distributed.run \
    --nnodes "$NNODES" --node-rank "$NODE_RANK" --nproc-per-node "$ranks" \
    --master-addr "$MASTER_ADDR" --master-port "${MASTER_PORT:-29500}" \
    -m modelexport --tp $((NNODES * ranks)) --workspace "$WORKSPACE" "$@"
