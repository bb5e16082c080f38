#!/bin/bash
# A build on a Ray cluster inside a Slurm allocation: sbatch build.sh, and again to resume. Without GPUs, omit
# --gpus-per-node and --num-gpus and use backend=virtual. Checked by syntax alone; it has not run under Slurm.
#SBATCH --job-name=vramcast
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --gpus-per-node=4
#SBATCH --time=12:00:00
#SBATCH --signal=B:TERM@60
set -euo pipefail
source /shared/venv/bin/activate
export RAY_USAGE_STATS_ENABLED=0
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN # for this job only; srun passes both to all nodes
RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')

head=$(hostname) # this script runs on the first node
address=$(hostname --ip-address | awk '{print $1}'):6379
resources=(--num-cpus="$SLURM_CPUS_PER_TASK" --num-gpus="$SLURM_GPUS_ON_NODE")

srun --overlap --nodes=1 --ntasks=1 --nodelist="$head" \
    ray start --head --block --include-dashboard=false \
    --node-ip-address="${address%:*}" --port="${address#*:}" "${resources[@]}" &
until ray health-check --address "$address" > /dev/null 2>&1; do sleep 2; done
others=$((SLURM_JOB_NUM_NODES - 1))
if ((others)); then
    srun --overlap --nodes="$others" --ntasks="$others" --exclude="$head" \
        ray start --block --address="$address" "${resources[@]}" &
fi

vramcast build family=cnn n=20000 backend=cuda executor=ray executor.address="$address" out=/shared/rows/cnn &
build=$!
trap 'kill -TERM $build; wait $build' TERM # a minute before the limit; rows already written are safe
wait $build
