// The linear kernels, written once for every instruction set and dtype.
//
//   y[M,N] = x[M,K] * W[N,K]^T + bias, products summed in fp32 and rounded once
//
// Work:     a thread owns a range of rows of W. It takes kRowGroup rows at a time and, for each tile of up to
//           kMaxTile tokens, walks them together, 64 columns (a block) at a time. Several rows share each load of x
//           and keep several chains of multiply-adds in flight.
// Memory:   W is read once, and each of its lines is prefetched once, evenly over the blocks, a row group and a bit
//           ahead. x is converted to fp32 once per call, padded with zeros to whole blocks and laid out in the
//           order of use; it comes from L1 or L2.
// Decode:   an expand step turns a few bits of bitmap into a vector with the non-zeros in place and zeros between,
//           and moves the value pointer by their number. There is no branch on the bits. A zero of W is multiplied,
//           not skipped, so Inf and NaN in x spread as they do in a dense product.
// Limits:   an expand step may read kOverread elements past the row's last value. Rows that lie so close to the
//           end of `values` that this would leave the array are first copied to a padded buffer. Bitmaps are read
//           in whole 8-byte words inside the row only. Dense rows are read exactly.
// Bound by: memory at M <= 2, multiply-adds above about 4.
// Tests:    tests/kernels/test_bitmap_linear.py, test_dense_linear.py, test_bitmap_bounds.py
//
// A file that includes this first defines, in kernels::(unnamed), the instruction set:
//   Vec, kLanes, kOverread, load, store, zero, multiply_add(a, b, c) = a*b + c, sum(Vec) -> float,
//   Element<T>: kColumns (columns a step, a divisor of 64), kVecs (= kColumns / kLanes),
//     dense(const T*, Vec*), expand(const T* values, uint64_t bits, Vec*), in the same order of columns,
//     select(uint64_t block, int c) -> the block's bits of columns [c, c + kColumns), shifted as expand wants them,
//   Raw<Word> for uint16_t and uint32_t: kColumns, select, expand(values, bits, Word* out),
//     nonzeros(in) -> kColumns bits, compress(in, those bits, out), which may write kOverread elements past what it
//     packs,
//   rows_for_tile(m): rows walked together for a tile of m tokens, a divisor of kRowGroup.

#include <bit>
#include <cstring>

#include "linear_kernels.h"
#include "scratch.h"

namespace kernels {
namespace {

constexpr int64_t kRowGroup = 4;
constexpr int64_t kMaxTile = 8;

// How far to prefetch beyond the row group in use. Covers DRAM latency at one core's share of the bandwidth,
// 100 ns * 20 GB/s = 2 KB, twice over.
constexpr int64_t kPrefetchBytes = 4096;

inline int64_t blocks_in(int64_t K) { return (K + kBlockColumns - 1) / kBlockColumns; }

// Runs ahead of a reader through an array and asks for every line once. A prefetch tied to the streams' own
// positions misses the lines that an uneven row steps over; at 5% such misses a bitmap product took twice as long.
// Lines go to L2: in L1 they would push out x and the tables. Beyond the array this is harmless: a prefetch never
// faults.
class Prefetcher {
 public:
  Prefetcher(const void* begin, int64_t group_bytes)
      : next_(static_cast<const char*>(begin)), ahead_(group_bytes + kPrefetchBytes) {}

  // The reader is about to take `blocks` steps and will then stand at `position`.
  void plan(const void* position, int64_t blocks) {
    const int64_t lines = (static_cast<const char*>(position) + ahead_ - next_) / 64;
    lines_per_block_ = lines > 0 && blocks > 0 ? (lines + blocks - 1) / blocks : 0;
  }

  void step() {
    for (int64_t i = 0; i < lines_per_block_; ++i, next_ += 64) __builtin_prefetch(next_, 0, 2);
  }

 private:
  const char* next_;
  int64_t ahead_;
  int64_t lines_per_block_ = 0;
};

// The first `bytes` (1 to 8) bytes at p as a little-endian word.
inline uint64_t load_bits(const uint8_t* p, int64_t bytes) {
  uint64_t word = 0;
  for (int64_t i = 0; i < bytes; ++i) word |= static_cast<uint64_t>(p[i]) << (8 * i);
  return word;
}

inline uint64_t load_bits(const uint8_t* p) {
  if constexpr (std::endian::native == std::endian::little) {
    uint64_t word;
    std::memcpy(&word, p, sizeof word);
    return word;
  }
  return load_bits(p, 8);
}

// --- tokens ---------------------------------------------------------------------------------------------

// Tokens are cut into tiles of kMaxTile; the last is as large as the next power of two, filled up with zeros.
inline int64_t tile_size(int64_t tokens_left) {
  if (tokens_left >= kMaxTile) return kMaxTile;
  return static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(tokens_left)));
}

