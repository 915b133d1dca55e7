// Lane-stream weight to dense, sm_90 and newer: for the token counts where a dense matmul is faster.
//
//   dense[n, k] = W[n, k], 16-bit elements of either type     (formats/LANE_STREAM.md)
//
// Work:     the warps and streams of lane_stream_linear, without x: a warp decodes its stream and stores each
//           fragment. W's column permutation gives a lane 8 neighbouring columns, so it stores 16 bytes at a time.
// Memory:   shared = warps * plan.ring_bytes() + barriers.
// Limits:   any N, K; where K is not a multiple of 8 the stores are 2 bytes wide.
// Bound by: reads of W and writes of `dense`.
// Tests:    tests/kernels/test_lane_stream_gpu.py
//
// No torch header here: this file takes raw pointers and a stream, returns cudaError_t.
#include "lane_stream_device.cuh"

namespace kernels {
namespace {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// Eight neighbouring elements of one row, as two fragment registers of either k16 step hold them.
__device__ void store_row_piece(uint16_t* dense, int64_t row, int64_t column, int64_t N, int64_t K, bool aligned,
                                uint4 piece) {
  if (row >= N || column >= K) return;
  uint16_t* destination = dense + row * K + column;
  if (aligned) {
    *reinterpret_cast<uint4*>(destination) = piece;
  } else {
    const uint32_t words[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (column + i < K) destination[i] = static_cast<uint16_t>(words[i / 2] >> (i % 2 * 16));
    }
  }
}

#endif

template <int kTiles>
__global__ void __launch_bounds__(kMaxWarps * 32, 1)
    lane_stream_unpack_kernel(const __grid_constant__ LaneStreamPlan plan, const uint8_t* __restrict__ data,
                              const LaneStreamDescriptor* __restrict__ descriptors, uint16_t* __restrict__ dense) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) uint8_t shared[];
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int slice = static_cast<int>(blockIdx.x) / plan.blocks_per_slice;
  const int groups_per_slice = static_cast<int>(plan.groups_per_slice());
  const uint32_t rings = ptx::shared_address(shared);
  const uint32_t barriers = rings + static_cast<uint32_t>(plan.warps_per_block * plan.ring_bytes());
  const LaneStreamDescriptor stream = descriptors[static_cast<int64_t>(blockIdx.x) * plan.warps_per_block + warp];
  StreamReader<kTiles> reader;
  reader.begin(plan, stream, data, rings + static_cast<uint32_t>(warp * plan.ring_bytes()),
               barriers + static_cast<uint32_t>(warp * (plan.lookahead + 1) * 8), lane);

  const bool aligned = plan.K % 8 == 0 && reinterpret_cast<uintptr_t>(dense) % 16 == 0;
  int64_t strip = int64_t{stream.first_group / static_cast<uint32_t>(groups_per_slice)} * plan.warps_per_block + warp;
  int group_in_strip = static_cast<int>(stream.first_group) % groups_per_slice;
  while (reader.group < reader.group_count) {
    GroupMasks<kTiles> masks;
    reader.next_group(masks, lane);
    const int64_t group_column =
        (static_cast<int64_t>(slice) * groups_per_slice + group_in_strip) * (kTiles * kTileColumns);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int half_tile = 0; half_tile < 2; ++half_tile) {
        reader.wrap();
        const int64_t column = group_column + tile * kTileColumns + half_tile * 32 + lane % 4 * 8;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint32_t mask = masks.word[tile * 2 + half];
          uint32_t a[2][4];
          if (half_tile == 0) {
            decode_fragment<0>(mask, reader.even, reader.odd, a[0], kAbsentSelector);
            decode_fragment<1>(mask, reader.even, reader.odd, a[1], kAbsentSelector);
          } else {
            decode_fragment<2>(mask, reader.even, reader.odd, a[0], kAbsentSelector);
            decode_fragment<3>(mask, reader.even, reader.odd, a[1], kAbsentSelector);
          }
          const int64_t row = strip * kStripRows + half * 16 + lane / 4;
          store_row_piece(dense, row, column, plan.N, plan.K, aligned, make_uint4(a[0][0], a[0][2], a[1][0], a[1][2]));
          store_row_piece(dense, row + 8, column, plan.N, plan.K, aligned,
                          make_uint4(a[0][1], a[0][3], a[1][1], a[1][3]));
        }
      }
    }
    reader.finish_group();
    if (++group_in_strip == groups_per_slice) {
      group_in_strip = 0;
      strip += plan.warps_per_block;
    }
  }
#else
  __trap();  // launch_lane_stream_unpack refuses such a device
#endif
}

template <int kTiles>
cudaError_t launch(const LaneStreamPlan& plan, const uint8_t* data, const LaneStreamDescriptor* descriptors,
                   uint16_t* dense, cudaStream_t stream) {
  const auto kernel = lane_stream_unpack_kernel<kTiles>;
  cudaFuncAttributes attributes;
  cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
  if (error != cudaSuccess) return error;
  if (attributes.ptxVersion < 90) return cudaErrorNoKernelImageForDevice;
  const int shared_bytes = plan.warps_per_block * plan.ring_bytes() + plan.barrier_bytes();
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (error != cudaSuccess) return error;
  const auto blocks = static_cast<unsigned>(plan.k_slices * plan.blocks_per_slice);
  const auto threads = static_cast<unsigned>(plan.warps_per_block * 32);
  kernel<<<blocks, threads, static_cast<size_t>(shared_bytes), stream>>>(plan, data, descriptors, dense);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_lane_stream_unpack(const LaneStreamPlan& plan, const uint8_t* data,
                                      const LaneStreamDescriptor* descriptors, uint16_t* dense, cudaStream_t stream) {
  switch (plan.group_tiles) {
    case 2:
      return launch<2>(plan, data, descriptors, dense, stream);
    case 4:
      return launch<4>(plan, data, descriptors, dense, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace kernels
