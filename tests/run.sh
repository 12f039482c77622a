#!/usr/bin/env bash
# Sets up the project where needed, then runs all tests: `bash tests/run.sh [pytest arguments]`. No GPU is needed.
set -euo pipefail
cd "$(dirname "$0")/.."
. launch/environment.sh
# One thread a process: the tests start several processes, and their tensors are small
export OMP_NUM_THREADS=1 DS_ACCELERATOR="${DS_ACCELERATOR:-cpu}"
ruff check kernels pdn_train data_prep launch tests docs
exec python -m pytest "$@"
