// Which unprotected node goes first.
//
// An order lists unprotected nodes, coldest first, every node before its parent: so the first is
// always a leaf, and who walks the list meets nodes as they become leaves. Another policy is another
// class with these calls.
#pragma once

#include <cstdint>

#include "core/grow_array.hpp"

namespace pagoda {

// Least recently used, as a linked list. Paths are used deepest node first, which keeps a child
// before its parent.
class LeastRecentlyUsed {
 public:
  // Room for nodes 0 ... n - 1.
  void reserve(int64_t n) {
    links_.reserve(n);
    if (n > links_.size()) links_.extend(n - links_.size());
  }
  void commit(int64_t n) { links_.commit(n); }
  void expect(int64_t n) { links_.reserve(n); }

  // Used just now: the hottest. The node is not listed.
  void add(int32_t node) { link(node, hottest_, -1); }
  // The coldest. The node is not listed.
  void add_coldest(int32_t node) { link(node, -1, coldest_); }
  // Right behind a listed node that is below it.
  void add_upper(int32_t upper, int32_t lower) { link(upper, lower, links_[lower].hotter); }
  // Protected, or gone.
  void remove(int32_t node) {
    const Links at = links_[node];
    (at.colder < 0 ? coldest_ : links_[at.colder].hotter) = at.hotter;
    (at.hotter < 0 ? hottest_ : links_[at.hotter].colder) = at.colder;
  }

  // The first, and the one after a node; -1 when there is none.
  int32_t coldest() const { return coldest_; }
  int32_t after(int32_t node) const { return links_[node].hotter; }

  void prefetch(int32_t node) const { __builtin_prefetch(&links_[node]); }

  void clear() {
    links_.clear();
    coldest_ = hottest_ = -1;
  }

 private:
  struct Links {
    int32_t colder;
    int32_t hotter;
  };

  void link(int32_t node, int32_t colder, int32_t hotter) {
    links_[node] = {colder, hotter};
    (colder < 0 ? coldest_ : links_[colder].hotter) = node;
    (hotter < 0 ? hottest_ : links_[hotter].colder) = node;
  }

  GrowArray<Links> links_;
  int32_t coldest_ = -1;
  int32_t hottest_ = -1;
};

}  // namespace pagoda
