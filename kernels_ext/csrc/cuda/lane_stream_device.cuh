// Device code shared by the lane-stream kernels that read the format: a warp's ring of value rows, filled by
// bulk copies, and the decoder that turns bitmap words and values into mma A fragments.
//
// A lane's values lie in two streams, one for the even and one for the odd element of each 32-bit fragment
// register, in the order in which the lane needs them. Row r of a ring holds one 32-bit word for each of 32
// slots, one stream in its low half, one in its high half. A slot is a bank of shared memory, so 32 lanes on 32
// slots never conflict, whatever rows they have come to.
#pragma once

#include "lane_stream.cuh"
#include "ptx.cuh"

namespace kernels {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// What a header says about its own group (flags) and the transfer `lookahead` groups on (the rest).
struct Refill {
  uint32_t flags;        // kRefillMirror, kRefillExchange
  uint32_t rows;         // low half: rows that fit before the ring's end; high half: rows that go to its start
  uint32_t ring_offset;  // byte offset in the ring of the first row
  uint32_t line;         // where the transfer begins in `data`, in lines of 128 bytes
};

template <int kTiles>
struct GroupMasks {
  // Word [tile * 2 + half strip]: bit r * 8 + step * 2 + e tells whether element e of register r of the
  // A fragment of k16 step `step` is stored.
  uint32_t word[2 * kTiles];
};

// One warp's view of its stream. All members are warp-uniform but `even` and `odd`.
template <int kTiles>
struct StreamReader {
  static constexpr int kMaskBytes = 2 * kTiles * kRowBytes;
  static constexpr int kHeadBytes = kHeaderBytes + kMaskBytes;

  uint32_t ring, ring_end, ring_size, heads, barriers;
  const uint8_t* data;
  uint64_t policy;
  int lookahead, group_count, group;
  int read_slot, issue_slot;
  uint32_t parity;
  uint32_t even, odd;  // this lane's next value of either stream, a shared address

  // One lane: copies a transfer's head to its slot and its rows to the ring, round its end if need be.
  __device__ void issue(int slot, uint32_t rows_to_end, uint32_t rows_after, uint32_t ring_offset, uint32_t line) {
    const uint32_t barrier = barriers + static_cast<uint32_t>(slot) * 8;
    const uint32_t bytes_to_end = rows_to_end * kRowBytes;
    const uint32_t bytes_after = rows_after * kRowBytes;
    const uint8_t* source = data + uint64_t{line} * kRowBytes;
    ptx::mbarrier_arrive_expect_tx(barrier, kHeadBytes + bytes_to_end + bytes_after);
    ptx::cp_async_bulk(heads + static_cast<uint32_t>(slot * kHeadBytes), source, kHeadBytes, barrier, policy);
    source += kHeadBytes;
    if (rows_to_end) ptx::cp_async_bulk(ring + ring_offset, source, bytes_to_end, barrier, policy);
    if (rows_after) ptx::cp_async_bulk(ring, source + bytes_to_end, bytes_after, barrier, policy);
  }

  // Sets up the ring at `shared` (plan.ring_bytes() of it) and issues the first transfers. Weights are constant,
  // so this runs before the wait for the preceding kernel.
  __device__ void begin(const LaneStreamPlan& plan, const LaneStreamDescriptor& stream, const uint8_t* all_data,
                        uint32_t shared, uint32_t shared_barriers, int lane) {
    ring = shared;
    ring_size = static_cast<uint32_t>(plan.ring_rows * kRowBytes);
    ring_end = ring + ring_size;
    heads = ring_end + kGuardRows * kRowBytes;
    barriers = shared_barriers;
    data = all_data;
    policy = ptx::create_policy_evict_first();
    lookahead = plan.lookahead;
    group_count = static_cast<int>(stream.group_count);
    group = 0;
    read_slot = 0;
    issue_slot = lookahead;
    parity = 0;
    even = ring + static_cast<uint32_t>(lane) * 4;
    odd = even + 2;
    if (ptx::elect_one()) {
#pragma unroll
      for (int i = 0; i <= kMaxLookahead; ++i) {
        if (i <= lookahead) ptx::mbarrier_init(barriers + static_cast<uint32_t>(i) * 8, 1);
      }
      ptx::fence_proxy_async();
      int row = 0;
#pragma unroll
      for (int i = 0; i < kMaxLookahead; ++i) {
        if (i < lookahead && i < group_count) {
          const int rows = stream.lead_rows[i];
          const int rows_to_end = min(rows, plan.ring_rows - row);
          issue(i, static_cast<uint32_t>(rows_to_end), static_cast<uint32_t>(rows - rows_to_end),
                static_cast<uint32_t>(row * kRowBytes), stream.lead_lines[i]);
          row += rows;
          if (row >= plan.ring_rows) row -= plan.ring_rows;
        }
      }
    }
    __syncwarp();
  }

