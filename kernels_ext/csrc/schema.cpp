// Schemas of the linear ops, and the Python module _C.
//
// Schemas are additive: a family of ops declares its own in csrc/schema_<family>.cpp with
// STABLE_TORCH_LIBRARY_FRAGMENT, as this file does for the linear ops. They sit in csrc/, apart from the
// kernels, because the CPU kernels (csrc/cpu) and the CUDA kernels (csrc/cuda) implement the same schemas.
// Kernels register with STABLE_TORCH_LIBRARY_IMPL(kernels_ext, CPU or CUDA, m) beside their code. Every op has
// a fake kernel in the Python module that wraps it, and an opcheck test.
//
// Letters: y[M,N] = x[M,K] * W[N,K]^T. A bitmap weight is three tensors (formats/BITMAP.md):
// bitmap uint8 [N, ceil(K/8)], values [nnz], row_offsets int64 [N+1].
// `isa` is 0 for the best this processor has, or an Isa (csrc/cpu/isa.h).

#include "module_init.h"

#include <torch/csrc/stable/library.h>

KERNELS_EMPTY_PYTHON_MODULE(_C)

STABLE_TORCH_LIBRARY_FRAGMENT(kernels_ext, m) {
  m.def("cpu_isa() -> int");
  m.def("read_checksum(Tensor buffer) -> Tensor");

  m.def("bitmap_pack(Tensor dense, int isa=0) -> (Tensor bitmap, Tensor values, Tensor row_offsets)");
  m.def(
      "bitmap_pack_into(Tensor dense, Tensor(a!) bitmap, Tensor(b!) values, Tensor(c!) row_offsets, int isa=0)"
      " -> ()");
  m.def("bitmap_row_counts(Tensor bitmap) -> Tensor");
  m.def(
      "bitmap_unpack_into(Tensor(a!) dense, Tensor bitmap, Tensor values, Tensor row_offsets, int isa=0) -> ()");
  m.def(
      "bitmap_linear(Tensor x, Tensor bitmap, Tensor values, Tensor row_offsets, Tensor? bias=None, int isa=0)"
      " -> Tensor");

  m.def("dense_linear(Tensor x, Tensor weight, Tensor? bias=None, int isa=0) -> Tensor");
}
