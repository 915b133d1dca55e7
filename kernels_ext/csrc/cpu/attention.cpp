// paged_attention for the CPU: checks, the split into tiles, and threads. The arithmetic is in attention.inl.

#include <atomic>
#include <vector>

#include "decoder_ops.h"
#include "scratch.h"

namespace kernels {
namespace {

// Multiply-adds below which one thread does it all: about 10 us on one core, a little more than waking a thread.
constexpr int64_t kParallelMultiplyAdds = 256 * 1024;
// Above this many floats of partial states a call isn't split over partitions: 16 MiB.
constexpr int64_t kMaxStateFloats = 4 * 1024 * 1024;

// A tile, and where the states of its partitions [begin, end) start when they are computed apart.
struct Work {
  AttentionTile tile;
  int64_t partition_begin;
  int64_t partition_end;
  int64_t state_offset;
  int64_t multiply_adds;
};

// Every entry that a kernel will read, and no other: blocks before a window or after the context may hold anything.
void check_block_table(const char* op, const int32_t* table, int64_t sequence, int64_t begin, int64_t end,
                       int64_t blocks) {
  for (int64_t i = begin; i < end; ++i) {
    KERNELS_CHECK(table[i] >= 0 && table[i] < blocks, op, ": block_tables[", sequence, ", ", i, "] is ", table[i],
                    ", outside 0 to ", blocks - 1, " (blocks of k_cache)");
  }
}

// Appends the tiles of all sequences to `work` after checking the sequences' bounds.
void plan(const char* op, const AttentionArgs& args, const Tensor& query_start, const Tensor& context_lens, int64_t T,
          int64_t blocks, std::vector<Work>& work) {
  const int32_t* starts = static_cast<const int32_t*>(query_start.const_data_ptr());
  const int32_t* contexts = static_cast<const int32_t*>(context_lens.const_data_ptr());
  const int64_t S = context_lens.size(0);
  const int64_t group = args.num_heads / args.num_kv_heads;
  KERNELS_CHECK(starts[0] == 0, op, ": query_start[0] must be 0, got ", starts[0]);
  KERNELS_CHECK(starts[S] == T, op, ": query_start ends with ", starts[S], ", but q has ", T, " rows");
  for (int64_t s = 0; s < S; ++s) {
    const int64_t first_token = starts[s];
    const int64_t queries = starts[s + 1] - first_token;
    const int64_t context = contexts[s];
    KERNELS_CHECK(queries >= 0, op, ": query_start must not fall, got ", starts[s], " then ", starts[s + 1],
                    " at sequence ", s);
    if (queries == 0) continue;
    KERNELS_CHECK(context >= queries, op, ": context_lens[", s, "] is ", context, ", but sequence ", s, " has ",
                    queries, " query tokens, which count as context");
    KERNELS_CHECK(context <= args.max_blocks * args.block_size, op, ": context_lens[", s, "] is ", context,
                    ", but a row of block_tables holds ", args.max_blocks, " blocks of ", args.block_size);
    const int64_t first_position = context - queries;
    const int64_t first_key = first_position >= args.window ? first_position - args.window + 1 : 0;
    check_block_table(op, args.block_tables + s * args.max_blocks, s, first_key / args.block_size,
                      (context + args.block_size - 1) / args.block_size, blocks);
    for (int64_t row = 0; row < queries * group; row += kTileRows) {
      const int64_t rows = queries * group - row < kTileRows ? queries * group - row : kTileRows;
      AttentionTile tile = {
          .sequence = s,
          .kv_head = 0,
          .first_row = row,
          .rows = rows,
          .first_token = first_token,
          .first_position = first_position,
      };
      const int64_t begin = attention_row_begin(args, tile, 0);
      const int64_t end = attention_row_end(args, tile, rows - 1);
      for (; tile.kv_head < args.num_kv_heads; ++tile.kv_head) {
        work.push_back({
            .tile = tile,
            .partition_begin = begin / kPartitionKeys,
            .partition_end = (end - 1) / kPartitionKeys + 1,
            .state_offset = 0,
            .multiply_adds = 2 * rows * (end - begin) * args.head_dim,
        });
      }
    }
  }
}

float* tile_scratch(const AttentionArgs& args) {
  return static_cast<float*>(thread_scratch(
      Scratch::kAttention, static_cast<size_t>(attention_scratch_floats(args.head_dim)) * sizeof(float)));
}

// Hands the items [0, n) out one by one to torch's threads, so that unequal items balance.
template <class F>
void parallel_items(int64_t n, int64_t threads, const F& f) {
  std::atomic<int64_t> next{0};
  torch::stable::parallel_for(0, n < threads ? n : threads, 1, [&](int64_t, int64_t) {
    for (int64_t i = next.fetch_add(1, std::memory_order_relaxed); i < n;
         i = next.fetch_add(1, std::memory_order_relaxed)) {
      f(i);
    }
  });
}

void run(const DecoderKernels& kernels, const AttentionArgs& args, std::vector<Work>& work) {
  int64_t multiply_adds = 0;
  for (const Work& w : work) multiply_adds += w.multiply_adds;
  const int64_t threads = multiply_adds < kParallelMultiplyAdds ? 1 : torch::stable::get_num_threads();
  const int64_t tiles = static_cast<int64_t>(work.size());
  if (threads == 1) {
    float* scratch = tile_scratch(args);
    for (const Work& w : work) kernels.attention_tile(args, w.tile, scratch);
    return;
  }

  int64_t partitions = 0;
  int64_t state_floats = 0;
  for (Work& w : work) {
    w.state_offset = state_floats;
    const int64_t n = w.partition_end - w.partition_begin;
    state_floats += n * attention_state_floats(w.tile.rows, args.head_dim);
    partitions += n;
  }
  // With several tiles a thread, whole tiles balance. The results are the same bits either way.
  if (tiles >= 4 * threads || partitions == tiles || state_floats > kMaxStateFloats) {
    // Backwards: a prompt's last tiles see the most keys, and long items are best started first.
    parallel_items(tiles, threads, [&](int64_t i) {
      kernels.attention_tile(args, work[static_cast<size_t>(tiles - 1 - i)].tile, tile_scratch(args));
    });
    return;
  }
  struct Item {
    const Work* work;
    int64_t partition;
  };
  std::vector<Item> items;
  items.reserve(static_cast<size_t>(partitions));
  for (const Work& w : work) {
    for (int64_t p = w.partition_begin; p < w.partition_end; ++p) items.push_back({&w, p});
  }
  float* states = static_cast<float*>(
      thread_scratch(Scratch::kAttentionStates, static_cast<size_t>(state_floats) * sizeof(float)));
  parallel_items(partitions, threads, [&](int64_t i) {
    const Work& w = *items[static_cast<size_t>(i)].work;
    const int64_t p = items[static_cast<size_t>(i)].partition;
    float* state =
        states + w.state_offset + (p - w.partition_begin) * attention_state_floats(w.tile.rows, args.head_dim);
    kernels.attention_partition(args, w.tile, p, state, tile_scratch(args));
  });
  float* scratch = tile_scratch(args);
  for (const Work& w : work) {
    kernels.attention_merge(args, w.tile, w.partition_begin, w.partition_end, states + w.state_offset, scratch);
  }
}

Tensor paged_attention(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, const Tensor& block_tables,
                       const Tensor& query_start, const Tensor& context_lens, double scale,
                       std::optional<int64_t> window, int64_t isa) {
  constexpr const char* op = "paged_attention";
  const Dtype dtype = kernel_dtype(op, "q", q);
  const AttentionSizes sizes =
      check_paged_attention(op, check_tensor, q, k_cache, v_cache, block_tables, query_start, context_lens, window);

  const DecoderKernels& kernels = decoder_kernels(op, isa, dtype);
  Tensor out = empty_cpu({sizes.T, sizes.num_heads * sizes.head_dim}, q.scalar_type());
  const AttentionArgs args = {
      .q = q.const_data_ptr(),
      .k_cache = k_cache.const_data_ptr(),
      .v_cache = v_cache.const_data_ptr(),
      .block_tables = static_cast<const int32_t*>(block_tables.const_data_ptr()),
      .out = out.mutable_data_ptr(),
      .max_blocks = sizes.max_blocks,
      .block_size = sizes.block_size,
      .num_heads = sizes.num_heads,
      .num_kv_heads = sizes.num_kv_heads,
      .head_dim = sizes.head_dim,
      .window = window.value_or(INT64_MAX),
      .scale = static_cast<float>(scale),
  };
  // Kept between calls for its memory: one step calls this once a layer.
  thread_local std::vector<Work> work;
  work.clear();
  plan(op, args, query_start, context_lens, sizes.T, k_cache.size(0), work);
  run(kernels, args, work);
  return out;
}

}  // namespace
}  // namespace kernels

STABLE_TORCH_LIBRARY_IMPL(kernels_ext, CPU, m) { m.impl("paged_attention", TORCH_BOX(&kernels::paged_attention)); }
