#!/usr/bin/env bash
# Builds kernels_ext on a bare machine with an NVIDIA GPU and checks it there: GPU tests, compute-sanitizer,
# benchmark. Needs nvcc, CMake, ninja, pytest and a CUDA build of torch 2.11 or newer; no network. Nothing but the
# build stops it early: a part that fails or crashes is reported at the end, and the others still run.
#
#   benchmarks/gpu_check.sh [OUTPUT_FOLDER]     logs and the benchmark's JSON go there (default build/gpu_check)
#
# PARTS="tests sanitizer bench" chooses parts; BENCH_FLAGS is passed to bench_linear.py; COMMIT names the commit
# where there is no git; CUDA_ARCHITECTURES as CMake takes it (default: this machine's GPU).
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:-build/gpu_check}
mkdir -p "$out"
out=$(cd "$out" && pwd)
parts=${PARTS:-tests sanitizer bench}
failed=()

part() {
  local name=$1 limit=$2 begin=$SECONDS
  shift 2
  echo "=== $name: $*"
  if timeout --kill-after=10 "$limit" "$@" >"$out/$name.log" 2>&1; then
    tail -n "${SHOW:-15}" "$out/$name.log"
    echo "=== $name: ok, $((SECONDS - begin)) s"
  else
    local status=$?
    tail -n 60 "$out/$name.log"
    echo "=== $name: FAILED with status $status, $((SECONDS - begin)) s (log: $out/$name.log)"
    failed+=("$name")
  fi
}

nvidia-smi -L || { echo "gpu_check.sh: no NVIDIA driver here" >&2; exit 1; }

build() {
  cmake -S kernels_ext -B build/gpu -G Ninja -DCMAKE_BUILD_TYPE=Release -DPython_EXECUTABLE="$(command -v python3)" \
    -DKERNELS_CUDA=ON -DKERNELS_WERROR=ON -DCMAKE_CUDA_ARCHITECTURES="${CUDA_ARCHITECTURES:-native}" &&
    cmake --build build/gpu &&
    cmake --install build/gpu --prefix . &&
    python3 -m kernels_ext
}
export -f build
part build 300 bash -c build
((${#failed[@]})) && exit 1

# The project's pytest settings name plugins that a bare machine lacks, so they are left out.
pytest=(python3 -m pytest -c /dev/null --rootdir . -p no:cacheprovider -W ignore -q --require-gpu)
gpu_tests=(tests/kernels/test_cuda_bitmap.py tests/kernels/test_lane_stream_gpu.py
  tests/kernels/test_decoder_ops_gpu.py tests/conformance/test_logits_gpu.py)
# A few sizes of every kernel: the sanitizer makes each launch some hundred times slower.
sanitized="packs_the_same_bytes and 129 or crowded and 256 and 16 or bias or repeats or unaligned or bitmap and 2049"

for name in $parts; do
  case $name in
    tests)
      part tests 240 "${pytest[@]}" "${gpu_tests[@]}"
      grep -q skipped "$out/tests.log" && { echo "GPU tests were skipped"; failed+=(skipped); }
      ;;
    sanitizer)
      part sanitizer_memcheck 240 compute-sanitizer --tool memcheck --error-exitcode 9 \
        "${pytest[@]}" "${gpu_tests[@]}" -k "$sanitized"
      # Of our kernels alone: racecheck does not follow the asynchronous copies in cuBLAS's Hopper kernels.
      part sanitizer_racecheck 240 compute-sanitizer --tool racecheck --error-exitcode 9 \
        --kernel-name kernel_substring=lane_stream --kernel-name kernel_substring=bitmap_unpack \
        "${pytest[@]}" "${gpu_tests[@]}" -k "$sanitized"
      ;;
    bench)
      SHOW=80 PYTHONPATH=. part bench 400 python3 benchmarks/bench_linear.py --out "$out/bench_linear.json" \
        ${COMMIT:+--commit "$COMMIT"} ${BENCH_FLAGS:-}
      SHOW=40 PYTHONPATH=. part bench_decode 200 python3 benchmarks/bench_decode.py --out "$out/bench_decode.json" \
        ${COMMIT:+--commit "$COMMIT"}
      ;;
    *) echo "gpu_check.sh: no part '$name'" >&2; failed+=("$name") ;;
  esac
done

if ((${#failed[@]})); then
  echo "FAILED: ${failed[*]}"
  exit 1
fi
echo "All parts passed."
