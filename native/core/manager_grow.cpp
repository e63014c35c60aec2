// How rows grow: slots for tokens, tokens that become known, pages that leave a window.
#include <algorithm>
#include <cstring>
#include <new>

#include "core/manager.hpp"

namespace pagoda {

int64_t Manager::num_reservable(Ids rows, const PerRow& counts) {
  require_rows(rows);
  require_counts(rows, counts, "n");
  Needs needs(groups_.size());
  for (int64_t i = 0; i < rows.size; ++i) {
    const int64_t to = row(rows[i]).reserved + counts[i];
    if (to > max_tokens_) return i;
    for (size_t g = 0; g < groups_.size(); ++g) {
      needs[g].pages += std::max<int64_t>(0, groups_[g].math.pages_for(to) - end(rows[i], g));
    }
    if (!has_room(needs, 0)) return i;
  }
  return rows.size;
}

void Manager::reserve(Ids rows, const PerRow& counts) {
  require_counts(rows, counts, "n");
  Needs needs(groups_.size());
  growing_.clear();
  ++call_;
  for (int64_t i = 0; i < rows.size; ++i) {
    const int64_t to = require_row(rows, i).reserved + counts[i];
    if (to > max_tokens_) {
      throw BadArgument("row " + text(rows[i]) + " would have " + text(to) +
                        " tokens, more than max_tokens = " + text(max_tokens_));
    }
    bool is_growing = false;
    const int32_t* ends = ends_.data() + rows[i] * groups_.size();
    for (size_t g = 0; g < groups_.size(); ++g) {
      const int64_t more = groups_[g].math.pages_for(to) - *ends++;
      if (more <= 0) continue;
      needs[g].pages += more;
      is_growing = true;
    }
    if (is_growing) growing_.push_back(rows[i]);
  }
  if (!growing_.empty()) {
    int64_t writes = 0;
    for (const Need& need : needs) writes += need.pages;
    require_room(needs, 0);
    grow_writes(writes);
    make_room(needs);
  }
  for (int64_t i = 0; i < rows.size; ++i) row(rows[i]).reserved += static_cast<int32_t>(counts[i]);
  // The delta names only rows that get pages. A row that gets slots in pages it already has, and is released before the
  // step is planned, takes no part in it: no step computes those slots.
  constexpr size_t kAhead = 8;  // rows to prefetch: their ends are scattered over the tables
  for (size_t i = 0; i < growing_.size(); ++i) {
    for (size_t g = 0; g < groups_.size() && i + kAhead < growing_.size(); ++g) {
      const int64_t later = growing_[i + kAhead], at = end(later, g);
      __builtin_prefetch(groups_[g].ids(later) + at, 1);
      __builtin_prefetch(groups_[g].owned(later) + at, 1);
    }
    const int32_t number = growing_[i];
    touched_[static_cast<size_t>(number)] = step_;
    const int64_t to = row(number).reserved;
    for (size_t g = 0; g < groups_.size(); ++g) add_pages(groups_[g], g, number, groups_[g].math.pages_for(to));
  }
}

void Manager::add_pages(Group& group, size_t g, int64_t number, int64_t to) {
  const int64_t from = end(number, g), n = to - from;
  if (n <= 0) return;
  int32_t* ids = groups_[g].ids(number) + from;
  group.pages.alloc(n, ids);
  std::fill_n(group.owned(number) + from, n, uint8_t{1});
  group.num_own += n;
  write(g, number, from, ids, n);
  end(number, g) = static_cast<int32_t>(to);
}

void Manager::rollback(Ids rows, const PerRow& counts) {
  require_rows(rows);
  require_counts(rows, counts, "n");
  for (int64_t i = 0; i < rows.size; ++i) {
    const Row& row = this->row(rows[i]);
    if (states_.has_states && counts[i] > 0) require_settled(rows[i], "roll back");
    if (counts[i] > row.reserved - row.committed) {
      throw BadArgument("row " + text(rows[i]) + " has " + text(row.reserved - row.committed) +
                        " tokens reserved and not committed: cannot roll back " + text(counts[i]));
    }
  }
  for (int64_t i = 0; i < rows.size; ++i) {
    Row& row = this->row(rows[i]);
    row.reserved -= static_cast<int32_t>(counts[i]);
    row.computed = std::min(row.computed, row.reserved);
  }
}

void Manager::commit(Ids rows, Ids tokens, const PerRow& counts) {
  require_counts(rows, counts, "counts");
  int64_t sum = 0;
  filling_.clear();
  ++call_;
  for (int64_t i = 0; i < rows.size; ++i) {
    const Row& row = require_row(rows, i);
    sum += counts[i];
    if (row.committed - row.stored + counts[i] >= math_.size()) filling_.push_back(rows[i]);
    if (counts[i] > row.computed - row.committed) {
      throw BadArgument("row " + text(rows[i]) + " has " + text(row.computed - row.committed) +
                        " tokens computed and not committed: cannot commit " + text(counts[i]) + "; plan them first");
    }
  }
  if (sum != tokens.size) {
    throw BadArgument("tokens has " + text(tokens.size) + " entries, but counts add up to " + text(sum));
  }
  if (tokens.size > 0) require_tokens(tokens);
  const int32_t* next = tokens.data;
  size_t num_filled = 0;
  clear_given_up();
  try {
    for (int64_t i = 0; i < rows.size; ++i) {
      Row& row = this->row(rows[i]);
      const int64_t n = counts[i], waiting = row.committed - row.stored, all = waiting + n;
      if (!request(rows[i]).prompt.empty()) compare_prompt(rows[i], next, n);
      if (all >= math_.size()) prefetch_stores(++num_filled);
      if (row.is_stored && all < math_.size()) {
        std::copy_n(next, n, tail(rows[i]) + waiting);
      } else if (row.is_stored) {
        store_all(rows[i], next, waiting, n);
      }
      row.committed += static_cast<int32_t>(n);
      if (row.committed >= row.next_kept) keep_saves(rows[i]);
      if (has_windows_ && all >= math_.size()) give_up(rows[i]);
      next += n;
    }
  } catch (...) {  // no memory for this row: the rows before it are done
    free_given_up();
    throw;
  }
  if (has_windows_) free_given_up();
}

// Rows that fill a page in one step are scattered over memory: without prefetching, waiting for one cache line after
// the other takes most of the time.
void Manager::prefetch_stores(size_t i) const {
  constexpr size_t kRequest = 12, kNode = 8, kAll = 4;  // rows ahead: each stage needs what the one before has fetched
  if (i + kRequest < filling_.size()) __builtin_prefetch(&requests_[static_cast<size_t>(filling_[i + kRequest])]);
  if (i + kNode < filling_.size()) {
    tree_.prefetch_node(requests_[static_cast<size_t>(filling_[i + kNode])].lease);
  }
  if (i + kAll >= filling_.size()) return;
  const int64_t number = filling_[i + kAll];
  tree_.prefetch_tail(requests_[static_cast<size_t>(number)].lease);
  __builtin_prefetch(tails_.data() + number * math_.size());
  const int64_t page = math_.page(rows_[static_cast<size_t>(number)].stored);
  for (size_t g = 0; g < groups_.size(); ++g) {
    const Group& group = groups_[g];
    const int64_t next = page * group.num_columns;
    __builtin_prefetch(groups_[g].ids(number) + next);
    __builtin_prefetch(group.owned(number) + next, 1);
    if (!group.has_window()) continue;
    __builtin_prefetch(groups_[g].ids(number) + first(number, g));
    __builtin_prefetch(group.owned(number) + first(number, g), 1);
  }
}

// Stores the whole pages of a row's tail and the n tokens after it, and keeps the rest as the new tail.
void Manager::store_all(int64_t number, const int32_t* tokens, int64_t waiting, int64_t n) {
  const int64_t num_pages = math_.page(waiting + n), whole = math_.first_slot(num_pages);
  const int32_t* all = tokens;
  if (waiting > 0) {
    joined_.assign(tail(number), tail(number) + waiting);
    joined_.insert(joined_.end(), tokens, tokens + (whole - waiting));
    all = joined_.data();
  }
  store(number, all, num_pages);
  std::copy(tokens + (whole - waiting), tokens + n, tail(number));
}

// Moves whole pages of committed tokens into the tree.
void Manager::store(int64_t number, const int32_t* tokens, int64_t n) {
  Row& row = this->row(number);
  Request& request = this->request(number);
  const int64_t first_page = math_.page(row.stored);
  for (size_t g = 0; g < groups_.size(); ++g) {
    const Group& group = groups_[g];
    const int32_t* ids = groups_[g].ids(number) + first_page * group.num_columns;
    for (int c = 0; c < group.num_columns; ++c) {
      const size_t at = static_cast<size_t>(group.first_column + c);
      auto& column = columns_[at];
      if (group.has_window()) grow(column, static_cast<size_t>(first_page + n));  // for link_duplicates
      if (group.num_columns == 1) {
        column_ids_[at] = {ids, n};
        continue;
      }
      column.resize(static_cast<size_t>(n));
      for (int64_t p = 0; p < n; ++p) column[static_cast<size_t>(p)] = ids[p * group.num_columns + c];
      column_ids_[at] = {column.data(), n};
    }
  }
  const Sequence sequence{
      request.space, {tokens, math_.first_slot(n)}, request.ranges.empty() ? nullptr : &request.ranges};
  const Inserted done = tree_.insert(sequence, column_ids_, &request.lease, {});
  // The row no longer owns what the tree took.
  const auto hand_over = [&](size_t g, int64_t begin, int64_t to) {
    Group& group = groups_[g];
    uint8_t* own = group.owned(number);
    std::fill(own + begin, own + to, uint8_t{0});
    group.num_own -= to - begin;
    if (!group.has_window()) return;
    for (int64_t p = begin; p < to; ++p) group.cached.add(groups_[g].ids(number)[p]);
  };
  const int64_t present = math_.page(done.present);
  for (size_t g = 0; g < groups_.size(); ++g) {
    Group& group = groups_[g];
    hand_over(g, present * group.num_columns, math_.page(done.stored) * group.num_columns);
    if (!done.filled.empty()) {
      for (int c = 0; c < group.num_columns; ++c) {
        for (int32_t page : done.filled[static_cast<size_t>(group.first_column + c)]) {
          const int64_t at = int64_t{page} * group.num_columns + c;
          hand_over(g, at, at + 1);
        }
      }
    }
    if (group.has_window() && present > first_page) link_duplicates(group, number, first_page, present);
  }
  row.stored += static_cast<int32_t>(math_.first_slot(n));
  if (present > first_page) {
    if (request.end_duplicate <= request.first_duplicate) {
      request.first_duplicate = first_page;
      ++num_duplicating_;
    }
    request.end_duplicate = present;
    exchange_duplicates(number);
  }
}

void Manager::exchange_duplicates(int64_t number) noexcept {
  Request& request = this->request(number);
  if (request.end_duplicate <= request.first_duplicate) return;
  // The group of a column, and the page of the row.
  const auto find = [&](int64_t page, int column) {
    size_t g = 0;
    while (column >= groups_[g].first_column + groups_[g].num_columns) ++g;
    return std::pair<size_t, int64_t>(g, page * groups_[g].num_columns + column - groups_[g].first_column);
  };
  const auto offer = [&](int64_t page, int column, int32_t id) {
    const auto [g, p] = find(page, column);
    const Group& group = groups_[g];
    if (p < first(number, g) || p >= end(number, g) || group.owned(number)[p] == 0) return id;
    if (group.has_window() && id > 0 && group.cached.readers(id) > 0) return id;
    return group.ids(number)[p];
  };
  const auto took = [&](int64_t page, int column, int32_t id, int32_t own) {
    const auto [g, p] = find(page, column);
    Group& group = groups_[g];
    group.owned(number)[p] = 0;
    --group.num_own;
    if (group.has_window()) {
      group.cached.unlink_duplicate(group.place(number, p));
      if (id > 0) group.cached.move_duplicates(id, own);
      if (id > 0) group.cached.forget(id);
      group.cached.add(own);
    }
    if (id > 0) group.pages.free({&id, 1}, std::nullopt);
  };
  try {
    request.end_duplicate = std::min(request.end_duplicate, tree_.exchange(request.lease, request.first_duplicate,
                                                                           request.end_duplicate, offer, took));
  } catch (const std::bad_alloc&) {  // no memory for events: the rest stay duplicates
  }
  num_duplicating_ -= request.end_duplicate <= request.first_duplicate;
}

// Links the row's own pages to pages [tree_begin, tree_end) of the tree, which another row stored first.
void Manager::link_duplicates(Group& group, int64_t number, int64_t tree_begin, int64_t tree_end) {
  const uint8_t* own = group.owned(number);
  for (int c = 0; c < group.num_columns; ++c) {
    auto& column = columns_[static_cast<size_t>(group.first_column + c)];
    column.resize(static_cast<size_t>(tree_.length(request(number).lease) / math_.size()));  // memory has been reserved
    tree_.copy_pages(request(number).lease, group.first_column + c, tree_begin, column.data());
    for (int64_t p = tree_begin; p < tree_end; ++p) {
      const int64_t at = p * group.num_columns + c;
      if (own[at] != 0) group.cached.link_duplicate(group.place(number, at), column[static_cast<size_t>(p)]);
    }
  }
}

// Gives up pages that no query from `committed` on reads, and so none of the next step. The row frees its own; the tree
// keeps its pages until memory is needed.
void Manager::give_up(int64_t number) {
  const bool is_touched = this->is_touched(number);
  const int64_t fence = this->fence(is_touched), committed = row(number).committed;
  for (size_t g = 0; g < groups_.size(); ++g) {
    Group& group = groups_[g];
    int32_t& first = this->first(number, g);
    const int64_t from = first, live = std::min<int64_t>(live_from(group, committed), end(number, g));
    if (live <= from) continue;
    const int32_t* ids = groups_[g].ids(number);
    uint8_t* own = group.owned(number);
    // Allocates first: what follows, freeing included, cannot fail.
    auto& given_up = group.given_up[is_touched];
    int64_t num_own = 0;
    for (int64_t p = from; p < live; ++p) num_own += own[p];
    if (num_own > 0) {
      num_own += static_cast<int64_t>(given_up.size());
      grow(given_up, static_cast<size_t>(num_own));
      group.pages.expect(num_own, fence);
    }
    if (fence > passed_) group.cached.leaving.reserve(live - from, fence);
    for (int64_t p = from; p < live;) {
      const int64_t begin = p;
      while (p < live && own[p] == 0) ++p;
      leave(group, ids + begin, p - begin, is_touched);
      for (; p < live && own[p] != 0; ++p) {
        own[p] = 0;
        if (group.cached.num_duplicates() > 0) group.cached.unlink_duplicate(group.place(number, p));
        given_up.push_back(ids[p]);
      }
    }
    first = static_cast<int32_t>(live);
  }
}

void Manager::compare_prompt(int64_t number, const int32_t* tokens, int64_t n) {
  std::vector<int32_t>& prompt = request(number).prompt;
  const int64_t at = row(number).committed;
  const bool goes_on =
      n < static_cast<int64_t>(prompt.size()) - at && std::equal(tokens, tokens + n, prompt.begin() + at);
  if (!goes_on) std::vector<int32_t>().swap(prompt);
}

}  // namespace pagoda
