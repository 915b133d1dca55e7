// Lane-stream sparse linear for 1 to 32 tokens (decode), sm_90 and newer.
//
//   y[M,N] = x[M,K] * W[N,K]^T (+ bias[N])     x, y, bias fp16 or bf16; W packed (formats/LANE_STREAM.md)
//
// Work:     every warp decodes one stream: a run of groups of 32 rows x 128 or 256 columns, taken from the list of
//           all groups of one K slice. Streams are equally long to within one group, whatever the shape and the
//           number of multiprocessors. A block's warps share a slice of K, whose x they hold in shared memory.
// Sums:     a strip of 32 rows whose groups lie in several streams is summed through the workspace: every warp
//           stores its fp32 part, and the one that arrives last adds all parts in a fixed order, so the result does
//           not depend on timing.
// Memory:   shared = warps * plan.ring_bytes() + barriers + x of a slice in fragment order (16 bytes a column for up
//           to 8 tokens, 32 for more). W is read once, by bulk copies, evict-first; x comes from L2. Tokens 17 to 32
//           have no room beside the rings: every warp reads theirs from L2, a half tile or two before they are wanted.
// Limits:   any N, K; M <= kMaxTokens. x rows on 16 bytes are read as vectors, others element by element.
// Bound by: reads of W at sparsity 0.5 and below: without decoding, a launch takes 94 to 97% of the time (H200, 8192
//           x 28672 and 28672 x 4096, 8 tokens). Decoding issues 4.75 SASS instructions an element, all of the loop
//           counted, and sets the pace from sparsity 0.7 on. Launch, x and the sums cost about 2 us.
// Source:   PTX ISA for m16n8k16's fragment layout; the stream layout is this project's own.
// Tests:    tests/kernels/test_lane_stream_gpu.py
//
// No torch header here: this file takes raw pointers and a stream, returns cudaError_t.
#include "element.cuh"
#include "lane_stream_device.cuh"

#include <algorithm>
#include <atomic>

namespace kernels {
namespace {

struct LinearArguments {
  LaneStreamPlan plan;
  const uint8_t* data;
  const LaneStreamDescriptor* descriptors;
  const void* x;
  const void* bias;
  void* y;
  int32_t* arrivals;  // [strips], zero between launches
  float4* partials;   // [strips, strip_parts, 2 * token tiles, 32 lanes]
  int32_t M;
  // Of the plan, so that no thread divides 64-bit numbers.
  int32_t groups_per_slice;
  int32_t strip_parts;  // room for the parts of one strip
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// Tokens 8 * tile ... of x as B fragments straight from global memory, for half tiles in the order of a stream.
template <typename T, int kFirstTile, int kCount>
class GlobalTokens {
 public:
  __device__ GlobalTokens(const LinearArguments& arguments, int64_t first_column, int lane)
      : K_(arguments.plan.K), column_(first_column + lane % 4 * 8) {
#pragma unroll
    for (int t = 0; t < kCount; ++t) {
      const int token = (kFirstTile + t) * 8 + lane / 4;
      row_[t] = token < arguments.M ? static_cast<const T*>(arguments.x) + token * K_ : nullptr;
    }
  }

  // The fragments of a half tile that begins `column` columns into the slice; past M or K they are zero.
  __device__ void load(int column, uint4 (&fragment)[kCount]) const {
    const int64_t at = column_ + column;
#pragma unroll
    for (int t = 0; t < kCount; ++t) {
      fragment[t] = row_[t] != nullptr && at < K_ ? *reinterpret_cast<const uint4*>(row_[t] + at) : uint4{0, 0, 0, 0};
    }
  }

