#!/usr/bin/env bash
# Serves a model with SGLang on a CPU, with the flags that training uses, after setting both environments up if need be:
#   scripts/serve_sglang_cpu.sh MODEL PORT [more flags of sglang.launch_server]
# Ready when http://127.0.0.1:PORT/health answers, some 30 seconds later; Ctrl-C ends it.
set -euo pipefail
[ $# -ge 2 ] || { echo "usage: scripts/serve_sglang_cpu.sh MODEL PORT [more flags of sglang.launch_server]" >&2; exit 2; }
model=$(realpath "$1") port=$2
shift 2
source "$(dirname "$0")/environment.sh"
scripts/setup_sglang_cpu.sh
mapfile -t flags < <(python -c 'from miles_sc.rollout.engines.sglang.settings import CPU_SERVER_ARGS; print(*CPU_SERVER_ARGS, sep="\n")')
export SGLANG_USE_CPU_ENGINE=1 SGLANG_RETURN_ORIGINAL_LOGPROB=0 HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
exec .venv-sglang/bin/python -m sglang.launch_server --model-path "$model" --host 127.0.0.1 --port "$port" "${flags[@]}" "$@"