inline int64_t tile_count(int64_t M) { return (M + kMaxTile - 1) / kMaxTile; }

// Prepared x of the tile that starts at token m: [block][token of the tile][64 columns in Element<T>'s order].
inline int64_t tile_offset(int64_t m, int64_t K) { return m * blocks_in(K) * kBlockColumns; }

inline int64_t prepared_floats(int64_t M, int64_t K) {
  const int64_t whole = M / kMaxTile * kMaxTile;
  const int64_t rest = M > whole ? tile_size(M - whole) : 0;
  return tile_offset(whole + rest, K);
}

template <class T>
inline void prepare_block(const T* x, float* out) {
  constexpr int kVecs = Element<T>::kVecs;
  for (int64_t c = 0; c < kBlockColumns; c += Element<T>::kColumns) {
    Vec v[kVecs];
    Element<T>::dense(x + c, v);
    for (int i = 0; i < kVecs; ++i) store(out + c + i * kLanes, v[i]);
  }
}

template <class T>
void prepare_x(const T* x, int64_t M, int64_t K, float* prepared, int64_t tile_begin, int64_t tile_end) {
  const int64_t rest = K % kBlockColumns;
  for (int64_t tile = tile_begin; tile < tile_end; ++tile) {
    const int64_t m0 = tile * kMaxTile;
    const int64_t tokens = tile_size(M - m0);
    float* out = prepared + tile_offset(m0, K);
    for (int64_t m = 0; m < tokens; ++m) {
      const bool padding = m0 + m >= M;
      for (int64_t b = 0; b < blocks_in(K); ++b) {
        float* block = out + (b * tokens + m) * kBlockColumns;
        const T* from = x + (m0 + m) * K + b * kBlockColumns;
        if (padding) {
          std::memset(block, 0, kBlockColumns * sizeof(float));
        } else if (b * kBlockColumns + kBlockColumns <= K) {
          prepare_block(from, block);
        } else {
          T padded[kBlockColumns] = {};
          std::memcpy(padded, from, static_cast<size_t>(rest) * sizeof(T));
          prepare_block(padded, block);
        }
      }
    }
  }
}

// --- weights --------------------------------------------------------------------------------------------
// A source of weights opens rows, opens blocks of a row and decodes a block step by step.

template <class T>
class BitmapRows {
 public:
  using Value = T;
  struct Row {
    const uint8_t* bits;
    const T* values;
  };
  using Block = uint64_t;

  // For rows from row_begin on.
  BitmapRows(const BitmapMatrix& W, int64_t row_begin)
      : W_(W),
        row_bytes_((W.K + 7) / 8),
        values_ahead_(values_of(row_begin), W.nnz * static_cast<int64_t>(sizeof(T)) / W.N * kRowGroup),
        bitmap_ahead_(bits_of(row_begin), row_bytes_ * kRowGroup),
        padded_elements_(W.K + kOverread),
        padded_(static_cast<T*>(
            thread_scratch(Scratch::kRows, static_cast<size_t>(kRowGroup * padded_elements_) * sizeof(T)))) {}

  int64_t columns() const { return W_.K; }

  // Rows up to `end` are about to be read, in `blocks` blocks.
  void plan_prefetch(int64_t end, int64_t blocks) {
    values_ahead_.plan(values_of(end), blocks);
    bitmap_ahead_.plan(bits_of(end), blocks);
    __builtin_prefetch(W_.row_offsets + end + 64);
  }

  void prefetch_step() {
    values_ahead_.step();
    bitmap_ahead_.step();
  }

  Row row(int64_t n, int slot) const {
    const int64_t begin = W_.row_offsets[n];
    const int64_t end = W_.row_offsets[n + 1];
    const T* values = values_of(n);
    if (end + kOverread > W_.nnz) {
      T* copy = padded_ + slot * padded_elements_;
      if (end > begin) std::memcpy(copy, values, static_cast<size_t>(end - begin) * sizeof(T));
      values = copy;
    }
    return {bits_of(n), values};
  }

