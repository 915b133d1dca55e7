// Causal attention of new tokens over a paged cache, decoding and (chunked) prefill alike, sm_80 and newer.
//
//   out[t, h] = softmax(scale * q[t, h] . k[keys that t sees, h / group]) v[the same keys]      group = Hq / Hkv
//
// Rows:     the queries of one sequence and one KV head, token by token and within a token head by head of the group:
//           row r is token r / group. So a decoded token fills `group` rows of an mma tile, and K and V are read once
//           for the group.
// Work:     a sequence with at most 16 rows goes to split_kernel: its keys are shared out to blockIdx.z and within a
//           block to 4 warps, and the parts are added in a fixed order: up to 8 blocks of sm_90 form a cluster and
//           read each other's shared memory; otherwise, and past kClusterKeys, merge_kernel adds them. A longer one goes to
//           tile_kernel: 128 rows a block, 32 a warp, every warp over all keys that its rows see; heads of more than
//           128 to wide_tile_kernel. What the host knows are sizes only, so every grid is an upper bound, and a block
//           finds its tile in query_start.
//           float32, head sizes that are no multiple of 8 and blocks that are no multiple of 16 go to scalar_kernel.
// Memory:   tile_kernel's warps share K and V through shared memory, 64 keys ahead. Elsewhere, K and V go from global
//           memory to mma fragments by loads of 16 bytes, without shared memory: the sums over
//           the head size and over keys may run in any order, so each lane takes as its fragment what lies together.
//           A warp has one chunk of 16 keys in flight ahead of the one it computes (head sizes up to 128).
// Limits:   any T, S, context, window; D <= kMaxHeadDim. Rows of the cache outside the keys that some row of a tile sees
//           are not read. A non-finite value in a key or value that one token of a sequence sees may reach the
//           sequence's other tokens of the same call (zero weight times infinity).
// Bound by: decode: reads of the cache; prefill: mma.sync and L2.
// Source:   online softmax: FlashAttention-2 (Dao 2023); split keys: Flash-Decoding; fragment layout: PTX ISA, m16n8k16.
// Tests:    tests/kernels/test_decoder_ops_gpu.py
//
// No torch header here: this file takes raw pointers and a stream, returns cudaError_t.
#include "decoder.cuh"
#include "element.cuh"
#include "launch.cuh"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

namespace kernels {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * 32;
constexpr int kRows = 16;       // of an mma tile
constexpr int kChunkKeys = 16;  // keys a warp takes at once
constexpr int kMaxSplits = 128;
constexpr int kMaxCluster = 8;  // blocks, on every GPU with clusters; 8 * kWarps is one warp's lanes
constexpr int64_t kClusterKeys = 16384;
constexpr int kAnyRows = std::numeric_limits<int>::max();
constexpr float kLog2E = 1.4426950408889634f;
constexpr float kNone = -std::numeric_limits<float>::infinity();  // the maximum of no scores

using Fragment = Vector<uint32_t, 4>;

// Some rows of one sequence.
struct Tile {
  int sequence;  // -1: there is no such tile
  int first_row;
  int rows;
  int first_token;     // of the sequence
  int first_position;  // of that token
};

// The tile-th run of `tile_rows` rows, counted over the sequences that have `least` to `most` rows. Called by whole
// warps: lanes look at 32 sequences at a time.
__device__ Tile find_tile(const AttentionArguments& a, int tile, int tile_rows, int least, int most) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int group = a.num_heads / a.num_kv_heads;
  for (int base = 0; base < a.S; base += 32) {
    const int sequence = base + lane;
    const int start = sequence < a.S ? a.query_start[sequence] : 0;
    const int rows = sequence < a.S ? (a.query_start[sequence + 1] - start) * group : 0;
    const int context = sequence < a.S ? a.context_lens[sequence] : 0;  // read along, not after
    const int tiles = rows >= least && rows <= most ? (rows + tile_rows - 1) / tile_rows : 0;
    int through = tiles;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int below = __shfl_up_sync(~0u, through, distance);
      if (lane >= distance) through += below;
    }
    const unsigned holders = __ballot_sync(~0u, through > tile);
    if (holders != 0) {
      const int owner = __ffs(static_cast<int>(holders)) - 1;
      Tile found;
      found.sequence = base + owner;
      found.first_row = (tile - __shfl_sync(~0u, through - tiles, owner)) * tile_rows;
      const int all_rows = __shfl_sync(~0u, rows, owner);
      found.rows = min(tile_rows, all_rows - found.first_row);
      found.first_token = __shfl_sync(~0u, start, owner);
      found.first_position = __shfl_sync(~0u, context, owner) - all_rows / group;
      return found;
    }
    tile -= __shfl_sync(~0u, through, 31);
  }
  return {-1, 0, 0, 0, 0};
}

// Keys [begin, end) that rows [first, last] of a sequence see between them.
struct Keys {
  int begin, end;
};

__device__ Keys keys_of_rows(const AttentionArguments& a, const Tile& tile, int first, int last) {
  const int group = a.num_heads / a.num_kv_heads;
  const int first_position = tile.first_position + first / group;
  const int last_position = tile.first_position + last / group;
  return {first_position >= a.window ? first_position - a.window + 1 : 0, last_position + 1};
}

