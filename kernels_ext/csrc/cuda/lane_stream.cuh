// The lane-stream weight format (formats/LANE_STREAM.md) and the host entries of its kernels.
//
// No torch header here: raw pointers and a stream in, cudaError_t out.
#pragma once

#include <cstdint>

#include <cuda_runtime.h>

namespace kernels {

// Sizes fixed by the format.
constexpr int kStripRows = 32;        // rows of W in a strip: two m16 fragments
constexpr int kTileColumns = 64;      // columns of K in a tile: four k16 steps
constexpr int kRowBytes = 128;        // a row of the value ring: one 32-bit word for each lane
constexpr int kGuardRows = 16;        // most values a lane takes from one stream before it checks for the ring's end
constexpr int kHeaderBytes = 128;     // 32 slot sources, the refill record, zeros up to a full line
constexpr int kRefillOffset = 64;     // of the refill record in the header
constexpr uint32_t kRefillMirror = 1;    // flag: the group's own transfer wrote ring rows that the guard repeats
constexpr uint32_t kRefillExchange = 2;  // flag: from this group on even and odd elements exchange their streams
constexpr int kMaxLookahead = 4;      // transfers in flight ahead of the one being decoded
constexpr int64_t kMaxStrips = 65536;  // of a plan, so N is at most 2097152
constexpr int kMaxWarps = 16;         // warps of a block
constexpr int kMaxTokens = 16;        // tokens of one lane_stream_linear launch
constexpr int kMaxBatchTokens = 96;   // tokens of one lane_stream_batch launch
constexpr int kMinRingRows = kGuardRows;

// How W is cut into streams. Everything below follows from these numbers.
struct LaneStreamPlan {
  int64_t N, K;
  int32_t group_tiles;       // 64-column tiles in a group: 2 or 4
  int32_t k_slices;          // K is cut into this many equal slices of whole groups
  int32_t blocks_per_slice;  // thread blocks that share a slice
  int32_t warps_per_block;   // warp w of a slice's block b owns the slice's stream b * warps_per_block + w; also the
                             // strips of a band
  int32_t lookahead;         // 1..kMaxLookahead
  int32_t ring_rows;         // rows of a warp's value ring

