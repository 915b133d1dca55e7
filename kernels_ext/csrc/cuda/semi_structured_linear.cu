// 2:4 sparse linear for 1 to 64 tokens, sm_90 and newer.
//
//   y[M,N] = x[M,K] * W[N,K]^T (+ bias[N])     x, y, bias fp16 or bf16; W packed (formats/SEMI_STRUCTURED.md)
//
// Work:     a warp takes a strip of 32 rows and a part of K, whose groups lie in memory one after the other, and feeds
//           them to mma.sp as they are: values and metadata are stored in the order of its registers. See Plan.
// Sums:     where K is cut, every warp stores its fp32 part in the workspace, and the one that arrives last adds all
//           parts in a fixed order, so the result does not depend on timing.
// Memory:   shared = warps * ring_slots * 4608 + barriers + x, row by row (k_warps * 8, 16, 32 or 64 rows of x_groups *
//           256 + 16 bytes, twice where x comes in phases). W is read once, by bulk copies, evict-first.
// Limits:   any N, K. x rows on 16 bytes are copied as vectors, others element by element.
// Bound by: reads of W up to 16 tokens; from 32 on by the shared-memory reads of x, 512 bytes for every 32 x 32 of W
//           and 8 tokens.
// Source:   PTX ISA for mma.sp's fragment and metadata layout; the order in memory is this project's own.
// Tests:    tests/kernels/test_semi_structured_gpu.py
//
// No torch header here: this file takes raw pointers and a stream, returns cudaError_t.
#include "element.cuh"
#include "ptx.cuh"
#include "ptx_sparse.cuh"
#include "semi_structured.cuh"

#include <atomic>

namespace kernels::semi_structured {
namespace {

struct LinearArguments {
  Plan plan;
  const uint8_t* data;
  const void* x;
  const void* bias;
  void* y;
  int32_t* arrivals;  // [strips], zero between launches
  float4* partials;   // [strips, parts, kRowTiles * token tiles, 32 lanes]
  int32_t M;
  // Of the plan, so that no thread divides 64-bit numbers.
  int32_t strips;
  int32_t strip_groups;
  int32_t part_groups;
};

// Threads of a block for a token tile count: with 8 the sums alone take 64 registers of a thread.
constexpr int max_threads(int token_tiles) { return token_tiles >= 8 ? 384 : 512; }

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// Starts bringing x of one phase to shared memory, for all parts of the block's slice. Columns past K become zero;
// rows past M are left as they are, since they reach only columns of the product that are not stored.
template <typename T, int kTokenTiles>
__device__ void load_x(const LinearArguments& arguments, int slice, int phase, uint32_t destination) {
  const Plan& plan = arguments.plan;
  const int64_t K = plan.K;
  const T* x = static_cast<const T*>(arguments.x);
  const bool aligned = K % 8 == 0 && reinterpret_cast<uintptr_t>(x) % 16 == 0;
  const int first_group = phase * plan.x_groups;
  const int chunks = min(plan.x_groups, arguments.part_groups - first_group) * (kGroupColumns / 8);
  const int rows = plan.k_warps * arguments.M;
  for (int row = static_cast<int>(threadIdx.x) / 32; row < rows; row += plan.warps) {
    const int k_warp = row / arguments.M;
    const int token = row - k_warp * arguments.M;
    const int64_t part = slice * plan.k_warps + k_warp;
    const int64_t first_column = (part * arguments.part_groups + first_group) * kGroupColumns;
    const uint32_t row_shared =
        destination + static_cast<uint32_t>((k_warp * kTokenTiles * 8 + token) * plan.x_row_bytes());
    for (int c = static_cast<int>(threadIdx.x) % 32; c < chunks; c += 32) {
      const int64_t column = first_column + c * 8;
      const int valid = static_cast<int>(min(max(K - column, int64_t{0}), int64_t{8}));
      const T* source = x + (valid > 0 ? token * K + column : 0);
      const uint32_t chunk = row_shared + static_cast<uint32_t>(c) * 16;
      if (aligned) {
        ptx::cp_async_16(chunk, source, valid * 2);
      } else {
        for (int e = 0; e < 8; ++e) {
          const uint16_t v = e < valid ? reinterpret_cast<const uint16_t*>(source)[e] : uint16_t{0};
          ptx::st_shared_u16(chunk + static_cast<uint32_t>(e) * 2, v);
        }
      }
    }
  }
}

// Writes the finished sums of a strip to y.
template <typename T, int kTokenTiles>
__device__ void store_strip(const LinearArguments& arguments, int strip,
                            const float (&sums)[kRowTiles][kTokenTiles][4], int lane) {
  const int64_t N = arguments.plan.N;
  const T* bias = static_cast<const T*>(arguments.bias);
  T* y = static_cast<T*>(arguments.y);
#pragma unroll
  for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
      const int64_t row = static_cast<int64_t>(strip) * kStripRows + tile * 16 + upper * 8 + lane / 4;
      if (row >= N) continue;
      const float offset = bias ? to_float(bias[row]) : 0.f;
#pragma unroll
      for (int tokens = 0; tokens < kTokenTiles; ++tokens) {
#pragma unroll
        for (int next = 0; next < 2; ++next) {
          const int token = tokens * 8 + lane % 4 * 2 + next;
          if (token < arguments.M) y[token * N + row] = from_float<T>(sums[tile][tokens][upper * 2 + next] + offset);
        }
      }
    }
  }
}

