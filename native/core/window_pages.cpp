#include "core/window_pages.hpp"

namespace pagoda {

void WindowPages::add(int32_t page) {
  is_cached_[page] = 1;
  count_[page] = 1;
  ++num_cached_;
}

void WindowPages::read(int32_t page) {
  if (count_[page]++ > 0) return;
  unread_.remove(page);
  --num_unread_;
}

// Pages that lost their readers one after the other are adjacent in the list and are removed together.
void WindowPages::read(const int32_t* ids, int64_t n) {
  for (int64_t i = 0; i < n;) {
    const int64_t begin = i;
    if (count_[ids[i++]]++ > 0) continue;
    while (i < n && ids[i] == unread_.next(ids[i - 1])) ++count_[ids[i++]];
    unread_.remove(ids[begin], ids[i - 1]);
    num_unread_ -= i - begin;
  }
}

void WindowPages::leave(int32_t page, bool is_lost) {
  if (--count_[page] > 0) return;
  ++num_unread_;
  if (is_lost) {
    unread_.add_first(page);
  } else {
    unread_.add_last(page);
  }
}

void WindowPages::put_first(int32_t page) {
  unread_.remove(page);
  unread_.add_first(page);
}

void WindowPages::forget(int32_t page) {
  unread_.remove(page);
  --num_unread_;
  is_cached_[page] = 0;
  --num_cached_;
}

void WindowPages::link_duplicate(int32_t place, int32_t tree_page) {
  tree_page_[place] = tree_page;
  const int32_t next = first_duplicate_[tree_page];
  next_duplicate_[place] = next;
  prev_duplicate_[place] = 0;
  if (next != 0) prev_duplicate_[next] = place;
  first_duplicate_[tree_page] = place;
  ++num_duplicates_;
}

void WindowPages::unlink_duplicate(int32_t place) {
  const int32_t page = tree_page_[place];
  if (page == 0) return;
  const int32_t next = next_duplicate_[place], prev = prev_duplicate_[place];
  (prev == 0 ? first_duplicate_[page] : next_duplicate_[prev]) = next;
  if (next != 0) prev_duplicate_[next] = prev;
  tree_page_[place] = 0;
  --num_duplicates_;
}

void WindowPages::move_duplicates(int32_t from, int32_t to) {
  for (int32_t place = first_duplicate_[from]; place != 0; place = next_duplicate_[place]) tree_page_[place] = to;
  first_duplicate_[to] = first_duplicate_[from];
  first_duplicate_[from] = 0;
}

}  // namespace pagoda
