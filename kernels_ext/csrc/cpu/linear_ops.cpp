// Torch ops of the bitmap and dense linear kernels: checks, threads, and the choice of instruction set.

#include <algorithm>
#include <atomic>
#include <optional>
#include <tuple>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "isa.h"
#include "linear_kernels.h"
#include "scratch.h"
#include "tensors.h"

namespace kernels {
namespace {

// A thread should have at least this much to do, or waking it costs more than it saves: about 4 us of memory
// reads, or of multiply-adds.
constexpr int64_t kMinThreadBytes = 64 * 1024;
constexpr int64_t kMinThreadMultiplyAdds = 256 * 1024;

const LinearKernels& kernels_for(const char* op, int64_t isa) {
  switch (resolve_isa(op, isa)) {
#if KERNELS_X86
    case Isa::kAvx512: return avx512_linear_kernels();
    case Isa::kAvx2: return avx2_linear_kernels();
#endif
    default: return generic_linear_kernels();
  }
}

// Rows that one thread should at least have.
int64_t grain_rows(int64_t row_bytes, int64_t row_multiply_adds) {
  const int64_t by_bytes = kMinThreadBytes / (row_bytes > 0 ? row_bytes : 1) + 1;
  const int64_t by_work = kMinThreadMultiplyAdds / (row_multiply_adds > 0 ? row_multiply_adds : 1) + 1;
  return by_bytes < by_work ? by_bytes : by_work;
}

// Calls f(begin, end) over [0, rows) on torch's own threads; each call gets at least the minimum above.
template <class F>
void parallel_rows(int64_t rows, int64_t row_bytes, int64_t row_multiply_adds, const F& f) {
  if (rows <= 0) return;
  const int64_t grain = grain_rows(row_bytes, row_multiply_adds);
  if (rows <= grain) {
    f(int64_t{0}, rows);
  } else {
    torch::stable::parallel_for(0, rows, grain, f);
  }
}

// The same, but a thread takes its next share of the rows when it is through with the last one: half of an even
// share of what is left, so that shares shrink and threads finish together. Cores do not get equal parts of the
// memory's bandwidth, and the slower one would be waited for.
template <class F>
void balanced_rows(int64_t rows, int64_t row_bytes, int64_t row_multiply_adds, const F& f) {
  if (rows <= 0) return;
  const int64_t grain = (grain_rows(row_bytes, row_multiply_adds) + 3) / 4 * 4;
  const int64_t threads = std::min<int64_t>(torch::stable::get_num_threads(), (rows + grain - 1) / grain);
  if (threads <= 1) {
    f(int64_t{0}, rows);
    return;
  }
  std::atomic<int64_t> next{0};
  torch::stable::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    int64_t begin = next.load(std::memory_order_relaxed);
    while (begin < rows) {
      const int64_t share = std::max(grain, (rows - begin) / (2 * threads) / 4 * 4);
      const int64_t end = std::min(rows, begin + share);
      if (!next.compare_exchange_weak(begin, end, std::memory_order_relaxed)) continue;
      f(begin, end);
      begin = next.load(std::memory_order_relaxed);
    }
  });
}

BitmapMatrix bitmap_matrix(const char* op, const Tensor& bitmap, const Tensor& values, const Tensor& row_offsets,
                           int64_t K) {
  check_dtype(op, "bitmap", bitmap, ScalarType::Byte);
  check_dtype(op, "row_offsets", row_offsets, ScalarType::Long);
  check_dim(op, "bitmap", bitmap, 2);
  check_dim(op, "values", values, 1);
  check_dim(op, "row_offsets", row_offsets, 1);
  check_contiguous(op, "bitmap", bitmap);
  check_contiguous(op, "values", values);
  check_contiguous(op, "row_offsets", row_offsets);
  check_size(op, "bitmap", bitmap, 1, (K + 7) / 8, "K of the weight / 8, rounded up");
  check_size(op, "row_offsets", row_offsets, 0, bitmap.size(0) + 1, "rows of bitmap + 1");

  const BitmapMatrix W = {
      .bitmap = static_cast<const uint8_t*>(bitmap.const_data_ptr()),
      .values = values.const_data_ptr(),
      .row_offsets = static_cast<const int64_t*>(row_offsets.const_data_ptr()),
      .N = bitmap.size(0),
      .K = K,
      .nnz = values.size(0),
  };
  KERNELS_CHECK(W.row_offsets[W.N] == W.nnz, op, ": row_offsets ends with ", W.row_offsets[W.N], ", but values has ",
                  W.nnz, " elements");
  return W;
}

