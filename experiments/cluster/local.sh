#!/bin/bash
# A run of several processes on the CPU of this machine: bash local.sh PROCESSES CONFIG.toml ...
processes=$1; shift
one() {
  fedjax-peft run "$@" --distributed --coordinator "127.0.0.1:${PORT:-12355}" \
    --processes "$processes" --process "$process"
}
for ((process = 1; process < processes; process++)); do one "$@" & done
process=0 one "$@"; code=$?
wait
exit $code