template <typename T>
__device__ uint32_t pack_pair(float low, float high);
template <>
__device__ uint32_t pack_pair<__half>(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
template <>
__device__ uint32_t pack_pair<__nv_bfloat16>(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// One warp's 16 rows: their queries, and their softmax so far. Lane (g, c) = (lane / 4, lane % 4) holds rows g and g + 8.
//
// Fragment layouts. For K, mma's k index is a column of the head: lane c takes columns 32 b + 8 c ... + 7 of block b for
// two mma steps, and the queries are loaded alike. For V, k is a key and n a column: in n-tile j of block v, column n
// stands for 64 v + 8 n + j, so that a lane's 8 n-tiles are 8 neighbours of one row, and its results, too.
template <typename T, int kDim>
struct WarpRows {
  static constexpr int kKeyBlocks = (kDim + 31) / 32;
  // Above 128 columns the registers hold no chunk ahead, and the results of half the columns only: two blocks compute
  // the same scores.
  static constexpr bool kAhead = kDim <= 128;
  static constexpr int kParts = kAhead ? 1 : 2;
  static constexpr int kValueBlocks = (kDim + 63) / 64 / kParts;

  Fragment q[kKeyBlocks][2];
  int first_column;  // of the results
  float out[kValueBlocks][8][4];
  float maximum[2];  // scaled by log2(e)
  float sum[2];      // this lane's part
  int position[2];   // the last key that the row sees, -1 for no row

  __device__ void load(const AttentionArguments& a, const Tile& tile, int first_row, int kv_head, int column_part) {
    const int g = static_cast<int>(threadIdx.x) % 32 / 4, c = static_cast<int>(threadIdx.x) % 4;
    first_column = column_part * kValueBlocks * 64;
    const int group = a.num_heads / a.num_kv_heads;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int in_tile = first_row + g + 8 * i;
      const bool valid = in_tile < tile.rows;
      const int row = tile.first_row + (valid ? in_tile : 0);
      position[i] = valid ? tile.first_position + row / group : -1;
      const int64_t head = static_cast<int64_t>(tile.first_token + row / group) * a.num_heads + kv_head * group + row % group;
      const T* source = static_cast<const T*>(a.q) + head * a.head_dim;
#pragma unroll
      for (int b = 0; b < kKeyBlocks; ++b) q[b][i] = load_columns(source, 32 * b + 8 * c, valid, a.head_dim);
      maximum[i] = kNone;
      sum[i] = 0.0f;
    }
#pragma unroll
    for (int v = 0; v < kValueBlocks; ++v) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) out[v][j][e] = 0.0f;
      }
    }
  }

  // Attends to chunks first, first + step, ... below last; of their keys only those in `keys` are read.
  __device__ void attend(const AttentionArguments& a, const Tile& tile, int kv_head, Keys keys, int first, int step,
                         int last) {
    if (first >= last) return;
    const int32_t* table = a.block_tables + static_cast<int64_t>(tile.sequence) * a.max_blocks;
    Fragment k[kAhead ? kKeyBlocks : 1][2], v[kAhead ? kValueBlocks : 1][4];
    // A lane looks a chunk up, so that 32 chunks wait for the block table once.
    const int lane = static_cast<int>(threadIdx.x) % 32;
    int64_t looked_up = 0;
    const auto chunk_row = [&](int chunk) {
      const int index = (chunk - first) / step;
      if (index % 32 == 0) {
        const int mine = chunk + lane * step;
        looked_up = mine < last ? look_up(a, table, mine) : 0;
      }
      return static_cast<int64_t>(__shfl_sync(~0u, static_cast<long long>(looked_up), index % 32));
    };
    int64_t row = chunk_row(first);
    const auto load_all_keys = [&](int chunk) {
#pragma unroll
      for (int b = 0; b < kKeyBlocks; ++b) load_keys(a, row, kv_head, chunk, keys, b, k[b]);
    };
    const auto load_all_values = [&](int chunk) {
#pragma unroll
      for (int b = 0; b < kValueBlocks; ++b) load_values(a, row, kv_head, chunk, keys, b, v[b]);
    };
    if constexpr (kAhead) {
      load_all_keys(first);
      load_all_values(first);
    }
    for (int chunk = first; chunk < last; chunk += step) {
      const int next = chunk + step;
      const int64_t next_row = next < last ? chunk_row(next) : 0;
      float score[2][4] = {};
#pragma unroll
      for (int b = 0; b < kKeyBlocks; ++b) {
        if constexpr (!kAhead) load_keys(a, row, kv_head, chunk, keys, b, k[0]);
        const Fragment(&block)[2] = k[kAhead ? b : 0];
        const Fragment &upper = q[b][0], &lower = q[b][1];
        const uint32_t low[4] = {upper.element[0], lower.element[0], upper.element[1], lower.element[1]};
        const uint32_t high[4] = {upper.element[2], lower.element[2], upper.element[3], lower.element[3]};
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          ptx::mma_m16n8k16<T>(score[n], low, block[n].element[0], block[n].element[1]);
          ptx::mma_m16n8k16<T>(score[n], high, block[n].element[2], block[n].element[3]);
        }
      }
      if constexpr (kAhead) {
        row = next_row;
        if (next < last) load_all_keys(next);
      }
      uint32_t weights[4];
      add_scores(a, chunk, score, weights);
#pragma unroll
      for (int b = 0; b < kValueBlocks; ++b) {
        if constexpr (!kAhead) load_values(a, row, kv_head, chunk, keys, b, v[0]);
        add_values(weights, v[kAhead ? b : 0], out[b]);
      }
      if constexpr (kAhead) {
        if (next < last) load_all_values(next);
      } else {
        row = next_row;
      }
    }
  }

  // Sums of whole rows, after the last chunk.
  __device__ void finish() {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      sum[i] += __shfl_xor_sync(~0u, sum[i], 1);
      sum[i] += __shfl_xor_sync(~0u, sum[i], 2);
    }
  }

  // Calls store(row in the warp's 16, first column, 8 values) for the results that this lane holds.
  template <typename Store>
  __device__ void for_results(int head_dim, const Store& store) const {
    const int g = static_cast<int>(threadIdx.x) % 32 / 4, c = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int v = 0; v < kValueBlocks; ++v) {
#pragma unroll
        for (int p = 0; p < 2; ++p) {
          const int column = first_column + 64 * v + 8 * (2 * c + p);
          if (column >= head_dim) continue;
          float values[8];
#pragma unroll
          for (int j = 0; j < 8; ++j) values[j] = out[v][j][2 * i + p];
          store(g + 8 * i, i, column, values);
        }
      }
    }
  }

 private:
  __device__ static Fragment load_columns(const T* row, int column, bool valid, int head_dim) {
    Fragment zero = {};
    return valid && column < head_dim ? *reinterpret_cast<const Fragment*>(row + column) : zero;
  }

  // The cache's row, [blocks * block_size] of them, of a chunk's first key.
  __device__ static int64_t look_up(const AttentionArguments& a, const int32_t* table, int chunk) {
    const auto key = static_cast<unsigned>(chunk * kChunkKeys), size = static_cast<unsigned>(a.block_size);
    return static_cast<int64_t>(table[key / size]) * a.block_size + key % size;
  }

  __device__ static const T* cache_row(const AttentionArguments& a, const void* cache, int64_t row, int kv_head) {
    return static_cast<const T*>(cache) + (row * a.num_kv_heads + kv_head) * a.head_dim;
  }

  // Block b of a chunk's keys, that is 32 of their columns.
  __device__ static void load_keys(const AttentionArguments& a, int64_t row, int kv_head, int chunk, Keys keys, int b,
                                   Fragment (&k)[2]) {
    const int g = static_cast<int>(threadIdx.x) % 32 / 4, c = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int key = chunk * kChunkKeys + 8 * n + g;
      const bool valid = key >= keys.begin && key < keys.end;
      const T* source = cache_row(a, a.k_cache, row + 8 * n + g, kv_head);
      k[n] = load_columns(source, 32 * b + 8 * c, valid, a.head_dim);
    }
  }

  // Block b of a chunk's values, that is 64 of their columns.
  __device__ void load_values(const AttentionArguments& a, int64_t row, int kv_head, int chunk, Keys keys, int b,
                              Fragment (&v)[4]) const {
    const int g = static_cast<int>(threadIdx.x) % 32 / 4, c = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int in_chunk = 2 * c + i % 2 + 8 * (i / 2);
      const int key = chunk * kChunkKeys + in_chunk;
      const bool valid = key >= keys.begin && key < keys.end;
      const T* source = cache_row(a, a.v_cache, row + in_chunk, kv_head);
      v[i] = load_columns(source, first_column + 64 * b + 8 * g, valid, a.head_dim);
    }
  }

  // Takes a chunk's scores into the softmax, and makes its weights an A fragment.
  __device__ void add_scores(const AttentionArguments& a, int chunk, float (&score)[2][4], uint32_t (&weights)[4]) {
    const int c = static_cast<int>(threadIdx.x) % 4;
    const float scale = a.scale * kLog2E;
    bool grown = false;
    float correction[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int first_seen = position[i] - a.window + 1;
      float most = maximum[i];
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int p = 0; p < 2; ++p) {
          const int key = chunk * kChunkKeys + 8 * n + 2 * c + p;
          float& s = score[n][2 * i + p];
          s = key <= position[i] && key >= first_seen ? s * scale : kNone;
          most = fmaxf(most, s);
        }
      }
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
      const float base = most == kNone ? 0.0f : most;
      correction[i] = exp2f(maximum[i] - base);
      grown = grown || most > maximum[i];
      maximum[i] = most;
      float added = 0.0f;
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int p = 0; p < 2; ++p) {
          float& s = score[n][2 * i + p];
          s = exp2f(s - base);
          added += s;
        }
      }
      sum[i] = sum[i] * correction[i] + added;
    }
    if (__any_sync(~0u, grown)) {
#pragma unroll
      for (int b = 0; b < kValueBlocks; ++b) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
#pragma unroll
          for (int e = 0; e < 4; ++e) out[b][j][e] *= correction[e / 2];
        }
      }
    }
    weights[0] = pack_pair<T>(score[0][0], score[0][1]);
    weights[1] = pack_pair<T>(score[0][2], score[0][3]);
    weights[2] = pack_pair<T>(score[1][0], score[1][1]);
    weights[3] = pack_pair<T>(score[1][2], score[1][3]);
  }

  __device__ static void add_values(const uint32_t (&weights)[4], const Fragment (&v)[4], float (&to)[8][4]) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      // The low or the high halves of a pair of neighbouring keys.
      const uint32_t selector = j % 2 == 0 ? 0x5410u : 0x7632u;
      ptx::mma_m16n8k16<T>(to[j], weights, ptx::prmt(v[0].element[j / 2], v[1].element[j / 2], selector),
                           ptx::prmt(v[2].element[j / 2], v[3].element[j / 2], selector));
    }
  }
};

