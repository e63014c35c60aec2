// Capacity: how many pages each group can provide, and evictions from the tree.
#include <algorithm>
#include <functional>

#include "core/manager.hpp"

namespace pagoda {

bool Manager::has_room(const Needs& needs, int64_t spare) const {
  for (size_t g = 0; g < groups_.size(); ++g) {
    const Need& need = needs[g];
    if (need.pages + need.locked > 0 && need.pages + spare > available(groups_[g], need)) return false;
  }
  return true;
}

void Manager::require_room(const Needs& needs, int64_t spare) const {
  for (size_t g = 0; g < groups_.size(); ++g) {
    const Group& group = groups_[g];
    const Need& need = needs[g];
    const int64_t there = available(group, need);
    if (need.pages + need.locked == 0 || need.pages + spare <= there) continue;
    const Pages pages = this->pages(group);
    std::string what = "pages of group " + group.spec.name + " (" + text(pages.free) + " free, " +
                       text(pages.evictable - need.locked) + " evictable, " + text(pages.leased + need.locked) +
                       " leased, " + text(pages.running) + " held by running rows, " + text(pages.waiting) +
                       " waiting for a fence";
    if (spare > 0) what += ", " + text(spare) + " kept back for running rows";
    throw OutOfIds{what + holders(group) + ")", need.pages, std::max<int64_t>(0, there - spare), group.spec.num_pages};
  }
}

std::string Manager::holders(const Group& group) const {
  const size_t g = static_cast<size_t>(group.number);
  std::vector<std::pair<int64_t, int64_t>> rows;  // (pages, -row): of equal counts the lowest row is first
  for (int64_t number = 1; number <= num_rows_; ++number) {
    const int64_t n = end(number, g) - first(number, g);
    if (row(number).is_running && n > 0) rows.emplace_back(n, -number);
  }
  if (rows.empty()) return "";
  const auto most = rows.begin() + std::min<std::ptrdiff_t>(3, rows.end() - rows.begin());
  std::partial_sort(rows.begin(), most, rows.end(), std::greater<>());
  std::string words;
  for (auto row = rows.begin(); row != most; ++row) {
    words += (row == rows.begin() ? "" : ", ") + text(-row->second) + " (" + text(row->first) +
             (row != rows.begin() ? ")"
              : row->first == 1   ? " page)"
                                  : " pages)");
  }
  return most - rows.begin() == 1 ? "; row " + words + " holds the most" : "; rows " + words + " hold the most";
}

void Manager::require_row_ids(int64_t n) const {
  if (n <= row_ids_.num_free()) return;
  throw OutOfIds{
      "rows (" + text(row_ids_.num_held()) + " running, " + text(row_ids_.num_quarantined()) + " waiting for a fence)",
      n, row_ids_.num_free(), num_rows_};
}

void Manager::make_room(const Needs& needs) {
  // Evictions for a group that keeps every token also free window pages.
  for (const bool has_window : {false, true}) {
    for (size_t g = 0; g < groups_.size(); ++g) {
      const int64_t missing = needs[g].pages - groups_[g].pages.num_free();
      if (missing > 0 && groups_[g].has_window() == has_window) evict(groups_[g], missing);
    }
  }
}

// Frees pages of a group: the window pages whose last readers left first, or the tails of the coldest leaves.
void Manager::evict(Group& group, int64_t num_pages) {
  if (group.has_window()) {
    for (; num_pages > 0; --num_pages) evict_window_page(group);
    return;
  }
  const int64_t tree_pages = (num_pages + group.num_columns - 1) / group.num_columns;
  tree_.plan_evict(math_.first_slot(tree_pages), group.first_column, removal_);
  carry_out_removal();
}

// The page leaves a hole in the tree, unless a running row has a duplicate, which then replaces it.
void Manager::evict_window_page(Group& group) {
  const int32_t page = group.cached.first_unread(), place = group.cached.duplicate_of(page);
  if (place == 0 || (tree_.has_lost() && tree_.is_lost(group.number, page))) {
    tree_.punch_page(group.number, page);
    while (group.cached.duplicate_of(page) != 0) group.cached.unlink_duplicate(group.cached.duplicate_of(page));
  } else {
    const int32_t duplicate = group.table[place];
    tree_.replace_page(group.number, page, duplicate);
    group.cached.unlink_duplicate(place);
    group.cached.move_duplicates(page, duplicate);
    group.cached.add(duplicate);
    group.own[place] = 0;
    --group.num_own;
  }
  group.cached.forget(page);
  group.pages.free({&page, 1}, std::nullopt);
  ++evicted_;
}

void Manager::carry_out_removal() {
  std::vector<int32_t*> out;
  for (size_t c = 0; c < columns_.size(); ++c) {
    columns_[c].resize(static_cast<size_t>(removal_.columns()[c]));
    out.push_back(columns_[c].data());
  }
  freed_states_.resize(static_cast<size_t>(removal_.states()));
  tree_.carry_out(removal_, out, freed_states_.data());
  free_columns();
  free_states();
}

// Frees pages that the tree gave up. They have no readers.
void Manager::free_columns() {
  for (Group& group : groups_) {
    for (int c = group.first_column; c < group.first_column + group.num_columns; ++c) {
      const auto& ids = columns_[static_cast<size_t>(c)];
      if (group.has_window()) {
        for (int32_t id : ids) group.cached.forget(id);
      }
      group.pages.free({ids.data(), static_cast<int64_t>(ids.size())}, std::nullopt);
      evicted_ += static_cast<int64_t>(ids.size());
    }
  }
}

// What a row computed from a bad duplicate is cached behind the tree's page of the same tokens: the pages that it gave
// the tree after it are bad. A checkpoint may be the row's or another's, and rows may have resumed from it, so if there
// is one, the tree's page counts as bad, or the next one if it has left the tree. Returns whether one was added.
bool Manager::blame(const Group& group, int64_t number, BitSet& bad) {
  const int32_t* ids = group.ids(number);
  const uint8_t* own = group.owned(number);
  const int64_t stored = math_.page(row(number).stored) * group.num_columns;
  int64_t at = first(number, static_cast<size_t>(group.number));
  while (at < stored && (own[at] == 0 || !bad.contains(ids[at]))) ++at;
  if (at >= stored) return false;
  const auto add = [&](int32_t page) {
    const bool is_new = !bad.contains(page);
    if (is_new) bad.insert(page);
    return is_new;
  };
  const LeaseId lease = request(number).lease;
  const int64_t first_page = at / group.num_columns, end_page = math_.page(row(number).stored);
  if (!states_.has_states || tree_.last_checkpoint(lease, row(number).stored).length <= math_.first_slot(first_page)) {
    while (at < stored && own[at] != 0) ++at;
    return at < stored && add(ids[at]);
  }
  for (int c = group.first_column; c < group.first_column + group.num_columns; ++c) {
    columns_[static_cast<size_t>(c)].resize(static_cast<size_t>(end_page));
    tree_.copy_pages(lease, c, first_page, columns_[static_cast<size_t>(c)].data());
  }
  for (int64_t page = first_page; page < end_page; ++page) {
    for (int c = group.first_column; c < group.first_column + group.num_columns; ++c) {
      const int32_t original = columns_[static_cast<size_t>(c)][static_cast<size_t>(page)];
      if (original > 0) return add(original);
    }
  }
  return false;
}

int64_t Manager::invalidate(int64_t g, Ids page_ids, int32_t* rows_out) {
  Group& group = groups_[static_cast<size_t>(g)];
  BitSet bad(group.spec.num_pages + 1);
  for (int64_t i = 0; i < page_ids.size; ++i) {
    if (page_ids[i] < 1 || page_ids[i] > group.spec.num_pages) {
      throw BadId{IdFault::kOutOfRange, page_ids[i], i,
                  "page_ids[" + text(i) + "] = " + text(page_ids[i]) + " is out of range: page ids of group " +
                      group.spec.name + " are 1 to " + text(group.spec.num_pages)};
    }
    bad.insert(page_ids[i]);
  }
  // Copies of bad pages are bad as well, and copies of copies.
  for (bool is_done = false; !is_done;) {
    is_done = true;
    for (int64_t number = 1; number <= num_rows_; ++number) {
      for (const Copy& copy : request(number).copies) {
        if (copy.group != group.number || !bad.contains(copy.source) || bad.contains(copy.target)) continue;
        bad.insert(copy.target);
        is_done = false;
      }
      if (row(number).is_running && blame(group, number, bad)) is_done = false;
    }
  }
  std::vector<bool> was_discarded(static_cast<size_t>(num_rows_ + 1));
  for (int64_t number = 1; number <= num_rows_; ++number) {
    if (row(number).is_running) {
      was_discarded[static_cast<size_t>(number)] = tree_.is_discarded(request(number).lease);
    }
  }
  tree_.discard(group.first_column, group.num_columns, bad, columns_, freed_states_);
  free_columns();
  free_states();
  int64_t n = 0;
  for (int64_t number = 1; number <= num_rows_; ++number) {
    Row& row = this->row(number);
    if (!row.is_running) continue;
    const size_t which = static_cast<size_t>(g);
    const int32_t* ids = group.ids(number);
    const bool reads =
        std::any_of(ids + first(number, which), ids + end(number, which), [&](int32_t id) { return bad.contains(id); });
    const auto& copies = request(number).copies;
    const bool has_copied = std::any_of(copies.begin(), copies.end(), [&](const Copy& copy) {
      return copy.group == group.number && bad.contains(copy.target);
    });
    // A row that read a bad page and moved on has computed everything after it from bad contents.
    const bool follows = !was_discarded[static_cast<size_t>(number)] && tree_.is_discarded(request(number).lease);
    if (!reads && !has_copied && !follows) continue;
    rows_out[n++] = static_cast<int32_t>(number);
    row.is_stored = false;
    if (states_.has_states) forget_saves(number);
    forget_duplicates(number);
    for (size_t each = 0; each < groups_.size(); ++each) {  // its duplicates no longer replace evicted pages
      for (int64_t p = first(number, each); groups_[each].has_window() && p < end(number, each); ++p) {
        groups_[each].cached.unlink_duplicate(groups_[each].place(number, p));
      }
    }
  }
  put_lost_first();
  give_up_lost();
  return n;
}

void Manager::drop(std::string_view space) {
  tree_.plan_drop(space, removal_);
  carry_out_removal();
  for (int64_t number = 1; number <= num_rows_; ++number) {
    if (!row(number).is_running || request(number).space != space) continue;
    row(number).is_stored = false;
    if (states_.has_states) forget_saves(number);
  }
  put_lost_first();
  give_up_lost();
}

void Manager::put_lost_first() {
  if (!tree_.has_lost()) return;
  for (Group& group : groups_) {
    if (!group.has_window()) continue;
    for (int32_t page = group.cached.first_unread(), next; page != 0; page = next) {
      next = group.cached.after(page);
      if (tree_.is_lost(group.number, page)) group.cached.put_first(page);
    }
  }
}

}  // namespace pagoda