  // Waits for the next group, hands the streams round as its header says, and refills behind it.
  __device__ void next_group(GroupMasks<kTiles>& masks, int lane) {
    ptx::mbarrier_wait(barriers + static_cast<uint32_t>(read_slot) * 8, parity);
    const uint32_t head = heads + static_cast<uint32_t>(read_slot * kHeadBytes);
    const uint32_t sources = ptx::ld_shared_u16(head + static_cast<uint32_t>(lane) * 2);
    const uint4 record = ptx::ld_shared_v4(head + kRefillOffset);
    const Refill refill{record.x, record.y, record.z, record.w};
#pragma unroll
    for (int quad = 0; quad < 2 * kTiles / 4; ++quad) {
      const uint4 v =
          ptx::ld_shared_v4(head + static_cast<uint32_t>(kHeaderBytes + quad * 4 * kRowBytes + lane * 16));
      masks.word[quad * 4] = v.x;
      masks.word[quad * 4 + 1] = v.y;
      masks.word[quad * 4 + 2] = v.z;
      masks.word[quad * 4 + 3] = v.w;
    }
    if (++read_slot > lookahead) {
      read_slot = 0;
      parity ^= 1;
    }
    // The slot refilled here held the group before this one, which every lane has left (finish_group).
    if (group + lookahead < group_count && ptx::elect_one()) {
      issue(issue_slot, refill.rows & 0xffff, refill.rows >> 16, refill.ring_offset, refill.line);
    }
    if (++issue_slot > lookahead) issue_slot = 0;
    ++group;
    // The guard behind the ring repeats the ring's first rows, so that a lane may run past the end between two
    // checks. Nobody needs the guard's old rows: they repeat ring rows that this transfer has replaced.
    if (refill.flags & kRefillMirror) {
#pragma unroll
      for (int i = 0; i < kGuardRows * kRowBytes / 512; ++i) {
        const uint32_t address = ring + static_cast<uint32_t>(i * 512 + lane * 16);
        ptx::st_shared_v4(address + ring_size, ptx::ld_shared_v4(address));
      }
    }
    if (refill.flags & kRefillExchange) {
      const uint32_t low = even;
      even = odd;
      odd = low;
    }
    even = __shfl_sync(~0u, even, static_cast<int>(sources & 31));
    odd = __shfl_sync(~0u, odd, static_cast<int>(sources >> 5));
    __syncwarp();
  }

  // Every lane has taken the group's values: their rows and head may be overwritten.
  __device__ void finish_group() { __syncwarp(); }

  // To be called before every kGuardRows values of a stream.
  __device__ void wrap() {
    even = ptx::subtract_if_at_least(even, ring_end, ring_size);
    odd = ptx::subtract_if_at_least(odd, ring_end, ring_size);
  }
};

// Takes the values of one A fragment (k16 step kStep of a tile, 16 rows): eight elements of this lane.
//
// The mask word's bytes are the fragment's registers. With the step's bits moved to the bytes' signs, where a bit is
// worth 128 = kRowBytes, a dp4a with ones is the distance in bytes that a register's value lies behind the stream's
// pointer: no popcount, no prefix sum. Loads are not predicated; an absent element loads a neighbour's value, and
// its selector takes the zero half of the loaded word instead.
template <int kStep>
__device__ __forceinline__ void decode_fragment(uint32_t mask, uint32_t& even, uint32_t& odd, uint32_t (&a)[4],
                                                uint32_t absent_selector) {
  const uint32_t even_signs = mask << (7 - 2 * kStep);
  const uint32_t odd_signs = mask << (6 - 2 * kStep);
  const uint32_t even_rows = even_signs & 0x80808080u;
  const uint32_t odd_rows = odd_signs & 0x80808080u;
  const uint32_t e0 = ptx::ld_shared_u16(even);
  const uint32_t e1 = ptx::ld_shared_u16(__dp4a(even_rows, 0x1u, even));
  const uint32_t e2 = ptx::ld_shared_u16(__dp4a(even_rows, 0x101u, even));
  const uint32_t e3 = ptx::ld_shared_u16(__dp4a(even_rows, 0x10101u, even));
  const uint32_t o0 = ptx::ld_shared_u16(odd);
  const uint32_t o1 = ptx::ld_shared_u16(__dp4a(odd_rows, 0x1u, odd));
  const uint32_t o2 = ptx::ld_shared_u16(__dp4a(odd_rows, 0x101u, odd));
  const uint32_t o3 = ptx::ld_shared_u16(__dp4a(odd_rows, 0x10101u, odd));
  even = __dp4a(even_rows, 0x1010101u, even);
  odd = __dp4a(odd_rows, 0x1010101u, odd);

  // prmt spreads the signs to whole bytes: one byte per element. Where an element is present, 2 is flipped in both
  // nibbles of its selector byte, which turns "bytes 2 and 3" (zero, the loads are 16 bits wide) of the loaded word
  // into "bytes 0 and 1".
  const uint32_t select01 = ptx::lop3<0x6A>(ptx::prmt(even_signs, odd_signs, 0xD9C8), 0x22222222u, absent_selector);
  const uint32_t select23 = ptx::lop3<0x6A>(ptx::prmt(even_signs, odd_signs, 0xFBEA), 0x22222222u, absent_selector);
  a[0] = ptx::prmt(e0, o0, select01);
  a[1] = ptx::prmt(e1, o1, select01 >> 16);
  a[2] = ptx::prmt(e2, o2, select23);
  a[3] = ptx::prmt(e3, o3, select23 >> 16);
}

// Both selector bytes of two elements that are absent: bytes 3, 2 of the even word, bytes 7, 6 of the odd one.
constexpr uint32_t kAbsentSelector = 0x76327632u;

#endif

}  // namespace kernels
