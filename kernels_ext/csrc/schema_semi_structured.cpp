// Schemas of the 2:4 ops (formats/SEMI_STRUCTURED.md), implemented for CUDA in csrc/cuda/binding_semi_structured.cpp.
//
// `plan` is SemiStructuredPlan's eight numbers in the order of csrc/cuda/semi_structured.cuh: N, K, k_slices,
// strips_per_block, warps, k_warps, x_groups, ring_slots. `dense` is int16 (the bits of either type); `data` is uint8,
// and semi_structured_linear takes the type from x.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY_FRAGMENT(kernels_ext, m) {
  m.def("semi_structured_pack(Tensor dense) -> (Tensor data, Tensor violations)");
  m.def("semi_structured_unpack_into(Tensor(a!) dense, Tensor data) -> ()");
  m.def(
      "semi_structured_linear(Tensor x, Tensor data, Tensor? bias, Tensor(a!) workspace, int[] plan,"
      " bool overlap_launch=True) -> Tensor");
}
