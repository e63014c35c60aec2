// How rows begin: admission with the longest cached prefix, and forks of running rows.
#include <algorithm>
#include <limits>

#include "core/manager.hpp"

namespace pagoda {

namespace {

// Length of the prefix over which two sequences have the same extra keys.
int64_t common_keys(const std::vector<KeyRange>& a, const std::vector<KeyRange>& b) {
  constexpr int64_t kNone = std::numeric_limits<int64_t>::max();
  for (size_t i = 0; i < a.size() || i < b.size(); ++i) {
    const int64_t x = i < a.size() ? a[i].begin : kNone, y = i < b.size() ? b[i].begin : kNone;
    if (x != y || a[i].key != b[i].key) return std::min(x, y);
    if (a[i].end != b[i].end) return std::min(a[i].end, b[i].end);
  }
  return kNone;
}

}  // namespace

Manager::Admission Manager::find_hit(const Prompt& prompt) {
  const Ids tokens = prompt.sequence.tokens;
  if (tokens.size == 0) throw BadArgument("tokens: give at least one");
  if (tokens.size > max_tokens_) {
    throw BadArgument("tokens: " + text(tokens.size) + " exceed max_tokens = " + text(max_tokens_) +
                      ": shorten the prompt");
  }
  const int64_t most = prompt.most_hit();
  require_tokens(tokens, most);  // the match checks the tokens it covers
  Admission plan;
  tree_.match({prompt.sequence.space, {tokens.data, most}, prompt.sequence.ranges}, plan.match, nullptr);
  const Match& match = plan.match;
  plan.target = prompt.reserve < 0 ? tokens.size : match.length + prompt.reserve;
  if (plan.target > max_tokens_) {
    throw BadArgument("reserve: a hit of " + text(match.length) + " and " + text(prompt.reserve) +
                      " tokens exceed max_tokens = " + text(max_tokens_));
  }
  const int64_t unlocked = tree_.count_unlocked(match);
  plan.needs.resize(groups_.size());
  for (size_t g = 0; g < groups_.size(); ++g) {
    const Group& group = groups_[g];
    Need& need = plan.needs[g];
    const int64_t hit = group.math.page(match.length);
    need.pages = group.math.pages_for(plan.target) - hit;
    if (!group.has_window()) {
      need.locked = group.math.page(unlocked);
      continue;
    }
    // Readers are checked page by page only if it matters.
    const int64_t read = hit - live_from(group, match.length);
    need.locked = need.pages + watermark_ + read <= available(group, need) ? read : count_unread(group, match);
  }
  if (states_.has_states && prompt.store) plan.cuts = plan_cuts(prompt, match);
  return plan;
}

int64_t Manager::count_unread(const Group& group, const Match& match) {
  const int64_t first = live_from(group, match.length) / group.num_columns, end = math_.page(match.length);
  int64_t n = 0;
  for (int c = group.first_column; c < group.first_column + group.num_columns; ++c) {
    auto& ids = columns_[static_cast<size_t>(c)];
    ids.resize(static_cast<size_t>(end));
    tree_.copy_pages(match, c, first, ids.data());
    for (int64_t p = first; p < end; ++p) n += group.cached.readers(ids[static_cast<size_t>(p)]) == 0;
  }
  return n;
}

bool Manager::can_admit(const Prompt& prompt) {
  const Admission plan = find_hit(prompt);
  return row_ids_.num_free() > 0 && has_room(plan.needs, watermark_);
}

Manager::Admitted Manager::admit(const Prompt& prompt) {
  Admission plan = find_hit(prompt);
  require_row_ids(1);
  require_room(plan.needs, watermark_);

  // From here on only allocations can fail, and they come first.
  const Sequence& sequence = prompt.sequence;
  std::vector<int32_t> tokens;
  if (prompt.store) tokens.assign(sequence.tokens.data, sequence.tokens.data + sequence.tokens.size);
  std::string space(sequence.space);
  std::vector<KeyRange> ranges;
  if (sequence.ranges != nullptr) ranges = *sequence.ranges;
  int64_t writes = 0;
  for (const Group& group : groups_) writes += group.math.pages_for(plan.target);
  grow_writes(writes);
  std::vector<int32_t> cuts;
  if (states_.has_states) {
    cuts.reserve(plan.cuts.size());
    for (auto cut = plan.cuts.rbegin(); cut != plan.cuts.rend(); ++cut) cuts.push_back(cut->length);
    restores_.grow(1);
    grow(resets_, resets_.size() + 1);
  }
  const int64_t hit = plan.match.length;
  grow_columns(math_.page(hit));
  const LeaseId lease = tree_.lock_fresh(plan.match);

  int32_t number;
  row_ids_.alloc(1, &number);
  Request& request = this->request(number);
  request.prompt.swap(tokens);
  request.space.swap(space);
  request.ranges.swap(ranges);
  start(number, lease, hit, plan.target);
  row(number).is_stored = prompt.store;
  const size_t num_writes = places_.size();
  for (size_t g = 0; g < groups_.size(); ++g) take_hit(groups_[g], g, number);  // leased: it is not evicted below
  try {
    make_room(plan.needs);
  } catch (...) {
    abandon(number, num_writes);
    throw;
  }
  for (size_t g = 0; g < groups_.size(); ++g) {
    add_pages(groups_[g], g, number, groups_[g].math.pages_for(plan.target));
  }
  if (states_.has_states) start_state(number, prompt, plan.match, std::move(plan.cuts));
  ++admitted_;
  tokens_ += sequence.tokens.size;
  hits_ += hit;
  return {number, hit, plan.target, std::move(cuts)};
}

void Manager::start(int64_t number, LeaseId lease, int64_t length, int64_t reserved) {
  const int32_t known = static_cast<int32_t>(length);
  row(number) = {static_cast<int32_t>(reserved), known, known, known, kNever, kNever, true, true, 0};
  request(number).lease = lease;
  touched_[static_cast<size_t>(number)] = step_;
}

void Manager::abandon(int32_t number, size_t num_writes) {
  for (size_t g = 0; g < groups_.size(); ++g) {
    Group& group = groups_[g];
    for (int64_t p = first(number, g); group.has_window() && p < end(number, g); ++p) {
      let_go(group, groups_[g].ids(number)[p]);
    }
  }
  places_.resize(num_writes);
  page_ids_.resize(num_writes);
  tree_.release(request(number).lease);
  clear(number);
  touched_[static_cast<size_t>(number)] = 0;
  row_ids_.free({&number, 1}, std::nullopt);
}

// Writes the leased pages of a row into a table. Window groups start at the first page that the next query reads.
void Manager::take_hit(Group& group, size_t g, int64_t number) {
  const Row& row = this->row(number);
  const LeaseId lease = request(number).lease;
  const int64_t tree_pages = math_.page(row.stored), n = tree_pages * group.num_columns;
  const int64_t first = live_from(group, row.committed), tree_first = first / group.num_columns;
  int32_t* ids = groups_[g].ids(number);
  if (group.num_columns == 1) {
    tree_.copy_pages(lease, group.first_column, first, ids);
  } else {
    for (int c = 0; c < group.num_columns; ++c) {
      auto& column = columns_[static_cast<size_t>(group.first_column + c)];
      column.resize(static_cast<size_t>(tree_pages));
      tree_.copy_pages(lease, group.first_column + c, tree_first, column.data());
      for (int64_t p = tree_first; p < tree_pages; ++p) {
        ids[p * group.num_columns + c] = column[static_cast<size_t>(p)];
      }
    }
  }
  if (group.has_window()) group.cached.read(ids + first, n - first);
  write(g, number, first, ids + first, n - first);
  this->first(number, g) = static_cast<int32_t>(first);
  end(number, g) = static_cast<int32_t>(n);
}

int64_t Manager::hit(const Sequence& sequence) const {
  require_tokens(sequence.tokens);
  return tree_.match_length({sequence.space, {sequence.tokens.data, sequence.tokens.size - 1}, sequence.ranges});
}

Manager::Pending Manager::pending(const Sequence& sequence) const {
  const int64_t n = sequence.tokens.size;
  Pending best{0, hit(sequence)};
  const std::vector<KeyRange> no_ranges;
  for (int64_t number = 1; number <= num_rows_; ++number) {
    const Row& row = this->row(number);
    const Request& request = this->request(number);
    if (!row.is_running || !row.is_stored || row.reserved <= best.length || request.space != sequence.space) continue;
    const auto& prompt = request.prompt;
    const int64_t keys = common_keys(sequence.ranges == nullptr ? no_ranges : *sequence.ranges, request.ranges);
    const int64_t most = std::min({n - 1, int64_t{row.reserved}, static_cast<int64_t>(prompt.size()), keys});
    if (most <= best.length || most <= row.committed) continue;
    const auto end = std::mismatch(prompt.begin(), prompt.begin() + most, sequence.tokens.data).first;
    int64_t same = math_.first_slot(math_.page(end - prompt.begin()));
    if (states_.has_states) same = last_planned(number, same);
    // Its committed tokens can be found already, or cannot be resumed from any more.
    if (same > best.length && same > row.committed) best = {number, same};
  }
  return best;
}

void Manager::fork(int64_t number, int64_t n, int32_t* rows_out) {
  const Row& parent = row_at(number, 0);
  if (!parent.is_stored) {
    throw BadArgument("row " + text(number) +
                      " cannot be forked, because its tokens are not cached: it was admitted with store=False, its "
                      "namespace was dropped, or it reads invalidated pages");
  }
  if (states_.has_states) require_settled(number, "fork");
  require_row_ids(n);
  Needs needs(groups_.size());
  int64_t writes = 0;
  for (size_t g = 0; g < groups_.size(); ++g) {
    const Group& group = groups_[g];
    const int64_t shared = math_.page(parent.stored) * group.num_columns;
    const uint8_t* own = group.owned(number);
    needs[g].pages = n * (group.math.pages_for(parent.committed) - shared);
    if (group.has_window()) {
      needs[g].pages += n * std::count(own + std::min<int64_t>(first(number, g), shared), own + shared, 1);
    }
    writes += n * group.math.pages_for(parent.committed);
  }
  require_room(needs, 0);
  // Allocates first: after that only evictions can fail, and they come next.
  const Request& origin = request(number);
  std::vector<Request> requests(static_cast<size_t>(n));
  int64_t copies = 0;
  grow_writes(writes);
  grow_columns(math_.page(parent.stored));
  for (size_t g = 0; g < groups_.size(); ++g) {
    Group& group = groups_[g];
    grow(group.sources, group.sources.size() + static_cast<size_t>(needs[g].pages));
    grow(group.targets, group.targets.size() + static_cast<size_t>(needs[g].pages));
    copies += needs[g].pages / n;
  }
  for (Request& request : requests) {
    request.copies.reserve(origin.copies.size() + static_cast<size_t>(copies));
    request.copies = origin.copies;
    request.space = origin.space;
    request.ranges = origin.ranges;
  }
  if (states_.has_states) {
    grow(state_sources_, state_sources_.size() + static_cast<size_t>(n));
    grow(state_targets_, state_targets_.size() + static_cast<size_t>(n));
  }
  tree_.reserve_leases(n);
  make_room(needs);
  row_ids_.alloc(n, rows_out);
  touched_[static_cast<size_t>(number)] = step_;
  for (int64_t i = 0; i < n; ++i) {
    const int64_t child = rows_out[i];
    request(child) = std::move(requests[static_cast<size_t>(i)]);
    start(child, tree_.lease_again(origin.lease), parent.stored, parent.committed);
    row(child).committed = row(child).computed = parent.committed;
    std::copy_n(tail(number), parent.committed - parent.stored, tail(child));
    for (size_t g = 0; g < groups_.size(); ++g) inherit(groups_[g], g, number, child);
    if (states_.has_states) start_fork_state(number, child);
  }
}

// Gives a fork the pages of its parent. Pages of the tree are shared; if the parent has a duplicate, the fork takes the
// tree's page. Pages that only the parent has are copied: those not in the tree yet, and duplicates whose original has
// left the tree.
void Manager::inherit(Group& group, size_t g, int64_t parent, int64_t child) {
  const int64_t shared = math_.page(row(parent).stored) * group.num_columns, from = first(parent, g);
  const int64_t to = group.math.pages_for(row(parent).committed);
  const int32_t* theirs = group.ids(parent);
  const uint8_t* own = group.owned(parent);
  int32_t* ids = group.ids(child);
  if (!group.has_window()) {
    take_hit(group, g, child);
  } else {
    std::fill_n(ids, from, 0);
    std::fill_n(group.owned(child), shared, uint8_t{0});
    first(child, g) = static_cast<int32_t>(from);
  }
  const auto copy = [&](int64_t p) {
    group.pages.alloc(1, ids + p);
    group.owned(child)[p] = 1;
    ++group.num_own;
    // The page that has the contents when the step's copies begin: all sources are read before a target is written.
    const int32_t copied = group.source_of[theirs[p]], source = copied != 0 ? copied : theirs[p];
    group.sources.push_back(source);
    group.targets.push_back(ids[p]);
    group.source_of[ids[p]] = source;
    request(child).copies.push_back({group.number, theirs[p], ids[p]});
    write(g, child, p, ids + p, 1);
  };
  for (int64_t p = from; p < shared && group.has_window(); ++p) {
    if (own[p] != 0) {
      copy(p);
      if (const int32_t page = group.cached.tree_page_at(group.place(parent, p)); page != 0) {
        group.cached.link_duplicate(group.place(child, p), page);
      }
      continue;
    }
    ids[p] = theirs[p];
    group.cached.read(ids[p]);
    write(g, child, p, ids + p, 1);
  }
  for (int64_t p = std::max(from, shared); p < to; ++p) copy(p);
  end(child, g) = static_cast<int32_t>(to);
}

}  // namespace pagoda
