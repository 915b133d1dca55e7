// 2:4 weights in memory, and the launchers that pack, unpack and multiply them. The format is specified in
// formats/SEMI_STRUCTURED.md; formats/semi_structured.py is its slow reference.
#pragma once

#include <cstdint>

#include <cuda_runtime.h>

namespace kernels::semi_structured {

constexpr int kRowTiles = 2;  // of 16 rows, in a strip
constexpr int kSteps = 4;     // of 32 columns, in a group
constexpr int kStripRows = 16 * kRowTiles;
constexpr int kGroupColumns = 32 * kSteps;
constexpr int kValueBytes = kRowTiles * kSteps * 512;  // of a group: 16 for each lane, row tile and step
constexpr int kGroupBytes = kValueBytes + 512;         // and 16 bytes of metadata a lane

constexpr int kMaxTokens = 64;  // of one launch
constexpr int kMaxStrips = 1 << 16;

enum class Type { kHalf, kBFloat16 };

// How a launch shares out the groups of an [N, K] matrix. It changes nothing about how the matrix is stored.
//
// Columns are cut into k_slices * k_warps parts of equally many groups (the last ones may have fewer or none). A block
// takes one slice and strips_per_block strips; of its warps, k_warps share a strip, each with its own part, and
// warps / k_warps strips are in work at a time.
struct Plan {
  int64_t N;
  int64_t K;
  int32_t k_slices;
  int32_t strips_per_block;
  int32_t warps;
  int32_t k_warps;
  int32_t x_groups;    // columns of x that lie in shared memory at a time, in groups, for each part
  int32_t ring_slots;  // groups in flight for each warp

  __host__ __device__ int64_t strips() const { return (N + kStripRows - 1) / kStripRows; }
  __host__ __device__ int64_t strip_groups() const { return (K + kGroupColumns - 1) / kGroupColumns; }
  __host__ __device__ int32_t parts() const { return k_slices * k_warps; }
  __host__ __device__ int64_t part_groups() const { return (strip_groups() + parts() - 1) / parts(); }
  __host__ __device__ int64_t row_blocks() const { return (strips() + strips_per_block - 1) / strips_per_block; }
  // Where x of a part does not fit at once it is brought in phases, into two buffers in turn.
  __host__ __device__ int32_t x_phases() const {
    return static_cast<int32_t>((part_groups() + x_groups - 1) / x_groups);
  }
  // A row of x in shared memory; the 16 bytes keep ldmatrix free of bank conflicts.
  __host__ __device__ int32_t x_row_bytes() const { return x_groups * kGroupColumns * 2 + 16; }
  __host__ __device__ int32_t ring_bytes() const { return ring_slots * kGroupBytes; }
  __host__ __device__ int32_t barrier_bytes() const { return (warps * ring_slots * 8 + 127) / 128 * 128; }
};

int64_t data_bytes(int64_t N, int64_t K);
int64_t shared_bytes(const Plan& plan, int64_t M);
int64_t workspace_bytes(const Plan& plan, int64_t M);

// `violations` counts the groups of four with more than two non-zeros; their later elements are left out.
cudaError_t launch_pack(const uint16_t* dense, int64_t N, int64_t K, uint8_t* data, int32_t* violations,
                        cudaStream_t stream);
cudaError_t launch_unpack(const uint8_t* data, int64_t N, int64_t K, uint16_t* dense, cudaStream_t stream);
cudaError_t launch_linear(const Plan& plan, Type type, const uint8_t* data, const void* x, const void* bias, void* y,
                          void* workspace, int64_t M, bool overlap_launch, cudaStream_t stream);

}  // namespace kernels::semi_structured