  static Block whole_block(const Row& row, int64_t b) { return load_bits(row.bits + b * (kBlockColumns / 8)); }

  static Block part_block(const Row& row, int64_t b, int64_t columns, T*) {
    return load_bits(row.bits + b * (kBlockColumns / 8), (columns + 7) / 8);
  }

  static void step(Row& row, Block block, int c, Vec* w) {
    const uint64_t bits = Element<T>::select(block, c);
    Element<T>::expand(row.values, bits, w);
    row.values += std::popcount(bits);
  }

 private:
  const T* values_of(int64_t n) const { return static_cast<const T*>(W_.values) + W_.row_offsets[n]; }
  const uint8_t* bits_of(int64_t n) const { return W_.bitmap + n * row_bytes_; }

  const BitmapMatrix& W_;
  int64_t row_bytes_;
  Prefetcher values_ahead_;
  Prefetcher bitmap_ahead_;
  int64_t padded_elements_;
  T* padded_;
};

template <class T>
class DenseRows {
 public:
  using Value = T;
  using Row = const T*;
  using Block = const T*;

  // For rows from row_begin on.
  DenseRows(const DenseMatrix& W, int64_t row_begin)
      : W_(W), ahead_(row(row_begin, 0), W.K * static_cast<int64_t>(sizeof(T)) * kRowGroup) {}

  int64_t columns() const { return W_.K; }

  void plan_prefetch(int64_t end, int64_t blocks) { ahead_.plan(row(end, 0), blocks); }
  void prefetch_step() { ahead_.step(); }

  Row row(int64_t n, int) const { return static_cast<const T*>(W_.weight) + n * W_.K; }

  static Block whole_block(const Row& row, int64_t b) { return row + b * kBlockColumns; }

  // `padded` has room for a block.
  static Block part_block(const Row& row, int64_t b, int64_t columns, T* padded) {
    std::memset(padded, 0, kBlockColumns * sizeof(T));
    std::memcpy(padded, row + b * kBlockColumns, static_cast<size_t>(columns) * sizeof(T));
    return padded;
  }

  static void step(Row&, Block block, int c, Vec* w) { Element<T>::dense(block + c, w); }

 private:
  const DenseMatrix& W_;
  Prefetcher ahead_;
};

// --- multiply -------------------------------------------------------------------------------------------

// One block of R rows times a tile of kTokens tokens: 64 columns in steps.
template <class Source, int R, int kTokens>
__attribute__((always_inline)) inline void multiply_block(typename Source::Row (&rows)[R],
                                                          const typename Source::Block (&blocks)[R],
                                                          const float* x,
                                                          Vec (&sums)[R][kTokens]) {
  using Steps = Element<typename Source::Value>;
#pragma GCC unroll 8
  for (int c = 0; c < kBlockColumns; c += Steps::kColumns) {
    Vec w[R][Steps::kVecs];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) Source::step(rows[r], blocks[r], c, w[r]);
#pragma GCC unroll 8
    for (int v = 0; v < Steps::kVecs; ++v) {
#pragma GCC unroll 8
      for (int m = 0; m < kTokens; ++m) {
        const Vec xv = load(x + m * kBlockColumns + c + v * kLanes);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) sums[r][m] = multiply_add(w[r][v], xv, sums[r][m]);
      }
    }
  }
}