// Rounds 8 values, divided by the row's sum, to the row of `out` that belongs to a row of a tile.
template <typename T>
__device__ void store_row(const AttentionArguments& a, const Tile& tile, int in_tile, int kv_head, int column,
                          const float (&values)[8], float inverse) {
  const int group = a.num_heads / a.num_kv_heads;
  const int row = tile.first_row + in_tile;
  const int64_t head = static_cast<int64_t>(tile.first_token + row / group) * a.num_heads + kv_head * group + row % group;
  Vector<T, 8> rounded;
#pragma unroll
  for (int j = 0; j < 8; ++j) rounded.element[j] = from_float<T>(values[j] * inverse);
  *reinterpret_cast<Vector<T, 8>*>(static_cast<T*>(a.out) + head * a.head_dim + column) = rounded;
}

// --- split keys -------------------------------------------------------------------------------------------------

// Chunks of a tile that one block takes: a multiple of the warps, so that every warp has as many.
__device__ int chunks_per_split(int chunks, int splits) {
  return max((chunks + splits - 1) / splits + kWarps - 1, kWarps) / kWarps * kWarps;
}

// A part's floats in the workspace: results [16, D], then maximum and sum of every row.
__device__ float* part(const AttentionArguments& a, int tile, int kv_head, int splits, int split) {
  const int64_t index = (static_cast<int64_t>(tile) * a.num_kv_heads + kv_head) * splits + split;
  return a.workspace + index * kRows * (a.head_dim + 2);
}

// What a block's warps found in their keys, for the merge.
template <typename T, int kDim>
struct alignas(16) Findings {
  static constexpr int kColumns = WarpRows<T, kDim>::kValueBlocks * 64;
  float out[kWarps][kRows][kColumns + 4];  // 4 more: rows start in different banks
  float2 softmax[kWarps][kRows];           // maximum and sum
};

// *p of the block with this rank in the cluster.
__device__ float2 read_block(const float2* p, int rank, bool clustered) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if (clustered) return ptx::ld_shared_cluster_v2(ptx::mapa(ptx::shared_address(p), static_cast<uint32_t>(rank)));
#endif
  return *p;
}

// Waits for the cluster's threads or, without clusters, for the block's.
__device__ void wait_for_blocks(bool clustered) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if (clustered) {
    ptx::barrier_cluster();
    return;
  }
