#include "core/window_pages.hpp"

namespace pagoda {

void WindowPages::link(int32_t page, int32_t before) {
  const int32_t after = prev_[before];
  next_[after] = prev_[before] = page;
  prev_[page] = after;
  next_[page] = before;
  ++num_unread_;
}

void WindowPages::unlink(int32_t page) {
  next_[prev_[page]] = next_[page];
  prev_[next_[page]] = prev_[page];
  --num_unread_;
}

void WindowPages::add(int32_t page) {
  is_cached_[page] = 1;
  count_[page] = 1;
  ++num_cached_;
}

void WindowPages::read(int32_t page) {
  if (count_[page]++ == 0) unlink(page);
}

// Pages that were left one after the other are neighbours in the list, and leave it together.
void WindowPages::read(const int32_t* ids, int64_t n) {
  for (int64_t i = 0; i < n;) {
    const int32_t first = ids[i++];
    if (count_[first]++ > 0) continue;
    const int32_t before = prev_[first];
    const int64_t begin = i;
    int32_t after = next_[first];
    for (; i < n && ids[i] == after; ++i) {
      ++count_[ids[i]];
      after = next_[ids[i]];
    }
    next_[before] = after;
    prev_[after] = before;
    num_unread_ -= i - begin + 1;
  }
}

void WindowPages::leave(int32_t page, bool is_lost) {
  if (--count_[page] == 0) link(page, is_lost ? next_[0] : 0);
}

void WindowPages::put_first(int32_t page) {
  unlink(page);
  link(page, next_[0]);
}

void WindowPages::forget(int32_t page) {
  unlink(page);
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
