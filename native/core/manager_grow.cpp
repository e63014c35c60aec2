// How rows grow: places for tokens, tokens that become known, pages that leave a window, continuations.
#include <algorithm>
#include <cstring>

#include "core/manager.hpp"

namespace pagoda {

int64_t Manager::can_reserve(Ids rows, const Counts& counts) {
  require_rows(rows);
  require_counts(rows, counts, "n");
  clear_plan();
  for (int64_t i = 0; i < rows.size; ++i) {
    const Row& row = rows_[static_cast<size_t>(rows[i])];
    const int64_t to = row.reserved + counts[i];
    if (to > max_tokens_) return i;
    for (size_t g = 0; g < groups_.size(); ++g) {
      groups_[g].needed += std::max<int64_t>(0, groups_[g].math.pages_for(to) - end(rows[i], g));
    }
    if (!has_room(0)) return i;
  }
  return rows.size;
}

void Manager::reserve(Ids rows, const Counts& counts) {
  require_rows(rows);
  require_counts(rows, counts, "n");
  clear_plan();
  growing_.clear();
  for (int64_t i = 0; i < rows.size; ++i) {
    const int64_t to = row(rows[i]).reserved + counts[i];
    if (to > max_tokens_) {
      throw BadArgument("row " + text(rows[i]) + " would have " + text(to) + " tokens: a row has at most " +
                        text(max_tokens_) + ", as this manager was made");
    }
    bool is_growing = false;
    const int32_t* ends = &end(rows[i], 0);
    for (Group& group : groups_) {
      const int64_t more = group.math.pages_for(to) - *ends++;
      if (more <= 0) continue;
      group.needed += more;
      is_growing = true;
    }
    if (is_growing) growing_.push_back(rows[i]);
  }
  if (!growing_.empty()) {
    int64_t writes = 0;
    for (const Group& group : groups_) writes += group.needed;
    require_room(0);
    grow_writes(writes);
    make_room();
  }
  for (int64_t i = 0; i < rows.size; ++i) row(rows[i]).reserved += static_cast<int32_t>(counts[i]);
  // Only who gets pages stands in the delta. A row that gets places in pages it has already, and is released in this
  // step, is no part of it: nobody computes those places.
  constexpr size_t kAhead = 8;  // rows whose ends are on their way: they lie all over the tables
  for (size_t i = 0; i < growing_.size(); ++i) {
    for (size_t g = 0; g < groups_.size() && i + kAhead < growing_.size(); ++g) {
      const int64_t later = growing_[i + kAhead], at = end(later, g);
      __builtin_prefetch(groups_[g].entries(later) + at, 1);
      __builtin_prefetch(groups_[g].owned(later) + at, 1);
    }
    const int32_t number = growing_[i];
    touched_[static_cast<size_t>(number)] = step_;
    const int64_t to = row(number).reserved;
    for (size_t g = 0; g < groups_.size(); ++g) add_pages(groups_[g], g, number, groups_[g].math.pages_for(to));
  }
}

void Manager::rollback(Ids rows, const Counts& counts) {
  require_rows(rows);
  require_counts(rows, counts, "n");
  for (int64_t i = 0; i < rows.size; ++i) {
    const Row& row = rows_[static_cast<size_t>(rows[i])];
    if (counts[i] > row.reserved - row.committed) {
      throw BadArgument("row " + text(rows[i]) + " has " + text(row.reserved - row.committed) +
                        " tokens that are reserved and not committed, not " + text(counts[i]));
    }
  }
  for (int64_t i = 0; i < rows.size; ++i) row(rows[i]).reserved -= static_cast<int32_t>(counts[i]);
}

void Manager::commit(Ids rows, Ids tokens, const Counts& counts) {
  require_rows(rows);
  require_counts(rows, counts, "counts");
  int64_t sum = 0;
  filling_.clear();
  for (int64_t i = 0; i < rows.size; ++i) {
    const Row& row = rows_[static_cast<size_t>(rows[i])];
    sum += counts[i];
    if (row.committed - row.stored + counts[i] >= math_.size()) filling_.push_back(rows[i]);
    if (counts[i] > row.reserved - row.committed) {
      throw BadArgument("row " + text(rows[i]) + " has " + text(row.reserved - row.committed) +
                        " tokens that are reserved and not committed, not " + text(counts[i]));
    }
  }
  if (sum != tokens.size) {
    throw BadArgument("tokens has " + text(tokens.size) + " entries, and counts add up to " + text(sum));
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
      if (has_windows_ && all >= math_.size()) give_up(rows[i]);
      next += n;
    }
  } catch (...) {  // no memory for this row: those before are done
    free_given_up();
    throw;
  }
  if (has_windows_) free_given_up();
}

