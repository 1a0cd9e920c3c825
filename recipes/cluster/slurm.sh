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
# Starts one Ray process per machine, then the run on the first machine. Ten minutes before the time limit
# SLURM sends SIGTERM: the run saves and stops. Submit the job again to resume it.
set -euo pipefail

first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
address=$(srun --nodes=1 --ntasks=1 --nodelist="$first" hostname --ip-address | sed "s/ .*//")
port=$((20000 + SLURM_JOB_ID % 20000))  # two jobs may share a machine
export RAY_AUTH_MODE=token  # token in the shared home directory: other users cannot join
ray get-auth-token --generate > /dev/null
export RAY_health_check_failure_threshold=3  # an unreachable machine counts as lost after 40 seconds

srun --nodes=1 --ntasks=1 --overlap --nodelist="$first" \
    ray start --head --block --node-ip-address="$address" --port="$port" --include-dashboard=false &
ray=$!
until (exec 3<> "/dev/tcp/$address/$port") 2> /dev/null; do
    kill -0 "$ray"  # fails if Ray did not start
    sleep 1
done
others=$((SLURM_JOB_NUM_NODES - 1))
if [ "$others" -gt 0 ]; then  # the run waits for these machines
    srun --nodes="$others" --ntasks="$others" --overlap --exclude="$first" \
        ray start --block --address="$address:$port" &
fi

srun --nodes=1 --ntasks=1 --overlap --nodelist="$first" --kill-on-bad-exit=0 \
    postgrad train "$@" --cluster.type ray --cluster.address "$address:$port" &
run=$!
trap 'kill -TERM "$run"' TERM  # srun forwards it to the run
code=0
wait "$run" || code=$?
if [ "$code" -gt 128 ]; then  # the signal ended the wait; the run is saving
    code=0
    wait "$run" || code=$?
fi
trap - TERM
kill $(jobs -p) 2> /dev/null || true
exit "$code"
