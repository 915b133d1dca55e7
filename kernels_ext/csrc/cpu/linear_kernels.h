// The linear kernels that each instruction set offers, as a table of function pointers.
//
// linear_generic.cpp, linear_avx2.cpp and linear_avx512.cpp each fill one table from the templates in
// linear_core.h; linear_ops.cpp picks a table at run time, checks the arguments and splits the work over
// torch's threads. No torch header here: the tables' files are compiled for one instruction set, and an
// inline function of a shared header compiled there could replace the generic copy at link time.
#pragma once

#include <cstdint>

#include "scalar.h"

namespace kernels {

// Columns that the kernels handle at a time: one 64-bit word of bitmap.
constexpr int64_t kBlockColumns = 64;

// W[N,K] as a bitmap and its non-zeros; the layout is formats/BITMAP.md.
// Invariant, which the kernels rely on and BitmapWeight.validate() checks: row n has
// row_offsets[n+1] - row_offsets[n] set bits, its padding bits are clear, and row_offsets[N] == nnz.
struct BitmapMatrix {
  const uint8_t* bitmap;
  const void* values;
  const int64_t* row_offsets;
  int64_t N;
  int64_t K;
  int64_t nnz;
};

struct DenseMatrix {
  const void* weight;
  int64_t N;
  int64_t K;
};

// The other side of y = x W^T + bias. `x` was laid out by LinearKernels::prepare_x.
struct LinearCall {
  const float* x;
  int64_t M;
  const void* bias;  // [N] in the weight's dtype, or null
  void* y;           // [M,N] in the weight's dtype
};

struct LinearKernels {
  // Floats that prepare_x writes for x [M,K], and the number of parts its work can be split in.
  int64_t (*prepared_floats)(int64_t M, int64_t K);
  int64_t (*prepared_parts)(int64_t M);
  void (*prepare_x)(Dtype dtype, const void* x, int64_t M, int64_t K, float* prepared, int64_t part_begin,
                    int64_t part_end);

  // Rows [row_begin, row_end) of W, that is these columns of y.
  void (*bitmap_linear)(Dtype dtype, const BitmapMatrix& W, const LinearCall& call, int64_t row_begin,
                        int64_t row_end);
  void (*dense_linear)(Dtype dtype, const DenseMatrix& W, const LinearCall& call, int64_t row_begin,
                       int64_t row_end);

  // Packing and unpacking move bits, so they know only the element's size: 2 or 4 bytes.
  // mark: fills the bitmap's rows and counts[row]. gather: writes values at row_offsets[row].
  void (*mark_nonzeros)(int element_bytes, const void* dense, int64_t K, uint8_t* bitmap, int64_t* counts,
                        int64_t row_begin, int64_t row_end);
  void (*gather_nonzeros)(int element_bytes, const void* dense, int64_t K, const int64_t* row_offsets, void* values,
                          int64_t row_begin, int64_t row_end);
  void (*unpack)(int element_bytes, const BitmapMatrix& W, void* dense, int64_t row_begin, int64_t row_end);
};

const LinearKernels& generic_linear_kernels();
const LinearKernels& avx2_linear_kernels();
const LinearKernels& avx512_linear_kernels();

}  // namespace kernels
