#!/usr/bin/env bash
# Sets up the environment if need be and runs the test suite; arguments go to pytest.
set -euo pipefail
source "$(dirname "$0")/environment.sh"
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
ruff check .
exec python -m pytest "$@"
