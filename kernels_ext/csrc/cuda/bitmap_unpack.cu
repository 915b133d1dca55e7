// Portable bitmap weight to dense, sm_80 and newer.
//
//   dense[n, k] = bit k of bitmap row n ? the row's next value : 0     (formats/BITMAP.md)
//
// Work:     one block of 256 threads per row of W; a thread expands one bitmap byte (8 columns) at a time, so
//           a block covers 2048 columns per round and a warp writes 512 (16-bit) or 1024 (fp32) contiguous bytes.
// Memory:   a running offset and 8 warp totals in shared memory. Every byte of the weight is read once and every
//           element of `dense` is written once, zeros included.
// Limits:   any N, K >= 0. A value index past the row's end reads as zero, so a bitmap that disagrees with its
//           offsets cannot read outside `values`; BitmapWeight.validate() reports such a weight.
// Bound by: writes of `dense`.
// Tests:    tests/kernels/test_cuda_bitmap.py
//
// No torch header here: this file takes raw pointers and a stream, returns cudaError_t.
#include "bitmap_unpack.cuh"

#include <algorithm>

namespace kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kColumnsPerThread = 8;  // one bitmap byte

// Exclusive prefix sum of `count` over the block, and the block's total.
__device__ int block_exclusive_scan(int count, int* warp_totals, int* total) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  int inclusive = count;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int below = __shfl_up_sync(~0u, inclusive, distance);
    if (lane >= distance) inclusive += below;
  }
  if (lane == 31) warp_totals[warp] = inclusive;
  __syncthreads();
  int before = 0, sum = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    const int warp_total = warp_totals[w];
    if (w < warp) before += warp_total;
    sum += warp_total;
  }
  __syncthreads();  // the next round overwrites warp_totals
  *total = sum;
  return before + inclusive - count;
}

template <typename Element>
__global__ void __launch_bounds__(kThreads)
    bitmap_unpack_kernel(const uint8_t* __restrict__ bitmap, const Element* __restrict__ values,
                         const int64_t* __restrict__ row_offsets, Element* __restrict__ dense, int64_t N, int64_t K) {
  __shared__ int warp_totals[kWarps];
  const int64_t row_bytes = (K + 7) / 8;
  // A thread's 8 elements may be stored as 16-byte vectors when every row starts on such a boundary.
  const bool aligned = K % kColumnsPerThread == 0 && reinterpret_cast<uintptr_t>(dense) % 16 == 0;
  for (int64_t row = blockIdx.x; row < N; row += gridDim.x) {
    int64_t next = row_offsets[row];
    const int64_t row_end = row_offsets[row + 1];
    for (int64_t first_byte = 0; first_byte < row_bytes; first_byte += kThreads) {
      const int64_t byte = first_byte + threadIdx.x;
      const unsigned bits = byte < row_bytes ? bitmap[row * row_bytes + byte] : 0u;
      int total;
      int64_t index = next + block_exclusive_scan(__popc(bits), warp_totals, &total);
      next += total;
      if (byte >= row_bytes) continue;

      alignas(16) Element out[kColumnsPerThread];
#pragma unroll
      for (int i = 0; i < kColumnsPerThread; ++i) {
        out[i] = Element{0};
        if (bits >> i & 1u) {
          if (index < row_end) out[i] = values[index];
          ++index;
        }
      }
      const int64_t column = byte * kColumnsPerThread;
      Element* destination = dense + row * K + column;
      if (aligned) {
#pragma unroll
        for (int v = 0; v < static_cast<int>(sizeof(out) / 16); ++v) {
          reinterpret_cast<uint4*>(destination)[v] = reinterpret_cast<const uint4*>(out)[v];
        }
      } else {
#pragma unroll
        for (int i = 0; i < kColumnsPerThread; ++i) {
          if (column + i < K) destination[i] = out[i];
        }
      }
    }
  }
}

}  // namespace

cudaError_t launch_bitmap_unpack(const uint8_t* bitmap, const void* values, const int64_t* row_offsets, void* dense,
                                 int64_t N, int64_t K, int element_bytes, cudaStream_t stream) {
  if (N == 0 || K == 0) return cudaSuccess;
  // gridDim.x may be 2^31 - 1 at most; rows past it are taken by the grid-stride loop.
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(N, int64_t{1} << 30));
  if (element_bytes == 2) {
    bitmap_unpack_kernel<uint16_t><<<blocks, kThreads, 0, stream>>>(bitmap, static_cast<const uint16_t*>(values),
                                                                    row_offsets, static_cast<uint16_t*>(dense), N, K);
  } else if (element_bytes == 4) {
    bitmap_unpack_kernel<uint32_t><<<blocks, kThreads, 0, stream>>>(bitmap, static_cast<const uint32_t*>(values),
                                                                    row_offsets, static_cast<uint32_t*>(dense), N, K);
  } else {
    return cudaErrorInvalidValue;
  }
  return cudaGetLastError();
}

}  // namespace kernels