 private:
  int64_t K_;
  int64_t column_;
  const T* row_[kCount];
};

template <typename T, int kFirstTile>
class GlobalTokens<T, kFirstTile, 0> {
 public:
  __device__ GlobalTokens(const LinearArguments&, int64_t, int) {}
};

// Brings x[0:M, first_column : first_column + tiles * 64] to shared memory in B-fragment order: 16 bytes a lane for
// each (tile, half tile of 32 columns, token tile of 8). Within a half tile lane (token g, quarter t) takes columns
// t * 8 .. t * 8 + 7; W's columns are permuted alike (formats/LANE_STREAM.md), which leaves the product unchanged.
// Tokens past M and columns past K become zero.
template <typename T, int kTokenTiles>
__device__ void load_x(const LinearArguments& arguments, int64_t first_column, int tiles, uint32_t destination) {
  const int64_t K = arguments.plan.K;
  const T* x = static_cast<const T*>(arguments.x);
  const bool aligned = K % 8 == 0 && reinterpret_cast<uintptr_t>(x) % 16 == 0;
  const int chunks = tiles * 2 * kTokenTiles * 32;
  for (int i = static_cast<int>(threadIdx.x); i < chunks; i += static_cast<int>(blockDim.x)) {
    const int lane = i % 32;
    const int token = (i / 32) % kTokenTiles * 8 + lane / 4;
    const int64_t column = first_column + (i / (32 * kTokenTiles)) * 32 + (lane % 4) * 8;
    const int64_t valid = token < arguments.M ? min(max(K - column, int64_t{0}), int64_t{8}) : 0;
    const T* source = x + (valid > 0 ? token * K + column : 0);
    const uint32_t chunk = destination + static_cast<uint32_t>(i) * 16;
    if (aligned) {
      ptx::cp_async_16(chunk, source, static_cast<int>(valid) * 2);
    } else {
      for (int e = 0; e < 8; ++e) {
        const uint16_t v = e < valid ? reinterpret_cast<const uint16_t*>(source)[e] : uint16_t{0};
        ptx::st_shared_u16(chunk + static_cast<uint32_t>(e) * 2, v);
      }
    }
  }
  ptx::cp_async_wait_all();
  __syncthreads();
}

// Where in the workspace a lane's fragments of a strip's parts lie.
template <int kTokenTiles>
__device__ float4* strip_partials(const LinearArguments& arguments, int strip, int lane) {
  return arguments.partials + static_cast<int64_t>(strip) * arguments.strip_parts * (2 * kTokenTiles * 32) + lane;
}

// Leaves a warp's sums of a strip in the workspace, to be counted by combine_parts.
template <int kTokenTiles>
__device__ void store_part(const LinearArguments& arguments, int strip, int part,
                           const float (&sums)[2][kTokenTiles][4], int lane) {
  constexpr int kFragments = 2 * kTokenTiles;
  float4* partials = strip_partials<kTokenTiles>(arguments, strip, lane);
#pragma unroll
  for (int f = 0; f < kFragments; ++f) {
    const float* s = sums[f / kTokenTiles][f % kTokenTiles];
    __stcg(partials + (part * kFragments + f) * 32, make_float4(s[0], s[1], s[2], s[3]));
  }
}

// Writes the finished sums of a strip to y.
template <typename T, int kTokenTiles>
__device__ void store_strip(const LinearArguments& arguments, int strip, const float (&sums)[2][kTokenTiles][4],
                            int lane) {
  const int64_t N = arguments.plan.N;
  const T* bias = static_cast<const T*>(arguments.bias);
  T* y = static_cast<T*>(arguments.y);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
      const int64_t row = static_cast<int64_t>(strip) * kStripRows + half * 16 + upper * 8 + lane / 4;
      if (row >= N) continue;
      const float offset = bias ? to_float(bias[row]) : 0.f;
#pragma unroll
      for (int tile = 0; tile < kTokenTiles; ++tile) {
#pragma unroll
        for (int next = 0; next < 2; ++next) {
          const int token = tile * 8 + lane % 4 * 2 + next;
          if (token < arguments.M) y[token * N + row] = from_float<T>(sums[half][tile][upper * 2 + next] + offset);
        }
      }
    }
  }
}

// Counts this warp's part of a strip as stored. The warp that stored the last one adds all parts, in their order,
// and writes y.
template <typename T, int kTokenTiles>
__device__ void combine_parts(const LinearArguments& arguments, int strip, int parts, int lane) {
  constexpr int kFragments = 2 * kTokenTiles;
  __syncwarp();
  int arrived = 0;
  if (lane == 0) arrived = ptx::atomic_increment_acq_rel(arguments.arrivals + strip);
  arrived = __shfl_sync(~0u, arrived, 0);
  if (arrived != parts - 1) return;
  if (lane == 0) arguments.arrivals[strip] = 0;
  float sums[2][kTokenTiles][4] = {};
  const float4* partials = strip_partials<kTokenTiles>(arguments, strip, lane);
#pragma unroll(kTokenTiles == 1 ? 8 : kTokenTiles == 2 ? 4 : 1)  // loads in flight together
  for (int p = 0; p < parts; ++p) {
#pragma unroll
    for (int f = 0; f < kFragments; ++f) {
      const float4 v = __ldcg(partials + (p * kFragments + f) * 32);
      float* s = sums[f / kTokenTiles][f % kTokenTiles];
      s[0] += v.x;
      s[1] += v.y;
      s[2] += v.z;
      s[3] += v.w;
    }
  }
  store_strip<T, kTokenTiles>(arguments, strip, sums, lane);
}

#endif

template <typename T, int kTiles, int kSharedTiles, int kGlobalTiles>
__global__ void __launch_bounds__(kMaxWarps * 32, 1)
    lane_stream_linear_kernel(const __grid_constant__ LinearArguments arguments) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  constexpr int kTokenTiles = kSharedTiles + kGlobalTiles;
  constexpr int kHalfTiles = kTiles * 2;  // of a group
  extern __shared__ __align__(128) uint8_t shared[];
  const LaneStreamPlan& plan = arguments.plan;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);  // uniform, and known to be
  const int slice = static_cast<int>(blockIdx.x) / plan.blocks_per_slice;
  const int groups_per_slice = arguments.groups_per_slice;
  ptx::griddepcontrol_launch_dependents();

  const uint32_t rings = ptx::shared_address(shared);
  const uint32_t barriers = rings + static_cast<uint32_t>(plan.warps_per_block * plan.ring_bytes());
  const uint32_t x_shared = (barriers + static_cast<uint32_t>(plan.barrier_bytes()) + 127u) & ~127u;
  const LaneStreamDescriptor stream =
      arguments.descriptors[static_cast<int64_t>(blockIdx.x) * plan.warps_per_block + warp];
  StreamReader<kTiles> reader;
  reader.begin(plan, stream, arguments.data, rings + static_cast<uint32_t>(warp * plan.ring_bytes()),
               barriers + static_cast<uint32_t>(warp * (plan.lookahead + 1) * 8), lane);

  // From here on memory that the preceding kernel wrote or reads is touched: x, y, the workspace.
  ptx::griddepcontrol_wait();
  const int64_t first_column = static_cast<int64_t>(slice) * groups_per_slice * (kTiles * kTileColumns);
  load_x<T, kSharedTiles>(arguments, first_column, groups_per_slice * kTiles, x_shared);

  float sums[2][kTokenTiles][4] = {};
  const int first_strip = static_cast<int>(stream.first_group) / groups_per_slice;
  int strip = first_strip;
  int group_in_strip = static_cast<int>(stream.first_group) % groups_per_slice;
  const uint32_t x_lane = x_shared + static_cast<uint32_t>(lane) * 16;
  // A strip whose part is stored but not counted yet, and its parts. Counting waits until the next group's refill is
  // on its way: the fence in it waits for the stores, and the ring would run dry meanwhile.
  int stored_strip = 0, stored_parts = 0;
  const GlobalTokens<T, kSharedTiles, kGlobalTiles> global_tokens(arguments, first_column, lane);
  constexpr int kAhead = __CUDA_ARCH__ < 1200 ? 2 : 0;  // half tiles; more would not fit the registers
  uint4 x_ahead[2][kGlobalTiles > 0 ? kGlobalTiles : 1];
  if constexpr (kGlobalTiles > 0) {
#pragma unroll
    for (int h = 0; h < kAhead; ++h) {
      global_tokens.load(group_in_strip * (kTiles * kTileColumns) + h * 32, x_ahead[h]);
    }
  }
  while (reader.group < reader.group_count) {
    GroupMasks<kTiles> masks;
    reader.next_group(masks, lane);
    if (stored_parts > 0) {
      combine_parts<T, kTokenTiles>(arguments, stored_strip, stored_parts, lane);
      stored_parts = 0;
    }
    const uint32_t x_group = x_lane + static_cast<uint32_t>(group_in_strip * (kHalfTiles * kSharedTiles * 512));
    const int column = group_in_strip * (kTiles * kTileColumns);
    // After a strip's last group comes the next strip's first.
    const int next_column = group_in_strip + 1 < groups_per_slice ? column + kTiles * kTileColumns : 0;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int half_tile = 0; half_tile < 2; ++half_tile) {
        reader.wrap();
        const int h = tile * 2 + half_tile;
        uint4 x_fragment[kTokenTiles];
#pragma unroll
        for (int t = 0; t < kSharedTiles; ++t) {
          x_fragment[t] = ptx::ld_shared_v4(x_group + static_cast<uint32_t>((h * kSharedTiles + t) * 512));
        }
        if constexpr (kGlobalTiles > 0) {
          if constexpr (kAhead == 0) global_tokens.load(column + h * 32, x_ahead[0]);
#pragma unroll
          for (int t = 0; t < kGlobalTiles; ++t) x_fragment[kSharedTiles + t] = x_ahead[kAhead > 0 ? half_tile : 0][t];
          if constexpr (kAhead > 0) {
            const int ahead = h + kAhead;
            global_tokens.load(ahead < kHalfTiles ? column + ahead * 32 : next_column + (ahead - kHalfTiles) * 32,
                               x_ahead[half_tile]);
          }
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint32_t mask = masks.word[tile * 2 + half];
          uint32_t a[2][4];
          if (half_tile == 0) {
            decode_fragment<0>(mask, reader.even, reader.odd, a[0], kAbsentSelector);
            decode_fragment<1>(mask, reader.even, reader.odd, a[1], kAbsentSelector);
          } else {
            decode_fragment<2>(mask, reader.even, reader.odd, a[0], kAbsentSelector);
            decode_fragment<3>(mask, reader.even, reader.odd, a[1], kAbsentSelector);
          }
#pragma unroll
          for (int t = 0; t < kTokenTiles; ++t) {
            ptx::mma_m16n8k16<T>(sums[half][t], a[0], x_fragment[t].x, x_fragment[t].y);
            ptx::mma_m16n8k16<T>(sums[half][t], a[1], x_fragment[t].z, x_fragment[t].w);
          }
        }
      }
    }
    reader.finish_group();
    if (++group_in_strip == groups_per_slice || reader.group == reader.group_count) {
      // Strips between a stream's first and last are all its own within the slice.
      const int parts_in_slice = strip == first_strip                      ? stream.first_parts
                                 : reader.group == reader.group_count ? stream.last_parts
                                                                      : 1;
      const int part_in_slice = strip == first_strip ? stream.first_part : 0;
      const int parts = plan.k_slices * parts_in_slice;
      if (parts == 1) {
        store_strip<T, kTokenTiles>(arguments, strip, sums, lane);
      } else {
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
      ++strip;
    }
  }
  if (stored_parts > 0) combine_parts<T, kTokenTiles>(arguments, stored_strip, stored_parts, lane);
