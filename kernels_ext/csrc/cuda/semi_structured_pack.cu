// Packs a dense 16-bit matrix into the 2:4 form, and unpacks it; any architecture.
//
// Work:     one warp a group of 32 rows x 128 columns; a lane gathers the 16 quads that its registers will hold.
// Limits:   any N, K; elements past them are zero. Zeros of either sign are not stored: pruning by a mask leaves -0.0.
// Bound by: memory. The dense side moves 8 bytes a lane, four lanes to a 32-byte sector.
// Tests:    tests/kernels/test_semi_structured_gpu.py holds the result to formats/semi_structured.py byte for byte.
//
// No torch header here: this file takes raw pointers and a stream, returns cudaError_t.
#include "semi_structured.cuh"

namespace kernels::semi_structured {
namespace {

constexpr int kWarpsPerBlock = 4;

struct GroupPlace {
  int64_t index;  // of the group
  int64_t row, column;
};

__device__ GroupPlace group_place(int64_t K, int64_t index) {
  const int64_t strip_groups = (K + kGroupColumns - 1) / kGroupColumns;
  return {index, index / strip_groups * kStripRows, index % strip_groups * kGroupColumns};
}

struct Quad {
  uint16_t element[4];
};

__device__ Quad load_quad(const uint16_t* dense, int64_t N, int64_t K, int64_t row, int64_t column) {
  Quad quad = {};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (row < N && column + i < K) quad.element[i] = dense[row * K + column + i];
  }
  return quad;
}

struct Pair {
  uint32_t values;   // the lower index in the low half
  uint32_t indices;  // two bits each, the lower first; always two different ones in ascending order
  bool too_many;
};

__device__ Pair choose_pair(const Quad& quad) {
  int index[2] = {0, 0}, count = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if ((quad.element[i] & 0x7fff) == 0) continue;
    if (count < 2) index[count] = i;
    ++count;
  }
  uint32_t low = 0, high = 0;
  int low_index = 0, high_index = count == 0 ? 1 : 3;
  if (count >= 2) {
    low_index = index[0];
    high_index = index[1];
    low = quad.element[low_index];
    high = quad.element[high_index];
  } else if (count == 1 && index[0] < 3) {
    low_index = index[0];
    low = quad.element[low_index];
  } else if (count == 1) {
    high = quad.element[3];
  }
  return {low | high << 16, static_cast<uint32_t>(low_index | high_index << 2), count > 2};
}

__global__ void __launch_bounds__(kWarpsPerBlock * 32)
    pack_kernel(const uint16_t* __restrict__ dense, int64_t N, int64_t K, int64_t groups, uint8_t* __restrict__ data,
                int32_t* __restrict__ violations) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kWarpsPerBlock + static_cast<int>(threadIdx.x) / 32;
  if (index >= groups) return;
  const GroupPlace place = group_place(K, index);
  const int quad_row = lane / 4, t = lane % 4;
  uint8_t* const group = data + index * kGroupBytes;
  uint32_t metadata[kRowTiles * kSteps / 2] = {};
  int wrong = 0;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
      uint32_t registers[4];
      uint32_t words[2] = {};  // of the columns' lower and upper half
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const int upper_rows = r % 2, upper_columns = r / 2;
        const Pair pair = choose_pair(load_quad(dense, N, K, place.row + tile * 16 + quad_row + upper_rows * 8,
                                                place.column + step * 32 + (upper_columns * 4 + t) * 4));
        registers[r] = pair.values;
        words[upper_columns] |= pair.indices << (4 * t + 16 * upper_rows);
        wrong += pair.too_many;
      }
      reinterpret_cast<uint4*>(group)[(step * kRowTiles + tile) * 32 + lane] =
          make_uint4(registers[0], registers[1], registers[2], registers[3]);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        words[half] |= __shfl_xor_sync(~0u, words[half], 1);
        words[half] |= __shfl_xor_sync(~0u, words[half], 2);
      }
      // mma.sp reads metadata from two lanes of each quad: 0 and 1 for even steps, 2 and 3 for odd ones.
      if (t / 2 == step % 2) metadata[step / 2 * kRowTiles + tile] = words[t % 2];
    }
  }
  reinterpret_cast<uint4*>(group + kValueBytes)[lane] =
      make_uint4(metadata[0], metadata[1], metadata[2], metadata[3]);
  if (wrong > 0) atomicAdd(violations, wrong);
}

__global__ void __launch_bounds__(kWarpsPerBlock * 32)
    unpack_kernel(const uint8_t* __restrict__ data, int64_t N, int64_t K, int64_t groups,
                  uint16_t* __restrict__ dense) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kWarpsPerBlock + static_cast<int>(threadIdx.x) / 32;
  if (index >= groups) return;
  const GroupPlace place = group_place(K, index);
  const int quad_row = lane / 4, t = lane % 4;
  const uint8_t* const group = data + index * kGroupBytes;
  const uint4 stored = reinterpret_cast<const uint4*>(group + kValueBytes)[lane];
  const uint32_t metadata[4] = {stored.x, stored.y, stored.z, stored.w};
  const bool vectors = K % 4 == 0 && reinterpret_cast<uintptr_t>(dense) % 8 == 0;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
      const uint4 values = reinterpret_cast<const uint4*>(group)[(step * kRowTiles + tile) * 32 + lane];
      const uint32_t registers[4] = {values.x, values.y, values.z, values.w};
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const int upper_rows = r % 2, upper_columns = r / 2;
        const uint32_t word = __shfl_sync(~0u, metadata[step / 2 * kRowTiles + tile],
                                          quad_row * 4 + step % 2 * 2 + upper_columns);
        const uint32_t indices = word >> (4 * t + 16 * upper_rows) & 15u;
        const uint64_t quad = static_cast<uint64_t>(registers[r] & 0xffffu) << (indices % 4 * 16) |
                              static_cast<uint64_t>(registers[r] >> 16) << (indices / 4 * 16);
        const int64_t row = place.row + tile * 16 + quad_row + upper_rows * 8;
        const int64_t column = place.column + step * 32 + (upper_columns * 4 + t) * 4;
        if (row >= N || column >= K) continue;
        uint16_t* const destination = dense + row * K + column;
        if (vectors) {
          *reinterpret_cast<uint64_t*>(destination) = quad;
        } else {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            if (column + i < K) destination[i] = static_cast<uint16_t>(quad >> (i * 16));
          }
        }
      }
    }
  }
}

int64_t group_count(int64_t N, int64_t K) {
  return (N + kStripRows - 1) / kStripRows * ((K + kGroupColumns - 1) / kGroupColumns);
}

unsigned block_count(int64_t groups) { return static_cast<unsigned>((groups + kWarpsPerBlock - 1) / kWarpsPerBlock); }

}  // namespace

int64_t data_bytes(int64_t N, int64_t K) { return group_count(N, K) * kGroupBytes; }

cudaError_t launch_pack(const uint16_t* dense, int64_t N, int64_t K, uint8_t* data, int32_t* violations,
                        cudaStream_t stream) {
  const int64_t groups = group_count(N, K);
  pack_kernel<<<block_count(groups), kWarpsPerBlock * 32, 0, stream>>>(dense, N, K, groups, data, violations);
  return cudaGetLastError();
}

cudaError_t launch_unpack(const uint8_t* data, int64_t N, int64_t K, uint16_t* dense, cudaStream_t stream) {
  const int64_t groups = group_count(N, K);
  unpack_kernel<<<block_count(groups), kWarpsPerBlock * 32, 0, stream>>>(data, N, K, groups, dense);
  return cudaGetLastError();
}

}  // namespace kernels::semi_structured