#endif
  __syncthreads();
}

template <typename T, int kDim>
__global__ void __launch_bounds__(kThreads) split_kernel(AttentionArguments a, int splits, int most_rows,
                                                         bool clustered) {
  using Rows = WarpRows<T, kDim>;
  __shared__ Findings<T, kDim> findings;
  begin_dependent();
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int kv_head = static_cast<int>(blockIdx.y) / Rows::kParts, split = static_cast<int>(blockIdx.z);
  const int column_part = static_cast<int>(blockIdx.y) % Rows::kParts;
  const Tile tile = find_tile(a, static_cast<int>(blockIdx.x), kRows, 1, most_rows);
  if (tile.sequence < 0) return;
  const Keys keys = keys_of_rows(a, tile, tile.first_row, tile.first_row + tile.rows - 1);
  const int first_chunk = keys.begin / kChunkKeys;
  const int chunks = (keys.end + kChunkKeys - 1) / kChunkKeys - first_chunk;
  const int taken = chunks_per_split(chunks, splits);
  const int parts = (chunks + taken - 1) / taken;
  const int first = first_chunk + split * taken;
  const int last = min(first_chunk + chunks, first + taken);
  // The cluster's blocks without keys help to merge, if there is something to merge.
  const bool merges_blocks = clustered && parts > 1;
  if (first >= last && !merges_blocks) return;

  if (first < last) {
    Rows rows;
    rows.load(a, tile, 0, kv_head, column_part);
    rows.attend(a, tile, kv_head, keys, first + warp, kWarps, last);
    rows.finish();
    rows.for_results(a.head_dim, [&](int row, int i, int column, const float(&values)[8]) {
      if (row >= tile.rows) return;
      const int own_column = column - rows.first_column;
      float4* to = reinterpret_cast<float4*>(&findings.out[warp][row][own_column]);
      to[0] = make_float4(values[0], values[1], values[2], values[3]);
      to[1] = make_float4(values[4], values[5], values[6], values[7]);
      if (own_column == 0) findings.softmax[warp][row] = make_float2(rows.maximum[i], rows.sum[i]);
    });
  }
  wait_for_blocks(merges_blocks);

  // A warp takes 64 columns of a row: its lanes first look at the maxima and sums of up to 8 blocks' warps.
  const int sources = (merges_blocks ? parts : 1) * kWarps;
  const int first_column = column_part * Findings<T, kDim>::kColumns;
  const int columns = min(a.head_dim - first_column, Findings<T, kDim>::kColumns);
  const int slices = (columns + 63) / 64;
  const bool complete = merges_blocks || parts == 1;
  const int group = a.num_heads / a.num_kv_heads;
  const int workers = (merges_blocks ? splits : 1) * kWarps;
  for (int task = (merges_blocks ? split * kWarps : 0) + warp; task < tile.rows * slices; task += workers) {
    const int row = task / slices, column = task % slices * 64 + 2 * lane;
    float2 softmax = make_float2(kNone, 0.0f);
    if (lane < sources) {
      softmax = read_block(&findings.softmax[lane % kWarps][row], lane / kWarps, merges_blocks);
    }
    float most = softmax.x;
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, distance));
    const float weight = exp2f(softmax.x - (most == kNone ? 0.0f : most));
    const float sum = warp_sum(softmax.y * weight);
    float2 out = make_float2(0.0f, 0.0f);
    const float2* from = reinterpret_cast<const float2*>(&findings.out[0][row][min(column, columns - 2)]);
    constexpr int kWarpStride = static_cast<int>(sizeof(findings.out[0]) / sizeof(float2));
#pragma unroll 2
    for (int block = 0; block < sources / kWarps; ++block) {
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        const float of_warp = __shfl_sync(~0u, weight, block * kWarps + w);
        const float2 value = read_block(from + w * kWarpStride, block, merges_blocks);
        out.x += value.x * of_warp;
        out.y += value.y * of_warp;
      }
    }
    if (complete) {
      if (column < columns) {
        const int in_sequence = tile.first_row + row;
        const int64_t head = static_cast<int64_t>(tile.first_token + in_sequence / group) * a.num_heads +
                             kv_head * group + in_sequence % group;
        const float inverse = 1.0f / sum;
        Vector<T, 2> rounded;
        rounded.element[0] = from_float<T>(out.x * inverse);
        rounded.element[1] = from_float<T>(out.y * inverse);
        *reinterpret_cast<Vector<T, 2>*>(static_cast<T*>(a.out) + head * a.head_dim + first_column + column) = rounded;
      }
    } else {
      float* destination = part(a, static_cast<int>(blockIdx.x), kv_head, splits, split);
      if (column < columns) {
        *reinterpret_cast<float2*>(destination + row * a.head_dim + first_column + column) = out;
      }
      if (lane == 0 && first_column == 0 && task % slices == 0) {
        *reinterpret_cast<float2*>(destination + kRows * a.head_dim + 2 * row) = make_float2(most, sum);
      }
    }
  }
  // No block may leave while others read its shared memory.
  if (merges_blocks) wait_for_blocks(true);
}

