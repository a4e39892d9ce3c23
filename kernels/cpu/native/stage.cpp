// See stage.h.
#include "stage.h"

#include <cstdlib>
#include <new>

namespace tokenline {

Scratch::~Scratch() { std::free(memory_); }

void* Scratch::bytes(size_t size) {
  if (size > size_) {
    std::free(memory_);
    size_ = 0;
    const size_t whole_pages = (size + 4095) & ~size_t{4095};
    memory_ = std::aligned_alloc(64, whole_pages);
    if (!memory_) throw std::bad_alloc();
    size_ = whole_pages;
  }
  return memory_;
}

Span Stage::weights(int64_t, int, const int64_t*) const { return {}; }

}  // namespace tokenline
