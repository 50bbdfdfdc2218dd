#!/bin/bash
# A recipe as a Slurm job:
#   MLFLOW_TRACKING_URI=http://mlflow:5000 ENVIRONMENT=/shared/venv SHARED=/shared sbatch examples/cluster/slurm.sh
# Each job has a run of its own, which Slurm continues when it puts the job back into the queue. RUN=NAME before the command
# continues the run NAME.
#SBATCH --job-name=grpo
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --gpus-per-node=4
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=04:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:TERM@300
#SBATCH --output=%x-%j.log
set -euo pipefail

# Every machine must see the environment and the output folder.
source "${ENVIRONMENT:?the folder of a virtual environment with rl-plugins[gpu]}/bin/activate"
shared=${SHARED:?a folder that every machine can write}
mlflow=${MLFLOW_TRACKING_URI:?the address of an MLflow server, because jobs on several machines break a file of SQLite}
# A job keeps its number in the queue, and a new job has another number.
run=$shared/outputs/${RUN:-grpo-$SLURM_JOB_ID}

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
address="$head:6379"

# Ray refuses everybody without the token of the job. Only the user of the job can read the file.
token=$(mktemp "$shared/ray-token-XXXXXX")
finished=$token.finished
trap 'rm -f "$token" "$finished"' EXIT
od -An -vtx1 -N32 /dev/urandom | tr -d ' \n' >"$token"
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$token" RAY_USAGE_STATS_ENABLED=0

# Each job has whole machines, because the end of Ray on a machine ends every Ray of the user there. Ray's own folder, /tmp/ray,
# may belong to another user. The name is short, because the path of a socket has at most 107 characters.
export RAY_TMPDIR=/tmp/ray-$SLURM_JOB_ID

# A virtual environment on a shared file system starts slowly. By default, all machines must start Ray within 30 seconds.
export RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT=600

# Slurm sends SIGTERM five minutes before the time limit, and the run finishes its step and saves. Before a preemption, Slurm
# sends this signal only with PreemptParameters=send_user_signal of the cluster. Otherwise only the newest checkpoint remains.
asked=
trap 'asked=1; [ ! -d "$run" ] || touch "$run/stop"' TERM

# Ray starts on every machine, and the recipe starts on the first machine. Ray ends with the recipe. A finished recipe leaves a
# mark, because the status of symmetric-run is 0 without a recipe, too: if Ray does not start, or after an interrupt.
# Since Slurm 22.05, srun does not inherit --cpus-per-task of the job. chmod fails for a folder of another user.
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" sh -c 'mkdir -p -m 700 "$0" && chmod 700 "$0" && exec "$@"' "$RAY_TMPDIR" \
    ray symmetric-run --address "$address" --min-nodes "$SLURM_JOB_NUM_NODES" \
    --num-cpus "$SLURM_CPUS_PER_TASK" --num-gpus 4 -- \
    env RAY_ADDRESS="$address" sh -c '"$@" && touch "$0"' "$finished" python -m rl_plugins.recipes.grpo \
    run.output_dir="${run%/*}" run.name="${run##*/}" run.resume=auto \
    model.path="$shared/models/policy" model.precision=bf16-true \
    "data.train_files=[$shared/data/train.parquet]" "data.val_files=[$shared/data/test.parquet]" reward=gsm8k \
    batch.prompts_per_step=64 placement.num_workers=8 placement.device=cuda tracking.uri="$mlflow" "$@" &
job=$!
status=0
wait "$job" || status=$?
# The signal ends the wait with 128 + 15. The recipe continues to the end of its step.
while [ "$status" -eq 143 ] && [ -n "$asked" ]; do
    asked=
    status=0
    wait "$job" || status=$?
done
if [ "$status" -eq 0 ] && [ ! -e "$finished" ]; then
    echo "error: the recipe has not run to its end: Ray did not start, or was interrupted. The lines above say why" >&2
    status=1
fi
if [ "$status" -eq 75 ]; then
    echo "stopped and saved. To continue, submit the job again with RUN=${run##*/}"
fi
exit "$status"
