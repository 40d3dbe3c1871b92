#!/usr/bin/env bash
# Everything that waits for an NVIDIA GPU: parity and speed of the attention kernel, the kernels' tests compiled, then the
# benches. Needs jax with CUDA in $PYTHON (default python3); pytest, haliax and equinox for the latter parts, which are
# left out without them. Results: JSON lines in the folder $1 (default gpu-results), for docs/benchmarks/gpu.md.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
results=${1:-gpu-results}
mkdir -p "$results"
export PYTHONPATH=$PWD/src${PYTHONPATH:+:$PYTHONPATH}
failed=0

has() { "$python" -c "import $1" 2>/dev/null; }

nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv >"$results/device.csv" 2>&1
"$python" scripts/gpu_check.py --parity | tee "$results/parity.jsonl" || failed=1
"$python" scripts/gpu_check.py --speed | tee "$results/speed.jsonl" || failed=1
if has pytest; then
  "$python" -m pytest -p no:cacheprovider -m "slow or not slow" tests/kernels/test_ragged_paged_attention.py tests/kernels/test_rpa_gpu.py \
    tests/kernels/test_linear_gpu.py \
    | tee "$results/pytest.txt" || failed=1
fi
if has haliax && has equinox; then
  "$python" -m pytest -p no:cacheprovider -m "slow or not slow" tests/engine/test_gpu.py | tee -a "$results/pytest.txt" || failed=1
  "$python" -m levanter_infer.bench attention --impl gpu --batch 1,32,256 --context 1024,8192 --heads 32 --kv-heads 8 \
    --head-dim 128 | tee "$results/attention.jsonl" || failed=1
  for kernels in gpu xla; do
    "$python" -m levanter_infer.bench throughput --shape M --batch 1,32,256 --output 64 --repeats 3 \
      --attention "$kernels" --matmul "$kernels" | tee "$results/throughput-$kernels.jsonl" || failed=1
  done
fi
exit "$failed"
