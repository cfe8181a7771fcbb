#!/bin/bash
# One run on two nodes of eight GPUs: the batch script's node orchestrates, and srun starts an agent on each.
#   sbatch docs/templates/slurm.sh configs/flux1_dev.yaml s3://bucket/store
#SBATCH --job-name=flowmill
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=64
#SBATCH --mem=0
#SBATCH --gpus-per-node=8
#SBATCH --requeue
#SBATCH --open-mode=append
# An agent, with its ranks and what scores beside them, gets all that was asked for: srun of Slurm 22.05 and 23.02 does not
# take the CPUs of the job by itself. What is set here reaches every node, also where the job was submitted without.
export SLURM_EXPORT_ENV=ALL
agents="srun, '--nodes=$SLURM_NNODES', '--ntasks-per-node=1', '--cpus-per-task=$SLURM_CPUS_PER_TASK', --kill-on-bad-exit=1"
flowmill run "$1" --root "$2" \
  --set execution.processes=8 --set "execution.nodes=$SLURM_NNODES" \
  --set "execution.launcher={name: agents, options: {endpoint: '$SLURMD_NODENAME:29500', prefixes: [[$agents]]}}"
