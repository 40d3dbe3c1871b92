#!/usr/bin/env bash
# Everything that waits for an NVIDIA GPU. Needs jax with CUDA in $PYTHON (default python3); pytest, haliax and equinox for
# some stages, which are left out without them. Results: JSON lines in the folder $1 (default gpu-results), for
# docs/benchmarks/gpu.md. Further arguments choose stages; without them all run, in this order:
#   parity    the compiled attention kernel against the reference
#   sampling  the kernels that sample against XLA's code and a sort, and their µs
#   invariant requests alone and in batches, bit by bit
#   speed     its µs, GB/s and share of the memory's speed
#   tests     the kernels' tests, compiled, and the engine's
#   roofline  copy bandwidth, bfloat16 peak, decode and prefill of an 8B as shares of them, launches of a step from a
#             profile, and vLLM beside it where $VLLM_PYTHON is the Python of an environment that has it
#   graphs    the same without CUDA graphs
#   tiles     the fastest tiles of matmuls and attention beside those that the kernels choose
#   benches   attention and throughput of shape M, with the kernels and with XLA
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
results=${1:-gpu-results}
stages=" ${*:2} "
mkdir -p "$results"
export PYTHONPATH=$PWD/src:$PWD${PYTHONPATH:+:$PYTHONPATH}
failed=0

has() { "$python" -c "import $1" 2>/dev/null; }
wanted() { [[ $stages == "  " || $stages == *" $1 "* ]]; }
engine=0
has haliax && has equinox && engine=1
read -ra roofline <<<"${ROOFLINE:---shape 8B --batch 1,8,32,64}" # for a rehearsal: ROOFLINE="--shape tiny --batch 2"

nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv >"$results/device.csv" 2>&1
if wanted parity; then "$python" scripts/gpu_check.py --parity | tee "$results/parity.jsonl" || failed=1; fi
if wanted sampling && [[ $engine == 1 ]]; then
  "$python" scripts/gpu_check.py --sampling | tee "$results/sampling.jsonl" || failed=1
fi
if wanted invariant && [[ $engine == 1 ]]; then
  "$python" scripts/gpu_check.py --invariant | tee "$results/invariant.jsonl" || failed=1
fi
if wanted speed; then "$python" scripts/gpu_check.py --speed | tee "$results/speed.jsonl" || failed=1; fi
if wanted tests && has pytest; then
  tests=(tests/kernels/test_ragged_paged_attention.py tests/kernels/test_rpa_gpu.py tests/kernels/test_linear_gpu.py
    tests/kernels/test_kv_write_gpu.py tests/kernels/test_logits_gpu.py tests/kernels/test_sampling_gpu.py)
  [[ $engine == 1 ]] && tests+=(tests/engine/test_gpu.py)
  "$python" -m pytest -p no:cacheprovider -m "slow or not slow" "${tests[@]}" | tee "$results/pytest.txt" || failed=1
fi
if wanted roofline && [[ $engine == 1 ]]; then
  memory=${XLA_PYTHON_CLIENT_MEM_FRACTION:-${VLLM_PYTHON:+.5}} # half where vLLM runs beside it; empty: JAX's own
  env ${memory:+XLA_PYTHON_CLIENT_MEM_FRACTION="$memory"} "$python" scripts/gpu_roofline.py "${roofline[@]}" \
    --trace "$results/trace" ${VLLM_PYTHON:+--vllm "$VLLM_PYTHON"} | tee "$results/roofline.jsonl" || failed=1
fi
if wanted graphs && [[ $engine == 1 ]]; then
  XLA_FLAGS="${XLA_FLAGS:-} --xla_gpu_enable_command_buffer=" "$python" scripts/gpu_roofline.py "${roofline[@]}" \
    | tee "$results/roofline-no-graphs.jsonl" || failed=1
fi
if wanted tiles; then
  "$python" scripts/gpu_tiles.py matmul --rows 1,32,64,256,2048 | tee "$results/tiles-matmul.jsonl" || failed=1
  for lane in decode prefill; do
    "$python" scripts/gpu_tiles.py "$lane" | tee "$results/tiles-$lane.jsonl" || failed=1
  done
fi
if wanted benches && [[ $engine == 1 ]]; then
  "$python" -m levanter_infer.bench attention --impl gpu --batch 1,32,256 --context 1024,8192 --heads 32 --kv-heads 8 \
    --head-dim 128 | tee "$results/attention.jsonl" || failed=1
  for kernels in gpu xla; do
    "$python" -m levanter_infer.bench throughput --shape M --batch 1,32,256 --output 64 --repeats 3 \
      --attention "$kernels" --matmul "$kernels" | tee "$results/throughput-$kernels.jsonl" || failed=1
  done
fi
exit "$failed"
