// Which unprotected node is evicted first.
//
// An order lists unprotected nodes, coldest first, every node before its parent. So the first is always a leaf, and a
// walk over the list meets each node when it has become a leaf. Another policy is another class with the same calls.
#pragma once

#include <cstdint>

#include "core/grow_array.hpp"
#include "core/intrusive_list.hpp"

namespace pagoda {

// Least recently used. Paths are used deepest node first, which keeps a child before its parent.
class LeastRecentlyUsed {
 public:
  // Room for nodes 0 ... n - 1.
  void reserve(int64_t n) {
    auto& links = list_.links();
    links.reserve(n);
    if (n > links.size()) links.extend(n - links.size());
  }
  void commit(int64_t n) { list_.links().commit(n); }
  void expect(int64_t n) { list_.links().reserve(n); }

  // Adds a node that is not listed as the hottest.
  void add(int32_t node) { list_.add_last(node); }
  // Adds a node that is not listed as the coldest.
  void add_coldest(int32_t node) { list_.add_first(node); }
  // Adds a node right after a listed node below it.
  void add_upper(int32_t upper, int32_t lower) { list_.insert_after(upper, lower); }
  // Removes a node that becomes protected or is freed.
  void remove(int32_t node) { list_.remove(node); }

  // The first node, and the one after a node; -1 if there is none.
  int32_t coldest() const { return list_.first(); }
  int32_t after(int32_t node) const { return list_.next(node); }

  void prefetch(int32_t node) const { list_.prefetch(node); }

  void clear() {
    list_.links().clear();
    list_.clear();
  }

 private:
  IntrusiveList<GrowArray<ListLink>> list_;
};

}  // namespace pagoda
