// Which unprotected node goes first.
//
// An order lists unprotected nodes, coldest first, every node before its parent: so the first is
// always a leaf, and who walks the list meets nodes as they become leaves. Another policy is another
// class with these calls.
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

  // Used just now: the hottest. The node is not listed.
  void add(int32_t node) { list_.add_last(node); }
  // The coldest. The node is not listed.
  void add_coldest(int32_t node) { list_.add_first(node); }
  // Right behind a listed node that is below it.
  void add_upper(int32_t upper, int32_t lower) { list_.insert_after(upper, lower); }
  // Protected, or gone.
  void remove(int32_t node) { list_.remove(node); }

  // The first, and the one after a node; -1 when there is none.
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
