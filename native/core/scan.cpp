#include "core/scan.hpp"

#include <algorithm>

// Compiled for two instruction sets if the loader can choose between them. Not with sanitizers, whose code runs before
// the choice is made.
#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__)
#define PAGODA_WIDE __attribute__((target_clones("avx2", "default")))
#else
#define PAGODA_WIDE
#endif

namespace pagoda {

namespace {

PAGODA_WIDE bool any_outside(const int32_t* entries, int64_t n, int32_t low, int32_t high) {
  int32_t any = 0;
  for (int64_t i = 0; i < n; ++i) any |= (entries[i] < low) | (entries[i] > high);
  return any != 0;
}

}  // namespace

int64_t first_outside(const int32_t* entries, int64_t n, int32_t low, int32_t high) {
  constexpr int64_t kBlock = 4096;
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t size = std::min(kBlock, n - begin);
    if (!any_outside(entries + begin, size, low, high)) continue;
    while (entries[begin] >= low && entries[begin] <= high) ++begin;
    return begin;
  }
  return n;
}

}  // namespace pagoda
