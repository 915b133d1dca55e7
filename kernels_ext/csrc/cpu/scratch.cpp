#include "scratch.h"

#include <memory>
#include <new>

namespace kernels {
namespace {

constexpr std::align_val_t kAlignment{64};

struct AlignedDelete {
  void operator()(std::byte* p) const { ::operator delete(p, kAlignment); }
};

struct Buffer {
  std::unique_ptr<std::byte, AlignedDelete> data;
  size_t size = 0;
};

}  // namespace

void* thread_scratch(Scratch purpose, size_t bytes) {
  thread_local Buffer buffers[static_cast<size_t>(Scratch::kCount)];
  Buffer& buffer = buffers[static_cast<size_t>(purpose)];
  if (buffer.size < bytes) {
    buffer.data.reset();  // first, so that the old and the new are never held together
    buffer.data.reset(static_cast<std::byte*>(::operator new(bytes, kAlignment)));
    buffer.size = bytes;
  }
  return buffer.data.get();
}

}  // namespace kernels
