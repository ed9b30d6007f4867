#!/usr/bin/env bash
# Two laptops hold a model together that is too large for one: rank 0 drafts, rank 1 verifies.
#
#   examples/cluster/two_laptops.sh 192.168.1.10 model/ serve    # on the laptop with this address
#   examples/cluster/two_laptops.sh 192.168.1.10 model/          # on the other one
#
# The first one answers over HTTP, at http://192.168.1.10:8000/v1. When one laptop loses the other, torchrun starts both
# ranks again, and answers go on where they were. Which of them is rank 0 is torchrun's to say. Both need the same model,
# exit head and processor generation, and no firewall between them. Messages are not encrypted: set PPSD_ENGINE_KEY and
# PPSD_API_KEY, and use a network that you trust. Never tried on two real hosts.
set -euo pipefail
host=$1 model=$2
export PPSD_ENGINE_KEY=${PPSD_ENGINE_KEY:?the same 16 characters or more on both, such as of openssl rand -hex 16}
if [ "${3:-}" = serve ]; then
  python -m ppsd_rt serve -m "$model" --host 0.0.0.0 --engines 0.0.0.0:7000 &
  trap 'kill %1' EXIT
fi
torchrun --nnodes 2 --nproc-per-node 1 --max-restarts 1000 \
  --rdzv-backend c10d --rdzv-id laptops --rdzv-endpoint "$host:29500" \
  -m ppsd_rt engine -m "$model" --front "$host:7000" --rank-timeout 10
