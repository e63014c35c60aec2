// Which tokens of a window are still read. The manager gives up pages by this rule, and layouts use it to size groups.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/page_math.hpp"

namespace pagoda {

// The first page of the tree that is still read once `committed` tokens are committed. The window is counted back from
// the end of their last whole page of the tree, so that a request that resumes there finds it complete; no later query
// reads before it. The unit is whole pages of the tree, so that all columns of a group keep the same pages.
inline int64_t first_live_page(int64_t committed, int64_t window, const PageMath& tree_pages) {
  const int64_t whole = tree_pages.first_slot(tree_pages.page(committed));
  return tree_pages.page(std::max<int64_t>(0, whole - window + 1));
}

}  // namespace pagoda
