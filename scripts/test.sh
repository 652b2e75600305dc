#!/usr/bin/env bash
# Sets up the environments if need be and runs the test suite, real SGLang servers included; arguments go to pytest.
set -euo pipefail
source "$(dirname "$0")/environment.sh"
[ "$(uname -s)" != Linux ] || scripts/setup_sglang_cpu.sh
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
ruff check .
exec python -m pytest "$@"
