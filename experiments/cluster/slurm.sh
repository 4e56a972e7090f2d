#!/bin/bash
#SBATCH --job-name=fedjax-peft --time=04:00:00
#SBATCH --nodes=2 --ntasks-per-node=4 --gpus-per-node=4 --cpus-per-task=8
# One process for each GPU: sbatch slurm.sh CONFIG.toml --out /shared/runs/NAME
srun fedjax-peft run "$@" --distributed
