#!/bin/sh
# Profiles two models with random weights on this host's GPUs and keeps the files: about ten minutes in all.
# Usage: sh profiler/gpu_host.sh [NAME]     NAME ends the names of the files; by default the GPU's.
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-python}

gpus=$(nvidia-smi --list-gpus | wc -l)
name=${1:-$(nvidia-smi --query-gpu=name --format=csv,noheader | head -n 1 | tr 'A-Z ' 'a-z-' | sed 's/^nvidia-//')}
tp=1
[ "$gpus" -ge 2 ] && tp=1,2
[ "$gpus" -ge 4 ] && tp=1,2,4

timeout 90 "$python" -m pytest -q -m gpu tests/test_profiler_engine.py || echo "the gpu tests failed or took too long" >&2
for one in "llama3.1-8b 200s" "qwen3-32b 240s"; do
    model=${one% *} budget=${one#* }
    file="topologies/profiles/$model-$name.yaml"
    "$python" -m planner profile --model "$model" --load-format dummy --dtype bfloat16 --device cuda --tp "$tp" \
        --time-budget "$budget" --name "$model-$name" -o "$file" || echo "$model: not measured" >&2
    [ -f "$file" ] && "$python" -m planner profile lint "$file" || true
done
