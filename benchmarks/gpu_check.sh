#!/usr/bin/env bash
# Checks and measures the GPU kernels on one GPU, within eight minutes, unattended.
#
#   benchmarks/gpu_check.sh [FOLDER]      results land in FOLDER (default: gpu_check)
#
# Needs Python 3.12 or newer with jax 0.11.2 or newer for CUDA and nothing else; PYTHON names it (default: python3).
# matplotlib draws the picture where it is installed, tokamax and torch are compared with where they are. Nothing is
# downloaded. Every part runs even if one before it failed, each under its own time limit, and leaves what it had when
# it was stopped; the exit code is 1 if a kernel was wrong or a part did not end. LIMIT is the time for all, in seconds.
set -uo pipefail

folder=${1:-gpu_check}
python=${PYTHON:-python3}
limit_of_all=${LIMIT:-465}
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
mkdir -p "$folder" || exit 1
folder=$(cd "$folder" && pwd)
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONUNBUFFERED=1
export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-0}
export XLA_PYTHON_CLIENT_PREALLOCATE=false
export JAX_COMPILATION_CACHE_DIR="$folder/compilation_cache" # parts share compilations
export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0
failed=0

part() { # name, seconds, command: logs to FOLDER/name.log and to the terminal
    local name=$1 limit=$2 start=$SECONDS left=$((limit_of_all - SECONDS)) status
    shift 2
    limit=$((limit < left ? limit : left))
    if [ "$limit" -lt 1 ]; then
        echo "== $name: left out, no time" | tee -a "$folder/summary.txt"
        failed=1
        return
    fi
    echo "== $name (at most $limit s)"
    timeout --kill-after=2 "$limit" "$@" 2>&1 | tee "$folder/$name.log"
    status=${PIPESTATUS[0]}
    echo "== $name: exit code $status after $((SECONDS - start)) s" | tee -a "$folder/summary.txt"
    [ "$status" -eq 0 ] || failed=1
}

: >"$folder/summary.txt"
cd "$folder" || exit 1
if command -v nvidia-smi >/dev/null; then
    timeout 10 nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.max.sm --format=csv | tee "$folder/gpu.txt"
fi
part versions 30 "$python" -c \
    'import jax; print(jax.__version__, jax.devices()); assert jax.default_backend() == "gpu", "no GPU"'
part numerics 125 "$python" "$root/benchmarks/kernel_gpu_numerics.py" "$folder/numerics.json"
part layer_step 105 "$python" "$root/benchmarks/kernel_layer_step.py" "$folder/layer_step.json"
part kernels 115 "$python" -m moejax bench kernels --rows 64 1024 8192 --backends padded xla --seconds 0.3 --limit 85 --out "$folder"
# Mosaic kernels run on Hopper; elsewhere a warning leaves them out
part mosaic 40 "$python" -m moejax bench kernels --rows 1024 --loads skewed --backends mosaic --seconds 0.3 --limit 25 --out "$folder/mosaic"
part tune 50 "$python" -m moejax bench kernels --tune --loads skewed --rows 64 1024 8192 --seconds 0.2 --limit 15 --out "$folder"
cat "$folder/summary.txt"
exit "$failed"
