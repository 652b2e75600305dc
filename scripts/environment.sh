# Sourced by the other scripts: a virtual environment in .venv with everything that training and tests need.
# Does nothing when it is up to date. Set PYTHON for another interpreter, MILES_SC_TORCH for another build of PyTorch.

cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON=${PYTHON:-python3}
if [ "$(uname -s)" = Linux ]; then default_torch="torch==2.13.0+cpu"; else default_torch="torch==2.13.0"; fi
MILES_SC_TORCH=${MILES_SC_TORCH:-$default_torch}

"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "miles_sc needs Python 3.11 or newer; $PYTHON is $("$PYTHON" --version 2>&1). Set PYTHON=/path/to/python3.11" >&2
  exit 1
}

wanted=$({ cat pyproject.toml; echo "$MILES_SC_TORCH"; "$PYTHON" --version; } | sha256sum | cut -d' ' -f1)
if [ "$(cat .venv/.installed 2>/dev/null)" != "$wanted" ]; then
  echo "setting up .venv (a few minutes, once)"
  [ -x .venv/bin/python ] || "$PYTHON" -m venv .venv
  # the CPU build first and by its full name: a bare "torch" would bring several GB of CUDA on Linux
  .venv/bin/python -m pip install --quiet --disable-pip-version-check "$MILES_SC_TORCH" numpy || {
    echo "pip found no $MILES_SC_TORCH. Point pip at PyTorch's index of CPU wheels (PIP_EXTRA_INDEX_URL; the address is on" >&2
    echo "PyTorch's \"Start Locally\" page, compute platform CPU), or set MILES_SC_TORCH to a build of your own." >&2
    exit 1
  }
  .venv/bin/python -m pip install --quiet --disable-pip-version-check -e ".[train,report,megatron,session,dev]"
  echo "$wanted" > .venv/.installed
fi
export PATH="$PWD/.venv/bin:$PATH"
