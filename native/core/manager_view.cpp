// Views of a manager, and the check of its invariants.
#include <algorithm>
#include <limits>

#include "core/manager.hpp"

namespace pagoda {

Manager::Lengths Manager::lengths(int64_t number) const {
  const Row& row = row_at(number, 0);
  return {row.reserved, row.computed, row.committed, row.stored};
}

int64_t Manager::first_page(int64_t number, int64_t g) const {
  row_at(number, 0);
  return first(number, static_cast<size_t>(g));
}

int64_t Manager::end_page(int64_t number, int64_t g) const {
  row_at(number, 0);
  return end(number, static_cast<size_t>(g));
}

Manager::Stats Manager::stats() const {
  return {row_ids_.num_held(), row_ids_.num_quarantined(), admitted_, tokens_, hits_, evicted_};
}

// Pages held only by leases and readers that wait for a fence count as waiting.
Manager::Pages Manager::pages(const Group& group) const {
  int64_t waiting = 0;
  if (group.has_window()) {
    std::vector<int32_t> leaving;
    group.cached.leaving.for_each([&](int64_t, int32_t page) { leaving.push_back(page); });
    std::sort(leaving.begin(), leaving.end());
    for (auto begin = leaving.begin(), end = begin; begin != leaving.end(); begin = end) {
      while (end != leaving.end() && *end == *begin) ++end;
      waiting += end - begin == group.cached.readers(*begin);
    }
  } else {
    std::vector<LeaseId> leases;
    waiting_.for_each([&](int64_t, const LeaseId& lease) { leases.push_back(lease); });
    waiting = tree_.count_released(leases) * group.num_columns;
  }
  const int64_t evictable = group.num_evictable(tree_);
  return {group.pages.num_free(), evictable, group.num_cached(tree_) - evictable - waiting,
          group.num_own + group.num_given_out, group.pages.num_quarantined() + waiting};
}

void Manager::reset() {
  require_no_step("reset");
  tree_.reset();
  row_ids_.reset();
  checkpoint_ids_.reset();
  order_.reset();
  waiting_.clear();
  clear_delta();
  std::fill(touched_.begin(), touched_.end(), 0);
  for (int64_t number = 1; number <= num_rows_; ++number) {
    if (row(number).is_running) clear(number);
  }
  for (Group& group : groups_) {
    group.pages.reset();
    group.num_own = group.num_given_out = 0;
    group.given_out = {};
    group.cached = WindowPages(group.has_window() ? group.spec.num_pages : 0, (num_rows_ + 1) * group.max_pages);
  }
  step_ = 1;
  passed_ = 0;
  admitted_ = tokens_ = hits_ = evicted_ = 0;
  saved_ = resumed_ = evicted_states_ = 0;
}

void Manager::broken(const std::string& what) const { throw BrokenInvariant{17, what}; }

// Checks that cached window pages count the rows and steps that read them, and that duplicates are linked to cached
// pages.
void Manager::check_window(const Group& group, size_t g) const {
  const WindowPages& cached = group.cached;
  const std::string name = "group " + group.spec.name + ": ";
  if (!group.has_window()) return;
  std::vector<int32_t> expected(static_cast<size_t>(group.spec.num_pages + 1));
  int64_t num_duplicates = 0;
  for (int64_t number = 1; number <= num_rows_; ++number) {
    for (int64_t p = 0; p < group.max_pages; ++p) {
      const int32_t page = cached.tree_page_at(group.place(number, p));
      if (page == 0) continue;
      ++num_duplicates;
      const bool is_own =
          row(number).is_running && p >= first(number, g) && p < end(number, g) && group.owned(number)[p] != 0;
      if (!is_own || !cached.is_cached(page) || cached.duplicate_of(page) == 0) {
        broken(name + "page " + text(p) + " of row " + text(number) + " is linked to page " + text(page));
      }
    }
    if (!row(number).is_running) continue;
    for (int64_t p = first(number, g); p < end(number, g); ++p) {
      if (group.owned(number)[p] == 0) ++expected[static_cast<size_t>(groups_[g].ids(number)[p])];
    }
  }
  if (num_duplicates != cached.num_duplicates()) broken(name + "duplicates are miscounted");
  cached.leaving.for_each([&](int64_t fence, int32_t page) {
    if (fence <= passed_ || fence > step_) broken(name + "a reader waits for fence " + text(fence));
    ++expected[static_cast<size_t>(page)];
  });
  int64_t num_cached = 0, num_unread = 0, listed = 0;
  for (int32_t page = 1; page <= group.spec.num_pages; ++page) {
    if (cached.readers(page) != expected[static_cast<size_t>(page)]) {
      broken(name + "page " + text(page) + " counts " + text(cached.readers(page)) + " readers");
    }
    if (cached.readers(page) > 0 && !cached.is_cached(page)) broken(name + "a page that is read is not cached");
    num_cached += cached.is_cached(page);
    num_unread += cached.is_cached(page) && cached.readers(page) == 0;
  }
  for (int32_t page = cached.first_unread(); page != 0 && listed <= num_unread; page = cached.after(page), ++listed) {
    if (!cached.is_cached(page) || cached.readers(page) > 0)
      broken(name + "a listed page is not cached, or has readers");
  }
  int64_t in_tree = 0;
  for (int c = 0; c < group.num_columns; ++c) in_tree += tree_.pages(group.first_column + c).total;
  if (num_cached != cached.num_cached() || num_cached != in_tree || num_unread != cached.num_unread() ||
      listed != num_unread) {
    broken(name + text(in_tree) + " pages are in the tree, " + text(num_cached) + " are marked as cached, " +
           text(num_unread) + " have no reader, " + text(listed) + " are listed");
  }
}

// Checks that every page has one owner: the free-list, the tree, or one row.
void Manager::check_group(size_t g, const std::vector<NodeInfo>& nodes) const {
  const Group& group = groups_[g];
  const std::string name = "group " + group.spec.name + ": ";
  group.pages.check();
  BitSet owners(group.spec.num_pages + 1);
  int64_t num_cached = 0, num_own = 0;
  const auto claim = [&](int32_t id, const std::string& who) {
    if (id < 1 || id > group.spec.num_pages || !group.pages.is_held(id)) {
      broken(name + who + " has page " + text(id) + ", which is not held");
    }
    if (owners.contains(id)) broken(name + "page " + text(id) + " of " + who + " has two owners");
    owners.insert(id);
  };
  for (const NodeInfo& node : nodes) {
    for (int c = 0; c < group.num_columns; ++c) {
      for (int32_t id : node.columns[static_cast<size_t>(group.first_column + c)]) {
        if (id < 0) continue;
        claim(id, "the tree");
        ++num_cached;
      }
    }
  }
  for (int64_t number = 1; number <= num_rows_; ++number) {
    const Row& row = this->row(number);
    const std::string who = "row " + text(number);
    const int32_t* ids = groups_[g].ids(number);
    const uint8_t* own = group.owned(number);
    const int64_t first = this->first(number, g), end = row.is_running ? this->end(number, g) : 0;
    if (row.is_running && end < group.math.pages_for(row.reserved))
      throw BrokenInvariant{5, name + who + " has too few pages"};
    for (int64_t p = 0; p < group.max_pages; ++p) {
      const bool is_live = p >= first && p < end;
      if (own[p] != 0 && !is_live) broken(name + who + " owns page " + text(p) + ", which it gave up");
      if (!is_live) continue;
      if (ids[p] < 1) throw BrokenInvariant{5, name + who + " has no page at " + text(p)};
      if (own[p] == 0 && p >= math_.page(row.stored) * group.num_columns) {
        broken(name + who + " has page " + text(p) + ", which nobody owns");
      }
      if (own[p] == 0) continue;
      claim(ids[p], who);
      ++num_own;
    }
  }
  check_window(group, g);
  int64_t num_given_out = 0;
  for (int32_t id = 1; group.given_out && id <= group.spec.num_pages; ++id) {
    if (group.given_out[id] == 0) continue;
    claim(id, "alloc_pages");
    ++num_given_out;
  }
  if (num_given_out != group.num_given_out)
    broken(name + text(num_given_out) + " pages are given out, counted " + text(group.num_given_out));
  if (num_own != group.num_own) broken(name + "rows own " + text(num_own) + " pages, counted " + text(group.num_own));
  if (num_own + num_cached + num_given_out != group.pages.num_held()) {
    broken(name + text(group.pages.num_held()) + " pages are held, " + text(num_cached) + " by the tree, " +
           text(num_own) + " by rows and " + text(num_given_out) + " given out");
  }
}

void Manager::check() const {
  tree_.check();
  row_ids_.check();
  const int64_t all = std::numeric_limits<int64_t>::max() / 4;
  const std::vector<NodeInfo> nodes = tree_.nodes(all, all, nullptr);
  for (size_t g = 0; g < groups_.size(); ++g) check_group(g, nodes);
  int64_t running = 0;
  for (int64_t number = 0; number <= num_rows_; ++number) {
    const Row& row = this->row(number);
    if (!row.is_running) continue;
    ++running;
    const std::string who = "row " + text(number);
    if (number == 0 || !row_ids_.is_held(number)) broken(who + " is running, but its id is not held");
    if (row.stored > row.committed || row.committed > row.computed || row.computed > row.reserved ||
        row.reserved > max_tokens_) {
      broken(who + ": " + text(row.stored) + " stored, " + text(row.committed) + " committed, " + text(row.computed) +
             " computed, " + text(row.reserved) + " reserved");
    }
    if (tree_.length(request(number).lease) != row.stored) broken(who + " has a lease of the wrong length");
    if (row.is_stored && row.committed - row.stored >= math_.size())
      broken(who + " has a whole page that is not stored");
    const auto& prompt = request(number).prompt;
    if (!prompt.empty() && row.committed >= static_cast<int64_t>(prompt.size())) {
      broken(who + " keeps a prompt that is already computed");
    }
    if (touched_[static_cast<size_t>(number)] > step_) broken(who + " was touched in a future step");
  }
  check_states();
  waiting_.for_each([&](int64_t fence, const LeaseId&) {
    if (fence <= passed_ || fence > step_) broken("a lease waits for fence " + text(fence));
  });
  if (running != row_ids_.num_held()) broken("row ids are held by rows that are not running");
  if (tree_.num_leases() != running + waiting_.size()) broken("there are leases of no row");
}

}  // namespace pagoda