// Rows [n, n + kRowGroup) that lie below row_end, times the tile of kTokens tokens that starts at m0.
template <class Source, int kTokens>
void multiply_group(Source& source, const LinearCall& call, int64_t N, int64_t m0, int64_t n, int64_t row_end) {
  using T = typename Source::Value;
  constexpr int R = rows_for_tile(kTokens);
  const int64_t K = source.columns();
  const int64_t rest = K % kBlockColumns;
  const int64_t group_end = n + kRowGroup < row_end ? n + kRowGroup : row_end;
  for (; n < group_end; n += R) {
    typename Source::Row rows[R];
    // Past the end the last row is computed again and not stored, which spares a second copy of this loop.
    for (int r = 0; r < R; ++r) rows[r] = source.row(n + r < row_end ? n + r : row_end - 1, r);
    source.plan_prefetch(n + R < row_end ? n + R : row_end, blocks_in(K));

    Vec sums[R][kTokens];
    for (int r = 0; r < R; ++r)
      for (int m = 0; m < kTokens; ++m) sums[r][m] = zero();

    const float* x = call.x + tile_offset(m0, K);
    typename Source::Block blocks[R];
    for (int64_t b = 0; b < K / kBlockColumns; ++b) {
      source.prefetch_step();
      for (int r = 0; r < R; ++r) blocks[r] = Source::whole_block(rows[r], b);
      multiply_block<Source, R, kTokens>(rows, blocks, x, sums);
      x += kTokens * kBlockColumns;
    }
    if (rest > 0) {
      T padded[R][kBlockColumns];
      for (int r = 0; r < R; ++r) blocks[r] = Source::part_block(rows[r], K / kBlockColumns, rest, padded[r]);
      multiply_block<Source, R, kTokens>(rows, blocks, x, sums);
    }

    const T* bias = static_cast<const T*>(call.bias);
    T* y = static_cast<T*>(call.y);
    for (int r = 0; r < R && n + r < row_end; ++r) {
      const float add = bias ? to_float(bias[n + r]) : 0.0f;
      for (int m = 0; m < kTokens && m0 + m < call.M; ++m)
        y[(m0 + m) * N + n + r] = from_float<T>(sum(sums[r][m]) + add);
    }
  }
}

template <class Source, class Matrix>
void linear_rows(const Matrix& W, const LinearCall& call, int64_t row_begin, int64_t row_end) {
  Source source(W, row_begin);
  for (int64_t n = row_begin; n < row_end; n += kRowGroup) {
    // The tiles go inside the rows: a group's weights come from memory once and from L1 for later tiles.
    for (int64_t m = 0; m < call.M; m += kMaxTile) {
      switch (tile_size(call.M - m)) {
        case 1: multiply_group<Source, 1>(source, call, W.N, m, n, row_end); break;
        case 2: multiply_group<Source, 2>(source, call, W.N, m, n, row_end); break;
        case 4: multiply_group<Source, 4>(source, call, W.N, m, n, row_end); break;
        default: multiply_group<Source, 8>(source, call, W.N, m, n, row_end); break;
      }
    }
  }
}

// --- packing --------------------------------------------------------------------------------------------

template <class Word>
void mark_nonzeros(const Word* dense, int64_t K, uint8_t* bitmap, int64_t* counts, int64_t row_begin,
                   int64_t row_end) {
  const int64_t row_bytes = (K + 7) / 8;
  for (int64_t n = row_begin; n < row_end; ++n) {
    int64_t count = 0;
    for (int64_t k = 0; k < K; k += kBlockColumns) {
      const int64_t columns = K - k < kBlockColumns ? K - k : kBlockColumns;
      Word padded[kBlockColumns];
      const Word* in = dense + n * K + k;
      if (columns < kBlockColumns) {
        std::memset(padded, 0, sizeof padded);
        std::memcpy(padded, in, static_cast<size_t>(columns) * sizeof(Word));
        in = padded;
      }
      uint64_t bits = 0;
      for (int64_t c = 0; c < kBlockColumns; c += Raw<Word>::kColumns) bits |= Raw<Word>::nonzeros(in + c) << c;
      count += std::popcount(bits);
      uint8_t* out = bitmap + n * row_bytes + k / 8;
      for (int64_t i = 0; i < (columns + 7) / 8; ++i) out[i] = static_cast<uint8_t>(bits >> (8 * i));
    }
    counts[n] = count;
  }
}

template <class Word>
void gather_nonzeros(const Word* dense, int64_t K, const int64_t* row_offsets, Word* values, int64_t row_begin,
                     int64_t row_end) {
  // A row is packed in a buffer of its own, because compress writes past what it packs and the next row may be
  // another thread's.
  Word* row = static_cast<Word*>(
      thread_scratch(Scratch::kRows, static_cast<size_t>(K + kBlockColumns + kOverread) * sizeof(Word)));
  for (int64_t n = row_begin; n < row_end; ++n) {
    Word* out = row;
    for (int64_t k = 0; k < K; k += kBlockColumns) {
      Word padded[kBlockColumns];
      const Word* in = dense + n * K + k;
      if (K - k < kBlockColumns) {
        std::memset(padded, 0, sizeof padded);
        std::memcpy(padded, in, static_cast<size_t>(K - k) * sizeof(Word));
        in = padded;
      }
      for (int64_t c = 0; c < kBlockColumns; c += Raw<Word>::kColumns) {
        const uint64_t bits = Raw<Word>::nonzeros(in + c);
        Raw<Word>::compress(in + c, bits, out);
        out += std::popcount(bits);
      }
    }
    const int64_t count = row_offsets[n + 1] - row_offsets[n];
    if (count > 0) std::memcpy(values + row_offsets[n], row, static_cast<size_t>(count) * sizeof(Word));
  }
}