// Leaves a warp's sums of a strip in the workspace and counts them. The warp that comes last adds all parts, in their
// order, and writes y.
template <typename T, int kTokenTiles>
__device__ void combine_parts(const LinearArguments& arguments, int strip, int part,
                              float (&sums)[kRowTiles][kTokenTiles][4], int lane) {
  constexpr int kFragments = kRowTiles * kTokenTiles;
  const int parts = arguments.plan.parts();
  float4* const partials = arguments.partials + static_cast<int64_t>(strip) * parts * (kFragments * 32) + lane;
#pragma unroll
  for (int f = 0; f < kFragments; ++f) {
    const float* s = sums[f / kTokenTiles][f % kTokenTiles];
    __stcg(partials + (part * kFragments + f) * 32, make_float4(s[0], s[1], s[2], s[3]));
  }
  __syncwarp();
  int arrived = 0;
  if (lane == 0) arrived = ptx::atomic_increment_acq_rel(arguments.arrivals + strip);
  arrived = __shfl_sync(~0u, arrived, 0);
  if (arrived != parts - 1) return;
  if (lane == 0) arguments.arrivals[strip] = 0;
#pragma unroll
  for (int f = 0; f < kFragments; ++f) {
    float* s = sums[f / kTokenTiles][f % kTokenTiles];
    s[0] = s[1] = s[2] = s[3] = 0.f;
  }
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

// A warp's groups, brought to its ring by bulk copies in the order in which it uses them.
class GroupReader {
 public:
  // `strip_stride` is how many strips lie between one of the warp's strips and its next.
  __device__ void begin(const LinearArguments& arguments, int first_strip, int strip_count, int strip_stride,
                        int first_group, int groups, uint32_t ring, uint32_t barriers, int lane) {
    ring_ = ring;
    barriers_ = barriers;
    slots_ = arguments.plan.ring_slots;
    groups_ = groups;
    left_ = strip_count * groups;
    source_ = arguments.data +
              (static_cast<int64_t>(first_strip) * arguments.strip_groups + first_group) * kGroupBytes;
    jump_ = (static_cast<int64_t>(strip_stride) * arguments.strip_groups - groups) * kGroupBytes;
    policy_ = ptx::create_policy_evict_first();
    if (lane == 0) {
      for (int slot = 0; slot < slots_; ++slot) ptx::mbarrier_init(barriers_ + static_cast<uint32_t>(slot) * 8, 1);
      ptx::fence_proxy_async();
      for (int slot = 0; slot < slots_; ++slot) refill(slot);
    }
    __syncwarp();
  }

  // Waits for the next group, takes it into registers and refills its slot.
  __device__ void next(uint4 (&values)[kSteps * kRowTiles], uint4& metadata, int lane) {
    ptx::mbarrier_wait(barriers_ + static_cast<uint32_t>(slot_) * 8, parity_);
    const uint32_t group = ring_ + static_cast<uint32_t>(slot_ * kGroupBytes + lane * 16);
    metadata = ptx::ld_shared_v4(group + kValueBytes);
#pragma unroll
    for (int i = 0; i < kSteps * kRowTiles; ++i) values[i] = ptx::ld_shared_v4(group + static_cast<uint32_t>(i) * 512);
    __syncwarp();
    if (lane == 0) refill(slot_);
    if (++slot_ == slots_) {
      slot_ = 0;
      parity_ ^= 1;
    }
  }

 private:
  // Of lane 0 alone, as are the members it changes.
  __device__ void refill(int slot) {
    if (left_ == 0) return;
    --left_;
    const uint32_t barrier = barriers_ + static_cast<uint32_t>(slot) * 8;
    ptx::mbarrier_arrive_expect_tx(barrier, kGroupBytes);
    ptx::cp_async_bulk(ring_ + static_cast<uint32_t>(slot * kGroupBytes), source_, kGroupBytes, barrier, policy_);
    source_ += kGroupBytes;
    if (++in_strip_ == groups_) {
      in_strip_ = 0;
      source_ += jump_;
    }
  }

  const uint8_t* source_;
  int64_t jump_;
  uint64_t policy_;
  uint32_t ring_, barriers_;
  int slots_, groups_, left_;
  int in_strip_ = 0;
  int slot_ = 0;
  uint32_t parity_ = 0;
};

#endif

template <typename T, int kTokenTiles>
__global__ void __launch_bounds__(max_threads(kTokenTiles), 1)
    linear_kernel(const __grid_constant__ LinearArguments arguments) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) uint8_t shared[];
  const Plan& plan = arguments.plan;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);  // uniform, and known to be
  const int k_warp = warp % plan.k_warps, row_warp = warp / plan.k_warps;
  const int row_warps = plan.warps / plan.k_warps;
  const int slice = static_cast<int>(blockIdx.x) % plan.k_slices;
  const int block_strip = static_cast<int>(blockIdx.x) / plan.k_slices * plan.strips_per_block;
  const int block_strips = min(plan.strips_per_block, arguments.strips - block_strip);
  const int part = slice * plan.k_warps + k_warp;
  const int first_group = part * arguments.part_groups;
  const int groups = min(max(arguments.strip_groups - first_group, 0), arguments.part_groups);
  ptx::griddepcontrol_launch_dependents();

  const uint32_t rings = ptx::shared_address(shared);
  const uint32_t barriers = rings + static_cast<uint32_t>(plan.warps * plan.ring_bytes());
  const uint32_t x_shared = barriers + static_cast<uint32_t>(plan.barrier_bytes());
  const uint32_t x_bytes = static_cast<uint32_t>(plan.k_warps * kTokenTiles * 8 * plan.x_row_bytes());
  const int own_strips = block_strips > row_warp ? (block_strips - row_warp + row_warps - 1) / row_warps : 0;
  GroupReader reader;
  reader.begin(arguments, block_strip + row_warp, own_strips, row_warps, first_group, groups,
               rings + static_cast<uint32_t>(warp * plan.ring_bytes()),
               barriers + static_cast<uint32_t>(warp * plan.ring_slots * 8), lane);

  // From here on memory that the preceding kernel wrote or reads is touched: x, y, the workspace.
  ptx::griddepcontrol_wait();
  const int phases = (arguments.part_groups + plan.x_groups - 1) / plan.x_groups;
  const int rounds = (block_strips + row_warps - 1) / row_warps;  // of strips
  const int loads = phases == 1 ? 1 : phases * rounds;
  load_x<T, kTokenTiles>(arguments, slice, 0, x_shared);
  ptx::cp_async_commit_group();
  if (loads > 1) load_x<T, kTokenTiles>(arguments, slice, 1, x_shared + x_bytes);
  ptx::cp_async_commit_group();  // of nothing, perhaps: wait_group<1> below always counts the same number

  const uint32_t x_lane = static_cast<uint32_t>(k_warp * kTokenTiles * 8 * plan.x_row_bytes() +
                                                lane % 8 * plan.x_row_bytes() + lane / 8 * 16);
  const uint32_t x_tile = static_cast<uint32_t>(8 * plan.x_row_bytes());
  int load = 0;
  for (int round = 0; round < rounds; ++round) {
    const bool active = row_warp + round * row_warps < block_strips;
    float sums[kRowTiles][kTokenTiles][4] = {};
    for (int phase = 0; phase < phases; ++phase) {
      if (phases > 1 || round == 0) {
        ptx::cp_async_wait_group<1>();
        __syncthreads();
      }
      const int phase_groups = active ? min(groups - phase * plan.x_groups, plan.x_groups) : 0;
      uint32_t x_group = x_shared + (load & 1 ? x_bytes : 0) + x_lane;
      for (int g = 0; g < phase_groups; ++g) {
        uint4 values[kSteps * kRowTiles], metadata;
        reader.next(values, metadata, lane);
        const uint32_t words[4] = {metadata.x, metadata.y, metadata.z, metadata.w};
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
#pragma unroll
          for (int tokens = 0; tokens < kTokenTiles; ++tokens) {
            const uint4 x_fragment =
                ptx::ldmatrix_x4(x_group + static_cast<uint32_t>(tokens) * x_tile + static_cast<uint32_t>(step) * 64);
#pragma unroll
            for (int tile = 0; tile < kRowTiles; ++tile) {
              const uint4& a = values[step * kRowTiles + tile];
              const uint32_t word = words[step / 2 * kRowTiles + tile];
              if (step % 2 == 0) {
                ptx::mma_sp_m16n8k32<T, 0>(sums[tile][tokens], a, x_fragment, word);
              } else {
                ptx::mma_sp_m16n8k32<T, 1>(sums[tile][tokens], a, x_fragment, word);
              }
            }
          }
        }
        x_group += kGroupColumns * 2;
      }
      if (phases > 1) {
        __syncthreads();  // all warps have read this buffer
        if (load + 2 < loads) {
          load_x<T, kTokenTiles>(arguments, slice, (load + 2) % phases, x_shared + (load & 1 ? x_bytes : 0));
        }
        ptx::cp_async_commit_group();
        ++load;
      }
    }
    if (!active) continue;
    const int strip = block_strip + row_warp + round * row_warps;
    if (plan.parts() == 1) {
      store_strip<T, kTokenTiles>(arguments, strip, sums, lane);
    } else {
      combine_parts<T, kTokenTiles>(arguments, strip, part, sums, lane);
    }
  }