#else
  __trap();  // launch_lane_stream_linear refuses such a device
#endif
}

// Shared memory a block may ask for is raised once for each kernel and device.
template <typename Kernel>
cudaError_t prepare_kernel(Kernel kernel, std::atomic<uint64_t>& prepared_devices) {
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  const uint64_t bit = device < 64 ? uint64_t{1} << device : 0;
  if (prepared_devices.load(std::memory_order_relaxed) & bit) return cudaSuccess;
  // PTX of an older architecture loads on a new device too, but holds only the trap above.
  cudaFuncAttributes attributes;
  error = cudaFuncGetAttributes(&attributes, kernel);
  if (error != cudaSuccess) return error;
  if (attributes.ptxVersion < 90) return cudaErrorNoKernelImageForDevice;
  int limit = 0;
  error = cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (error != cudaSuccess) return error;
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, limit);
  if (error != cudaSuccess) return error;
  prepared_devices.fetch_or(bit, std::memory_order_relaxed);
  return cudaSuccess;
}

template <typename T, int kTiles, int kSharedTiles, int kGlobalTiles>
cudaError_t launch(const LinearArguments& arguments, bool overlap_launch, cudaStream_t stream) {
  static std::atomic<uint64_t> prepared_devices{0};
  const auto kernel = lane_stream_linear_kernel<T, kTiles, kSharedTiles, kGlobalTiles>;
  if (const cudaError_t error = prepare_kernel(kernel, prepared_devices); error != cudaSuccess) return error;
  const LaneStreamPlan& plan = arguments.plan;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(plan.k_slices * plan.blocks_per_slice));
  config.blockDim = dim3(static_cast<unsigned>(plan.warps_per_block * 32));
  config.dynamicSmemBytes = static_cast<size_t>(lane_stream_shared_bytes(plan, arguments.M));
  config.stream = stream;
  cudaLaunchAttribute overlap = {};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &overlap;
  config.numAttrs = overlap_launch ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, arguments);
}

