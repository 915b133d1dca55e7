// Lane-stream sparse linear for 17 to 96 tokens, sm_90 and newer: decode once, multiply by many tokens.
//
//   y[M,N] = x[M,K] * W[N,K]^T (+ bias[N])     x, y, bias fp16 or bf16; W packed (formats/LANE_STREAM.md)
//
// Work:     the streams of lane_stream_linear. A block's warps are at the same columns of neighbouring strips, so
//           they share tiles of x, 64 columns by all tokens, which they fetch ahead together. (A warp for fetching
//           alone would take the registers of four: 65536 are dealt out by warps in fours.)
// Sums:     as in lane_stream_linear: parts of a strip go through the workspace, in a fixed order.
// Memory:   shared = warps * plan.ring_bytes() + barriers + 2 to kMaxStages tiles of x (128 bytes a token each). A
//           tile's rows are swizzled: 16-byte chunk c of token t lies at chunk c ^ (t % 8).
// Limits:   any N, K. x rows on 16 bytes are read as vectors, others element by element. Accumulators limit warps
//           and tokens together (max_warps).
// Source:   PTX ISA for m16n8k16's fragment layout; the stream layout is this project's own.
// Tests:    tests/kernels/test_lane_stream_gpu.py
//
// No torch header here: this file takes raw pointers and a stream, returns cudaError_t.
#include "lane_stream_sums.cuh"

#include <algorithm>

namespace kernels {
namespace {

constexpr int kMaxStages = 8;
constexpr int kMinStages = 2;

// Warps of a block whose threads have registers for that many token tiles of 8, without spilling: a lane has 8
// accumulators for each, and 65536 registers are shared out.
constexpr int max_warps(int group_tiles, int token_tiles) {
  if (token_tiles <= 4) return group_tiles == 2 ? 12 : 16;
  if (token_tiles <= 8) return group_tiles == 2 ? 12 : 8;
  return 8;
}

constexpr int64_t stage_bytes(int token_tiles) { return int64_t{token_tiles} * 8 * kRowBytes; }

// Shared memory before the tiles of x.
__host__ __device__ inline int64_t bytes_before_x(const LaneStreamPlan& plan) {
  const int64_t bytes =
      int64_t{plan.warps_per_block} * plan.ring_bytes() + plan.barrier_bytes() + int64_t{2} * kMaxStages * 8;
  return (bytes + 127) / 128 * 128;
}

// Tiles of x that fit beside a plan's rings; fewer than kMinStages: none.
int stages_that_fit(const LaneStreamPlan& plan, int token_tiles, int64_t shared_limit) {
  const int64_t fit = (shared_limit - bytes_before_x(plan)) / stage_bytes(token_tiles);
  return fit < kMinStages ? 0 : static_cast<int>(std::min<int64_t>(fit, kMaxStages));
}

struct BatchArguments {
  LinearArguments linear;
  int32_t stages;
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// Where a warp is in a ring of tiles in shared memory, each with a pair of barriers.
struct RingPosition {
  int stage = 0;
  uint32_t parity = 0;

