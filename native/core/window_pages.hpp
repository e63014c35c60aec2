// Cached pages of one window group: their readers, and which is evicted first.
//
// A page counts its readers: running rows, and steps whose fence has not passed. Pages without readers are listed in
// the order in which their last readers left; pages that can no longer be found come first.
//
// If another row stored the same tokens first, a row keeps its own pages as duplicates of the tree's. They are linked
// to the tree's page, so that a duplicate can replace that page when it is evicted.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/fence_queue.hpp"
#include "core/intrusive_list.hpp"
#include "core/lazy_array.hpp"

namespace pagoda {

class WindowPages {
 public:
  // num_pages is 0 for a group without a window. num_places: of the group's table.
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
  // The page to evict first, and the one after a page; 0 if there is none.
  int32_t first_unread() const { return std::max(0, unread_.first()); }
  int32_t after(int32_t page) const { return std::max(0, unread_.next(page)); }

  void add(int32_t page);                    // the tree takes it, and one row reads it
  void read(int32_t page);                   // adds a reader
  void read(const int32_t* ids, int64_t n);  // adds a reader to each
  void leave(int32_t page, bool is_lost);    // removes a reader; lost pages are listed first
  void forget(int32_t page);                 // the tree gives up a page without readers
  void put_first(int32_t page);              // lists a page without readers first

  // Links a place of the table, which has a row's duplicate, to the tree's page.
  void link_duplicate(int32_t place, int32_t tree_page);
  // Removes the link of a place, if it has one.
  void unlink_duplicate(int32_t place);
  // The place of a duplicate of a page, and the page that a place has a duplicate of; 0 if there is none.
  int32_t duplicate_of(int32_t tree_page) const { return first_duplicate_[tree_page]; }
  int32_t tree_page_at(int32_t place) const { return tree_page_[place]; }
  // Links the duplicates of a page to another page.
  void move_duplicates(int32_t from, int32_t to);
  int64_t num_duplicates() const { return num_duplicates_; }

  FenceQueue<int32_t> leaving;  // readers that leave when their fence has passed

 private:
  LazyArray<int32_t> count_;                                        // [num_pages + 1] readers
  LazyArray<uint8_t> is_cached_;                                    // [num_pages + 1]
  IntrusiveList<LazyArray<ListLink>> unread_;                       // pages without readers
  LazyArray<int32_t> first_duplicate_;                              // [num_pages + 1] places
  LazyArray<int32_t> tree_page_, next_duplicate_, prev_duplicate_;  // [num_places]; 0 if none
  int64_t num_unread_ = 0;
  int64_t num_cached_ = 0;
  int64_t num_duplicates_ = 0;
};

}  // namespace pagoda
