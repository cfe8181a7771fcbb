#!/bin/bash
# One run on two nodes of eight GPUs: the batch script's node orchestrates, and srun starts an agent on each.
#   sbatch docs/templates/slurm.sh configs/flux1_dev.yaml s3://bucket/store
#SBATCH --job-name=flowmill
#SBATCH --nodes=2
#SBATCH --gpus-per-node=8
#SBATCH --requeue
agents="srun, '--nodes=$SLURM_NNODES', '--ntasks-per-node=1'"
flowmill run "$1" --root "$2" \
  --set execution.processes=8 --set "execution.nodes=$SLURM_NNODES" \
  --set "execution.launcher={name: agents, options: {endpoint: '$SLURMD_NODENAME:29500', prefixes: [[$agents]]}}"
