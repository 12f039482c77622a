# Sourced by launch/demo.sh and tests/run.sh, from the root of the checkout: an environment with the project and its dependencies.
# An active virtual environment is used as it is. Otherwise .venv is made once and reused until pyproject.toml or the constraints change.

constraints=()
# Without an NVIDIA driver the CPU build of torch is enough, and this file names versions that work together there
command -v nvidia-smi >/dev/null 2>&1 || constraints=(-c tests/constraints-cpu.txt)

if [ -n "${VIRTUAL_ENV:-}" ]; then
    python -c 'import deepspeed, pdn_train, pytest, sentencepiece, tensorboard, torch' 2>/dev/null || {
        echo "The active environment $VIRTUAL_ENV lacks what the project needs. Either 'deactivate' and run this again, or install it there:" >&2
        echo "    DS_BUILD_OPS=0 pip install ${constraints[*]} -e '.[dev]'" >&2
        exit 1
    }
else
    wanted=$(cat pyproject.toml tests/constraints-cpu.txt | sha256sum)
    if [ "$(cat .venv/complete 2>/dev/null)" != "$wanted" ]; then
        echo "== Setting up .venv (a few minutes, once)"
        python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed, found $(python3 -V)" >&2; exit 1; }
        rm -rf .venv
        python3 -m venv .venv
        # DeepSpeed's C++ and CUDA parts are not used, so they are not built
        DS_BUILD_OPS=0 .venv/bin/pip install -q --disable-pip-version-check "${constraints[@]}" -e '.[dev]'
        echo "$wanted" >.venv/complete
    fi
    . .venv/bin/activate
fi
