// Packs a dense 16-bit matrix into lane streams, in two passes, any architecture.
//
//   lane_stream_measure   how many value rows every transfer holds   -> the caller places streams, sizes the ring
//   lane_stream_encode    the same walk again, writing headers, masks and values
//
// Work:     one warp per stream; it walks its groups in order, because where a lane's values lie depends on how
//           full the slots were before.
// Memory:   dense is read twice; `data` is written in 2-byte pieces (packing runs once, when a model is loaded).
// Limits:   any N, K; rows and columns past them are absent. An element is absent if all its
//           bits are zero; -0.0, NaN and Inf are values.
// Bound by: latency of the walk; 1 to 4 ms for a matrix of 8192 x 28672.
// Tests:    tests/kernels/test_lane_stream_gpu.py holds the result to formats/lane_stream.py byte for byte.
//
// No torch header here: this file takes raw pointers and a stream, returns cudaError_t.
#include "lane_stream.cuh"

namespace kernels {
namespace {

constexpr int kWarpsPerBlock = 4;
constexpr int kMaxMaskWords = 8;

// How full every slot is and which lane held it last, for either stream of a warp. In shared memory, because a
// lane looks up slots by rank.
struct SlotState {
  int level[2][32];    // [stream][slot]: values so far
  int owner[2][32];    // lane that held the slot in the group before
  int by_rank[2][32];  // scratch: slot with the rank-th smallest level
  uint32_t masks[kMaxMaskWords][32];  // of the group, by word and lane; each lane touches its own column only
};

struct SlotChoice {
  int slot;    // this lane's slot for the group
  int source;  // lane that held it before
  int start;   // value row at which this lane's values of the group begin
};

__device__ int warp_min(int v) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) v = min(v, __shfl_xor_sync(~0u, v, distance));
  return v;
}

__device__ int warp_sum(int v) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) v += __shfl_xor_sync(~0u, v, distance);
  return v;
}

__device__ int warp_max(int v) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) v = max(v, __shfl_xor_sync(~0u, v, distance));
  return v;
}

// The lane with most values takes the least-filled slot, and so on; equal ones go by number. This keeps the slots
// level to within a few rows over a whole stream.
__device__ SlotChoice assign_slot(SlotState& state, int stream, int count, int lane) {
  const int level = state.level[stream][lane];
  int rank_by_count = 0, rank_by_level = 0;
  for (int other = 0; other < 32; ++other) {
    const int other_count = __shfl_sync(~0u, count, other);
    const int other_level = __shfl_sync(~0u, level, other);
    rank_by_count += other_count > count || (other_count == count && other < lane);
    rank_by_level += other_level < level || (other_level == level && other < lane);
  }
  state.by_rank[stream][rank_by_level] = lane;
  __syncwarp();
  SlotChoice choice;
  choice.slot = state.by_rank[stream][rank_by_count];
  choice.source = state.owner[stream][choice.slot];
  choice.start = state.level[stream][choice.slot];
  __syncwarp();
  state.owner[stream][choice.slot] = lane;
  state.level[stream][choice.slot] = choice.start + count;
  __syncwarp();
  return choice;
}

// Where element e of register r of k16 step `step` lies, for this lane, within a tile and a half strip.
__device__ int element_row(int lane, int r) { return lane / 4 + r % 2 * 8; }
__device__ int element_column(int lane, int step, int r, int e) {
  return step / 2 * 32 + lane % 4 * 8 + step % 2 * 4 + r / 2 * 2 + e;
}

__device__ uint16_t element(const uint16_t* dense, const LaneStreamPlan& plan, int64_t row, int64_t column) {
  return row < plan.N && column < plan.K ? dense[row * plan.K + column] : uint16_t{0};
}

