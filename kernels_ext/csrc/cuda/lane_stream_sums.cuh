// What the lane-stream linear kernels share: their arguments, and how the sums of a strip whose groups lie in several
// streams come together in the workspace and go to y.
#pragma once

#include <atomic>

#include "element.cuh"
#include "lane_stream_device.cuh"

namespace kernels {

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
  int32_t strips;
};


// The counters come first, with room for the most strips that a plan may have: layers share a workspace, and one
// layer's partial sums must not lie where another's counters are.
constexpr int64_t kCounterBytes = kMaxStrips * 4;


inline LinearArguments linear_arguments(const LaneStreamPlan& plan, const uint8_t* data,
                                        const LaneStreamDescriptor* descriptors, const void* x, const void* bias,
                                        void* y, void* workspace, int64_t M) {
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
  arguments.strips = static_cast<int32_t>(plan.strips());
  return arguments;
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// Which of its tile's 8 tokens column `column` of an mma's B and D fragments holds. lane_stream_batch reads x from
// rows of 128 swizzled bytes: columns 2i and 2i + 1 are tokens i and i + 4 there, whose chunks lie in other banks.
template <int kTokenTiles>
__device__ __forceinline__ int token_of_column(int column) {
  return kTokenTiles <= 2 ? column : column / 2 + column % 2 * 4;
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

// Writes one finished fragment of a strip, 16 rows by 8 tokens, to y.
template <typename T, int kTokenTiles>
__device__ void store_fragment(const LinearArguments& arguments, int strip, int half, int tile, float4 sums, int lane) {
  const int64_t N = arguments.plan.N;
  const T* bias = static_cast<const T*>(arguments.bias);
  T* y = static_cast<T*>(arguments.y);
#pragma unroll
  for (int upper = 0; upper < 2; ++upper) {
    const int64_t row = static_cast<int64_t>(strip) * kStripRows + half * 16 + upper * 8 + lane / 4;
    if (row >= N) continue;
    const float offset = bias ? to_float(bias[row]) : 0.f;
#pragma unroll
    for (int next = 0; next < 2; ++next) {
      const int token = tile * 8 + token_of_column<kTokenTiles>(lane % 4 * 2 + next);
      const float sum = upper ? (next ? sums.w : sums.z) : (next ? sums.y : sums.x);
      if (token < arguments.M) y[token * N + row] = from_float<T>(sum + offset);
    }
  }
}

// Writes the finished sums of a strip to y.
template <typename T, int kTokenTiles>
__device__ void store_strip(const LinearArguments& arguments, int strip, const float (&sums)[2][kTokenTiles][4],
                            int lane) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int tile = 0; tile < kTokenTiles; ++tile) {
      const float* s = sums[half][tile];
      store_fragment<T, kTokenTiles>(arguments, strip, half, tile, make_float4(s[0], s[1], s[2], s[3]), lane);
    }
  }
}

// Fragments of a strip that one warp adds up at once.
template <int kTokenTiles>
constexpr int kChunkFragments = kTokenTiles == 1 ? 2 : 4;

// Adds all parts of the strip's chunk `chunk`, in their order, and writes y.
template <typename T, int kTokenTiles>
__device__ void add_parts(const LinearArguments& arguments, int strip, int parts, int chunk, int lane) {
  constexpr int kFragments = 2 * kTokenTiles;
  constexpr int kTogether = kChunkFragments<kTokenTiles>;
  const float4* partials = strip_partials<kTokenTiles>(arguments, strip, lane) + chunk * kTogether * 32;
  float4 sums[kTogether] = {};
#pragma unroll(kTokenTiles == 1 ? 8 : 4)  // loads in flight together
  for (int p = 0; p < parts; ++p) {
#pragma unroll
    for (int f = 0; f < kTogether; ++f) {
      const float4 v = __ldcg(partials + (p * kFragments + f) * 32);
      sums[f].x += v.x;
      sums[f].y += v.y;
      sums[f].z += v.z;
      sums[f].w += v.w;
    }
  }
#pragma unroll
  for (int f = 0; f < kTogether; ++f) {
    const int fragment = chunk * kTogether + f;
    store_fragment<T, kTokenTiles>(arguments, strip, fragment / kTokenTiles, fragment % kTokenTiles, sums[f], lane);
  }
}

// Counts this warp's part of a strip as stored; true if it was the last one.
__device__ inline bool arrive_with_part(const LinearArguments& arguments, int strip, int parts, int lane) {
  __syncwarp();
  int arrived = 0;
  if (lane == 0) arrived = ptx::atomic_increment_acq_rel(arguments.arrivals + strip);
  arrived = __shfl_sync(~0u, arrived, 0);
  __syncwarp();  // orders what the others read next after the first lane's addition
  return arrived == parts - 1;
}

// The warp that stores a strip's last part adds all of them up.
template <typename T, int kTokenTiles>
__device__ void combine_parts(const LinearArguments& arguments, int strip, int parts, int lane) {
  if (!arrive_with_part(arguments, strip, parts, lane)) return;
  if (lane == 0) arguments.arrivals[strip] = 0;
#pragma unroll 1
  for (int chunk = 0; chunk < 2 * kTokenTiles / kChunkFragments<kTokenTiles>; ++chunk) {
    add_parts<T, kTokenTiles>(arguments, strip, parts, chunk, lane);
  }
}

#endif

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

}  // namespace kernels
