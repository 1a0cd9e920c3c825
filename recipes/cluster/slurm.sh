#!/bin/bash
#SBATCH --job-name=postgrad
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@600
#SBATCH --requeue
#
#   sbatch recipes/cluster/slurm.sh recipes/cluster/grpo.toml [--section.key VALUE ...]
#
# One Ray process a machine, then the run on the first of them. Ten minutes before the time is up SLURM
# says so: the run saves and stops. Submitted again, it goes on from there.
set -euo pipefail

first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address=$(srun --nodes=1 --ntasks=1 --nodelist="$first" hostname --ip-address | awk '{print $1}')
port=$((20000 + SLURM_JOB_ID % 20000))  # two jobs may share a machine

srun --nodes=1 --ntasks=1 --overlap --nodelist="$first" \
    ray start --head --block --node-ip-address="$address" --port="$port" --include-dashboard=false &
if [ "$SLURM_JOB_NUM_NODES" -gt 1 ]; then
    srun --nodes=$((SLURM_JOB_NUM_NODES - 1)) --ntasks=$((SLURM_JOB_NUM_NODES - 1)) --overlap \
        --exclude="$first" bash -c "sleep 10; exec ray start --block --address=$address:$port" &
fi
sleep 15

srun --nodes=1 --ntasks=1 --overlap --nodelist="$first" --kill-on-bad-exit=0 \
    postgrad train "$@" --cluster.type ray --cluster.address "$address:$port" &
run=$!
trap 'kill -TERM "$run"' TERM  # srun hands it to the run
code=0
wait "$run" || code=$?
if [ "$code" -gt 128 ]; then  # the signal ended the wait; the run is saving
    code=0
    wait "$run" || code=$?
fi
trap - TERM
kill $(jobs -p) 2> /dev/null || true
exit "$code"