#else
  __trap();  // launch_linear refuses such a device
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

template <typename T, int kTokenTiles>
cudaError_t launch(const LinearArguments& arguments, bool overlap_launch, cudaStream_t stream) {
  static std::atomic<uint64_t> prepared_devices{0};
  const Plan& plan = arguments.plan;
  if (plan.warps * 32 > max_threads(kTokenTiles)) return cudaErrorInvalidValue;
  const auto kernel = linear_kernel<T, kTokenTiles>;
  if (const cudaError_t error = prepare_kernel(kernel, prepared_devices); error != cudaSuccess) return error;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(plan.row_blocks() * plan.k_slices));
  config.blockDim = dim3(static_cast<unsigned>(plan.warps * 32));
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes(plan, arguments.M));
  config.stream = stream;
  cudaLaunchAttribute overlap = {};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &overlap;
  config.numAttrs = overlap_launch ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, arguments);
}

template <typename T>
cudaError_t launch_for_tokens(const LinearArguments& arguments, bool overlap_launch, cudaStream_t stream) {
  if (arguments.M <= 8) return launch<T, 1>(arguments, overlap_launch, stream);
  if (arguments.M <= 16) return launch<T, 2>(arguments, overlap_launch, stream);
  if (arguments.M <= 32) return launch<T, 4>(arguments, overlap_launch, stream);
  return launch<T, 8>(arguments, overlap_launch, stream);
}