template <bool kEncode>
__global__ void __launch_bounds__(kWarpsPerBlock * 32, 2)
    lane_stream_pack_kernel(const __grid_constant__ LaneStreamPlan plan, const uint16_t* __restrict__ dense,
                            int32_t* __restrict__ group_rows, int32_t* __restrict__ least_rows,
                            const int32_t* __restrict__ all_lines, uint8_t* __restrict__ data) {
  __shared__ SlotState states[kWarpsPerBlock];
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int64_t stream = static_cast<int64_t>(blockIdx.x) * kWarpsPerBlock + warp;
  if (stream >= plan.streams()) return;
  SlotState& state = states[warp];
  for (int s = 0; s < 2; ++s) {
    state.level[s][lane] = 0;
    state.owner[s][lane] = lane;
  }
  __syncwarp();

  const int64_t slice = stream / plan.streams_per_slice();
  const int64_t block_in_slice = stream % plan.streams_per_slice() / plan.warps_per_block;
  const int64_t strip_in_band = stream % plan.warps_per_block;
  const int64_t first = plan.first_group(block_in_slice);
  const int64_t count = plan.first_group(block_in_slice + 1) - first;
  const int64_t groups_per_slice = plan.groups_per_slice();
  const int64_t stride = plan.max_groups_per_stream();
  int32_t* rows_after = group_rows + stream * stride;
  const int mask_words = plan.group_tiles * 2;
  const int32_t* const lines = kEncode ? all_lines + stream * stride : nullptr;

  int rows = 0;
  int even_stream = 0;  // the stream that takes the even elements
  for (int64_t g = 0; g < count; ++g) {
    const int64_t strip = (first + g) / groups_per_slice * plan.warps_per_block + strip_in_band;
    const int64_t strip_row = strip * kStripRows;
    const int64_t group_column = (slice * groups_per_slice + (first + g) % groups_per_slice) * plan.group_columns();
    int counts[2] = {0, 0};
    for (int word = 0; word < mask_words; ++word) {
      uint32_t mask = 0;
      for (int bit = 0; bit < 32; ++bit) {
        const int r = bit / 8, step = bit % 8 / 2, e = bit % 2;
        const uint16_t v = element(dense, plan, strip_row + word % 2 * 16 + element_row(lane, r),
                                   group_column + word / 2 * kTileColumns + element_column(lane, step, r, e));
        if (v != 0) mask |= 1u << bit;
      }
      state.masks[word][lane] = mask;
      counts[0] += __popc(mask & 0x55555555u);
      counts[1] += __popc(mask & 0xaaaaaaaau);
    }
    const int least = warp_min(min(state.level[0][lane], state.level[1][lane]));
    // The parity with more values goes to the stream with fewer, or the two would drift apart over a long stream.
    const bool more_even = warp_sum(counts[0]) > warp_sum(counts[1]);
    const bool fuller_low = warp_sum(state.level[0][lane]) > warp_sum(state.level[1][lane]);
    const bool exchange = even_stream != (more_even == fuller_low);
    even_stream = more_even == fuller_low;
    const SlotChoice choice[2] = {assign_slot(state, even_stream, counts[0], lane),
                                  assign_slot(state, 1 - even_stream, counts[1], lane)};
    const int rows_before = rows;
    rows = max(rows, warp_max(max(state.level[0][lane], state.level[1][lane])));
    if constexpr (!kEncode) {
      if (lane == 0) {
        rows_after[g] = rows;
        least_rows[stream * stride + g] = least;
      }
    } else {
      uint8_t* const head = data + int64_t{lines[g]} * kRowBytes;
      reinterpret_cast<uint16_t*>(head)[lane] = static_cast<uint16_t>(choice[0].source | choice[1].source << 5);
      if (lane == 0) {
        const int own_rows = rows - rows_before;
        const int own_start = rows_before % plan.ring_rows;
        uint4 refill = make_uint4(0, 0, 0, 0);
        if (own_rows > 0 && (own_start < kGuardRows || own_start + own_rows > plan.ring_rows)) refill.x = kRefillMirror;
        if (exchange) refill.x |= kRefillExchange;
        if (g + plan.lookahead < count) {
          const int begin = rows_after[g + plan.lookahead - 1];
          const int later_rows = rows_after[g + plan.lookahead] - begin;
          const int later_start = begin % plan.ring_rows;
          const int rows_to_end = min(later_rows, plan.ring_rows - later_start);
          refill.y = static_cast<uint32_t>(rows_to_end | (later_rows - rows_to_end) << 16);
          refill.z = static_cast<uint32_t>(later_start * kRowBytes);
          refill.w = static_cast<uint32_t>(lines[g + plan.lookahead]);
        }
        *reinterpret_cast<uint4*>(head + kRefillOffset) = refill;
      }
      for (int word = 0; word < mask_words; ++word) {
        uint32_t* quad = reinterpret_cast<uint32_t*>(head + kHeaderBytes + word / 4 * 4 * kRowBytes);
        quad[lane * 4 + word % 4] = state.masks[word][lane];
      }
      // Values in the order in which the decoder asks for them. A row may have come with an earlier transfer: the
      // slots fill unevenly, and a transfer brings rows as far as the fullest slot needs.
      int next[2] = {choice[0].start, choice[1].start};
      for (int tile = 0; tile < plan.group_tiles; ++tile) {
        for (int half_tile = 0; half_tile < 2; ++half_tile) {
          for (int half = 0; half < 2; ++half) {
            const uint32_t mask = state.masks[tile * 2 + half][lane];
            for (int step = half_tile * 2; step < half_tile * 2 + 2; ++step) {
              for (int r = 0; r < 4; ++r) {
                for (int e = 0; e < 2; ++e) {
                  if (!(mask >> (r * 8 + step * 2 + e) & 1u)) continue;
                  const int row = next[e]++;
                  int64_t transfer = g;
                  while (transfer > 0 && row < rows_after[transfer - 1]) --transfer;
                  const int first_row = transfer > 0 ? rows_after[transfer - 1] : 0;
                  uint8_t* ring_row =
                      data + int64_t{lines[transfer] + row - first_row} * kRowBytes + plan.head_bytes();
                  reinterpret_cast<uint16_t*>(ring_row)[choice[e].slot * 2 + (e ^ even_stream)] =
                      element(dense, plan, strip_row + half * 16 + element_row(lane, r),
                              group_column + tile * kTileColumns + element_column(lane, step, r, e));
                }
              }
            }
          }
        }
      }
    }
  }
  if constexpr (!kEncode) {
    const int least = warp_min(min(state.level[0][lane], state.level[1][lane]));
    for (int64_t g = count + lane; g < stride; g += 32) {
      rows_after[g] = rows;
      least_rows[stream * stride + g] = least;
    }
  }
}

