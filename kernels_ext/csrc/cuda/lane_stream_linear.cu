// Lane-stream sparse linear for 1 to 16 tokens (decode), sm_90 and newer.
//
//   y[M,N] = x[M,K] * W[N,K]^T (+ bias[N])     x, y, bias fp16 or bf16; W packed (formats/LANE_STREAM.md)
//
// Work:     every warp decodes one stream: a run of groups of 32 rows x 128 or 256 columns of one K slice. Streams
//           are equally long to within one group, whatever the shape and the number of multiprocessors. A block's
//           warps share a slice of K, whose x they hold in shared memory.
// Sums:     a strip of 32 rows whose groups lie in several streams is summed through the workspace: every warp
//           stores its fp32 part, and the one that arrives last adds all parts in a fixed order, so the result does
//           not depend on timing.
// Memory:   shared = warps * plan.ring_bytes() + barriers + x of a slice in fragment order (16 bytes a column for up
//           to 8 tokens, 32 for up to 16). W is read once, by bulk copies, evict-first; x comes from L2.
// Limits:   any N, K; M <= kMaxTokens. x rows on 16 bytes are read as vectors, others element by element.
// Bound by: reads of W at sparsity 0.5 and below: without decoding, a launch takes 94 to 97% of the time (H200, 8192
//           x 28672 and 28672 x 4096, 8 tokens). Decoding issues 4.75 SASS instructions an element, all of the loop
//           counted, and sets the pace from sparsity 0.7 on. Launch, x and the sums cost about 2 us.
// Source:   PTX ISA for m16n8k16's fragment layout; the stream layout is this project's own.
// Tests:    tests/kernels/test_lane_stream_gpu.py
//
// No torch header here: this file takes raw pointers and a stream, returns cudaError_t.
#include "lane_stream_sums.cuh"

namespace kernels {
namespace {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

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

#endif

template <typename T, int kTiles, int kTokenTiles>
__global__ void __launch_bounds__(kMaxWarps * 32, 1)
    lane_stream_linear_kernel(const __grid_constant__ LinearArguments arguments) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
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
  load_x<T, kTokenTiles>(arguments, static_cast<int64_t>(slice) * groups_per_slice * (kTiles * kTileColumns),
                         groups_per_slice * kTiles, x_shared);

  float sums[2][kTokenTiles][4] = {};
  const int first_strip = static_cast<int>(stream.first_group) / groups_per_slice * plan.warps_per_block + warp;
  int strip = first_strip;
  int group_in_strip = static_cast<int>(stream.first_group) % groups_per_slice;
  const uint32_t x_lane = x_shared + static_cast<uint32_t>(lane) * 16;
  // A strip whose part is stored but not counted yet, and its parts. Counting waits until the next group's refill is
  // on its way: the fence in it waits for the stores, and the ring would run dry meanwhile.
  int stored_strip = 0, stored_parts = 0;
  while (reader.group < reader.group_count) {
    GroupMasks<kTiles> masks;
    reader.next_group(masks, lane);
    if (stored_parts > 0) {
      combine_parts<T, kTokenTiles>(arguments, stored_strip, stored_parts, lane);
      stored_parts = 0;
    }
    const uint32_t x_group = x_lane + static_cast<uint32_t>(group_in_strip * (kTiles * 2 * kTokenTiles * 512));
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int half_tile = 0; half_tile < 2; ++half_tile) {
        reader.wrap();
        uint4 x_fragment[kTokenTiles];
#pragma unroll
        for (int t = 0; t < kTokenTiles; ++t) {
          x_fragment[t] =
              ptx::ld_shared_v4(x_group + static_cast<uint32_t>(((tile * 2 + half_tile) * kTokenTiles + t) * 512));
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
      strip += plan.warps_per_block;
    }
  }
  if (stored_parts > 0) combine_parts<T, kTokenTiles>(arguments, stored_strip, stored_parts, lane);
#else
  __trap();  // launch_lane_stream_linear refuses such a device
#endif
}

template <typename T, int kTiles, int kTokenTiles>
cudaError_t launch(const LinearArguments& arguments, bool overlap_launch, cudaStream_t stream) {
  static std::atomic<uint64_t> prepared_devices{0};
  const auto kernel = lane_stream_linear_kernel<T, kTiles, kTokenTiles>;
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

template <typename T>
cudaError_t launch_for_tiles(const LinearArguments& arguments, bool overlap_launch, cudaStream_t stream) {
  const bool one_token_tile = arguments.M <= 8;
  switch (arguments.plan.group_tiles) {
    case 2:
      return one_token_tile ? launch<T, 2, 1>(arguments, overlap_launch, stream)
                            : launch<T, 2, 2>(arguments, overlap_launch, stream);
    case 4:
      return one_token_tile ? launch<T, 4, 1>(arguments, overlap_launch, stream)
                            : launch<T, 4, 2>(arguments, overlap_launch, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace

int64_t lane_stream_workspace_bytes(const LaneStreamPlan& plan, int64_t tokens) {
  const int64_t fragments = 2 * ((tokens + 7) / 8);
  return kCounterBytes +
         plan.strips() * plan.k_slices * plan.max_parts_per_slice() * fragments * 32 * int64_t{sizeof(float4)};
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
  if (M < 0 || M > kMaxTokens) return cudaErrorInvalidValue;
  const LinearArguments arguments = linear_arguments(plan, data, descriptors, x, bias, y, workspace, M);
  return type == LaneStreamType::kHalf ? launch_for_tiles<__half>(arguments, overlap_launch, stream)
                                       : launch_for_tiles<__nv_bfloat16>(arguments, overlap_launch, stream);
}

}  // namespace kernels