// Many rows that fill a page in one step lie all over memory: waiting for one line after the other took most of the
// time.
void Manager::prefetch_stores(size_t i) const {
  constexpr size_t kRequest = 12, kNode = 8, kAll = 4;  // rows ahead: each needs what the one before has fetched
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
    __builtin_prefetch(group.entries(number) + next);
    __builtin_prefetch(group.owned(number) + next, 1);
    if (!group.has_window()) continue;
    __builtin_prefetch(group.entries(number) + first(number, g));
    __builtin_prefetch(group.owned(number) + first(number, g), 1);
  }
}

// Stores whole pages of a row's tail and of n tokens behind it, and keeps the rest as its tail.
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

// Makes pages of the tree out of what is committed behind it.
void Manager::store(int64_t number, const int32_t* tokens, int64_t n) {
  Row& row = this->row(number);
  Request& request = this->request(number);
  const int64_t first_page = math_.page(row.stored);
  for (const Group& group : groups_) {
    const int32_t* entries = group.entries(number) + first_page * group.num_columns;
    for (int c = 0; c < group.num_columns; ++c) {
      const size_t column = static_cast<size_t>(group.first_column + c);
      if (group.num_columns == 1) {
        column_ids_[column] = {entries, n};
        continue;
      }
      auto& ids = columns_[column];
      ids.resize(static_cast<size_t>(n));
      for (int64_t p = 0; p < n; ++p) ids[static_cast<size_t>(p)] = entries[p * group.num_columns + c];
      column_ids_[column] = {ids.data(), n};
    }
  }
  const Sequence sequence{
      request.space, {tokens, math_.first_slot(n)}, request.ranges.empty() ? nullptr : &request.ranges};
  const Inserted done = tree_.insert(sequence, column_ids_, &request.lease, {});
  // What the tree took is no longer the row's.
  const auto hand_over = [&](size_t g, int64_t begin, int64_t to) {
    Group& group = groups_[g];
    uint8_t* own = group.owned(number);
    std::fill(own + begin, own + to, uint8_t{0});
    group.num_own -= to - begin;
    if (!group.has_window()) return;
    for (int64_t p = begin; p < to; ++p) group.readers.add(group.entries(number)[p]);
  };
  for (size_t g = 0; g < groups_.size(); ++g) {
    const Group& group = groups_[g];
    hand_over(g, math_.page(done.present) * group.num_columns, math_.page(done.stored) * group.num_columns);
    if (done.filled.empty()) continue;
    for (int c = 0; c < group.num_columns; ++c) {
      for (int32_t page : done.filled[static_cast<size_t>(group.first_column + c)]) {
        const int64_t at = int64_t{page} * group.num_columns + c;
        hand_over(g, at, at + 1);
      }
    }
  }
  row.stored += static_cast<int32_t>(math_.first_slot(n));
  request.copied.clear();
}

// Pages that no query from `committed` on reads, so also none of the step being planned. The row's own go; the tree
// keeps its own until there is no room.
void Manager::give_up(int64_t number) {
  const bool is_touched = this->is_touched(number);
  const int64_t fence = this->fence(is_touched), committed = row(number).committed;
  int32_t* firsts = &first(number, 0);
  const int32_t* ends = &end(number, 0);
  for (Group& group : groups_) {
    int32_t& first = *firsts++;
    const int64_t from = first, live = std::min<int64_t>(live_from(group, committed), *ends++);
    if (live <= from) continue;
    const int32_t* entries = group.entries(number);
    uint8_t* own = group.owned(number);
    // Memory is asked for: what follows, and freeing them, does not fail.
    auto& given_up = group.given_up[is_touched];
    int64_t num_own = 0;
    for (int64_t p = from; p < live; ++p) num_own += own[p];
    if (num_own > 0) {
      num_own += static_cast<int64_t>(given_up.size());
      grow(given_up, static_cast<size_t>(num_own));
      group.pages.expect(num_own, fence);
    }
    if (fence > passed_) group.readers.leaving.reserve(live - from, fence);
    for (int64_t p = from; p < live; ++p) {
      if (own[p] != 0) {
        own[p] = 0;
        given_up.push_back(entries[p]);
      } else {
        leave(group, entries[p], is_touched);
      }
    }
    first = static_cast<int32_t>(live);
  }
}

