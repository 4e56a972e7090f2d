#!/bin/bash
# One process on each worker of a TPU pod: bash tpu_pod.sh TPU ZONE CONFIG.toml --out /shared/NAME
tpu=$1 zone=$2; shift 2
gcloud compute tpus tpu-vm ssh "$tpu" --zone="$zone" --worker=all \
  --command="fedjax-peft run $(printf '%q ' "$@")--distributed"
