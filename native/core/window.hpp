// Which tokens of a window are still read. The manager gives up pages by this rule, and layouts size groups by it.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/page_math.hpp"

namespace pagoda {

// The first page of the tree that is read once `committed` tokens are there. It is counted from their last whole page
// in the tree, whose window has to stay whole for whoever resumes there; no later query reads before it. Whole pages of
// the tree, so that all columns of a group keep the same pages.
inline int64_t first_live_page(int64_t committed, int64_t window, const PageMath& tree_pages) {
  const int64_t whole = tree_pages.first_slot(tree_pages.page(committed));
  return tree_pages.page(std::max<int64_t>(0, whole - window + 1));
}

}  // namespace pagoda
