#!/usr/bin/env bash
# Compiles every CUDA source of kernels_ext for every architecture the project supports. Needs nvcc (12.9 or
# newer for sm_120), no GPU and no torch: the .cu files take raw pointers only. Any compiler warning fails, and
# so does a kernel that spills registers.
#
#   kernels_ext/csrc/cuda/compile_all.sh [OUTPUT_FOLDER]    objects and the compiler's resource report go there
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=${1:-$(mktemp -d)}
mkdir -p "$out"
# The "a" target opens wgmma and setmaxnreg; sm_90 code without them is the same.
architectures=(80 89 90a 100 120)

command -v nvcc >/dev/null || { echo "compile_all.sh: no nvcc on PATH; install the CUDA toolkit" >&2; exit 1; }
shopt -s nullglob
sources=("$here"/*.cu)
((${#sources[@]})) || { echo "compile_all.sh: no .cu file in $here" >&2; exit 1; }

compile() {
  local source=$1 architecture=$2
  local log=$out/$(basename "$source" .cu).sm_$architecture
  nvcc -std=c++20 -O3 -Werror all-warnings -Xcompiler -Wall,-Wextra -Xptxas -v,-warn-spills \
    -gencode "arch=compute_$architecture,code=sm_$architecture" -c "$source" -o "$log.o" >"$log.log" 2>&1 ||
    { cat "$log.log" >&2; echo "FAILED $(basename "$source") sm_$architecture" >&2; return 1; }
  echo "compiled $(basename "$source") for sm_$architecture: $(grep -c 'Compiling entry function' "$log.log") kernels"
}
export -f compile
export out

printf '%s\n' "${sources[@]}" |
  while read -r source; do for a in "${architectures[@]}"; do printf '%s\0%s\0' "$source" "$a"; done; done |
  xargs -0 -n 2 -P "$(nproc)" bash -c 'compile "$1" "$2"' compile