// Adds up the parts of the tiles that split_kernel shared out to several blocks: one block a row.
template <typename T>
__global__ void __launch_bounds__(kThreads) merge_kernel(AttentionArguments a, int splits, int most_rows) {
  __shared__ float weights[kMaxSplits];
  begin_dependent();
  const int tile_index = static_cast<int>(blockIdx.x), kv_head = static_cast<int>(blockIdx.y);
  const int row = static_cast<int>(blockIdx.z), lane = static_cast<int>(threadIdx.x) % 32;
  const Tile tile = find_tile(a, tile_index, kRows, 1, most_rows);
  if (tile.sequence < 0 || row >= tile.rows) return;
  const Keys keys = keys_of_rows(a, tile, tile.first_row, tile.first_row + tile.rows - 1);
  const int chunks = (keys.end + kChunkKeys - 1) / kChunkKeys - keys.begin / kChunkKeys;
  const int taken = chunks_per_split(chunks, splits);
  const int parts = (chunks + taken - 1) / taken;
  if (parts <= 1) return;

  // Every warp computes all weights, 32 parts at a time; that takes one read, not one a part.
  const float* first = part(a, tile_index, kv_head, splits, 0);
  const int part_floats = kRows * (a.head_dim + 2);
  const auto softmax = [&](int p) {
    return *reinterpret_cast<const float2*>(first + p * part_floats + kRows * a.head_dim + 2 * row);
  };
  float most = kNone;
  for (int p = lane; p < parts; p += 32) most = fmaxf(most, softmax(p).x);
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, distance));
  const float base = most == kNone ? 0.0f : most;
  float sum = 0.0f;
  for (int p = lane; p < parts; p += 32) {
    const float2 s = softmax(p);
    const float weight = exp2f(s.x - base);
    sum += s.y * weight;
    weights[p] = weight;  // the same from every warp
  }
  const float inverse = 1.0f / warp_sum(sum);
  __syncthreads();

  const int group = a.num_heads / a.num_kv_heads;
  const int in_sequence = tile.first_row + row;
  const int64_t head = static_cast<int64_t>(tile.first_token + in_sequence / group) * a.num_heads + kv_head * group +
                       in_sequence % group;
  for (int column = static_cast<int>(threadIdx.x); column < a.head_dim; column += kThreads) {
    const float* from = first + row * a.head_dim + column;
    float out = 0.0f;
#pragma unroll 8
    for (int p = 0; p < parts; ++p) out += from[p * part_floats] * weights[p];
    static_cast<T*>(a.out)[head * a.head_dim + column] = from_float<T>(out * inverse);
  }
}

// --- tiles of rows ----------------------------------------------------------------------------------------------

// tile_kernel's shared memory: the block's queries, then twice 64 keys and 64 values. Rows of kPitch bytes, whose pieces
// of 16 bytes are swapped so that eight rows' pieces of one column lie in different banks.
template <int kDim>
struct TileShape {
  static constexpr int kRowTiles = 2;  // mma tiles of a warp
  static constexpr int kWarpRows = kRowTiles * kRows;
  static constexpr int kBlockRows = kWarps * kWarpRows;
  static constexpr int kKeys = 64;      // in shared memory at once
  // And in registers; with 32 an A100's compiler spills.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  static constexpr int kScores = 16;
#else
  static constexpr int kScores = 32;
#endif
  static constexpr int kPitch = (kDim + 63) / 64 * 128;
  static constexpr int kQueryBytes = kBlockRows * kPitch;
  static constexpr int kStageBytes = kKeys * kPitch;  // of keys, and as many of values
  static constexpr int kBytes = kQueryBytes + 4 * kStageBytes;

  __device__ static uint32_t offset(int row, int piece) {
    return static_cast<uint32_t>(row * kPitch + (piece ^ (row % 8)) * 16);
  }

  // The address of piece + 2 k of the row whose piece 0 or 1 is at `address`.
  __device__ static uint32_t advance(uint32_t address, int k) {
    return (address ^ static_cast<uint32_t>(k % 4 * 32)) + static_cast<uint32_t>(k / 4 * 128);
  }
};

// v, which is the same in all lanes, in a register of the warp.
__device__ int uniform(int v) { return __shfl_sync(~0u, v, 0); }

template <typename T, int kDim>
__global__ void __launch_bounds__(kThreads) tile_kernel(AttentionArguments a, int tiles) {
  using Shape = TileShape<kDim>;
  constexpr int kRowTiles = Shape::kRowTiles, kKeys = Shape::kKeys, kScores = Shape::kScores, kPieces = kDim / 8;
  extern __shared__ __align__(128) unsigned char tile_shared[];
  begin_dependent();
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = uniform(thread / 32);
  const int g = lane / 4, c = lane % 4;
  const int group = a.num_heads / a.num_kv_heads;
  const int kv_head = static_cast<int>(blockIdx.x) % a.num_kv_heads;
  // Backwards: a prompt's last rows see the most keys, and long work is best started first.
  const Tile tile = find_tile(a, tiles - 1 - static_cast<int>(blockIdx.x) / a.num_kv_heads, Shape::kBlockRows,
                              kRows + 1, kAnyRows);
  if (tile.sequence < 0) return;
  const Keys keys = keys_of_rows(a, tile, tile.first_row, tile.first_row + tile.rows - 1);
  const int32_t* table = a.block_tables + static_cast<int64_t>(tile.sequence) * a.max_blocks;
  const uint32_t queries = ptx::shared_address(tile_shared), stages = queries + Shape::kQueryBytes;

  // Copies: a thread takes every fourth piece of every 32nd row.
  const int own_row = thread / 4, own_piece = thread % 4;
  const uint32_t own_offset = Shape::offset(own_row, own_piece);
  const auto copy_row = [&](uint32_t destination, const T* source, bool valid) {
#pragma unroll
    for (int i = 0; i < kPieces / 4; ++i) {
      const int piece = own_piece + 4 * i;
      const bool inside = valid && 8 * piece < a.head_dim;
      ptx::cp_async_16(Shape::advance(destination + own_offset, 2 * i), source + (inside ? 8 * piece : 0), inside ? 16 : 0);
    }
  };
  const auto query_offset = [&](int in_tile) {
    const int row = tile.first_row + in_tile;
    const int64_t token = tile.first_token + row / group;
    return (token * a.num_heads + kv_head * group + row % group) * a.head_dim;
  };
  for (int row = own_row; row < Shape::kBlockRows; row += kThreads / 4) {
    const bool valid = row < tile.rows;
    copy_row(queries + (row - own_row) * Shape::kPitch, static_cast<const T*>(a.q) + query_offset(valid ? row : 0), valid);
  }
  const int first_key = uniform(keys.begin / kKeys * kKeys);
  const int steps = uniform((keys.end - first_key + kKeys - 1) / kKeys);
  int32_t blocks[2];  // of the keys that this thread copies next; -1: not one of `keys`
  const auto look_up = [&](int step) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int key = first_key + step * kKeys + own_row + 32 * i;
      const bool valid = key >= keys.begin && key < keys.end;
      blocks[i] = valid ? table[static_cast<unsigned>(key) / static_cast<unsigned>(a.block_size)] : -1;
    }
  };
  const auto load = [&](int step) {
    const uint32_t stage = stages + static_cast<uint32_t>(step % 2 * 2 * Shape::kStageBytes);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const auto key = static_cast<unsigned>(first_key + step * kKeys + own_row + 32 * i);
      const bool valid = blocks[i] >= 0;
      const unsigned in_block = key % static_cast<unsigned>(a.block_size);
      const int64_t row = valid ? static_cast<int64_t>(blocks[i]) * a.block_size + in_block : 0;
      const int64_t first = (row * a.num_kv_heads + kv_head) * a.head_dim;
      const uint32_t rows = stage + 32 * i * Shape::kPitch;
      copy_row(rows, static_cast<const T*>(a.k_cache) + first, valid);
      copy_row(rows + Shape::kStageBytes, static_cast<const T*>(a.v_cache) + first, valid);
    }
  };
  look_up(0);
  load(0);
  look_up(1);

  // The warp's rows, and their softmax so far: lane (g, c) holds rows g and g + 8 of each mma tile.
  const int warp_row = warp * Shape::kWarpRows;
  const int warp_rows = min(tile.rows - warp_row, Shape::kWarpRows);
  const int first_position = uniform(tile.first_position + (tile.first_row + warp_row) / group);
  const int last_position =
      uniform(warp_rows > 0 ? tile.first_position + (tile.first_row + warp_row + warp_rows - 1) / group : -1);
  float maximum[kRowTiles][2], sum[kRowTiles][2], out[kRowTiles][kDim / 8][4] = {};
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      maximum[m][i] = kNone;
      sum[m][i] = 0.0f;
    }
  }
  const float scale = a.scale * kLog2E;
  // Where this lane's rows of ldmatrix start: queries, and keys and values of the first stage.
  const int matrix = lane / 8, matrix_row = lane % 8;
  const uint32_t own_query = queries + Shape::offset(warp_row + matrix % 2 * 8 + matrix_row, matrix / 2);
  const uint32_t own_key = stages + Shape::offset(matrix / 2 * 8 + matrix_row, matrix % 2);
  const uint32_t own_value = stages + Shape::kStageBytes + Shape::offset(matrix % 2 * 8 + matrix_row, matrix / 2);

