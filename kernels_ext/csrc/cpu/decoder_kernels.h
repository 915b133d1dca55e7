// The CPU kernels around a decoder step's linears: RMSNorm, rotary embedding with the cache write, attention over the
// paged cache, and the gated activation. Compiled once per instruction set; decoder_kernels() picks at run time.
//
// Raw pointers and sizes: no torch header here. The callers (rms_norm.cpp, rope.cpp, attention.cpp, activation.cpp)
// check every shape and index first and split the work over threads, so a kernel trusts its arguments.
#pragma once

#include <cstdint>

namespace kernels {

struct RmsNormArgs {
  const void* x;       // [T, H]
  void* residual;      // [T, H], or null; holds residual + x afterwards, and that is what is normalised
  const void* weight;  // [H]
  void* y;             // [T, H]
  int64_t H;
  float eps;
};

struct RopeArgs {
  const void* qkv;                // [T, (num_heads + 2 * num_kv_heads) * head_dim]
  const float* cos;               // [P, rotary_dim]
  const float* sin;               // [P, rotary_dim]
  const int64_t* positions;       // [T]
  const int64_t* slots;           // [T]
  void* q;                        // [T, num_heads, head_dim]
  void* k_cache;                  // [slots, num_kv_heads, head_dim]
  void* v_cache;                  // likewise
  const void* q_norm_weight;      // [head_dim], or null
  const void* k_norm_weight;      // likewise
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_dim;
  int64_t rotary_dim;             // even, <= head_dim; the rest of a head passes through
  float eps;
};

// Keys are visited in chunks, and chunks are summed in partitions; both are aligned to absolute positions, so
// that a token's result depends on its context alone and not on what was computed beside it.
inline constexpr int64_t kChunkKeys = 64;
inline constexpr int64_t kPartitionKeys = 256;
// Query rows (token and head) that share one conversion of a chunk of keys and values.
inline constexpr int64_t kTileRows = 48;

struct AttentionArgs {
  const void* q;                // [T, num_heads, head_dim]
  const void* k_cache;          // [blocks, block_size, num_kv_heads, head_dim]
  const void* v_cache;          // likewise
  const int32_t* block_tables;  // [S, max_blocks]
  void* out;                    // [T, num_heads, head_dim]
  int64_t max_blocks;
  int64_t block_size;
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_dim;
  int64_t window;               // keys a token sees, itself included
  float scale;
};

// Consecutive rows of one sequence and one KV head. Row r is query token r / group and head
// kv_head * group + r % group, where group = num_heads / num_kv_heads.
struct AttentionTile {
  int64_t sequence;
  int64_t kv_head;
  int64_t first_row;
  int64_t rows;            // <= kTileRows
  int64_t first_token;     // index in q of the sequence's first query token
  int64_t first_position;  // that token's position in the sequence
};

// Running softmax of a tile's rows: `rows` maxima, `rows` sums, then rows x padded_dim(head_dim) weighted sums of values.
inline constexpr int64_t kMaxLanes = 16;
constexpr int64_t padded_dim(int64_t head_dim) { return (head_dim + kMaxLanes - 1) / kMaxLanes * kMaxLanes; }
constexpr int64_t attention_state_floats(int64_t rows, int64_t head_dim) { return rows * (2 + padded_dim(head_dim)); }
// Scratch floats for one call of an attention kernel, 64-byte aligned. In order: queries, transposed keys, values, one
// staging block of keys, scores, and two states.
constexpr int64_t attention_scratch_floats(int64_t head_dim) {
  return padded_dim(head_dim) * (kTileRows + 2 * kChunkKeys + kMaxLanes) + kTileRows * kChunkKeys +
         2 * attention_state_floats(kTileRows, head_dim);
}

struct DecoderKernels {
  // Rows [begin, end).
  void (*rms_norm)(const RmsNormArgs&, int64_t begin, int64_t end);
  // Tokens [begin, end).
  void (*rope_kv_write)(const RopeArgs&, int64_t begin, int64_t end);
  // gate_up [T, 2F] -> y [T, F]: elements [begin, end) of y, counted over all rows.
  void (*silu_mul)(const void* gate_up, void* y, int64_t F, int64_t begin, int64_t end);
  // A whole tile: every partition in turn, and the output.
  void (*attention_tile)(const AttentionArgs&, const AttentionTile&, float* scratch);
  // The same in two steps that threads can share. Partition p of a tile leaves its state; then the states of
  // partitions [begin, end), which lie one after the other, are merged in order and the output written.
  void (*attention_partition)(const AttentionArgs&, const AttentionTile&, int64_t partition, float* state,
                              float* scratch);
  void (*attention_merge)(const AttentionArgs&, const AttentionTile&, int64_t begin, int64_t end, float* states,
                          float* scratch);
};

// First position that row r of a tile may see, and one past the last.
inline constexpr int64_t attention_row_begin(const AttentionArgs& a, const AttentionTile& t, int64_t r) {
  const int64_t position = t.first_position + (t.first_row + r) / (a.num_heads / a.num_kv_heads);
  return position >= a.window ? position - a.window + 1 : 0;
}
inline constexpr int64_t attention_row_end(const AttentionArgs& a, const AttentionTile& t, int64_t r) {
  return t.first_position + (t.first_row + r) / (a.num_heads / a.num_kv_heads) + 1;
}

// One table per dtype, in the order of Dtype (scalar.h).
inline constexpr int kNumDtypes = 3;

namespace generic {
extern const DecoderKernels kDecoderKernels[kNumDtypes];
}
namespace avx2 {
extern const DecoderKernels kDecoderKernels[kNumDtypes];
}
namespace avx512 {
extern const DecoderKernels kDecoderKernels[kNumDtypes];
}

}  // namespace kernels
