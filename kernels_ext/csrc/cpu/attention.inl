// Attention over the paged KV cache, compiled per instruction set (see vec.h): causal, grouped heads, optional window.
//
//   out[row] = sum_j softmax_j(scale * q[row] . k[j]) * v[j]        j over the positions that the row's token sees
//
// Work:     a tile is up to kTileRows query rows of one sequence and KV head. A chunk of kChunkKeys keys is converted to
//           float32 once per tile: keys transposed, so that scores are vectors over keys, values as they are. Both products
//           are then the same small matrix product, with 1-4 rows by a few vectors of sums in registers.
// Softmax:  the stable form in float32, one running maximum per row, rescaled chunk by chunk within a partition;
//           partitions are merged in order. Both boundaries are absolute positions, every sum runs in ascending
//           order, and a row skips keys that it can't see, so a row's bits depend only on its own context:
//           not on the batch, on how a prompt was chunked, or on the number of threads.
// Memory:   a block-table entry or cache row is read only for positions that some row of the tile sees.
// Bound by: memory reads of K and V when decoding; FMA when prefilling.
// Tests:    tests/kernels/test_decoder_ops.py

namespace kernels::KERNELS_ISA {

#if defined(__AVX512F__)
inline constexpr int kProductVectors = 4;  // 4 rows x 4 vectors of sums, 4 of B, of 32 registers
#else
inline constexpr int kProductVectors = 2;  // 4 rows x 2 vectors of sums, 2 of B, of 16 registers
#endif
inline constexpr int64_t kProductRows = 4;

// C[R, V vectors] = (accumulate ? C : 0) + A[R, begin..end) * B[begin..end, V vectors], ascending in the shared index.
template <int R, int V>
KERNELS_INLINE void product_block(const float* A, int64_t lda, const float* B, int64_t ldb, float* C, int64_t ldc,
                                  int64_t begin, int64_t end, bool accumulate) {
  VecF sum[R][V];
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < V; ++v) sum[r][v] = accumulate ? load(C + r * ldc + v * kLanes) : VecF{};
  }
  for (int64_t j = begin; j < end; ++j) {
    VecF b[V];
    for (int v = 0; v < V; ++v) b[v] = load(B + j * ldb + v * kLanes);
    for (int r = 0; r < R; ++r) {
      const float a = A[r * lda + j];
      for (int v = 0; v < V; ++v) sum[r][v] += b[v] * a;
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < V; ++v) store(C + r * ldc + v * kLanes, sum[r][v]);
  }
}

template <int R>
void product_rows(const float* A, int64_t lda, const float* B, int64_t ldb, float* C, int64_t ldc, int64_t columns,
                  int64_t begin, int64_t end, bool accumulate) {
  int64_t n = 0;
  for (; n + kProductVectors * kLanes <= columns; n += kProductVectors * kLanes) {
    product_block<R, kProductVectors>(A, lda, B + n, ldb, C + n, ldc, begin, end, accumulate);
  }
  for (; n < columns; n += kLanes) product_block<R, 1>(A, lda, B + n, ldb, C + n, ldc, begin, end, accumulate);
}

inline void product(int64_t rows, const float* A, int64_t lda, const float* B, int64_t ldb, float* C, int64_t ldc,
                    int64_t columns, int64_t begin, int64_t end, bool accumulate) {
  switch (rows) {
    case 1: return product_rows<1>(A, lda, B, ldb, C, ldc, columns, begin, end, accumulate);
    case 2: return product_rows<2>(A, lda, B, ldb, C, ldc, columns, begin, end, accumulate);
    case 3: return product_rows<3>(A, lda, B, ldb, C, ldc, columns, begin, end, accumulate);
    default: return product_rows<4>(A, lda, B, ldb, C, ldc, columns, begin, end, accumulate);
  }
}

// Maxima, sums and weighted values of a tile's rows.
struct State {
  float* maximum;
  float* sum;
  float* values;  // [rows, Dp]
};

inline State state_at(float* p, int64_t rows) { return State{p, p + rows, p + 2 * rows}; }

struct TileBuffers {
  float* q;       // [kTileRows, Dp]
  float* keys;    // [Dp, kChunkKeys]
  float* values;  // [kChunkKeys, Dp]
  float* stage;   // [kMaxLanes, Dp]
  float* scores;  // [kTileRows, kChunkKeys]
  float* state_a;
  float* state_b;
};