#pragma unroll 1
  for (int done = 0; done < steps * kKeys; done += kScores) {
    const int step = done / kKeys;
    if (done % kKeys == 0) {
      ptx::cp_async_wait_all();
      __syncthreads();  // the stage is there, and nobody reads the other one any more
      if (step + 1 < steps) {
        load(step + 1);
        look_up(step + 2);
      }
    }
    const int key = first_key + done;
    if (key > last_position || key + kScores <= first_position - a.window + 1) continue;
    const auto in_stages = static_cast<uint32_t>(step % 2 * 2 * Shape::kStageBytes + done % kKeys * Shape::kPitch);

    float score[kRowTiles][kScores / 8][4] = {};
    // Unrolled further, heads of 128 spill.
#pragma unroll 2
    for (int k = 0; k < kDim / 16; ++k) {
      uint32_t q[kRowTiles][4];
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        ptx::ldmatrix_x4(q[m], Shape::advance(own_query, k) + m * kRows * Shape::kPitch);
      }
#pragma unroll
      for (int n = 0; n < kScores / 16; ++n) {
        uint32_t b[4];
        ptx::ldmatrix_x4(b, Shape::advance(own_key, k) + in_stages + 16 * n * Shape::kPitch);
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
          ptx::mma_m16n8k16<T>(score[m][2 * n], q[m], b[0], b[1]);
          ptx::mma_m16n8k16<T>(score[m][2 * n + 1], q[m], b[2], b[3]);
        }
      }
    }

    const bool all_seen = key + kScores - 1 <= first_position && key > last_position - a.window;
    uint32_t weights[kRowTiles][kScores / 16][4];
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float most = maximum[m][i];
#pragma unroll
        for (int n = 0; n < kScores / 8; ++n) {
#pragma unroll
          for (int p = 0; p < 2; ++p) {
            score[m][n][2 * i + p] *= scale;
          }
        }
        if (!all_seen) {
          const int position = tile.first_position + (tile.first_row + warp_row + m * kRows + 8 * i + g) / group;
#pragma unroll
          for (int n = 0; n < kScores / 8; ++n) {
#pragma unroll
            for (int p = 0; p < 2; ++p) {
              const int distance = position - (key + 8 * n + 2 * c + p);
              if (distance < 0 || distance >= a.window) score[m][n][2 * i + p] = kNone;
            }
          }
        }
#pragma unroll
        for (int n = 0; n < kScores / 8; ++n) {
          most = fmaxf(most, fmaxf(score[m][n][2 * i], score[m][n][2 * i + 1]));
        }
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
        const float base = most == kNone ? 0.0f : most;
        const float correction = exp2f(maximum[m][i] - base);
        maximum[m][i] = most;
        float added = 0.0f;
#pragma unroll
        for (int n = 0; n < kScores / 8; ++n) {
#pragma unroll
          for (int p = 0; p < 2; ++p) {
            float& s = score[m][n][2 * i + p];
            s = exp2f(s - base);
            added += s;
          }
        }
        sum[m][i] = sum[m][i] * correction + added;
        if (__any_sync(~0u, correction != 1.0f)) {
#pragma unroll
          for (int n = 0; n < kDim / 8; ++n) {
            out[m][n][2 * i] *= correction;
            out[m][n][2 * i + 1] *= correction;
          }
        }
      }
#pragma unroll
      for (int k = 0; k < kScores / 16; ++k) {
        weights[m][k][0] = pack_pair<T>(score[m][2 * k][0], score[m][2 * k][1]);
        weights[m][k][1] = pack_pair<T>(score[m][2 * k][2], score[m][2 * k][3]);
        weights[m][k][2] = pack_pair<T>(score[m][2 * k + 1][0], score[m][2 * k + 1][1]);
        weights[m][k][3] = pack_pair<T>(score[m][2 * k + 1][2], score[m][2 * k + 1][3]);
      }
    }

