// Slots, pages and offsets of one page size. Powers of two are shifted: a 64-bit division costs ten times as much, and
// a step makes thousands.
#pragma once

#include <cstdint>

namespace pagoda {

class PageMath {
 public:
  explicit PageMath(int64_t page_tokens)
      : size_(page_tokens), shift_((page_tokens & (page_tokens - 1)) == 0 ? __builtin_ctzll(page_tokens) : -1) {}

  int64_t size() const { return size_; }
  // The page of a slot, or the page number of a position; -1 for a negative slot.
  int64_t page(int64_t slot) const { return shift_ >= 0 ? slot >> shift_ : slot >= 0 ? slot / size_ : -1; }
  int64_t first_slot(int64_t page) const { return page * size_; }
  int64_t offset(int64_t slot) const { return slot - page(slot) * size_; }
  // How many pages hold this many tokens.
  int64_t pages_for(int64_t tokens) const { return page(tokens + size_ - 1); }

 private:
  int64_t size_;
  int shift_;
};

}  // namespace pagoda