inline TileBuffers buffers_at(float* p, int64_t head_dim) {
  const int64_t Dp = padded_dim(head_dim);
  TileBuffers s;
  s.q = p;
  s.keys = s.q + kTileRows * Dp;
  s.values = s.keys + kChunkKeys * Dp;
  s.stage = s.values + kChunkKeys * Dp;
  s.scores = s.stage + kMaxLanes * Dp;
  s.state_a = s.scores + kTileRows * kChunkKeys;
  s.state_b = s.state_a + attention_state_floats(kTileRows, head_dim);
  return s;
}

// src[0..D) as floats, and zeros up to Dp.
template <class T>
KERNELS_INLINE void load_row(const T* src, float* dst, int64_t D, int64_t Dp) {
  int64_t i = 0;
  for (; i + kLanes <= D; i += kLanes) store(dst + i, load(src + i));
  if (i < D) {
    store(dst + i, load(src + i, D - i));
    i += kLanes;
  }
  for (; i < Dp; i += kLanes) store(dst + i, VecF{});
}

KERNELS_INLINE void zero_row(float* dst, int64_t Dp) {
  for (int64_t i = 0; i < Dp; i += kLanes) store(dst + i, VecF{});
}

template <class T>
const T* query_row(const AttentionArgs& a, const AttentionTile& t, int64_t r) {
  const int64_t group = a.num_heads / a.num_kv_heads;
  const int64_t row = t.first_row + r;
  const int64_t head = t.kv_head * group + row % group;
  return static_cast<const T*>(a.q) + ((t.first_token + row / group) * a.num_heads + head) * a.head_dim;
}

template <class T>
void load_queries(const AttentionArgs& a, const AttentionTile& t, float* q) {
  const int64_t Dp = padded_dim(a.head_dim);
  for (int64_t r = 0; r < t.rows; ++r) load_row(query_row<T>(a, t, r), q + r * Dp, a.head_dim, Dp);
}

// Positions of one chunk that some row of a tile sees, and where their rows lie in the cache (in elements).
struct Chunk {
  int64_t base;  // the chunk's first position
  int64_t begin;
  int64_t end;
  int64_t offset[kChunkKeys];
};

inline Chunk find_chunk(const AttentionArgs& a, const AttentionTile& t, int64_t base) {
  const int64_t tile_begin = attention_row_begin(a, t, 0);
  const int64_t tile_end = attention_row_end(a, t, t.rows - 1);
  Chunk c;
  c.base = base;
  c.begin = base > tile_begin ? base : tile_begin;
  c.end = base + kChunkKeys < tile_end ? base + kChunkKeys : tile_end;
  const int32_t* table = a.block_tables + t.sequence * a.max_blocks;
  for (int64_t p = c.begin; p < c.end;) {
    const int64_t block = p / a.block_size;
    const int64_t block_end = (block + 1) * a.block_size;
    const int64_t first_slot = table[block] * a.block_size - block * a.block_size;
    for (; p < c.end && p < block_end; ++p) {
      c.offset[p - base] = ((first_slot + p) * a.num_kv_heads + t.kv_head) * a.head_dim;
    }
  }
  return c;
}

template <class T>
KERNELS_INLINE void prefetch_row(const T* cache, const Chunk& c, int64_t j, int64_t D) {
  if (c.base + j < c.begin || c.base + j >= c.end) return;
  const char* row = reinterpret_cast<const char*>(cache + c.offset[j]);
  for (int64_t i = 0; i < D * static_cast<int64_t>(sizeof(T)); i += 64) __builtin_prefetch(row + i, 0, 2);
}

// Keys (transposed) and values of a chunk. The columns of keys that no row sees become zero: their scores are computed
// with the rest and then masked.
//
// Rows of one head are too short and too far apart for the hardware to foresee, so this chunk's values and the next
// chunk's keys are prefetched meanwhile, row by row: decoding from memory takes half the time.
template <class T>
void load_chunk(const AttentionArgs& a, const Chunk& c, const Chunk& next, const TileBuffers& s) {
  const int64_t Dp = padded_dim(a.head_dim);
  const T* k_cache = static_cast<const T*>(a.k_cache);
  const T* v_cache = static_cast<const T*>(a.v_cache);
  for (int64_t j0 = 0; j0 < kChunkKeys; j0 += kLanes) {
    for (int64_t i = 0; i < kLanes; ++i) {
      const int64_t j = j0 + i;
      prefetch_row(v_cache, c, j, a.head_dim);
      if (c.base + j >= c.begin && c.base + j < c.end) {
        load_row(k_cache + c.offset[j], s.stage + i * Dp, a.head_dim, Dp);
      } else {
        zero_row(s.stage + i * Dp, Dp);
      }
    }
    for (int64_t d = 0; d < Dp; d += kLanes) {
      transpose_block(s.stage + d, Dp, s.keys + d * kChunkKeys + j0, kChunkKeys);
    }
  }
  for (int64_t j = 0; j < kChunkKeys; ++j) {
    prefetch_row(k_cache, next, j, a.head_dim);
    if (c.base + j >= c.begin && c.base + j < c.end) {
      load_row(v_cache + c.offset[j], s.values + j * Dp, a.head_dim, Dp);
    }
  }
}

