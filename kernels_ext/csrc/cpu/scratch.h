// Buffers that outlive a call, so that small ops don't pay for an allocation.
#pragma once

#include <cstddef>

namespace kernels {

// What a buffer is for; each purpose has its own, per thread.
enum class Scratch { kPreparedX, kRows, kAttention, kAttentionStates, kCount };

// At least `bytes` bytes, 64-byte aligned, private to the calling thread, valid until its next call for the
// same purpose. Contents are undefined. A worker may use what the thread that called it obtained.
void* thread_scratch(Scratch purpose, size_t bytes);

}  // namespace kernels
