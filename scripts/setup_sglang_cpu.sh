#!/usr/bin/env bash
# Sets up SGLang for CPUs in .venv-sglang, an environment of its own: a real server for tests, and for trying out --rollout-engine
# sglang without a GPU. Does nothing when it is up to date. Set PYTHON for another interpreter, MILES_SC_TORCH for another build of
# PyTorch. On a machine with GPUs install SGLang as its own documentation says, and name that interpreter in --sglang-python.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
if [ "$(uname -s)" != Linux ]; then echo "SGLang runs on Linux; this is $(uname -s)" >&2; exit 1; fi
MILES_SC_TORCH=${MILES_SC_TORCH:-torch==2.13.0+cpu}
venv=.venv-sglang

"$PYTHON" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || {
  echo "SGLang here needs Python 3.11 to 3.13; $PYTHON is $("$PYTHON" --version 2>&1). Set PYTHON=/path/to/python3.11" >&2
  exit 1
}

wanted=$({ cat "$0" scripts/sglang_cpu/*.py scripts/sglang_cpu/*/*.py; echo "$MILES_SC_TORCH"; "$PYTHON" --version; } | sha256sum | cut -d' ' -f1)
if [ "$(cat $venv/.installed 2>/dev/null)" = "$wanted" ]; then
  echo "$PWD/$venv/bin/python is up to date"
  exit
fi

echo "setting up $venv (some 3 GB and a few minutes, once)"
[ -x $venv/bin/python ] || "$PYTHON" -m venv $venv
install() { $venv/bin/python -m pip install --quiet --disable-pip-version-check "$@"; }
# the CPU build first and by its full name: what follows would bring several GB of CUDA
install "$MILES_SC_TORCH" || {
  echo "pip found no $MILES_SC_TORCH. Point pip at PyTorch's index of CPU wheels (PIP_EXTRA_INDEX_URL; the address is on" >&2
  echo "PyTorch's \"Start Locally\" page, compute platform CPU), or set MILES_SC_TORCH to a build of your own." >&2
  exit 1
}
# of what SGLang asks for, all that a text model on a CPU imports
install "$MILES_SC_TORCH" triton numpy transformers==5.19.0 fastapi uvicorn uvloop orjson pyzmq psutil setproctitle aiohttp msgspec \
  requests python-multipart pybase64 pillow IPython dill apache-tvm-ffi==0.1.11 sentencepiece==0.2.1 compressed-tensors==0.18.0 gguf \
  openai==2.8.0 partial_json_parser einops jsonschema xgrammar==0.2.7 soundfile
install --no-deps sglang==0.5.23 torchvision==0.28.0

# by a .pth file, since a distribution may have a sitecustomize of its own
site=$($venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
cp scripts/sglang_cpu/sitecustomize.py "$site/sglang_cpu_operators.py"
echo "import sglang_cpu_operators" > "$site/sglang_cpu.pth"
rm -rf "$site/sgl_kernel"
cp -r scripts/sglang_cpu/sgl_kernel "$site/sgl_kernel"

$venv/bin/python -c 'import torchvision, sgl_kernel, sglang.srt.server_args' > /dev/null || {
  echo "SGLang cannot be imported in $venv, see above. Remove $venv and run this again; if that does not help, MILES_SC_TORCH may" >&2
  echo "name a PyTorch other than 2.13, which the packages here belong to." >&2
  exit 1
}
echo "$wanted" > $venv/.installed
echo "done: --sglang-python $PWD/$venv/bin/python"