// --- linear ---------------------------------------------------------------------------------------------

// Checks x, bias and allocates y; then runs `rows(kernels, call, begin, end)` over the rows of W in parallel.
template <class F>
Tensor linear(const char* op, const Tensor& x, const std::optional<Tensor>& bias, Dtype dtype, ScalarType type,
              int64_t N, int64_t K, int64_t row_bytes, const LinearKernels& table, const F& rows) {
  check_dtype(op, "x", x, type);
  check_dim(op, "x", x, 2);
  check_contiguous(op, "x", x);
  check_size(op, "x", x, 1, K, "K of the weight");
  const int64_t M = x.size(0);
  if (bias) {
    check_dtype(op, "bias", *bias, type);
    check_dim(op, "bias", *bias, 1);
    check_contiguous(op, "bias", *bias);
    check_size(op, "bias", *bias, 0, N, "N of the weight");
  }
  Tensor y = empty_cpu({M, N}, type);
  if (M == 0 || N == 0) return y;

  float* prepared = static_cast<float*>(
      thread_scratch(Scratch::kPreparedX, static_cast<size_t>(table.prepared_floats(M, K)) * sizeof(float)));
  const void* x_data = x.const_data_ptr();
  const int64_t parts = table.prepared_parts(M);
  parallel_rows(parts, K * M * 8 / parts, 0, [&](int64_t begin, int64_t end) {
    table.prepare_x(dtype, x_data, M, K, prepared, begin, end);
  });

  const LinearCall call = {
      .x = prepared,
      .M = M,
      .bias = bias ? bias->const_data_ptr() : nullptr,
      .y = y.mutable_data_ptr(),
  };
  balanced_rows(N, row_bytes, M * K, [&](int64_t begin, int64_t end) { rows(call, begin, end); });
  return y;
}

Tensor bitmap_linear(const Tensor& x, const Tensor& bitmap, const Tensor& values, const Tensor& row_offsets,
                     const std::optional<Tensor>& bias, int64_t isa) {
  constexpr const char* op = "bitmap_linear";
  check_dim(op, "x", x, 2);
  const Dtype dtype = kernel_dtype(op, "values", values);
  const BitmapMatrix W = bitmap_matrix(op, bitmap, values, row_offsets, x.size(1));
  const LinearKernels& table = kernels_for(op, isa);
  const int64_t bytes = W.nnz * static_cast<int64_t>(values.element_size()) + W.N * (W.K + 7) / 8;
  return linear(op, x, bias, dtype, values.scalar_type(), W.N, W.K, W.N > 0 ? bytes / W.N : 0, table,
                [&](const LinearCall& call, int64_t begin, int64_t end) {
                  table.bitmap_linear(dtype, W, call, begin, end);
                });
}

Tensor dense_linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, int64_t isa) {
  constexpr const char* op = "dense_linear";
  const Dtype dtype = kernel_dtype(op, "weight", weight);
  check_dim(op, "weight", weight, 2);
  check_contiguous(op, "weight", weight);
  const DenseMatrix W = {.weight = weight.const_data_ptr(), .N = weight.size(0), .K = weight.size(1)};
  const LinearKernels& table = kernels_for(op, isa);
  return linear(op, x, bias, dtype, weight.scalar_type(), W.N, W.K,
                W.K * static_cast<int64_t>(weight.element_size()), table,
                [&](const LinearCall& call, int64_t begin, int64_t end) {
                  table.dense_linear(dtype, W, call, begin, end);
                });
}

// --- packing --------------------------------------------------------------------------------------------

