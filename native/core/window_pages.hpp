// Pages of one window group that the tree holds: who reads them, and which goes first when the group is short.
//
// A page counts its readers: running rows, and steps whose fence has not passed. Pages without readers are listed, the
// one whose last reader went first at the head; pages that can no longer be found stand before all others.
//
// A row whose tokens another row stored first keeps pages of its own, its duplicates of the tree's. They are linked to
// the tree's page, so that when that one is evicted the row's takes its place and nothing is lost.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/fence_queue.hpp"
#include "core/intrusive_list.hpp"
#include "core/lazy_array.hpp"

namespace pagoda {

class WindowPages {
 public:
  // num_pages 0: the group has no window, and nothing is kept. num_places: of the group's table.
  WindowPages(int64_t num_pages, int64_t num_places)
      : count_(num_pages + 1),
        is_cached_(num_pages + 1),
        unread_(LazyArray<ListLink>(num_pages + 1)),
        first_duplicate_(num_pages + 1),
        tree_page_(num_pages > 0 ? num_places : 0),
        next_duplicate_(num_pages > 0 ? num_places : 0),
        prev_duplicate_(num_pages > 0 ? num_places : 0) {}

  int64_t num_cached() const { return num_cached_; }
  int64_t num_unread() const { return num_unread_; }
  int32_t readers(int32_t page) const { return count_[page]; }
  bool is_cached(int32_t page) const { return is_cached_[page] != 0; }
  // The page to evict first, 0 for none, and the one behind another.
  int32_t first_unread() const { return std::max(0, unread_.first()); }
  int32_t after(int32_t page) const { return std::max(0, unread_.next(page)); }

  void add(int32_t page);                    // the tree takes it, and a row reads it
  void read(int32_t page);                   // one reader more
  void read(const int32_t* ids, int64_t n);  // of each
  void leave(int32_t page, bool is_lost);    // one less; what cannot be found is listed first
  void forget(int32_t page);                 // the tree gives it up; nobody reads it
  void put_first(int32_t page);              // of those that nobody reads

  // The page at a place of the table is a row's duplicate of a page of the tree.
  void link_duplicate(int32_t place, int32_t tree_page);
  // It is no longer, if it was.
  void unlink_duplicate(int32_t place);
  // The place of a duplicate of this page, 0 for none; and the page that a place has a duplicate of.
  int32_t duplicate_of(int32_t tree_page) const { return first_duplicate_[tree_page]; }
  int32_t tree_page_at(int32_t place) const { return tree_page_[place]; }
  // The duplicates of a page are those of another now.
  void move_duplicates(int32_t from, int32_t to);
  int64_t num_duplicates() const { return num_duplicates_; }

  FenceQueue<int32_t> leaving;  // readers that leave when their fence has passed

 private:
  LazyArray<int32_t> count_;                                        // [num_pages + 1] readers
  LazyArray<uint8_t> is_cached_;                                    // [num_pages + 1]
  IntrusiveList<LazyArray<ListLink>> unread_;                       // pages that nobody reads
  LazyArray<int32_t> first_duplicate_;                              // [num_pages + 1] places
  LazyArray<int32_t> tree_page_, next_duplicate_, prev_duplicate_;  // [num_places]; 0: none
  int64_t num_unread_ = 0;
  int64_t num_cached_ = 0;
  int64_t num_duplicates_ = 0;
};

}  // namespace pagoda