  __device__ void advance(int stages) {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// A warp's share in fetching the tiles of x that the block's streams come to, in order: four tokens in
// `warps_per_block` times four. Tokens past M and columns past K become zero.
template <typename T, int kTiles, int kTokenTiles>
struct TileFetcher {
  RingPosition position;
  int tile_in_strip;  // of the tile to fetch next
  int tiles_left;

  __device__ void fetch(const LinearArguments& arguments, uint32_t tiles, uint32_t full, uint32_t empty, int stages,
                        int64_t slice_column, int warp, int lane) {
    if (tiles_left == 0) return;
    --tiles_left;
    const int64_t K = arguments.plan.K;
    const T* x = static_cast<const T*>(arguments.x);
    const int64_t column = slice_column + tile_in_strip * kTileColumns + lane % 8 * 8;
    const int columns_left = static_cast<int>(min(max(K - column, int64_t{0}), int64_t{8}));
    const bool aligned = K % 8 == 0 && reinterpret_cast<uintptr_t>(x) % 16 == 0;
    const uint32_t stage = static_cast<uint32_t>(position.stage);
    const uint32_t destination = tiles + stage * (kTokenTiles * 8 * kRowBytes);
    // The first time round the tiles are empty as they are.
    ptx::mbarrier_wait(empty + stage * 8, position.parity ^ 1);
    for (int token = warp * 4 + lane / 8; token < kTokenTiles * 8; token += arguments.plan.warps_per_block * 4) {
      const int valid = token < arguments.M ? columns_left : 0;
      const T* source = x + (valid > 0 ? token * K + column : 0);
      const uint32_t chunk = destination + static_cast<uint32_t>(token * kRowBytes + ((lane % 8) ^ (token % 8)) * 16);
      if (aligned) {
        ptx::cp_async_16(chunk, source, valid * 2);
      } else {
        for (int e = 0; e < 8; ++e) {
          const uint16_t v = e < valid ? reinterpret_cast<const uint16_t*>(source)[e] : uint16_t{0};
          ptx::st_shared_u16(chunk + static_cast<uint32_t>(e) * 2, v);
        }
      }
    }
    if (aligned) {
      ptx::cp_async_mbarrier_arrive_noinc(full + stage * 8);
    } else {
      ptx::mbarrier_arrive(full + stage * 8);
    }
    position.advance(stages);
    if (++tile_in_strip == arguments.groups_per_slice * kTiles) tile_in_strip = 0;
  }
};

#endif

template <typename T, int kTiles, int kTokenTiles>
__global__ void __launch_bounds__(max_warps(kTiles, kTokenTiles) * 32, 1)
    lane_stream_batch_kernel(const __grid_constant__ BatchArguments batch) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) uint8_t shared[];
  const LinearArguments& arguments = batch.linear;
  const LaneStreamPlan& plan = arguments.plan;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);  // uniform, and known to be
  const int warps = plan.warps_per_block;
  const int slice = static_cast<int>(blockIdx.x) / plan.blocks_per_slice;
  const int groups_per_slice = arguments.groups_per_slice;
  ptx::griddepcontrol_launch_dependents();

  const uint32_t rings = ptx::shared_address(shared);
  const uint32_t barriers = rings + static_cast<uint32_t>(warps * plan.ring_bytes());
  const uint32_t full = barriers + static_cast<uint32_t>(plan.barrier_bytes());
  const uint32_t empty = full + kMaxStages * 8;
  const uint32_t tiles = rings + static_cast<uint32_t>(bytes_before_x(plan));
  const int stages = batch.stages;
  const LaneStreamDescriptor stream = arguments.descriptors[static_cast<int64_t>(blockIdx.x) * warps + warp];
  if (threadIdx.x == 0) {
    for (int i = 0; i < stages; ++i) {
      ptx::mbarrier_init(full + static_cast<uint32_t>(i) * 8, static_cast<uint32_t>(warps) * 32);
      ptx::mbarrier_init(empty + static_cast<uint32_t>(i) * 8, static_cast<uint32_t>(warps));
    }
  }
  StreamReader<kTiles> reader;
  reader.begin(plan, stream, arguments.data, rings + static_cast<uint32_t>(warp * plan.ring_bytes()),
               barriers + static_cast<uint32_t>(warp * (plan.lookahead + 1) * 8), lane);
  __syncthreads();

  // From here on memory that the preceding kernel wrote or reads is touched: x, y, the workspace.
  ptx::griddepcontrol_wait();
  int group_in_strip = static_cast<int>(stream.first_group) % groups_per_slice;
  const int64_t slice_column = static_cast<int64_t>(slice) * groups_per_slice * (kTiles * kTileColumns);
  TileFetcher<T, kTiles, kTokenTiles> fetcher{{}, group_in_strip * kTiles,
                                              static_cast<int>(stream.group_count) * kTiles};
  // Half the ring is fetched ahead; the other half is how far warps may be apart.
  for (int i = 0; i < stages - stages / 2; ++i) {
    fetcher.fetch(arguments, tiles, full, empty, stages, slice_column, warp, lane);
  }