// Scores of one row become weights e^(score - maximum), zero outside [begin, end). The row's maximum and sum follow, and
// its values are rescaled where the maximum grew.
KERNELS_INLINE void softmax_row(float* scores, int64_t begin, int64_t end, float scale, float* maximum, float* sum,
                                float* values, int64_t Dp) {
  constexpr int64_t kVectors = kChunkKeys / kLanes;
  VecF s[kVectors];
  VecF highest = broadcast(-kInfinity);
  for (int64_t v = 0; v < kVectors; ++v) {
    const VecI j = lane_index() + static_cast<int32_t>(v * kLanes);
    const VecI seen = (j >= static_cast<int32_t>(begin)) & (j < static_cast<int32_t>(end));
    s[v] = seen ? load(scores + v * kLanes) * scale : broadcast(-kInfinity);
    highest = (s[v] > highest) ? s[v] : highest;
  }
  const float chunk_maximum = max_lanes(highest);
  const float new_maximum = chunk_maximum > *maximum ? chunk_maximum : *maximum;
  VecF total{};
  for (int64_t v = 0; v < kVectors; ++v) {
    const VecF weight = exp(s[v] - new_maximum);
    store(scores + v * kLanes, weight);
    total += weight;
  }
  if (new_maximum > *maximum) {
    const float shrink = exp(*maximum - new_maximum);
    *sum *= shrink;
    for (int64_t d = 0; d < Dp; d += kLanes) store(values + d, load(values + d) * shrink);
    *maximum = new_maximum;
  }
  *sum += sum_lanes(total);
}

inline void clear(const AttentionTile& t, State state, int64_t Dp) {
  for (int64_t r = 0; r < t.rows; ++r) {
    state.maximum[r] = -kInfinity;
    state.sum[r] = 0.0f;
    zero_row(state.values + r * Dp, Dp);
  }
}

// Adds a loaded chunk to the state of every row that sees some of it.
inline void run_chunk(const AttentionArgs& a, const AttentionTile& t, int64_t base, const TileBuffers& s, State state) {
  const int64_t Dp = padded_dim(a.head_dim);
  for (int64_t r0 = 0; r0 < t.rows; r0 += kProductRows) {
    const int64_t rows = t.rows - r0 < kProductRows ? t.rows - r0 : kProductRows;
    int64_t begin[kProductRows];
    int64_t end[kProductRows];
    bool some = false;
    bool same = true;
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t row_begin = attention_row_begin(a, t, r0 + r) - base;
      const int64_t row_end = attention_row_end(a, t, r0 + r) - base;
      begin[r] = row_begin > 0 ? row_begin : 0;
      end[r] = row_end < kChunkKeys ? row_end : kChunkKeys;
      some = some || begin[r] < end[r];
      same = same && begin[r] == begin[0] && end[r] == end[0];
    }
    if (!some) continue;

    float* scores = s.scores + r0 * kChunkKeys;
    float* values = state.values + r0 * Dp;
    product(rows, s.q + r0 * Dp, Dp, s.keys, kChunkKeys, scores, kChunkKeys, kChunkKeys, 0, a.head_dim, false);
    for (int64_t r = 0; r < rows; ++r) {
      if (begin[r] >= end[r]) continue;
      softmax_row(scores + r * kChunkKeys, begin[r], end[r], a.scale, state.maximum + r0 + r, state.sum + r0 + r,
                  values + r * Dp, Dp);
    }
    if (same) {
      product(rows, scores, kChunkKeys, s.values, Dp, values, Dp, Dp, begin[0], end[0], true);
      continue;
    }
    // Rows that see different keys are summed one by one: a weight of zero would not keep out a value that is NaN or
    // infinite, and such a value belongs only to the tokens that see it.
    for (int64_t r = 0; r < rows; ++r) {
      if (begin[r] >= end[r]) continue;
      product(1, scores + r * kChunkKeys, kChunkKeys, s.values, Dp, values + r * Dp, Dp, Dp, begin[r], end[r], true);
    }
  }
}