template <class Word>
void unpack(const BitmapMatrix& W, Word* dense, int64_t row_begin, int64_t row_end) {
  using Rows = BitmapRows<Word>;
  Rows source(W, row_begin);
  const int64_t rest = W.K % kBlockColumns;
  const auto expand_block = [](typename Rows::Row& row, uint64_t bits, Word* out) {
#pragma GCC unroll 8
    for (int c = 0; c < kBlockColumns; c += Raw<Word>::kColumns) {
      const uint64_t step = Raw<Word>::select(bits, c);
      Raw<Word>::expand(row.values, step, out + c);
      row.values += std::popcount(step);
    }
  };
  for (int64_t n = row_begin; n < row_end; ++n) {
    typename Rows::Row row = source.row(n, 0);
    Word* out = dense + n * W.K;
    source.plan_prefetch(n + 1, blocks_in(W.K));
    for (int64_t b = 0; b < W.K / kBlockColumns; ++b) {
      source.prefetch_step();
      expand_block(row, Rows::whole_block(row, b), out + b * kBlockColumns);
    }
    if (rest > 0) {
      Word padded[kBlockColumns];
      expand_block(row, Rows::part_block(row, W.K / kBlockColumns, rest, nullptr), padded);
      std::memcpy(out + W.K - rest, padded, static_cast<size_t>(rest) * sizeof(Word));
    }
  }
}

// --- the table ------------------------------------------------------------------------------------------

// Calls f with a value of the dtype's element type.
template <class F>
void with_element(Dtype dtype, const F& f) {
  switch (dtype) {
    case Dtype::kFloat32: f(float{}); break;
    case Dtype::kBFloat16: f(BFloat16{}); break;
    case Dtype::kFloat16: f(Float16{}); break;
  }
}

template <class F>
void with_word(int element_bytes, const F& f) {
  if (element_bytes == 2) {
    f(uint16_t{});
  } else {
    f(uint32_t{});
  }
}

constexpr LinearKernels kLinearKernels = {
    .prepared_floats = prepared_floats,
    .prepared_parts = tile_count,
    .prepare_x =
        [](Dtype dtype, const void* x, int64_t M, int64_t K, float* prepared, int64_t part_begin, int64_t part_end) {
          with_element(dtype, [&](auto element) {
            prepare_x(static_cast<const decltype(element)*>(x), M, K, prepared, part_begin, part_end);
          });
        },
    .bitmap_linear =
        [](Dtype dtype, const BitmapMatrix& W, const LinearCall& call, int64_t row_begin, int64_t row_end) {
          with_element(dtype, [&](auto element) {
            linear_rows<BitmapRows<decltype(element)>>(W, call, row_begin, row_end);
          });
        },
    .dense_linear =
        [](Dtype dtype, const DenseMatrix& W, const LinearCall& call, int64_t row_begin, int64_t row_end) {
          with_element(dtype, [&](auto element) {
            linear_rows<DenseRows<decltype(element)>>(W, call, row_begin, row_end);
          });
        },
    .mark_nonzeros =
        [](int element_bytes, const void* dense, int64_t K, uint8_t* bitmap, int64_t* counts, int64_t row_begin,
           int64_t row_end) {
          with_word(element_bytes, [&](auto word) {
            mark_nonzeros(static_cast<const decltype(word)*>(dense), K, bitmap, counts, row_begin, row_end);
          });
        },
    .gather_nonzeros =
        [](int element_bytes, const void* dense, int64_t K, const int64_t* row_offsets, void* values,
           int64_t row_begin, int64_t row_end) {
          with_word(element_bytes, [&](auto word) {
            gather_nonzeros(static_cast<const decltype(word)*>(dense), K, row_offsets,
                            static_cast<decltype(word)*>(values), row_begin, row_end);
          });
        },
    .unpack =
        [](int element_bytes, const BitmapMatrix& W, void* dense, int64_t row_begin, int64_t row_end) {
          with_word(element_bytes, [&](auto word) {
            unpack(W, static_cast<decltype(word)*>(dense), row_begin, row_end);
          });
        },
};

}  // namespace
}  // namespace kernels