  float sums[2][kTokenTiles][4] = {};
  const int first_strip = static_cast<int>(stream.first_group) / groups_per_slice * warps + warp;
  int strip = first_strip;
  RingPosition position;
  // This lane's chunk of the first token tile: its token, and its eight columns of the first half tile; those of the
  // second lie four chunks on or back.
  const int token = token_of_column<kTokenTiles>(lane / 4);
  const uint32_t chunk = static_cast<uint32_t>(token * kRowBytes + ((lane % 4) ^ token) * 16);
  // As in lane_stream_linear: a stored part is counted once the next group's refill is on its way.
  int stored_strip = 0, stored_parts = 0;
  while (reader.group < reader.group_count) {
    GroupMasks<kTiles> masks;
    reader.next_group(masks, lane);
    if (stored_parts > 0) {
      combine_parts<T, kTokenTiles>(arguments, stored_strip, stored_parts, lane);
      stored_parts = 0;
    }
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      fetcher.fetch(arguments, tiles, full, empty, stages, slice_column, warp, lane);
      const uint32_t stage = static_cast<uint32_t>(position.stage);
      ptx::mbarrier_wait(full + stage * 8, position.parity);
      const uint32_t x_tile = tiles + stage * (kTokenTiles * 8 * kRowBytes) + chunk;
#pragma unroll
      for (int half_tile = 0; half_tile < 2; ++half_tile) {
        reader.wrap();
        const uint32_t x_half = x_tile ^ static_cast<uint32_t>(half_tile * 64);  // tiles lie on 128 bytes
        uint32_t a[2][2][4];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint32_t mask = masks.word[tile * 2 + half];
          if (half_tile == 0) {
            decode_fragment<0>(mask, reader.even, reader.odd, a[half][0], kAbsentSelector);
            decode_fragment<1>(mask, reader.even, reader.odd, a[half][1], kAbsentSelector);
          } else {
            decode_fragment<2>(mask, reader.even, reader.odd, a[half][0], kAbsentSelector);
            decode_fragment<3>(mask, reader.even, reader.odd, a[half][1], kAbsentSelector);
          }
        }
#pragma unroll
        for (int t = 0; t < kTokenTiles; ++t) {
          const uint4 x = ptx::ld_shared_v4(x_half + static_cast<uint32_t>(t * 8 * kRowBytes));
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            ptx::mma_m16n8k16<T>(sums[half][t], a[half][0], x.x, x.y);
            ptx::mma_m16n8k16<T>(sums[half][t], a[half][1], x.z, x.w);
          }
        }
      }
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(empty + stage * 8);
      position.advance(stages);
    }
    reader.finish_group();
    if (++group_in_strip == groups_per_slice || reader.group == reader.group_count) {
      const int parts_in_slice = strip == first_strip                      ? stream.first_parts
                                 : reader.group == reader.group_count ? stream.last_parts
                                                                      : 1;
      const int part_in_slice = strip == first_strip ? stream.first_part : 0;
      const int parts = plan.k_slices * parts_in_slice;
      if (parts == 1) {
        store_strip<T, kTokenTiles>(arguments, strip, sums, lane);
      } else if (strip < arguments.strips) {
        store_part<kTokenTiles>(arguments, strip, slice * parts_in_slice + part_in_slice, sums, lane);
        stored_strip = strip;
        stored_parts = parts;
      }
#pragma unroll
      for (int f = 0; f < 2 * kTokenTiles; ++f) {
        float* s = sums[f / kTokenTiles][f % kTokenTiles];
        s[0] = s[1] = s[2] = s[3] = 0.f;
      }
      group_in_strip = 0;
      strip += warps;
    }
  }
  if (stored_parts > 0) combine_parts<T, kTokenTiles>(arguments, stored_strip, stored_parts, lane);
#else
  __trap();  // launch_lane_stream_batch refuses such a device