template <typename T, int kTiles>
cudaError_t launch_for_tokens(const LinearArguments& arguments, bool overlap_launch, cudaStream_t stream) {
  if (arguments.M <= 8) return launch<T, kTiles, 1, 0>(arguments, overlap_launch, stream);
  if constexpr (kTiles == 2) {
    if (arguments.M > kMaxSharedTokens) return launch<T, kTiles, 2, 2>(arguments, overlap_launch, stream);
  }
  return launch<T, kTiles, 2, 0>(arguments, overlap_launch, stream);
}

template <typename T>
cudaError_t launch_for_tiles(const LinearArguments& arguments, bool overlap_launch, cudaStream_t stream) {
  switch (arguments.plan.group_tiles) {
    case 2:
      return launch_for_tokens<T, 2>(arguments, overlap_launch, stream);
    case 4:
      return launch_for_tokens<T, 4>(arguments, overlap_launch, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

// The counters come first, with room for the most strips that a plan may have: layers share a workspace, and one
// layer's partial sums must not lie where another's counters are.
constexpr int64_t kCounterBytes = kMaxStrips * 4;

}  // namespace

int64_t lane_stream_workspace_bytes(const LaneStreamPlan& plan) {
  const int64_t fragments = 2 * (kMaxTokens / 8);
  return kCounterBytes +
         plan.strips() * plan.k_slices * plan.max_parts_per_slice() * fragments * 32 * int64_t{sizeof(float4)};
}

int64_t lane_stream_launch_tokens(const LaneStreamPlan& plan, const void* x) {
  // Tokens past the shared ones are read as vectors. With groups of four tiles the registers do not hold them.
  const bool vectors = plan.K % 8 == 0 && reinterpret_cast<uintptr_t>(x) % 16 == 0;
  return vectors && plan.group_tiles == 2 ? kMaxTokens : kMaxSharedTokens;
}

int64_t lane_stream_shared_bytes(const LaneStreamPlan& plan, int64_t M) {
  const int64_t before_x = int64_t{plan.warps_per_block} * plan.ring_bytes() + plan.barrier_bytes();
  const int64_t token_tiles = M <= 8 ? 1 : 2;
  return (before_x + 127) / 128 * 128 + plan.groups_per_slice() * plan.group_columns() * 16 * token_tiles;
}

cudaError_t launch_lane_stream_linear(const LaneStreamPlan& plan, LaneStreamType type, const uint8_t* data,
                                      const LaneStreamDescriptor* descriptors, const void* x, const void* bias, void* y,
                                      void* workspace, int64_t M, bool overlap_launch, cudaStream_t stream) {
  if (M == 0) return cudaSuccess;
  if (M < 0 || M > lane_stream_launch_tokens(plan, x)) return cudaErrorInvalidValue;
  LinearArguments arguments = {};
  arguments.plan = plan;
  arguments.data = data;
  arguments.descriptors = descriptors;
  arguments.x = x;
  arguments.bias = bias;
  arguments.y = y;
  arguments.arrivals = static_cast<int32_t*>(workspace);
  arguments.partials = reinterpret_cast<float4*>(static_cast<uint8_t*>(workspace) + kCounterBytes);
  arguments.M = static_cast<int32_t>(M);
  arguments.groups_per_slice = static_cast<int32_t>(plan.groups_per_slice());
  arguments.strip_parts = static_cast<int32_t>(plan.k_slices * plan.max_parts_per_slice());
  return type == LaneStreamType::kHalf ? launch_for_tiles<__half>(arguments, overlap_launch, stream)
                                       : launch_for_tiles<__nv_bfloat16>(arguments, overlap_launch, stream);
}

}  // namespace kernels