// The state of one partition, from nothing.
template <class T>
void run_partition(const AttentionArgs& a, const AttentionTile& t, int64_t partition, const TileBuffers& s,
                   State state) {
  clear(t, state, padded_dim(a.head_dim));
  Chunk chunk = find_chunk(a, t, partition * kPartitionKeys);
  for (int64_t i = 0; i < kPartitionKeys / kChunkKeys; ++i) {
    const Chunk next = find_chunk(a, t, chunk.base + kChunkKeys);
    if (chunk.begin < chunk.end) {
      load_chunk<T>(a, chunk, next, s);
      run_chunk(a, t, chunk.base, s, state);
    }
    chunk = next;
  }
}

// total += part, for the rows that see a key in this partition.
inline void merge_partition(const AttentionArgs& a, const AttentionTile& t, int64_t partition, State total,
                            State part) {
  const int64_t Dp = padded_dim(a.head_dim);
  for (int64_t r = 0; r < t.rows; ++r) {
    if (attention_row_begin(a, t, r) >= (partition + 1) * kPartitionKeys ||
        attention_row_end(a, t, r) <= partition * kPartitionKeys) {
      continue;
    }
    const float maximum = part.maximum[r] > total.maximum[r] ? part.maximum[r] : total.maximum[r];
    const float keep = exp(total.maximum[r] - maximum);
    const float take = exp(part.maximum[r] - maximum);
    total.maximum[r] = maximum;
    total.sum[r] = total.sum[r] * keep + part.sum[r] * take;
    for (int64_t d = r * Dp; d < (r + 1) * Dp; d += kLanes) {
      store(total.values + d, load(total.values + d) * keep + load(part.values + d) * take);
    }
  }
}

template <class T>
void write_output(const AttentionArgs& a, const AttentionTile& t, State state) {
  const int64_t Dp = padded_dim(a.head_dim);
  for (int64_t r = 0; r < t.rows; ++r) {
    // The output is laid out as the queries are.
    T* out = static_cast<T*>(a.out) + (query_row<T>(a, t, r) - static_cast<const T*>(a.q));
    const float* values = state.values + r * Dp;
    const float scale = 1.0f / state.sum[r];
    for_vectors(a.head_dim, [&](int64_t d, int64_t count) KERNELS_LAMBDA {
      store(out + d, load(values + d) * scale, count);
    });
  }
}

template <class T>
void attention_tile(const AttentionArgs& a, const AttentionTile& t, float* scratch) {
  const TileBuffers s = buffers_at(scratch, a.head_dim);
  const State total = state_at(s.state_a, t.rows);
  const State part = state_at(s.state_b, t.rows);
  load_queries<T>(a, t, s.q);
  clear(t, total, padded_dim(a.head_dim));
  const int64_t last = (attention_row_end(a, t, t.rows - 1) - 1) / kPartitionKeys;
  for (int64_t p = attention_row_begin(a, t, 0) / kPartitionKeys; p <= last; ++p) {
    run_partition<T>(a, t, p, s, part);
    merge_partition(a, t, p, total, part);
  }
  write_output<T>(a, t, total);
}

template <class T>
void attention_partition(const AttentionArgs& a, const AttentionTile& t, int64_t partition, float* state,
                         float* scratch) {
  const TileBuffers s = buffers_at(scratch, a.head_dim);
  load_queries<T>(a, t, s.q);
  run_partition<T>(a, t, partition, s, state_at(state, t.rows));
}

template <class T>
void attention_merge(const AttentionArgs& a, const AttentionTile& t, int64_t begin, int64_t end, float* states,
                     float* scratch) {
  const TileBuffers s = buffers_at(scratch, a.head_dim);
  const State total = state_at(s.state_a, t.rows);
  clear(t, total, padded_dim(a.head_dim));
  for (int64_t p = begin; p < end; ++p) {
    merge_partition(a, t, p, total,
                    state_at(states + (p - begin) * attention_state_floats(t.rows, a.head_dim), t.rows));
  }
  write_output<T>(a, t, total);
}

}  // namespace kernels::KERNELS_ISA
