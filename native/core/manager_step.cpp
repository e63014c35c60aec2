// Steps and releases: the delta of a step, fences, rows that end.
#include <algorithm>
#include <numeric>

#include "core/manager.hpp"

namespace pagoda {

// ── steps ───────────────────────────────────────────────────────────────────────────────────────────

DeltaLayout Manager::lay_out(Ids rows, const PerRow& counts) {
  require_counts(rows, counts, "counts");
  ++call_;
  grow(lengths_, static_cast<size_t>(rows.size));
  grow(counts_, static_cast<size_t>(rows.size));
  lengths_.clear();
  counts_.clear();
  for (int64_t i = 0; i < rows.size; ++i) {
    const Row& row = require_row(rows, i);
    if (counts[i] > row.reserved - row.computed) {
      throw BadArgument("row " + text(rows[i]) + " has " + text(row.reserved - row.computed) +
                        " tokens reserved and not computed: cannot plan " + text(counts[i]) + "; reserve them first");
    }
    lengths_.push_back(static_cast<int32_t>(row.computed + counts[i]));
    counts_.push_back(static_cast<int32_t>(counts[i]));
  }
  if (states_.has_states) grow_saves(rows, counts);
  DeltaLayout layout(num_groups());
  const int64_t num_writes = static_cast<int64_t>(places_.size());
  layout.add(Section::kRows, 0, rows.size);
  layout.add(Section::kLengths, 0, rows.size);
  layout.add(Section::kCounts, 0, rows.size);
  layout.add(Section::kStarts, 0, rows.size > 0 ? rows.size + 1 : 0);
  if (states_.has_states) {
    const auto size = [](const std::vector<int32_t>& ids) { return static_cast<int64_t>(ids.size()); };
    for (const Section kind : {Section::kSaveRows, Section::kSaveLengths, Section::kSaveIds}) {
      layout.add(kind, 0, size(saves_.rows));
    }
    for (const Section kind : {Section::kRestoreRows, Section::kRestoreLengths, Section::kRestoreIds}) {
      layout.add(kind, 0, size(restores_.rows));
    }
    layout.add(Section::kResetRows, 0, size(resets_));
    layout.add(Section::kStateSources, 0, size(state_sources_));
    layout.add(Section::kStateTargets, 0, size(state_targets_));
  }
  layout.add(Section::kPlaces, 0, num_writes);
  layout.add(Section::kPageIds, 0, num_writes);
  for (const Group& group : groups_) {
    layout.add(Section::kSources, group.number, static_cast<int64_t>(group.sources.size()));
    layout.add(Section::kTargets, group.number, static_cast<int64_t>(group.targets.size()));
  }
  work_section_ = work_.make({lengths_.data(), rows.size}, {counts_.data(), rows.size});
  layout.add(Section::kWork, 0, work_section_.size);
  return layout;
}

void Manager::plan(Ids rows, const PerRow& counts, const DeltaLayout& layout, int32_t* out) {
  int32_t* lengths = nullptr;
  int32_t* computed = nullptr;  // counts of the rows
  due_.clear();
  layout.write(step_, out, [&](Section kind, int64_t g, int32_t* at) {
    const auto write = [&](const std::vector<int32_t>& ids) { std::copy(ids.begin(), ids.end(), at); };
    switch (kind) {
      case Section::kRows:
        std::copy_n(rows.data, rows.size, at);
        break;
      case Section::kLengths:
        lengths = at;
        break;
      case Section::kCounts:
        computed = at;
        break;
      case Section::kStarts:
        at[0] = 0;
        for (int64_t i = 0; i < rows.size; ++i) {
          const int32_t n = computed[i] = static_cast<int32_t>(counts[i]);
          Row& row = this->row(rows[i]);
          lengths[i] = row.computed += n;
          if (row.computed >= row.next_save) due_.push_back(rows[i]);
          at[i + 1] = at[i] + n;
        }
        break;
      case Section::kSaveRows:
        write(saves_.rows);
        break;
      case Section::kSaveLengths:
        write(saves_.lengths);
        break;
      case Section::kSaveIds:
        write(saves_.ids);
        break;
      case Section::kRestoreRows:
        write(restores_.rows);
        break;
      case Section::kRestoreLengths:
        write(restores_.lengths);
        break;
      case Section::kRestoreIds:
        write(restores_.ids);
        break;
      case Section::kResetRows:
        write(resets_);
        break;
      case Section::kStateSources:
        write(state_sources_);
        break;
      case Section::kStateTargets:
        write(state_targets_);
        break;
      case Section::kPlaces:
        write(places_);
        break;
      case Section::kPageIds:
        write(page_ids_);
        break;
      case Section::kSources:
        write(groups_[static_cast<size_t>(g)].sources);
        break;
      case Section::kTargets:
        write(groups_[static_cast<size_t>(g)].targets);
        break;
      case Section::kWork:
        std::copy_n(work_section_.data, work_section_.size, at);
        break;
    }
  });
  clear_delta();
  ++step_;
  for (const int32_t number : due_) plan_save(number);
}

void Manager::clear_delta() {
  places_.clear();
  page_ids_.clear();
  saves_.clear();
  restores_.clear();
  resets_.clear();
  for (const int32_t target : state_targets_) state_source_of_[static_cast<size_t>(target)] = 0;
  state_sources_.clear();
  state_targets_.clear();
  for (Group& group : groups_) {
    for (const int32_t target : group.targets) group.source_of[target] = 0;
    group.sources.clear();
    group.targets.clear();
  }
}

void Manager::pass_fence(int64_t fence) {
  if (fence >= step_) {
    throw BadArgument("step: " + text(fence) + " has not been planned yet; the next one is " + text(step_));
  }
  passed_ = std::max(passed_, fence);
  const int64_t num_released = waiting_.pass(fence, [&](const LeaseId& lease) { tree_.release(lease); });
  for (Group& group : groups_) {
    group.pages.pass_fence(fence);
    if (group.has_window()) group.cached.leaving.pass(fence, [&](int32_t page) { let_go(group, page); });
  }
  row_ids_.pass_fence(fence);
  if (num_released > 0) exchange_all_duplicates();
}

void Manager::grow_writes(int64_t n) {
  grow(places_, places_.size() + static_cast<size_t>(n));
  grow(page_ids_, page_ids_.size() + static_cast<size_t>(n));
}

void Manager::grow_columns(int64_t tree_pages) {
  for (const Group& group : groups_) {
    for (int c = group.first_column; group.num_columns > 1 && c < group.first_column + group.num_columns; ++c) {
      grow(columns_[static_cast<size_t>(c)], static_cast<size_t>(tree_pages));
    }
  }
}

void Manager::write(size_t g, int64_t row, int64_t page, const int32_t* ids, int64_t n) {
  const int32_t place = static_cast<int32_t>(table_.place(g, row) + page);
  if (n == 1) {  // the usual case of a decode step
    places_.push_back(place);
    page_ids_.push_back(*ids);
    return;
  }
  const size_t before = places_.size();
  places_.resize(before + static_cast<size_t>(n));
  std::iota(places_.begin() + static_cast<std::ptrdiff_t>(before), places_.end(), place);
  page_ids_.insert(page_ids_.end(), ids, ids + n);
}

// ── the end of a row ────────────────────────────────────────────────────────────────────────────────

void Manager::release(Ids rows) {
  require_rows(rows);
  clear_given_up();
  for (auto& ended : ended_) ended.clear();
  for (int64_t i = 0; i < rows.size; ++i) {
    const bool is_touched = this->is_touched(rows[i]);
    ended_[is_touched].push_back(rows[i]);
    for (size_t g = 0; g < groups_.size(); ++g) {
      const int32_t* ids = groups_[g].ids(rows[i]);
      const uint8_t* own = groups_[g].owned(rows[i]);
      for (int64_t p = first(rows[i], g), to = end(rows[i], g); p < to; ++p) {
        if (own[p] != 0) groups_[g].given_up[is_touched].push_back(ids[p]);
      }
    }
  }
  // Allocates first: what follows cannot fail.
  for (const bool is_touched : {false, true}) {
    const int64_t num_rows = static_cast<int64_t>(ended_[is_touched].size());
    waiting_.reserve(num_rows, fence(is_touched));
    row_ids_.expect(num_rows, fence(is_touched));
    for (size_t g = 0; g < groups_.size(); ++g) {
      Group& group = groups_[g];
      group.pages.expect(static_cast<int64_t>(group.given_up[is_touched].size()), fence(is_touched));
      if (!group.has_window() || fence(is_touched) <= passed_) continue;
      int64_t leaving = 0;
      for (const int32_t number : ended_[is_touched]) leaving += end(number, g) - first(number, g);
      group.cached.leaving.reserve(leaving, fence(is_touched));
    }
  }
  for (int64_t i = 0; i < rows.size; ++i) {
    const bool is_touched = this->is_touched(rows[i]);
    if (states_.has_states) end_saves(rows[i]);
    for (size_t g = 0; g < groups_.size(); ++g) {
      Group& group = groups_[g];
      if (!group.has_window()) continue;
      const int32_t* ids = groups_[g].ids(rows[i]);
      const uint8_t* own = group.owned(rows[i]);
      for (int64_t p = first(rows[i], g), to = end(rows[i], g); p < to;) {
        const int64_t begin = p;
        while (p < to && own[p] == 0) ++p;
        leave(group, ids + begin, p - begin, is_touched);
        for (; p < to && own[p] != 0; ++p) {
          if (group.cached.num_duplicates() > 0) group.cached.unlink_duplicate(group.place(rows[i], p));
        }
      }
    }
    if (fence(is_touched) <= passed_) {
      tree_.release(request(rows[i]).lease);
    } else {
      waiting_.push(fence(is_touched), request(rows[i]).lease);
    }
    clear(rows[i]);
  }
  free_given_up();
  for (const bool is_touched : {false, true}) {
    const auto& ended = ended_[is_touched];
    row_ids_.free({ended.data(), static_cast<int64_t>(ended.size())}, fence(is_touched));
  }
  exchange_all_duplicates();
}

void Manager::exchange_all_duplicates() noexcept {
  for (int64_t number = 1; num_duplicating_ > 0 && number <= num_rows_; ++number) exchange_duplicates(number);
}

// Marks a row as not running. Ids before its first live page are never read.
void Manager::clear(int64_t number) {
  for (size_t g = 0; g < groups_.size(); ++g) {
    const int64_t from = first(number, g), n = end(number, g) - from;
    std::fill_n(groups_[g].ids(number) + from, n, 0);
    std::fill_n(groups_[g].owned(number) + from, n, uint8_t{0});
    first(number, g) = end(number, g) = 0;
  }
  row(number) = {};
  forget_duplicates(number);
  request(number) = {};
}

void Manager::clear_given_up() {
  for (Group& group : groups_) {
    for (auto& ids : group.given_up) ids.clear();
  }
}

void Manager::free_given_up() {
  for (Group& group : groups_) {
    for (const bool is_touched : {false, true}) {
      const auto& ids = group.given_up[is_touched];
      if (ids.empty()) continue;
      group.pages.free({ids.data(), static_cast<int64_t>(ids.size())}, fence(is_touched));
      group.num_own -= static_cast<int64_t>(ids.size());
    }
  }
  clear_given_up();
}

}  // namespace pagoda
