#include "core/manager.hpp"

#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>

#include "core/scan.hpp"

namespace pagoda {

namespace {

int64_t common_step(const std::vector<GroupSpec>& groups) {
  int64_t step = 1;
  for (const GroupSpec& group : groups) step = std::lcm(step, group.page_tokens);
  return step;
}

std::vector<int64_t> tree_windows(const std::vector<GroupSpec>& groups, int64_t step) {
  std::vector<int64_t> windows;
  for (const GroupSpec& group : groups) {
    for (int64_t i = 0; i < step / group.page_tokens; ++i) windows.push_back(group.window);
  }
  return windows;
}

// The rows of a manager whose tables can be numbered.
int64_t checked_rows(const std::vector<GroupSpec>& groups, int64_t num_rows, int64_t max_tokens) {
  int64_t entries = 0, step = 1;
  for (const GroupSpec& group : groups) {
    step = std::lcm(step, group.page_tokens);
    if (step > std::numeric_limits<int32_t>::max()) {
      throw BadConfig("page sizes: they have no common multiple below 2^31: give sizes that divide each other");
    }
  }
  for (const GroupSpec& group : groups) {
    // Ids of the tree's pages are numbered with all their tokens.
    const int64_t most = std::numeric_limits<int32_t>::max() / step - 1;
    if (group.num_pages > most) {
      throw BadConfig("capacity of " + group.name + ": at most " + text(most) +
                      " pages, where the pages of all groups end every " + text(step) + " tokens");
    }
    entries += (num_rows + 1) * PageMath(group.page_tokens).pages_for(max_tokens);
    if (entries > std::numeric_limits<int32_t>::max()) {
      throw BadConfig("tables of " + text(num_rows) + " rows of " + text(max_tokens) +
                      " tokens pass 2^31 entries: give fewer rows or tokens");
    }
  }
  return num_rows;
}

// Up to where two sequences have the same extra keys.
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

Manager::Group::Group(GroupSpec given, int which, int64_t num_rows, int64_t max_tokens, int64_t at, int column,
                      int64_t step)
    : spec(std::move(given)),
      number(which),
      math(spec.page_tokens),
      pages(spec.num_pages, 1, "pages of group " + spec.name),
      max_pages(math.pages_for(max_tokens)),
      offset(at),
      first_column(column),
      num_columns(static_cast<int>(step / spec.page_tokens)),
      table((num_rows + 1) * max_pages),
      own((num_rows + 1) * max_pages),
      source_of(spec.num_pages + 1),
      readers(spec.window > 0 ? spec.num_pages : 0) {}

int64_t Manager::Group::cached(const PrefixTree& tree) const {
  return has_window() ? readers.num_cached : tree.pages(first_column).total * num_columns;
}

int64_t Manager::Group::evictable(const PrefixTree& tree) const {
  const Tally held = tree.pages(first_column);
  return has_window() ? readers.num_loose : (held.total - held.locked) * num_columns;
}

void Manager::Readers::link(int32_t page, int32_t before) {
  const int32_t after = prev[before];
  next[after] = prev[before] = page;
  prev[page] = after;
  next[page] = before;
  ++num_loose;
}

void Manager::Readers::unlink(int32_t page) {
  next[prev[page]] = next[page];
  prev[next[page]] = prev[page];
  --num_loose;
}

void Manager::Readers::add(int32_t page) {
  is_cached[page] = 1;
  count[page] = 1;
  ++num_cached;
}

void Manager::Readers::read(int32_t page) {
  if (count[page]++ == 0) unlink(page);
}

// Pages that were left one after the other stand one after the other in the list, and leave it together.
void Manager::Readers::read(const int32_t* ids, int64_t n) {
  for (int64_t i = 0; i < n;) {
    const int32_t first = ids[i++];
    if (count[first]++ > 0) continue;
    const int32_t before = prev[first];
    const int64_t begin = i;
    int32_t after = next[first];
    for (; i < n && ids[i] == after; ++i) {
      ++count[ids[i]];
      after = next[ids[i]];
    }
    next[before] = after;
    prev[after] = before;
    num_loose -= i - begin + 1;
  }
}

void Manager::Readers::leave(int32_t page, bool is_lost) {
  if (--count[page] == 0) link(page, is_lost ? next[0] : 0);
}

void Manager::Readers::put_first(int32_t page) {
  unlink(page);
  link(page, next[0]);
}

void Manager::Readers::forget(int32_t page) {
  unlink(page);
  is_cached[page] = 0;
  --num_cached;
}

Manager::Manager(std::vector<GroupSpec> specs, int64_t num_rows, int64_t max_tokens, int64_t watermark,
                 int64_t capacity)
    : num_rows_(checked_rows(specs, num_rows, max_tokens)),
      max_tokens_(max_tokens),
      watermark_(watermark),
      math_(common_step(specs)),
      tree_(math_.size(), tree_windows(specs, math_.size()), false, capacity),
      row_ids_(num_rows, 1, "rows"),
      rows_(static_cast<size_t>(num_rows + 1)),
      requests_(static_cast<size_t>(num_rows + 1)),
      firsts_(static_cast<size_t>(num_rows + 1) * specs.size()),
      ends_(static_cast<size_t>(num_rows + 1) * specs.size()),
      tails_((num_rows + 1) * math_.size()),
      touched_(static_cast<size_t>(num_rows + 1)),
      seen_(num_rows + 1) {
  int64_t offset = 0;
  int column = 0;
  for (GroupSpec& spec : specs) {
    has_windows_ = has_windows_ || spec.window > 0;
    const int number = static_cast<int>(groups_.size());
    groups_.emplace_back(std::move(spec), number, num_rows, max_tokens, offset, column, math_.size());
    offset += (num_rows + 1) * groups_.back().max_pages;
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
  // Without this a step now and then waited milliseconds while arrays moved.
  constexpr int64_t kMost = int64_t{1} << 26;
  int64_t tokens = 0;
  for (const Group& group : groups_) tokens = std::max(tokens, group.math.first_slot(group.spec.num_pages));
  tree_.expect(std::min(kMost, tokens + tokens / 4));
  columns_.resize(static_cast<size_t>(column));
  column_ids_.resize(static_cast<size_t>(column));
}

// ── arguments ───────────────────────────────────────────────────────────────────────────────────────

const Manager::Row& Manager::row_at(int64_t row, int64_t position) const {
  if (row < 1 || row > num_rows_) {
    throw BadId{IdFault::kOutOfRange, row, position,
                "rows[" + text(position) + "] = " + text(row) + " is out of range: rows are 1 to " + text(num_rows_)};
  }
  const Row& state = rows_[static_cast<size_t>(row)];
  if (!state.is_running) {
    throw BadId{
        IdFault::kNotHeld, row, position,
        "rows[" + text(position) + "] = " + text(row) + " is no running request: it was released, or never admitted"};
  }
  return state;
}

void Manager::require_rows(Ids rows) {
  int64_t i = 0;
  const auto unmark = [&] {
    while (i-- > 0) seen_.erase(rows[i]);
  };
  try {
    for (; i < rows.size; ++i) {
      row_at(rows[i], i);
      if (seen_.contains(rows[i])) {
        throw BadId{IdFault::kAlreadyHeld, rows[i], i,
                    "rows[" + text(i) + "] = " + text(rows[i]) + " stands twice in one call"};
      }
      seen_.insert(rows[i]);
    }
  } catch (...) {
    unmark();
    throw;
  }
  unmark();
}

void Manager::require_counts(Ids rows, const Counts& counts, const char* name) const {
  if (counts.is_each && counts.each.size != rows.size) {
    throw BadArgument(std::string(name) + " has " + text(counts.each.size) + " entries for " + text(rows.size) +
                      " rows");
  }
  for (int64_t i = 0; i < rows.size; ++i) {
    if (counts[i] < 0) {
      throw BadArgument(std::string(name) + "[" + text(i) + "] = " + text(counts[i]) + ": give 0 or more");
    }
  }
}

// ── room ────────────────────────────────────────────────────────────────────────────────────────────

int64_t Manager::available(const Group& group) const {
  return group.pages.num_free() + group.evictable(tree_) - group.locked;
}

void Manager::clear_plan() {
  for (Group& group : groups_) group.needed = group.locked = 0;
}

bool Manager::has_room(int64_t spare) const {
  return std::all_of(groups_.begin(), groups_.end(), [&](const Group& group) {
    return group.needed + group.locked == 0 || group.needed + spare <= available(group);
  });
}

void Manager::require_room(int64_t spare) const {
  for (const Group& group : groups_) {
    const int64_t there = available(group);
    if (group.needed + group.locked == 0 || group.needed + spare <= there) continue;
    const Pages pages = this->pages(group);
    std::string what = "pages of group " + group.spec.name + " (" + text(pages.free) + " free, " +
                       text(pages.evictable - group.locked) + " evictable, " + text(pages.leased + group.locked) +
                       " leased, " + text(pages.running) + " of running rows, " + text(pages.waiting) +
                       " waiting for a fence";
    if (spare > 0) what += ", " + text(spare) + " kept back for running rows";
    throw OutOfIds{what + holders(group) + ")", group.needed, std::max<int64_t>(0, there - spare),
                   group.spec.num_pages};
  }
}

std::string Manager::holders(const Group& group) const {
  const size_t g = static_cast<size_t>(group.number);
  std::vector<std::pair<int64_t, int64_t>> rows;  // pages, less the row's number: of as many the lowest row is first
  for (int64_t number = 1; number <= num_rows_; ++number) {
    const int64_t n = end(number, g) - first(number, g);
    if (rows_[static_cast<size_t>(number)].is_running && n > 0) rows.emplace_back(n, -number);
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

// Frees so many pages of a group: of a window the pages whose last reader went first, else tails of the coldest leaves.
void Manager::evict(Group& group, int64_t num_pages) {
  if (group.has_window()) {
    for (; num_pages > 0; --num_pages) {
      const int32_t page = group.readers.next[0];
      tree_.punch_page(group.number, page);
      group.readers.forget(page);
      group.pages.free({&page, 1}, std::nullopt);
      ++evicted_;
    }
    return;
  }
  const int64_t tree_pages = (num_pages + group.num_columns - 1) / group.num_columns;
  tree_.plan_evict(math_.first_slot(tree_pages), group.first_column, removal_);
  carry_out_removal();
}

// Takes out of the tree what was planned, and frees it.
void Manager::carry_out_removal() {
  std::vector<int32_t*> out;
  for (size_t c = 0; c < columns_.size(); ++c) {
    columns_[c].resize(static_cast<size_t>(removal_.columns()[c]));
    out.push_back(columns_[c].data());
  }
  tree_.carry_out(removal_, out, nullptr);
  free_columns();
}

// Frees what the tree gave back: nobody reads it.
void Manager::free_columns() {
  for (Group& each : groups_) {
    for (int c = each.first_column; c < each.first_column + each.num_columns; ++c) {
      const auto& ids = columns_[static_cast<size_t>(c)];
      if (each.has_window()) {
        for (int32_t id : ids) each.readers.forget(id);
      }
      each.pages.free({ids.data(), static_cast<int64_t>(ids.size())}, std::nullopt);
      evicted_ += static_cast<int64_t>(ids.size());
    }
  }
}

int64_t Manager::invalidate(int64_t g, Ids page_ids, int32_t* rows_out) {
  Group& group = groups_[static_cast<size_t>(g)];
  BitSet bad(group.spec.num_pages + 1);
  for (int64_t i = 0; i < page_ids.size; ++i) {
    if (page_ids[i] < 1 || page_ids[i] > group.spec.num_pages) {
      throw BadId{IdFault::kOutOfRange, page_ids[i], i,
                  "page_ids[" + text(i) + "] = " + text(page_ids[i]) + " is out of range: pages of group " +
                      group.spec.name + " are 1 to " + text(group.spec.num_pages)};
    }
    bad.insert(page_ids[i]);
  }
  tree_.discard(group.first_column, group.num_columns, bad, columns_);
  free_columns();
  int64_t n = 0;
  for (int64_t number = 1; number <= num_rows_; ++number) {
    Row& row = this->row(number);
    if (!row.is_running) continue;
    const int32_t* entries = group.entries(number);
    const size_t which = static_cast<size_t>(g);
    const bool reads = std::any_of(entries + first(number, which), entries + end(number, which),
                                   [&](int32_t id) { return bad.contains(id); });
    const auto& copied = request(number).copied;
    const bool is_copy = std::any_of(copied.begin(), copied.end(), [&](const std::pair<int, int32_t>& page) {
      return page.first == group.number && bad.contains(page.second);
    });
    if (reads || is_copy) rows_out[n++] = static_cast<int32_t>(number);
    if (reads || is_copy || tree_.is_lost(request(number).lease)) row.is_stored = false;
  }
  put_lost_first();
  return n;
}

void Manager::drop(std::string_view space) {
  tree_.plan_drop(space, removal_);
  carry_out_removal();
  for (int64_t number = 1; number <= num_rows_; ++number) {
    if (request(number).space == space) row(number).is_stored = false;
  }
  put_lost_first();
}

void Manager::put_lost_first() {
  if (!tree_.has_lost()) return;
  for (Group& group : groups_) {
    Readers& readers = group.readers;
    if (!group.has_window()) continue;
    for (int32_t page = readers.next[0], next; page != 0; page = next) {
      next = readers.next[page];
      if (tree_.is_lost(group.number, page)) readers.put_first(page);
    }
  }
}

void Manager::make_room() {
  // What leaves the tree for a group that keeps every token takes pages of windows with it.
  for (const bool has_window : {false, true}) {
    for (Group& group : groups_) {
      const int64_t missing = group.needed - group.pages.num_free();
      if (missing > 0 && group.has_window() == has_window) evict(group, missing);
    }
  }
}

void Manager::grow_writes(int64_t n) {
  grow(index_, index_.size() + static_cast<size_t>(n));
  grow(ids_, ids_.size() + static_cast<size_t>(n));
}

void Manager::grow_columns(int64_t tree_pages) {
  for (const Group& group : groups_) {
    for (int c = group.first_column; group.num_columns > 1 && c < group.first_column + group.num_columns; ++c) {
      grow(columns_[static_cast<size_t>(c)], static_cast<size_t>(tree_pages));
    }
  }
}

void Manager::write(const Group& group, int64_t row, int64_t page, const int32_t* ids, int64_t n) {
  const int32_t place = static_cast<int32_t>(group.offset + row * group.max_pages + page);
  if (n == 1) {  // as in most decode steps
    index_.push_back(place);
    ids_.push_back(*ids);
    return;
  }
  const size_t before = index_.size();
  index_.resize(before + static_cast<size_t>(n));
  std::iota(index_.begin() + static_cast<std::ptrdiff_t>(before), index_.end(), place);
  ids_.insert(ids_.end(), ids, ids + n);
}

void Manager::add_pages(Group& group, size_t g, int64_t number, int64_t to) {
  const int64_t from = end(number, g), n = to - from;
  if (n <= 0) return;
  int32_t* entries = group.entries(number) + from;
  group.pages.alloc(n, entries);
  std::fill_n(group.owned(number) + from, n, uint8_t{1});
  group.num_own += n;
  write(group, number, from, entries, n);
  end(number, g) = static_cast<int32_t>(to);
}

// ── admission ───────────────────────────────────────────────────────────────────────────────────────

void Manager::require_tokens(Ids tokens) {
  if (tokens.size == 0) throw BadArgument("tokens: give at least one");
  const int64_t at = first_outside(tokens.data, tokens.size, 0, std::numeric_limits<int32_t>::max());
  if (at == tokens.size) return;
  throw BadId{IdFault::kOutOfRange, tokens[at], at,
              "tokens[" + text(at) + "] = " + text(tokens[at]) + " is no token: give 0 or more"};
}

void Manager::find_hit(const Sequence& sequence, int64_t reserve, bool is_cached, Match& match) {
  const int64_t n = sequence.tokens.size;
  if (n == 0) throw BadArgument("tokens: give at least one");
  if (n > max_tokens_) {
    throw BadArgument(text(n) + " tokens: a row has at most " + text(max_tokens_) + ", as this manager was made");
  }
  if (reserve < -1) throw BadArgument("reserve: give 0 or more tokens, or None for all");
  // At least one token is computed: the last is not looked for. The others are checked on the way.
  require_tokens(is_cached ? Ids{sequence.tokens.data + n - 1, 1} : sequence.tokens);
  tree_.match({sequence.space, {sequence.tokens.data, is_cached ? n - 1 : 0}, sequence.ranges}, match, nullptr);
  const int64_t target = target_of(sequence, reserve, match);
  if (target > max_tokens_) {
    throw BadArgument("reserve: " + text(target) + " tokens are more than the " + text(max_tokens_) + " of a row");
  }
  const int64_t unlocked = tree_.count_unlocked(match);
  for (Group& group : groups_) {
    const int64_t hit = group.math.page(match.length);
    group.needed = group.math.pages_for(target) - hit;
    if (!group.has_window()) {
      group.locked = group.math.page(unlocked);
      continue;
    }
    // Whether somebody reads them is asked page by page only where it matters.
    group.locked = 0;
    const int64_t most = hit - live_from(group, match.length);
    group.locked = group.needed + watermark_ + most <= available(group) ? most : count_loose(group, match);
  }
}

int64_t Manager::count_loose(const Group& group, const Match& match) {
  const int64_t first = live_from(group, match.length) / group.num_columns, end = math_.page(match.length);
  int64_t n = 0;
  for (int c = group.first_column; c < group.first_column + group.num_columns; ++c) {
    auto& ids = columns_[static_cast<size_t>(c)];
    ids.resize(static_cast<size_t>(end));
    tree_.copy_pages(match, c, first, ids.data());
    for (int64_t p = first; p < end; ++p) n += group.readers.count[ids[static_cast<size_t>(p)]] == 0;
  }
  return n;
}

int64_t Manager::target_of(const Sequence& sequence, int64_t reserve, const Match& match) const {
  return reserve < 0 ? sequence.tokens.size : match.length + reserve;
}

bool Manager::can_admit(const Sequence& sequence, int64_t reserve, bool is_cached) {
  Match match;
  find_hit(sequence, reserve, is_cached, match);
  return row_ids_.num_free() > 0 && has_room(watermark_);
}

Manager::Admitted Manager::admit(const Sequence& sequence, int64_t reserve, bool is_cached) {
  Match match;
  find_hit(sequence, reserve, is_cached, match);
  require_row_ids(1);
  require_room(watermark_);
  const int64_t hit = match.length, target = target_of(sequence, reserve, match);

  // From here on only memory can run out, and that is asked for first.
  std::vector<int32_t> prompt;
  if (is_cached) prompt.assign(sequence.tokens.data, sequence.tokens.data + sequence.tokens.size);
  std::string space(sequence.space);
  std::vector<KeyRange> ranges;
  if (sequence.ranges != nullptr) ranges = *sequence.ranges;
  int64_t writes = 0;
  for (const Group& group : groups_) writes += group.math.pages_for(target);
  grow_writes(writes);
  grow_columns(math_.page(hit));
  const LeaseId lease = tree_.lock_fresh(match);

  int32_t number;
  row_ids_.alloc(1, &number);
  Request& request = this->request(number);
  request.prompt.swap(prompt);
  request.space.swap(space);
  request.ranges.swap(ranges);
  start(number, lease, hit, target);
  row(number).is_stored = is_cached;
  const size_t num_writes = index_.size();
  for (size_t g = 0; g < groups_.size(); ++g) take_hit(groups_[g], g, number);  // which nobody evicts now
  try {
    make_room();
  } catch (...) {
    abandon(number, num_writes);
    throw;
  }
  for (size_t g = 0; g < groups_.size(); ++g) {
    add_pages(groups_[g], g, number, groups_[g].math.pages_for(target));
  }
  ++admitted_;
  tokens_ += sequence.tokens.size;
  hits_ += hit;
  return {number, hit, target, lease.number};
}

void Manager::start(int64_t number, LeaseId lease, int64_t length, int64_t reserved) {
  const int32_t known = static_cast<int32_t>(length);
  row(number) = {static_cast<int32_t>(reserved), known, known, true, true};
  request(number).lease = lease;
  touched_[static_cast<size_t>(number)] = step_;
}

void Manager::abandon(int32_t number, size_t num_writes) {
  for (size_t g = 0; g < groups_.size(); ++g) {
    Group& group = groups_[g];
    for (int64_t p = first(number, g); group.has_window() && p < end(number, g); ++p) {
      let_go(group, group.entries(number)[p]);
    }
  }
  index_.resize(num_writes);
  ids_.resize(num_writes);
  tree_.release(request(number).lease);
  clear(number);
  touched_[static_cast<size_t>(number)] = 0;
  row_ids_.free({&number, 1}, std::nullopt);
}

// Writes the leased pages of a row into a table. Those of a window begin where the next query looks.
void Manager::take_hit(Group& group, size_t g, int64_t number) {
  const Row& row = this->row(number);
  const LeaseId lease = request(number).lease;
  const int64_t tree_pages = math_.page(row.stored), n = tree_pages * group.num_columns;
  const int64_t first = live_from(group, row.committed), tree_first = first / group.num_columns;
  int32_t* entries = group.entries(number);
  if (group.num_columns == 1) {
    tree_.copy_pages(lease, group.first_column, first, entries);
  } else {
    for (int c = 0; c < group.num_columns; ++c) {
      auto& ids = columns_[static_cast<size_t>(group.first_column + c)];
      ids.resize(static_cast<size_t>(tree_pages));
      tree_.copy_pages(lease, group.first_column + c, tree_first, ids.data());
      for (int64_t p = tree_first; p < tree_pages; ++p)
        entries[p * group.num_columns + c] = ids[static_cast<size_t>(p)];
    }
  }
  if (group.has_window()) group.readers.read(entries + first, n - first);
  write(group, number, first, entries + first, n - first);
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
    const Row& row = rows_[static_cast<size_t>(number)];
    const Request& request = requests_[static_cast<size_t>(number)];
    if (!row.is_running || !row.is_stored || row.reserved <= best.length || request.space != sequence.space) continue;
    const auto& prompt = request.prompt;
    const int64_t keys = common_keys(sequence.ranges == nullptr ? no_ranges : *sequence.ranges, request.ranges);
    const int64_t most = std::min({n - 1, int64_t{row.reserved}, static_cast<int64_t>(prompt.size()), keys});
    if (most <= best.length || most <= row.committed) continue;
    const auto end = std::mismatch(prompt.begin(), prompt.begin() + most, sequence.tokens.data).first;
    const int64_t same = math_.first_slot(math_.page(end - prompt.begin()));
    // What it has committed is found already, or can no longer be resumed from.
    if (same > best.length && same > row.committed) best = {number, same};
  }
  return best;
}

// ── the end of a row, and of steps ──────────────────────────────────────────────────────────────────

void Manager::release(Ids rows) {
  require_rows(rows);
  clear_given_up();
  for (auto& ended : ended_) ended.clear();
  for (int64_t i = 0; i < rows.size; ++i) {
    const bool is_touched = this->is_touched(rows[i]);
    ended_[is_touched].push_back(rows[i]);
    for (size_t g = 0; g < groups_.size(); ++g) {
      const int32_t* entries = groups_[g].entries(rows[i]);
      const uint8_t* own = groups_[g].owned(rows[i]);
      for (int64_t p = first(rows[i], g), to = end(rows[i], g); p < to; ++p) {
        if (own[p] != 0) groups_[g].given_up[is_touched].push_back(entries[p]);
      }
    }
  }
  // Memory is asked for: what follows does not fail.
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
      group.readers.leaving.reserve(leaving, fence(is_touched));
    }
  }
  for (int64_t i = 0; i < rows.size; ++i) {
    const bool is_touched = this->is_touched(rows[i]);
    for (size_t g = 0; g < groups_.size(); ++g) {
      Group& group = groups_[g];
      if (!group.has_window()) continue;
      const int32_t* entries = group.entries(rows[i]);
      const uint8_t* own = group.owned(rows[i]);
      for (int64_t p = first(rows[i], g), to = end(rows[i], g); p < to; ++p) {
        if (own[p] == 0) leave(group, entries[p], is_touched);
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
}

// Makes a row one that does not run. Entries before its first live one are never looked at.
void Manager::clear(int64_t number) {
  for (size_t g = 0; g < groups_.size(); ++g) {
    const int64_t from = first(number, g), n = end(number, g) - from;
    std::fill_n(groups_[g].entries(number) + from, n, 0);
    std::fill_n(groups_[g].owned(number) + from, n, uint8_t{0});
    first(number, g) = end(number, g) = 0;
  }
  row(number) = {};
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

void Manager::pass_fence(int64_t fence) {
  if (fence >= step_) {
    throw BadArgument("step " + text(fence) + " has not been taken yet: the one being planned is " + text(step_));
  }
  passed_ = std::max(passed_, fence);
  waiting_.pass(fence, [&](const LeaseId& lease) { tree_.release(lease); });
  for (Group& group : groups_) {
    group.pages.pass_fence(fence);
    if (group.has_window()) group.readers.leaving.pass(fence, [&](int32_t page) { let_go(group, page); });
  }
  row_ids_.pass_fence(fence);
}

// ── the delta ───────────────────────────────────────────────────────────────────────────────────────

// Packed: the step in two halves, writes, copies of each group; places, ids; sources and targets of each group.
int64_t Manager::delta_size() const {
  size_t n = 3 + groups_.size() + 2 * index_.size();
  for (const Group& group : groups_) n += 2 * group.sources.size();
  return static_cast<int64_t>(n);
}

void Manager::take_delta(int32_t* out) {
  *out++ = static_cast<int32_t>(step_ & std::numeric_limits<int32_t>::max());
  *out++ = static_cast<int32_t>(step_ >> 31);
  *out++ = static_cast<int32_t>(index_.size());
  for (const Group& group : groups_) *out++ = static_cast<int32_t>(group.sources.size());
  out = std::copy(index_.begin(), index_.end(), out);
  out = std::copy(ids_.begin(), ids_.end(), out);
  for (const Group& group : groups_) {
    out = std::copy(group.sources.begin(), group.sources.end(), out);
    out = std::copy(group.targets.begin(), group.targets.end(), out);
  }
  clear_delta();
  ++step_;
}

void Manager::clear_delta() {
  index_.clear();
  ids_.clear();
  for (Group& group : groups_) {
    for (const int32_t target : group.targets) group.source_of[target] = 0;
    group.sources.clear();
    group.targets.clear();
  }
}

}  // namespace pagoda