int64_t token_tiles(int64_t M) { return M <= 8 ? 1 : M <= 16 ? 2 : M <= 32 ? 4 : 8; }

// The counters come first, with room for the most strips that a plan may have: layers share a workspace, and one
// layer's partial sums must not lie where another's counters are.
constexpr int64_t kCounterBytes = kMaxStrips * 4;

}  // namespace

int64_t shared_bytes(const Plan& plan, int64_t M) {
  const int64_t x_bytes = int64_t{plan.k_warps} * token_tiles(M) * 8 * plan.x_row_bytes();
  return int64_t{plan.warps} * plan.ring_bytes() + plan.barrier_bytes() + x_bytes * (plan.x_phases() > 1 ? 2 : 1);
}

int64_t workspace_bytes(const Plan& plan, int64_t M) {
  const int64_t fragments = kRowTiles * token_tiles(M);
  const int64_t parts = plan.parts() > 1 ? plan.parts() : 0;
  return kCounterBytes + plan.strips() * parts * fragments * 32 * int64_t{sizeof(float4)};
}

cudaError_t launch_linear(const Plan& plan, Type type, const uint8_t* data, const void* x, const void* bias, void* y,
                          void* workspace, int64_t M, bool overlap_launch, cudaStream_t stream) {
  if (M == 0) return cudaSuccess;
  if (M < 0 || M > kMaxTokens) return cudaErrorInvalidValue;
  LinearArguments arguments = {};
  arguments.plan = plan;
  arguments.data = data;
  arguments.x = x;
  arguments.bias = bias;
  arguments.y = y;
  arguments.arrivals = static_cast<int32_t*>(workspace);
  arguments.partials = reinterpret_cast<float4*>(static_cast<uint8_t*>(workspace) + kCounterBytes);
  arguments.M = static_cast<int32_t>(M);
  arguments.strips = static_cast<int32_t>(plan.strips());
  arguments.strip_groups = static_cast<int32_t>(plan.strip_groups());
  arguments.part_groups = static_cast<int32_t>(plan.part_groups());
  return type == Type::kHalf ? launch_for_tokens<__half>(arguments, overlap_launch, stream)
                             : launch_for_tokens<__nv_bfloat16>(arguments, overlap_launch, stream);
}

}  // namespace kernels::semi_structured