  __host__ __device__ int64_t strips() const { return (N + kStripRows - 1) / kStripRows; }
  __host__ __device__ int32_t group_columns() const { return group_tiles * kTileColumns; }
  // Groups side by side in a slice; the last slice may end in columns past K, which are zero.
  __host__ __device__ int64_t groups_per_slice() const {
    const int64_t slice_columns = int64_t{k_slices} * group_columns();
    return (K + slice_columns - 1) / slice_columns;
  }
  // warps_per_block neighbouring strips form a band; warp w works on its strip w, so that all warps of a block are at
  // the same columns. Strips of the last band may lie past the matrix: they are stored as empty groups.
  __host__ __device__ int64_t bands() const { return (strips() + warps_per_block - 1) / warps_per_block; }
  // A slice's groups, band after band, form one list for each warp, which the slice's blocks share out evenly and in
  // order. There are no more blocks than groups in it, so no stream is empty.
  __host__ __device__ int64_t slice_groups() const { return bands() * groups_per_slice(); }
  __host__ __device__ int32_t streams_per_slice() const { return blocks_per_slice * warps_per_block; }
  __host__ __device__ int64_t streams() const { return int64_t{k_slices} * streams_per_slice(); }
  __host__ __device__ int64_t first_group(int64_t block_in_slice) const {
    return block_in_slice * slice_groups() / blocks_per_slice;
  }
  __host__ __device__ int64_t max_groups_per_stream() const {
    return (slice_groups() + blocks_per_slice - 1) / blocks_per_slice;
  }
  // At most this many blocks of one slice hold groups of one band.
  __host__ __device__ int64_t max_parts_per_slice() const {
    const int64_t least = slice_groups() / blocks_per_slice;
    const int64_t parts = (groups_per_slice() + least - 1) / least + 1;
    return parts < blocks_per_slice ? parts : blocks_per_slice;
  }
  __host__ __device__ int32_t mask_bytes() const { return group_tiles * 2 * kRowBytes; }
  // A transfer's bytes before its value rows.
  __host__ __device__ int32_t head_bytes() const { return kHeaderBytes + mask_bytes(); }
  __host__ __device__ int32_t ring_bytes() const {
    return (ring_rows + kGuardRows) * kRowBytes + (lookahead + 1) * head_bytes();
  }
  __host__ __device__ int32_t barrier_bytes() const { return warps_per_block * (lookahead + 1) * 8; }
};

// One stream, as the kernels find it. 48 bytes, little-endian.
struct LaneStreamDescriptor {
  uint32_t first_group;  // in the list of its slice and warp
  uint32_t group_count;
  uint16_t first_part;   // blocks of the slice before this one that hold groups of this one's first band
  uint16_t first_parts;  // blocks of the slice that hold groups of its first band
  uint16_t last_parts;   // likewise of its last band
  uint16_t reserved;     // 0
  uint16_t lead_rows[kMaxLookahead];   // value rows of transfers 0..lookahead-1
  uint32_t lead_lines[kMaxLookahead];  // where they begin in `data`, in lines of 128 bytes
  uint32_t padding[2];                 // 0
};
static_assert(sizeof(LaneStreamDescriptor) == 48);

enum class LaneStreamType { kHalf, kBFloat16 };

// Bytes a caller must provide for launches of up to `tokens` tokens. All zero before the first launch; every launch
// leaves the counters at its start zero again. Launches that may overlap need one each.
int64_t lane_stream_workspace_bytes(const LaneStreamPlan& plan, int64_t tokens);

// Most tokens that one launch can take on the current device with this workspace; kMaxTokens if no launch of
// lane_stream_batch is possible.
int64_t lane_stream_launch_tokens(const LaneStreamPlan& plan, int64_t workspace_bytes);

// Shared memory of one block of lane_stream_linear for M tokens.
int64_t lane_stream_shared_bytes(const LaneStreamPlan& plan, int64_t M);

// y[M, N] = x[M, K] * W^T (+ bias[N]), M <= kMaxTokens. `overlap_launch` lets the kernel start before its
// predecessor in the stream has finished (programmatic dependent launch): the weight must not be written by
// that predecessor.
cudaError_t launch_lane_stream_linear(const LaneStreamPlan& plan, LaneStreamType type, const uint8_t* data,
                                      const LaneStreamDescriptor* descriptors, const void* x, const void* bias, void* y,
                                      void* workspace, int64_t M, bool overlap_launch, cudaStream_t stream);

// The same for more tokens: kMaxTokens < M <= lane_stream_launch_tokens().
cudaError_t launch_lane_stream_batch(const LaneStreamPlan& plan, LaneStreamType type, const uint8_t* data,
                                     const LaneStreamDescriptor* descriptors, const void* x, const void* bias, void* y,
                                     void* workspace, int64_t M, bool overlap_launch, cudaStream_t stream);

// dense[N, K] = W, 16-bit elements.
cudaError_t launch_lane_stream_unpack(const LaneStreamPlan& plan, const uint8_t* data,
                                      const LaneStreamDescriptor* descriptors, uint16_t* dense, cudaStream_t stream);

// First packing pass. group_rows[stream, g]: value rows of the stream once its transfers 0..g are complete.
// least_rows[stream, g]: rows that every lane has passed when group g begins. Both int32 [streams,
// max_groups_per_stream]; entries past a stream's groups repeat the last one.
cudaError_t launch_lane_stream_measure(const LaneStreamPlan& plan, const uint16_t* dense, int32_t* group_rows,
                                       int32_t* least_rows, cudaStream_t stream);

// Second packing pass: writes every transfer where lines[stream, g] (int32, shaped like group_rows) says. `data` is
// zero beforehand; `plan.ring_rows` is final by now.
cudaError_t launch_lane_stream_encode(const LaneStreamPlan& plan, const uint16_t* dense, const int32_t* group_rows,
                                      const int32_t* lines, uint8_t* data, cudaStream_t stream);

}  // namespace kernels