void Manager::fork(int64_t number, int64_t n, int32_t* rows_out) {
  const Row& parent = row_at(number, 0);
  if (!parent.is_stored) {
    throw BadArgument("row " + text(number) +
                      " is not cached: it was admitted so, its namespace was dropped, or it reads invalid pages; "
                      "release it");
  }
  require_row_ids(n);
  clear_plan();
  int64_t writes = 0;
  for (size_t g = 0; g < groups_.size(); ++g) {
    Group& group = groups_[g];
    const int64_t shared = math_.page(parent.stored) * group.num_columns;
    const uint8_t* own = group.owned(number);
    group.needed = n * (group.math.pages_for(parent.committed) - shared);
    if (group.has_window())
      group.needed += n * std::count(own + std::min<int64_t>(first(number, g), shared), own + shared, 1);
    writes += n * group.math.pages_for(parent.committed);
  }
  require_room(0);
  // Memory is asked for: what follows does not fail, but for evictions, which come first.
  const Request& origin = request(number);
  std::vector<Request> requests(static_cast<size_t>(n));
  int64_t copies = 0;
  grow_writes(writes);
  grow_columns(math_.page(parent.stored));
  for (Group& group : groups_) {
    grow(group.sources, group.sources.size() + static_cast<size_t>(group.needed));
    grow(group.targets, group.targets.size() + static_cast<size_t>(group.needed));
    copies += group.needed / n;
  }
  for (Request& request : requests) {
    request.copied.reserve(origin.copied.size() + static_cast<size_t>(copies));
    request = origin;
  }
  tree_.reserve_leases(n);
  make_room();
  row_ids_.alloc(n, rows_out);
  touched_[static_cast<size_t>(number)] = step_;
  for (int64_t i = 0; i < n; ++i) {
    const int64_t child = rows_out[i];
    request(child) = std::move(requests[static_cast<size_t>(i)]);
    start(child, tree_.lease_again(origin.lease), parent.stored, parent.committed);
    row(child).committed = parent.committed;
    std::copy_n(tail(number), parent.committed - parent.stored, tail(child));
    for (size_t g = 0; g < groups_.size(); ++g) inherit(groups_[g], g, number, child);
  }
}

// Gives a continuation the pages of its parent: those of the tree are shared. Of a page that the tree had from somebody
// else first, the tree's own is taken; windows may have lost it there, and what is not in the tree yet is the parent's
// alone: these are copied.
void Manager::inherit(Group& group, size_t g, int64_t parent, int64_t child) {
  const int64_t shared = math_.page(row(parent).stored) * group.num_columns, from = first(parent, g);
  const int64_t to = group.math.pages_for(row(parent).committed);
  const int32_t* theirs = group.entries(parent);
  const uint8_t* own = group.owned(parent);
  int32_t* entries = group.entries(child);
  if (!group.has_window()) {
    take_hit(group, g, child);
  } else {
    std::fill_n(entries, from, 0);
    std::fill_n(group.owned(child), shared, uint8_t{0});
    first(child, g) = static_cast<int32_t>(from);
  }
  const auto copy = [&](int64_t p) {
    group.pages.alloc(1, entries + p);
    group.owned(child)[p] = 1;
    ++group.num_own;
    // Where the contents are when the step's copies begin: all sources are read before a target is written.
    const int32_t copied = group.source_of[theirs[p]], source = copied != 0 ? copied : theirs[p];
    group.sources.push_back(source);
    group.targets.push_back(entries[p]);
    group.source_of[entries[p]] = source;
    request(child).copied.emplace_back(group.number, theirs[p]);
    write(group, child, p, entries + p, 1);
  };
  for (int64_t p = from; p < shared && group.has_window(); ++p) {
    if (own[p] != 0) {
      copy(p);
      continue;
    }
    entries[p] = theirs[p];
    group.readers.read(entries[p]);
    write(group, child, p, entries + p, 1);
  }
  for (int64_t p = std::max(from, shared); p < to; ++p) copy(p);
  end(child, g) = static_cast<int32_t>(to);
}

void Manager::compare_prompt(int64_t number, const int32_t* tokens, int64_t n) {
  std::vector<int32_t>& prompt = request(number).prompt;
  const int64_t at = row(number).committed;
  const bool goes_on =
      n < static_cast<int64_t>(prompt.size()) - at && std::equal(tokens, tokens + n, prompt.begin() + at);
  if (!goes_on) std::vector<int32_t>().swap(prompt);
}

}  // namespace pagoda
