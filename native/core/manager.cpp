// Construction, and checks of the arguments of calls.
#include "core/manager.hpp"

#include <limits>
#include <numeric>

#include "core/scan.hpp"

namespace pagoda {

namespace {

int64_t require_step(const std::vector<GroupSpec>& groups, int64_t step) {
  if (step > std::numeric_limits<int32_t>::max()) {
    throw BadConfig("page_tokens: the groups have no common multiple below 2^31; choose sizes that divide each other");
  }
  for (const GroupSpec& group : groups) {
    if (step % group.page_tokens == 0) continue;
    throw BadConfig("resume_step: " + text(step) + " is not a multiple of " + text(group.page_tokens) +
                    ", the page_tokens of " + group.name);
  }
  return step;
}

std::vector<int64_t> tree_windows(const std::vector<GroupSpec>& groups, int64_t step) {
  std::vector<int64_t> windows;
  for (const GroupSpec& group : groups) {
    for (int64_t i = 0; i < step / group.page_tokens; ++i) windows.push_back(group.window);
  }
  return windows;
}

std::vector<PageTable::Group> tables_of(const std::vector<GroupSpec>& groups, int64_t step, int64_t max_tokens) {
  std::vector<PageTable::Group> tables;
  // The tree numbers slots by the tokens of its own pages.
  const int64_t most = std::numeric_limits<int32_t>::max() / step - 1;
  for (const GroupSpec& group : groups) {
    if (group.num_pages > most) {
      throw BadConfig("capacity of " + group.name + ": at most " + text(most) +
                      " pages, since the pages of all groups end together every " + text(step) + " tokens");
    }
    tables.push_back({group.name, PageMath(group.page_tokens).pages_for(max_tokens), group.num_pages});
  }
  return tables;
}

std::vector<WorkGroup> work_groups(const std::vector<GroupSpec>& groups) {
  std::vector<WorkGroup> found;
  for (const GroupSpec& group : groups) found.push_back({group.window, group.target});
  return found;
}

}  // namespace

Manager::Group::Group(GroupSpec given, int which, int32_t* ids, int64_t num_rows, int64_t max_tokens, int column,
                      int64_t step)
    : spec(std::move(given)),
      number(which),
      math(spec.page_tokens),
      pages(spec.num_pages, 1, "pages of group " + spec.name),
      max_pages(math.pages_for(max_tokens)),
      first_column(column),
      num_columns(static_cast<int>(step / spec.page_tokens)),
      table(ids),
      own((num_rows + 1) * max_pages),
      source_of(spec.num_pages + 1),
      cached(spec.window > 0 ? spec.num_pages : 0, (num_rows + 1) * max_pages) {}

int64_t Manager::Group::num_cached(const PrefixTree& tree) const {
  return has_window() ? cached.num_cached() : tree.pages(first_column).total * num_columns;
}

int64_t Manager::Group::num_evictable(const PrefixTree& tree) const {
  const Tally held = tree.pages(first_column);
  return has_window() ? cached.num_unread() : (held.total - held.locked) * num_columns;
}

Manager::Manager(std::vector<GroupSpec> specs, StateSpec states, int64_t resume_step, int64_t num_rows,
                 int64_t max_tokens, int64_t watermark)
    : num_rows_(num_rows),
      max_tokens_(max_tokens),
      watermark_(watermark),
      states_(states),
      math_(require_step(specs, resume_step)),
      table_(tables_of(specs, math_.size(), max_tokens), num_rows),
      tree_(math_.size(), tree_windows(specs, math_.size()), states.has_states, 0),
      row_ids_(num_rows, 1, "rows"),
      checkpoint_ids_(states.num_checkpoints, 1, "checkpoints"),
      order_(states.num_checkpoints),
      rows_(static_cast<size_t>(num_rows + 1)),
      requests_(static_cast<size_t>(num_rows + 1)),
      firsts_(static_cast<size_t>(num_rows + 1) * specs.size()),
      ends_(static_cast<size_t>(num_rows + 1) * specs.size()),
      tails_((num_rows + 1) * math_.size()),
      touched_(static_cast<size_t>(num_rows + 1)),
      work_(work_groups(specs)) {
  int column = 0;
  for (GroupSpec& spec : specs) {
    has_windows_ = has_windows_ || spec.window > 0;
    const int number = static_cast<int>(groups_.size());
    groups_.emplace_back(std::move(spec), number, table_.row(static_cast<size_t>(number), 0), num_rows, max_tokens,
                         column, math_.size());
    column += groups_.back().num_columns;
  }
  if (has_windows_) {
    std::vector<int> set_of;
    std::vector<int64_t> num_ids;
    for (size_t g = 0; g < groups_.size(); ++g) {
      const int set = groups_[g].has_window() ? static_cast<int>(g) : -1;
      set_of.insert(set_of.end(), static_cast<size_t>(groups_[g].num_columns), set);
      num_ids.push_back(groups_[g].has_window() ? groups_[g].spec.num_pages : 0);
    }
    tree_.follow(std::move(set_of), num_ids);
  }
  if (states_.has_states) {
    tree_.follow_states(states_.num_checkpoints);
    state_source_of_.resize(static_cast<size_t>(num_rows + 1));
  }
  // Without this, a step occasionally waits milliseconds while arrays move.
  constexpr int64_t kMost = int64_t{1} << 26;
  int64_t tokens = 0;
  for (const Group& group : groups_) tokens = std::max(tokens, group.math.first_slot(group.spec.num_pages));
  tree_.expect(std::min(kMost, tokens + tokens / 4));
  columns_.resize(static_cast<size_t>(column));
  column_ids_.resize(static_cast<size_t>(column));
}

const Manager::Row& Manager::row_at(int64_t number, int64_t position) const {
  if (number < 1 || number > num_rows_) {
    throw BadId{
        IdFault::kOutOfRange, number, position,
        "rows[" + text(position) + "] = " + text(number) + " is out of range: rows are 1 to " + text(num_rows_)};
  }
  const Row& found = row(number);
  if (!found.is_running) {
    throw BadId{
        IdFault::kNotHeld, number, position,
        "rows[" + text(position) + "] = " + text(number) + " is not running: it was released, or never admitted"};
  }
  return found;
}

void Manager::refuse_row(Ids rows, int64_t i) const {
  row_at(rows[i], i);
  throw BadId{IdFault::kAlreadyHeld, rows[i], i,
              "rows[" + text(i) + "] = " + text(rows[i]) + " is duplicated: name each row once"};
}

void Manager::require_counts(Ids rows, const PerRow& counts, const char* name) const {
  if (!counts.is_each) {
    if (counts.all < 0) throw BadArgument(std::string(name) + " = " + text(counts.all) + ": give 0 or more");
    return;
  }
  if (counts.each.size != rows.size) {
    throw BadArgument(std::string(name) + " has " + text(counts.each.size) + " entries for " + text(rows.size) +
                      " rows: give one per row");
  }
  for (int64_t i = 0; i < rows.size; ++i) {
    if (counts[i] < 0) {
      throw BadArgument(std::string(name) + "[" + text(i) + "] = " + text(counts[i]) + ": give 0 or more");
    }
  }
}

void Manager::require_tokens(Ids tokens, int64_t from) {
  if (tokens.size == 0) throw BadArgument("tokens: give at least one");
  const int64_t at =
      from + first_outside(tokens.data + from, tokens.size - from, 0, std::numeric_limits<int32_t>::max());
  if (at == tokens.size) return;
  throw BadId{IdFault::kOutOfRange, tokens[at], at,
              "tokens[" + text(at) + "] = " + text(tokens[at]) + " is out of range: token ids are 0 to 2^31 - 1"};
}

}  // namespace pagoda
