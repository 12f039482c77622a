#!/usr/bin/env bash
# Sets up the project where needed, then runs the tests: `bash tests/run.sh [pytest arguments]`. No GPU is needed. Without one the files are
# spread over up to four pytest processes; `-n 0` among the arguments keeps them in one, for --pdb and -s.
# `bash tests/run.sh --slurm [pytest arguments]` runs all tests of the launcher and of faults instead, those marked long too (13 to 28 minutes
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
if command -v nvidia-smi >/dev/null 2>&1; then
    workers=()  # tests on a GPU measure its memory: one at a time
elif python -c 'import xdist' 2>/dev/null; then
    cores=$(env -u OMP_NUM_THREADS nproc)
    workers=(-n "$((cores < 4 ? cores : 4))" --dist loadfile)  # a file's tests share what its fixtures have trained
else
    workers=()
    echo "pytest-xdist is not installed here (pip install pytest-xdist): all tests in one process, which takes longer" >&2
fi
exec python -m pytest "${workers[@]}" "$@"