#endif
}

template <typename T, int kTiles, int kTokenTiles>
cudaError_t launch(const LinearArguments& arguments, int64_t shared_limit, bool overlap_launch, cudaStream_t stream) {
  static std::atomic<uint64_t> prepared_devices{0};
  const auto kernel = lane_stream_batch_kernel<T, kTiles, kTokenTiles>;
  if (const cudaError_t error = prepare_kernel(kernel, prepared_devices); error != cudaSuccess) return error;
  const LaneStreamPlan& plan = arguments.plan;
  BatchArguments batch = {arguments, stages_that_fit(plan, kTokenTiles, shared_limit)};
  if (batch.stages == 0 || plan.warps_per_block > max_warps(kTiles, kTokenTiles)) return cudaErrorInvalidValue;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(plan.k_slices * plan.blocks_per_slice));
  config.blockDim = dim3(static_cast<unsigned>(plan.warps_per_block * 32));
  config.dynamicSmemBytes = static_cast<size_t>(bytes_before_x(plan) + batch.stages * stage_bytes(kTokenTiles));
  config.stream = stream;
  cudaLaunchAttribute overlap = {};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &overlap;
  config.numAttrs = overlap_launch ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, batch);
}

// Token tiles that a kernel is built for.
constexpr int kTokenTileCounts[] = {4, 8, 12};

template <typename T, int kTiles>
cudaError_t launch_for_tokens(const LinearArguments& arguments, int64_t shared_limit, bool overlap_launch,
                              cudaStream_t stream) {
  if (arguments.M <= 32) return launch<T, kTiles, 4>(arguments, shared_limit, overlap_launch, stream);
  if (arguments.M <= 64) return launch<T, kTiles, 8>(arguments, shared_limit, overlap_launch, stream);
  return launch<T, kTiles, 12>(arguments, shared_limit, overlap_launch, stream);
}

template <typename T>
cudaError_t launch_for_type(const LinearArguments& arguments, int64_t shared_limit, bool overlap_launch,
                            cudaStream_t stream) {
  switch (arguments.plan.group_tiles) {
    case 2:
      return launch_for_tokens<T, 2>(arguments, shared_limit, overlap_launch, stream);
    case 4:
      return launch_for_tokens<T, 4>(arguments, shared_limit, overlap_launch, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

cudaError_t current_shared_limit(int& limit) {
  int device = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  return cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
}

}  // namespace

int64_t lane_stream_launch_tokens(const LaneStreamPlan& plan, int64_t workspace_bytes) {
  int shared_limit = 0;
  if (current_shared_limit(shared_limit) != cudaSuccess) return kMaxTokens;
  int64_t tokens = kMaxTokens;
  for (const int tiles : kTokenTileCounts) {
    if (plan.warps_per_block <= max_warps(plan.group_tiles, tiles) && stages_that_fit(plan, tiles, shared_limit) > 0 &&
        lane_stream_workspace_bytes(plan, tiles * 8) <= workspace_bytes) {
      tokens = tiles * 8;
    }
  }
  return tokens;
}

cudaError_t launch_lane_stream_batch(const LaneStreamPlan& plan, LaneStreamType type, const uint8_t* data,
                                     const LaneStreamDescriptor* descriptors, const void* x, const void* bias, void* y,
                                     void* workspace, int64_t M, bool overlap_launch, cudaStream_t stream) {
  if (M <= 0 || M > kMaxBatchTokens) return cudaErrorInvalidValue;
  int shared_limit = 0;
  if (const cudaError_t error = current_shared_limit(shared_limit); error != cudaSuccess) return error;
  const LinearArguments arguments = linear_arguments(plan, data, descriptors, x, bias, y, workspace, M);
  return type == LaneStreamType::kHalf
             ? launch_for_type<__half>(arguments, shared_limit, overlap_launch, stream)
             : launch_for_type<__nv_bfloat16>(arguments, shared_limit, overlap_launch, stream);
}

}  // namespace kernels