#pragma unroll
    for (int k = 0; k < kScores / 16; ++k) {
#pragma unroll
      for (int n = 0; n < kDim / 16; ++n) {
        uint32_t b[4];
        ptx::ldmatrix_x4_trans(b, Shape::advance(own_value, n) + in_stages + 16 * k * Shape::kPitch);
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
          ptx::mma_m16n8k16<T>(out[m][2 * n], weights[m][k], b[0], b[1]);
          ptx::mma_m16n8k16<T>(out[m][2 * n + 1], weights[m][k], b[2], b[3]);
        }
      }
    }
  }

#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      sum[m][i] += __shfl_xor_sync(~0u, sum[m][i], 1);
      sum[m][i] += __shfl_xor_sync(~0u, sum[m][i], 2);
      const int row = warp_row + m * kRows + 8 * i + g;
      if (row >= tile.rows) continue;
      T* to = static_cast<T*>(a.out) + query_offset(row);
      const float inverse = 1.0f / sum[m][i];
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n) {
        if (8 * n >= a.head_dim) continue;
        *reinterpret_cast<uint32_t*>(to + 8 * n + 2 * c) =
            pack_pair<T>(out[m][n][2 * i] * inverse, out[m][n][2 * i + 1] * inverse);
      }
    }
  }
}

// Heads of more than 128: 16 rows a warp, every warp on its own, straight from memory.
template <typename T, int kDim>
__global__ void __launch_bounds__(kThreads) wide_tile_kernel(AttentionArguments a) {
  using Rows = WarpRows<T, kDim>;
  begin_dependent();
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int kv_head = static_cast<int>(blockIdx.y) / Rows::kParts;
  // Backwards: a prompt's last rows see the most keys, and long work is best started first.
  const Tile tile = find_tile(a, static_cast<int>(gridDim.x - 1 - blockIdx.x), kWarps * kRows, kRows + 1,
                              kAnyRows);
  const int first_row = warp * kRows;
  if (tile.sequence < 0 || first_row >= tile.rows) return;
  const int last_row = min(first_row + kRows, tile.rows) - 1;
  const Keys keys = keys_of_rows(a, tile, tile.first_row + first_row, tile.first_row + last_row);
  Rows rows;
  rows.load(a, tile, first_row, kv_head, static_cast<int>(blockIdx.y) % Rows::kParts);
  rows.attend(a, tile, kv_head, keys, keys.begin / kChunkKeys, 1, (keys.end + kChunkKeys - 1) / kChunkKeys);
  rows.finish();
  rows.for_results(a.head_dim, [&](int row, int i, int column, const float(&values)[8]) {
    if (first_row + row < tile.rows) {
      store_row<T>(a, tile, first_row + row, kv_head, column, values, 1.0f / rows.sum[i]);
    }
  });
}

// --- everything else --------------------------------------------------------------------------------------------

// One block a token and head; a warp takes every fourth key, its lanes share the columns out.
template <typename T>
__global__ void __launch_bounds__(kThreads) scalar_kernel(AttentionArguments a) {
  constexpr int kColumns = kMaxHeadDim / 32;
  __shared__ float outs[kWarps][kMaxHeadDim];
  __shared__ float maxima[kWarps], sums[kWarps];
  begin_dependent();
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int group = a.num_heads / a.num_kv_heads;
  const int head = static_cast<int>(blockIdx.y), kv_head = head / group;
  const Tile tile = find_tile(a, static_cast<int>(blockIdx.x), group, 1, kAnyRows);
  if (tile.sequence < 0) return;
  const int64_t token = tile.first_token + tile.first_row / group;
  const Keys keys = keys_of_rows(a, tile, tile.first_row, tile.first_row);
  const int32_t* table = a.block_tables + static_cast<int64_t>(tile.sequence) * a.max_blocks;
  const T* query = static_cast<const T*>(a.q) + (token * a.num_heads + head) * a.head_dim;
  float q[kColumns] = {}, out[kColumns] = {};
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    if (lane + 32 * i < a.head_dim) q[i] = to_float(query[lane + 32 * i]);
  }
  float most = kNone, sum = 0.0f;
  for (int key = keys.begin + warp; key < keys.end; key += kWarps) {
    const int64_t row = static_cast<int64_t>(table[key / a.block_size]) * a.block_size + key % a.block_size;
    const int64_t first = (row * a.num_kv_heads + kv_head) * a.head_dim;
    const T* k = static_cast<const T*>(a.k_cache) + first;
    const T* v = static_cast<const T*>(a.v_cache) + first;
    float score = 0.0f;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      if (lane + 32 * i < a.head_dim) score += q[i] * to_float(k[lane + 32 * i]);
    }
    score = warp_sum(score) * a.scale * kLog2E;
    const float now = fmaxf(most, score);
    const float base = now == kNone ? 0.0f : now;
    const float correction = exp2f(most - base), weight = exp2f(score - base);
    sum = sum * correction + weight;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      if (lane + 32 * i < a.head_dim) out[i] = out[i] * correction + weight * to_float(v[lane + 32 * i]);
    }
    most = now;
  }
#pragma unroll
  for (int i = 0; i < kColumns; ++i) outs[warp][lane + 32 * i] = out[i];
  if (lane == 0) maxima[warp] = most, sums[warp] = sum;
  __syncthreads();
  most = kNone, sum = 0.0f;
  for (int w = 0; w < kWarps; ++w) most = fmaxf(most, maxima[w]);
  const float base = most == kNone ? 0.0f : most;
  for (int w = 0; w < kWarps; ++w) sum += sums[w] * exp2f(maxima[w] - base);
  T* to = static_cast<T*>(a.out) + (token * a.num_heads + head) * a.head_dim;
  for (int d = static_cast<int>(threadIdx.x); d < a.head_dim; d += kThreads) {
    float value = 0.0f;
    for (int w = 0; w < kWarps; ++w) value += outs[w][d] * exp2f(maxima[w] - base);
    to[d] = from_float<T>(value / sum);
  }
}

// --- host -------------------------------------------------------------------------------------------------------

bool has_fragments(ElementType type, const AttentionArguments& a) {
  return type != ElementType::kFloat32 && a.head_dim % 8 == 0 && a.head_dim <= 256 && a.block_size % kChunkKeys == 0;
}

