// Host entry of bitmap_unpack.cu. No torch header: raw pointers and a stream in, cudaError_t out.
#pragma once

#include <cstdint>

#include <cuda_runtime.h>

namespace kernels {

// Expands a bitmap weight into dense row-major [N, K]. `element_bytes` is 2 (fp16, bf16) or 4 (fp32); the
// values are copied as they are. Device pointers: bitmap uint8 [N, ceil(K/8)], values [nnz],
// row_offsets int64 [N+1], dense [N, K].
cudaError_t launch_bitmap_unpack(const uint8_t* bitmap, const void* values, const int64_t* row_offsets, void* dense,
                                 int64_t N, int64_t K, int element_bytes, cudaStream_t stream);

}  // namespace kernels
