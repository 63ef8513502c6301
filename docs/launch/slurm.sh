#!/bin/bash
#SBATCH --job-name=pretrain
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=12
#SBATCH --time=12:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK
srun --cpus-per-task=$SLURM_CPUS_PER_TASK --kill-on-bad-exit=0 python recipes/pretrain.py --dp-replicate 2 --out /shared/runs/slurm "$@"
code=$?
echo "exit code $code"
# 75: saved. 76: stopped without a save; again too, from the last checkpoint, but not for ever.
if [ $code -eq 75 ] || { [ $code -eq 76 ] && [ ${SLURM_RESTART_COUNT:-0} -lt 6 ]; }; then
  scontrol requeue $SLURM_JOB_ID
fi
exit $code