// Fills the bitmap and the offsets of a matrix that is to be packed; its values are gathered after that.
void mark(const LinearKernels& table, const Tensor& dense, uint8_t* bits, int64_t* offsets) {
  const int64_t N = dense.size(0);
  const int64_t K = dense.size(1);
  const int element_bytes = static_cast<int>(dense.element_size());
  const void* from = dense.const_data_ptr();
  offsets[0] = 0;
  balanced_rows(N, K * element_bytes, 0, [&](int64_t begin, int64_t end) {
    table.mark_nonzeros(element_bytes, from, K, bits, offsets + 1, begin, end);
  });
  for (int64_t n = 0; n < N; ++n) offsets[n + 1] += offsets[n];
}

void gather(const LinearKernels& table, const Tensor& dense, const int64_t* offsets, void* values) {
  const int64_t K = dense.size(1);
  const int element_bytes = static_cast<int>(dense.element_size());
  const void* from = dense.const_data_ptr();
  balanced_rows(dense.size(0), K * element_bytes, 0, [&](int64_t begin, int64_t end) {
    table.gather_nonzeros(element_bytes, from, K, offsets, values, begin, end);
  });
}

std::tuple<Tensor, Tensor, Tensor> bitmap_pack(const Tensor& dense, int64_t isa) {
  constexpr const char* op = "bitmap_pack";
  kernel_dtype(op, "dense", dense);
  check_dim(op, "dense", dense, 2);
  check_contiguous(op, "dense", dense);
  const LinearKernels& table = kernels_for(op, isa);
  const int64_t N = dense.size(0);

  Tensor bitmap = empty_cpu({N, (dense.size(1) + 7) / 8}, ScalarType::Byte);
  Tensor row_offsets = empty_cpu({N + 1}, ScalarType::Long);
  int64_t* offsets = static_cast<int64_t*>(row_offsets.mutable_data_ptr());
  mark(table, dense, static_cast<uint8_t*>(bitmap.mutable_data_ptr()), offsets);
  Tensor values = empty_cpu({offsets[N]}, dense.scalar_type());
  gather(table, dense, offsets, values.mutable_data_ptr());
  return {bitmap, values, row_offsets};
}

void bitmap_pack_into(const Tensor& dense, Tensor bitmap, Tensor values, Tensor row_offsets, int64_t isa) {
  constexpr const char* op = "bitmap_pack_into";
  kernel_dtype(op, "dense", dense);
  check_dim(op, "dense", dense, 2);
  check_contiguous(op, "dense", dense);
  check_dtype(op, "bitmap", bitmap, ScalarType::Byte);
  check_dtype(op, "values", values, dense.scalar_type());
  check_dtype(op, "row_offsets", row_offsets, ScalarType::Long);
  check_dim(op, "bitmap", bitmap, 2);
  check_dim(op, "values", values, 1);
  check_dim(op, "row_offsets", row_offsets, 1);
  check_contiguous(op, "bitmap", bitmap);
  check_contiguous(op, "values", values);
  check_contiguous(op, "row_offsets", row_offsets);
  const int64_t N = dense.size(0);
  check_size(op, "bitmap", bitmap, 0, N, "rows of dense");
  check_size(op, "bitmap", bitmap, 1, (dense.size(1) + 7) / 8, "columns of dense / 8, rounded up");
  check_size(op, "row_offsets", row_offsets, 0, N + 1, "rows of dense + 1");
  const LinearKernels& table = kernels_for(op, isa);
  int64_t* offsets = static_cast<int64_t*>(row_offsets.mutable_data_ptr());
  mark(table, dense, static_cast<uint8_t*>(bitmap.mutable_data_ptr()), offsets);
  check_size(op, "values", values, 0, offsets[N], "elements of dense to store");
  gather(table, dense, offsets, values.mutable_data_ptr());
}

void bitmap_unpack_into(Tensor dense, const Tensor& bitmap, const Tensor& values, const Tensor& row_offsets,
                        int64_t isa) {
  constexpr const char* op = "bitmap_unpack_into";
  kernel_dtype(op, "values", values);
  check_dtype(op, "dense", dense, values.scalar_type());
  check_dim(op, "dense", dense, 2);
  check_contiguous(op, "dense", dense);
  const BitmapMatrix W = bitmap_matrix(op, bitmap, values, row_offsets, dense.size(1));
  check_size(op, "dense", dense, 0, W.N, "N of the weight");
  const LinearKernels& table = kernels_for(op, isa);
  const int element_bytes = static_cast<int>(values.element_size());
  void* out = dense.mutable_data_ptr();
  parallel_rows(W.N, W.K * element_bytes, 0, [&](int64_t begin, int64_t end) {
    table.unpack(element_bytes, W, out, begin, end);
  });
}