struct Launches {
  bool tiles;           // tile_kernel runs for sequences of more than 16 rows
  int64_t tile_blocks;  // upper bounds of tiles
  int64_t split_blocks;
  int most_split_rows;
  int splits;
  bool clustered;  // the splits of a tile form a cluster and merge through shared memory
};

int tile_rows(const AttentionArguments& a) { return a.head_dim <= 128 ? TileShape<128>::kBlockRows : kWarps * kRows; }

cudaError_t plan(const AttentionArguments& a, Launches* launches) {
  int multiprocessors = 0;
  if (const cudaError_t error = device_attribute(cudaDevAttrMultiProcessorCount, &multiprocessors);
      error != cudaSuccess) {
    return error;
  }
  int major = 0;
  if (const cudaError_t error = device_attribute(cudaDevAttrComputeCapabilityMajor, &major); error != cudaSuccess) {
    return error;
  }
  const int64_t rows = a.T * (a.num_heads / a.num_kv_heads);
  // With no more tokens than sequences it is a decode step, and split_kernel takes whatever there is.
  launches->tiles = a.T > a.S;
  launches->tile_blocks = std::min<int64_t>(a.S, rows / (kRows + 1)) + rows / tile_rows(a);
  launches->most_split_rows = launches->tiles ? kRows : kAnyRows;
  launches->split_blocks = launches->tiles ? (a.S > 1 || rows <= kRows ? a.S : 0) : a.S + rows / kRows;
  const int64_t keys = std::min<int64_t>(static_cast<int64_t>(a.max_blocks) * a.block_size, a.window);
  const int64_t useful = std::max<int64_t>(keys / (kChunkKeys * kWarps), 1);
  // split_blocks is an upper bound; a decoding sequence rarely has more than one tile.
  const int64_t wanted = 2 * multiprocessors / std::max<int64_t>(std::min<int64_t>(a.S, a.T) * a.num_kv_heads, 1);
  launches->splits = static_cast<int>(std::clamp<int64_t>(std::min(useful, wanted), 1, kMaxSplits));
  // Clusters spare a kernel, but are small: past some context more splits are faster.
  launches->clustered = major >= 9 && launches->splits > 1 && (launches->splits <= kMaxCluster || keys <= kClusterKeys);
  if (launches->clustered) {
    launches->splits = static_cast<int>(std::bit_floor(static_cast<unsigned>(std::min(launches->splits, kMaxCluster))));
  }
  return cudaSuccess;
}

template <typename T, int kDim>
cudaError_t launch_fragments(const AttentionArguments& a, cudaStream_t stream) {
  Launches launches = {};
  if (const cudaError_t error = plan(a, &launches); error != cudaSuccess) return error;
  const auto heads = static_cast<unsigned>(a.num_kv_heads);
  const unsigned head_parts = heads * WarpRows<T, kDim>::kParts;
  if (launches.tiles && launches.tile_blocks > 0) {
    cudaError_t error;
    if constexpr (kDim <= 128) {
      constexpr int kBytes = TileShape<kDim>::kBytes;
      error = cudaFuncSetAttribute(tile_kernel<T, kDim>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
      if (error != cudaSuccess) return error;
      error = launch_overlapped(tile_kernel<T, kDim>, dim3(static_cast<unsigned>(launches.tile_blocks) * heads),
                                dim3(kThreads), kBytes, stream, a, static_cast<int>(launches.tile_blocks));
    } else {
      error = launch_overlapped(wide_tile_kernel<T, kDim>, dim3(static_cast<unsigned>(launches.tile_blocks), head_parts),
                                dim3(kThreads), 0, stream, a);
    }
    if (error != cudaSuccess) return error;
  }
  if (launches.split_blocks == 0) return cudaSuccess;
  const dim3 grid(static_cast<unsigned>(launches.split_blocks), head_parts, static_cast<unsigned>(launches.splits));
  const unsigned cluster = launches.clustered ? grid.z : 1;
  const cudaError_t error =
      launch_overlapped_clusters(split_kernel<T, kDim>, grid, cluster, dim3(kThreads), 0, stream, a, launches.splits,
                                 launches.most_split_rows, launches.clustered);
  if (error != cudaSuccess || launches.splits == 1 || launches.clustered) return error;
  return launch_overlapped(merge_kernel<T>, dim3(grid.x, heads, kRows), dim3(kThreads), 0, stream, a, launches.splits,
                           launches.most_split_rows);
}

template <typename T>
cudaError_t launch_head_size(const AttentionArguments& a, cudaStream_t stream) {
  if (a.head_dim <= 64) return launch_fragments<T, 64>(a, stream);
  if (a.head_dim <= 96) return launch_fragments<T, 96>(a, stream);
  if (a.head_dim <= 128) return launch_fragments<T, 128>(a, stream);
  return launch_fragments<T, 256>(a, stream);
}

template <typename T>
cudaError_t launch_scalar(const AttentionArguments& a, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(a.T), static_cast<unsigned>(a.num_heads));
  return launch_overlapped(scalar_kernel<T>, grid, dim3(kThreads), 0, stream, a);
}

}  // namespace

cudaError_t attention_workspace_floats(ElementType type, const AttentionArguments& a, int64_t* floats) {
  *floats = 0;
  if (!has_fragments(type, a)) return cudaSuccess;
  Launches launches = {};
  if (const cudaError_t error = plan(a, &launches); error != cudaSuccess) return error;
  if (launches.splits > 1 && !launches.clustered) {
    *floats = launches.split_blocks * a.num_kv_heads * launches.splits * kRows * (a.head_dim + 2);
  }
  return cudaSuccess;
}

cudaError_t launch_paged_attention(ElementType type, const AttentionArguments& a, cudaStream_t stream) {
  if (a.T == 0 || a.S == 0) return cudaSuccess;
  const bool fragments = has_fragments(type, a);
  switch (type) {
    case ElementType::kFloat32:
      return launch_scalar<float>(a, stream);
    case ElementType::kFloat16:
      return fragments ? launch_head_size<__half>(a, stream) : launch_scalar<__half>(a, stream);
    case ElementType::kBFloat16:
      return fragments ? launch_head_size<__nv_bfloat16>(a, stream) : launch_scalar<__nv_bfloat16>(a, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace kernels
