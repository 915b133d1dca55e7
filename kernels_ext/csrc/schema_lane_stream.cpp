// Schemas of the lane-stream ops (formats/LANE_STREAM.md), implemented for CUDA in csrc/cuda/binding_lane_stream.cpp.
//
// `plan` is LaneStreamPlan's eight numbers in the order of csrc/cuda/lane_stream.cuh: N, K, group_tiles, k_slices,
// blocks_per_slice, warps_per_block, lookahead, ring_rows. Element types: 16-bit weights travel as uint8 `data`;
// `dense` is int16 (the bits of either type), and lane_stream_linear takes the type from x.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY_FRAGMENT(kernels_ext, m) {
  m.def("lane_stream_measure(Tensor dense, int[] plan) -> (Tensor group_rows, Tensor least_rows)");
  m.def(
      "lane_stream_encode(Tensor dense, Tensor group_rows, Tensor lines, int data_bytes, int[] plan)"
      " -> Tensor");
  m.def("lane_stream_unpack_into(Tensor(a!) dense, Tensor data, Tensor descriptors, int[] plan) -> ()");
  m.def(
      "lane_stream_linear(Tensor x, Tensor data, Tensor descriptors, Tensor? bias, Tensor(a!) workspace, int[] plan,"
      " bool overlap_launch=True) -> Tensor");
}