// Set bits of each row, for the validator.
Tensor bitmap_row_counts(const Tensor& bitmap) {
  constexpr const char* op = "bitmap_row_counts";
  check_dtype(op, "bitmap", bitmap, ScalarType::Byte);
  check_dim(op, "bitmap", bitmap, 2);
  check_contiguous(op, "bitmap", bitmap);
  const int64_t row_bytes = bitmap.size(1);
  Tensor counts = empty_cpu({bitmap.size(0)}, ScalarType::Long);
  const uint8_t* bits = static_cast<const uint8_t*>(bitmap.const_data_ptr());
  int64_t* out = static_cast<int64_t*>(counts.mutable_data_ptr());
  parallel_rows(bitmap.size(0), row_bytes, 0, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      int64_t count = 0;
      for (int64_t i = 0; i < row_bytes; ++i) count += std::popcount(bits[n * row_bytes + i]);
      out[n] = count;
    }
  });
  return counts;
}

// --- bandwidth ------------------------------------------------------------------------------------------

// The exclusive or of the buffer's 64-bit words: a read that cannot be optimised away, as fast as memory is. A
// block is read as four streams with a prefetch ahead of each, as the linear kernels read a weight; a single
// stream gets a fifth less out of a core.
Tensor read_checksum(const Tensor& buffer) {
  constexpr const char* op = "read_checksum";
  check_dtype(op, "buffer", buffer, ScalarType::Long);
  check_dim(op, "buffer", buffer, 1);
  check_contiguous(op, "buffer", buffer);
  constexpr int64_t kStreams = 4;
  constexpr int64_t kStreamWords = 512;  // 4 KB
  constexpr int64_t kBlockWords = kStreams * kStreamWords;
  constexpr int64_t kLineWords = 8;
  const uint64_t* words = static_cast<const uint64_t*>(buffer.const_data_ptr());
  const int64_t blocks = buffer.numel() / kBlockWords;
  Tensor partial = empty_cpu({blocks}, ScalarType::Long);
  Tensor result = empty_cpu({}, ScalarType::Long);
  uint64_t* sums = static_cast<uint64_t*>(partial.mutable_data_ptr());
  parallel_rows(blocks, kBlockWords * 8, 0, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      const uint64_t* block = words + b * kBlockWords;
      uint64_t lanes[kLineWords] = {};
      for (int64_t i = 0; i < kStreamWords; i += kLineWords) {
        for (int64_t s = 0; s < kStreams; ++s) {
          const uint64_t* line = block + s * kStreamWords + i;
          __builtin_prefetch(line + kBlockWords, 0, 2);
          for (int64_t j = 0; j < kLineWords; ++j) lanes[j] ^= line[j];
        }
      }
      sums[b] = 0;
      for (const uint64_t lane : lanes) sums[b] ^= lane;
    }
  });
  uint64_t total = 0;
  for (int64_t b = 0; b < blocks; ++b) total ^= sums[b];
  for (int64_t i = blocks * kBlockWords; i < buffer.numel(); ++i) total ^= words[i];
  *static_cast<uint64_t*>(result.mutable_data_ptr()) = total;
  return result;
}

}  // namespace
}  // namespace kernels

STABLE_TORCH_LIBRARY_IMPL(kernels_ext, CPU, m) {
  m.impl("read_checksum", TORCH_BOX(&kernels::read_checksum));
  m.impl("bitmap_pack", TORCH_BOX(&kernels::bitmap_pack));
  m.impl("bitmap_pack_into", TORCH_BOX(&kernels::bitmap_pack_into));
  m.impl("bitmap_row_counts", TORCH_BOX(&kernels::bitmap_row_counts));
  m.impl("bitmap_unpack_into", TORCH_BOX(&kernels::bitmap_unpack_into));
  m.impl("bitmap_linear", TORCH_BOX(&kernels::bitmap_linear));
  m.impl("dense_linear", TORCH_BOX(&kernels::dense_linear));
}
