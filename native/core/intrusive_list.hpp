// A doubly linked list of numbers, each listed at most once. The links are in an array indexed by number, so adding,
// removing and moving take O(1) and allocate nothing.
//
// `Links` is an array of ListLink with operator[]: GrowArray if the numbers grow, LazyArray if their range is fixed.
// The links of a number that is not listed are meaningless.
#pragma once

#include <cstdint>
#include <utility>

namespace pagoda {

struct ListLink {
  int32_t before;
  int32_t after;
};

template <typename Links>
class IntrusiveList {
 public:
  IntrusiveList() = default;
  explicit IntrusiveList(Links links) : links_(std::move(links)) {}

  // The ends, and the neighbours of a listed number; -1 if there is none.
  int32_t first() const { return first_; }
  int32_t last() const { return last_; }
  int32_t next(int32_t number) const { return links_[number].after; }
  int32_t prev(int32_t number) const { return links_[number].before; }
  bool empty() const { return first_ < 0; }

  // Lists a number that is not listed.
  void add_first(int32_t number) { link(number, number, -1, first_); }
  void add_last(int32_t number) { link(number, number, last_, -1); }
  void insert_before(int32_t number, int32_t at) { link(number, number, links_[at].before, at); }
  void insert_after(int32_t number, int32_t at) { link(number, number, at, links_[at].after); }
  void remove(int32_t number) { remove(number, number); }

  // The same for a stretch: the numbers from `begin` to `end`, both included, which are linked to each other in this
  // order. A removed stretch keeps its links and can be added again as a whole.
  void add_first(int32_t begin, int32_t end) { link(begin, end, -1, first_); }
  void add_last(int32_t begin, int32_t end) { link(begin, end, last_, -1); }
  void insert_before(int32_t begin, int32_t end, int32_t at) { link(begin, end, links_[at].before, at); }
  void insert_after(int32_t begin, int32_t end, int32_t at) { link(begin, end, at, links_[at].after); }
  void remove(int32_t begin, int32_t end) {
    const int32_t before = links_[begin].before, after = links_[end].after;
    (before < 0 ? first_ : links_[before].after) = after;
    (after < 0 ? last_ : links_[after].before) = before;
  }

  void prefetch(int32_t number) const { __builtin_prefetch(&links_[number]); }

  // Empties the list.
  void clear() { first_ = last_ = -1; }

  // For making room for more numbers.
  Links& links() { return links_; }

 private:
  void link(int32_t begin, int32_t end, int32_t before, int32_t after) {
    links_[begin].before = before;
    links_[end].after = after;
    (before < 0 ? first_ : links_[before].after) = begin;
    (after < 0 ? last_ : links_[after].before) = end;
  }

  Links links_;
  int32_t first_ = -1;
  int32_t last_ = -1;
};

}  // namespace pagoda
