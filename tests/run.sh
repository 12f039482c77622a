#!/usr/bin/env bash
# Sets up the project where needed, then runs the tests: `bash tests/run.sh [pytest arguments]`. No GPU is needed.
# `bash tests/run.sh --slurm [pytest arguments]` runs all tests of the launcher and of faults instead, those marked long too (20 to 28 minutes
# on 2 busy cores): on a SLURM cluster of their own, for which root is needed and Debian's packages are installed where they are missing.
set -euo pipefail
cd "$(dirname "$0")/.."
. launch/environment.sh
# One thread a process: the tests start several processes, and their tensors are small
export OMP_NUM_THREADS=1 DS_ACCELERATOR="${DS_ACCELERATOR:-cpu}"
ruff check kernels pdn_train data_prep launch tests docs
if [ "${1:-}" = --slurm ]; then
    exec python -m pytest -m "long or not long" tests/launch tests/faults "${@:2}"
fi
exec python -m pytest "$@"