unsigned pack_blocks(const LaneStreamPlan& plan) {
  return static_cast<unsigned>((plan.streams() + kWarpsPerBlock - 1) / kWarpsPerBlock);
}

bool group_tiles_supported(const LaneStreamPlan& plan) { return plan.group_tiles == 2 || plan.group_tiles == 4; }

}  // namespace

cudaError_t launch_lane_stream_measure(const LaneStreamPlan& plan, const uint16_t* dense, int32_t* group_rows,
                                       int32_t* least_rows, cudaStream_t stream) {
  if (!group_tiles_supported(plan)) return cudaErrorInvalidValue;
  lane_stream_pack_kernel<false><<<pack_blocks(plan), kWarpsPerBlock * 32, 0, stream>>>(plan, dense, group_rows,
                                                                                        least_rows, nullptr, nullptr);
  return cudaGetLastError();
}

cudaError_t launch_lane_stream_encode(const LaneStreamPlan& plan, const uint16_t* dense, const int32_t* group_rows,
                                      const int32_t* lines, uint8_t* data, cudaStream_t stream) {
  if (!group_tiles_supported(plan)) return cudaErrorInvalidValue;
  lane_stream_pack_kernel<true><<<pack_blocks(plan), kWarpsPerBlock * 32, 0, stream>>>(
      plan, dense, const_cast<int32_t*>(group_rows), nullptr, lines, data);
  return cudaGetLastError();
}

}  // namespace kernels
