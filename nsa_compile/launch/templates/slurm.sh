#!/bin/bash
#SBATCH --job-name={{ job.name }}
#SBATCH --nodes={{ job.nodes }}
#SBATCH --ntasks-per-node=1
{% if job.gpus %}
#SBATCH --gpus-per-node={{ job.nproc }}
{% endif %}
{# Or a task would have a single core. #}
#SBATCH --exclusive
{% for name, value in limits.items() if value is not none %}
#SBATCH --{{ name }}={{ value }}
{% endfor %}
{# To the batch shell alone, which passes it on: it has to know that it was not the run that ended. #}
#SBATCH --signal=B:TERM@{{ grace }}
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log

cd "$SLURM_SUBMIT_DIR" || exit
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={{ grace - 10 }}
host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

stopped=
trap 'stopped=yes; kill -TERM "$!"' TERM
{# In double quotes what the shell fills in, in single ones what comes from the user. #}
srun --kill-on-bad-exit=1 --cpu-bind=none torchrun --nnodes {{ job.nodes }} --nproc-per-node {{ job.nproc }} --rdzv-backend c10d --rdzv-endpoint "$host:{{ port }}" --rdzv-id "$SLURM_JOB_ID" -m {{ module }} {{ job.worker() | shell }} &
step=$!
wait "$step"
code=$?
# A signal ends `wait`, not the step, which saves a checkpoint first.
while kill -0 "$step" 2>/dev/null; do
  wait "$step"
  code=$?
done

# 75 says pre-empted, and so does a run that ended after the signal without being finished.
if [ "$code" -eq 75 ] || { [ "$stopped" ] && [ "$code" -ne 0 ]; }; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
