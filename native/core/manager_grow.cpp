// How rows grow: places for tokens, tokens that become known, pages that leave a window, continuations.
#include <algorithm>
#include <cstring>

#include "core/manager.hpp"

namespace pagoda {

int64_t Manager::can_reserve(Ids rows, const Counts& counts) {
  require_rows(rows);
  require_counts(rows, counts, "n");
  for (Group& group : groups_) group.needed = 0;
  for (int64_t i = 0; i < rows.size; ++i) {
    const Row& row = rows_[static_cast<size_t>(rows[i])];
    const int64_t to = row.reserved + counts[i];
    if (to > max_tokens_) return i;
    for (size_t g = 0; g < groups_.size(); ++g) {
      groups_[g].needed += std::max<int64_t>(0, groups_[g].math.pages_for(to) - end(rows[i], g));
    }
    if (!has_room(0, no_locks_)) return i;
  }
  return rows.size;
}

void Manager::reserve(Ids rows, const Counts& counts) {
  require_rows(rows);
  require_counts(rows, counts, "n");
  for (Group& group : groups_) group.needed = 0;
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
    require_room(0, no_locks_);
    grow_writes(writes);
    make_room();
  }
  for (int64_t i = 0; i < rows.size; ++i) row(rows[i]).reserved += static_cast<int32_t>(counts[i]);
  for (const int32_t number : growing_) {
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
  for (int64_t i = 0; i < rows.size; ++i) {
    const Row& row = rows_[static_cast<size_t>(rows[i])];
    sum += counts[i];
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
  for (Group& group : groups_) group.given_up.clear();
  for (int64_t i = 0; i < rows.size; ++i) {
    Row& row = this->row(rows[i]);
    const int64_t n = counts[i], waiting = row.committed - row.stored, all = waiting + n;
    row.committed += static_cast<int32_t>(n);
    if (row.is_stored && all < math_.size()) {
      std::copy_n(next, n, tail(rows[i]) + waiting);
    } else if (all >= math_.size()) {
      if (has_windows_) give_up(rows[i]);
      if (row.is_stored) store_all(rows[i], next, waiting, n);
    }
    next += n;
  }
  if (has_windows_) free_given_up();
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
  for (size_t g = 0; g < groups_.size(); ++g) {
    const Group& group = groups_[g];
    const int32_t* entries = group.entries(number) + first_page * group.num_columns;
    const int64_t live = first(number, g) - first_page * group.num_columns;  // those before are holes
    for (int c = 0; c < group.num_columns; ++c) {
      const size_t column = static_cast<size_t>(group.first_column + c);
      if (live <= 0 && group.num_columns == 1) {
        column_ids_[column] = {entries, n};
        continue;
      }
      auto& ids = columns_[column];
      ids.resize(static_cast<size_t>(n));
      for (int64_t p = 0; p < n; ++p) {
        const int64_t at = p * group.num_columns + c;
        ids[static_cast<size_t>(p)] = at < live ? -1 : entries[at];
      }
      column_ids_[column] = {ids.data(), n};
    }
  }
  const Sequence sequence{request.space, {tokens, math_.first_slot(n)}, request.ranges.empty() ? nullptr : &request.ranges};
  const Inserted done = tree_.insert(sequence, column_ids_, &request.lease, {});
  // What the tree took is no longer the row's.
  const auto hand_over = [&](size_t g, int64_t begin, int64_t to) {
    Group& group = groups_[g];
    uint8_t* own = group.owned(number);
    for (int64_t p = std::max<int64_t>(begin, first(number, g)); p < to; ++p) {
      group.num_own -= own[p];
      own[p] = 0;
    }
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
  // All that its window needs is there: the lease ends where the row's pages do.
  if (done.length != row.stored) broken("row " + text(number) + " stored " + text(done.length) + " tokens only");
}

// Pages that no query from `committed` on reads: the row's own go, those before in the tree are punched.
void Manager::give_up(int64_t number) {
  for (size_t g = 0; g < groups_.size(); ++g) {
    Group& group = groups_[g];
    if (!group.has_window()) continue;
    int32_t& from = first(number, g);
    const int64_t live = std::min<int64_t>(live_from(group, row(number).committed), end(number, g));
    if (live <= from) continue;
    const int32_t* entries = group.entries(number);
    uint8_t* own = group.owned(number);
    bool is_leased = false;
    for (int64_t p = from; p < live; ++p) {
      if (own[p] != 0) {
        own[p] = 0;
        group.given_up.push_back(entries[p]);
      } else {
        is_leased = true;
      }
    }
    if (is_leased) punch(number, g, from, live);
    from = static_cast<int32_t>(live);
  }
}

// Makes holes of a row's leased pages [begin, end) of a group.
void Manager::punch(int64_t number, size_t g, int64_t begin, int64_t end) {
  Group& group = groups_[g];
  for (int c = 0; c < group.num_columns; ++c) {
    const int64_t n = tree_.plan_punch(request(number).lease, group.first_column + c,
                                       math_.first_slot(begin / group.num_columns),
                                       math_.first_slot(end / group.num_columns));
    if (n == 0) continue;
    const size_t before = group.given_up.size();
    group.given_up.resize(before + static_cast<size_t>(n));
    tree_.carry_out_punch(group.given_up.data() + before);
    group.num_own += n;  // free_given_up counts them out again
  }
}

// Where the contents of a page are when the step's copies begin: all sources are read before a target is written.
int32_t Manager::source_of(const Group& group, int32_t page) const {
  const auto at = std::find(group.targets.begin(), group.targets.end(), page);
  return at == group.targets.end() ? page : group.sources[static_cast<size_t>(at - group.targets.begin())];
}

void Manager::fork(int64_t number, int64_t n, int32_t* rows_out) {
  const Row& parent = row_at(number, 0);
  if (!parent.is_stored) {
    throw BadArgument("row " + text(number) + " is of a dropped namespace, or reads invalid pages: release it");
  }
  row_ids_.require(n);
  int64_t writes = 0;
  for (size_t g = 0; g < groups_.size(); ++g) {
    Group& group = groups_[g];
    const int64_t shared = math_.page(parent.stored) * group.num_columns;
    group.needed = n * (group.math.pages_for(parent.committed) - shared);
    writes += n * group.math.pages_for(parent.committed);
  }
  require_room(0, no_locks_);
  grow_writes(writes);
  for (Group& group : groups_) {
    grow(group.sources, group.sources.size() + static_cast<size_t>(group.needed));
    grow(group.targets, group.targets.size() + static_cast<size_t>(group.needed));
  }
  make_room();
  row_ids_.alloc(n, rows_out);
  const Request& origin = request(number);
  for (int64_t i = 0; i < n; ++i) {
    const int64_t child = rows_out[i];
    Request& request = this->request(child);
    request.prompt = origin.prompt;
    request.space = origin.space;
    request.ranges = origin.ranges;
    start(child, tree_.lease_again(origin.lease), parent.stored, parent.committed);
    row(child).committed = parent.committed;
    std::copy_n(tail(number), parent.committed - parent.stored, tail(child));
    for (size_t g = 0; g < groups_.size(); ++g) {
      Group& group = groups_[g];
      take_hit(group, g, child);
      const int64_t shared = end(child, g);
      add_pages(group, g, child, group.math.pages_for(parent.committed));
      for (int64_t p = shared; p < end(child, g); ++p) {
        group.sources.push_back(source_of(group, group.entries(number)[p]));
        group.targets.push_back(group.entries(child)[p]);
      }
    }
  }
}

}  // namespace pagoda
