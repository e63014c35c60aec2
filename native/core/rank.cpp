#include "core/rank.hpp"

#include <algorithm>
#include <utility>

namespace pagoda {

namespace {

// Where a section begins in its delta; 0 if it is empty.
int64_t begin_of(Ids section, Ids packed) { return section.size == 0 ? 0 : section.data - packed.data; }

bool has_duplicate(std::vector<int32_t>& ids) {
  std::sort(ids.begin(), ids.end());
  return std::adjacent_find(ids.begin(), ids.end()) != ids.end();
}

void append(std::vector<int32_t>& all, Ids ids) { all.insert(all.end(), ids.data, ids.data + ids.size); }

}  // namespace

Rank::Rank(std::vector<PageTable::Group> tables, std::vector<KernelPages> pages, int64_t num_rows, int64_t max_tokens,
           int64_t num_checkpoints)
    : table_(std::move(tables), num_rows),
      pages_(std::move(pages)),
      max_tokens_(max_tokens),
      num_checkpoints_(num_checkpoints) {}

Rank::Content Rank::check(Ids packed, int64_t step) const {
  const DeltaView delta(packed);
  if (delta.num_groups() != table_.num_groups()) {
    std::string names;
    for (int64_t g = 0; g < table_.num_groups(); ++g) names += (g == 0 ? "" : ", ") + table_.group(g).name;
    throw BadArgument("delta: it has " + text(delta.num_groups()) + " groups, but these pools have " +
                      text(table_.num_groups()) + (names.empty() ? "" : ": " + names));
  }
  if (delta.step() != step) {
    throw BadArgument("delta: it is of step " + text(delta.step()) + ", but the next one is step " + text(step) +
                      ": apply every delta once, in the order of Manager.plan");
  }
  const auto begin = [&](Ids section) { return begin_of(section, packed); };
  const Ids rows = delta.section(Section::kRows), lengths = delta.section(Section::kLengths);
  const Ids counts = delta.section(Section::kCounts), starts = delta.section(Section::kStarts);
  check_rows(rows, lengths, counts, starts);
  const Ids places = delta.section(Section::kPlaces), page_ids = delta.section(Section::kPageIds);
  table_.require_writes(places, page_ids);
  Content content{rows.size,
                  starts.size == 0 ? 0 : starts[starts.size - 1],
                  counts.size == 0 ? 0 : *std::max_element(counts.data, counts.data + counts.size),
                  begin(rows),
                  begin(lengths),
                  begin(starts),
                  begin(delta.section(Section::kWork)),
                  places.size,
                  begin(places),
                  begin(page_ids),
                  {},
                  check_states(delta, packed),
                  {}};
  check_work(delta, lengths, counts);
  for (int64_t g = 0; g < table_.num_groups(); ++g) {
    const WorkView work = delta.work(g);
    content.parts.push_back({work.num_parts, work.extend_parts});
  }
  for (int64_t g = 0; g < table_.num_groups(); ++g) {
    const Ids sources = delta.section(Section::kSources, g), targets = delta.section(Section::kTargets, g);
    if (sources.size == 0) continue;
    const PageTable::Group& group = table_.group(g);
    check_range(sources, group, "sources");
    check_range(targets, group, "targets");
    content.copies.push_back({g, begin(sources), begin(targets), sources.size, is_disjoint(sources, targets, group)});
  }
  return content;
}

void Rank::check_rows(Ids rows, Ids lengths, Ids counts, Ids starts) const {
  require_rows(rows, "rows");
  int64_t sum = 0;
  for (int64_t i = 0; i < rows.size; ++i) {
    if (counts[i] < 0 || lengths[i] < counts[i] || lengths[i] > max_tokens_) {
      throw BadArgument("delta: row " + text(rows[i]) + " computes " + text(counts[i]) + " of " + text(lengths[i]) +
                        " tokens, but a row has at most " + text(max_tokens_) +
                        ": build the pools with the manager's max_tokens");
    }
    if (starts[i] != sum) throw BadArgument("delta: starts are not the sums of counts");
    sum += counts[i];
  }
  if (rows.size > 0 && starts[rows.size] != sum) throw BadArgument("delta: starts are not the sums of counts");
}

void Rank::check_work(const DeltaView& delta, Ids lengths, Ids counts) const {
  for (size_t g = 0; lengths.size > 0 && g < pages_.size(); ++g) {
    if (pages_[g].target == 0) continue;
    const int64_t number = static_cast<int64_t>(g);
    pagoda::check_work(delta.work(number), {pages_[g].window, pages_[g].target}, table_.group(number).name, lengths,
                       counts);
  }
}

Rank::States Rank::check_states(const DeltaView& delta, Ids packed) const {
  const Ids save_rows = delta.section(Section::kSaveRows), save_lengths = delta.section(Section::kSaveLengths);
  const Ids save_ids = delta.section(Section::kSaveIds);
  const Ids restore_rows = delta.section(Section::kRestoreRows), resets = delta.section(Section::kResetRows);
  const Ids restore_lengths = delta.section(Section::kRestoreLengths);
  const Ids restore_ids = delta.section(Section::kRestoreIds);
  const Ids sources = delta.section(Section::kStateSources), targets = delta.section(Section::kStateTargets);
  const auto begin = [&](Ids section) { return begin_of(section, packed); };
  const States states{save_rows.size,    begin(save_rows),    begin(save_lengths),    begin(save_ids),
                      restore_rows.size, begin(restore_rows), begin(restore_lengths), begin(restore_ids),
                      resets.size,       begin(resets),       sources.size,           begin(sources),
                      begin(targets)};
  if (states.is_empty()) return states;
  if (num_checkpoints_ == kNoStates) {
    throw BadArgument(
        "delta: it saves, restores, resets or copies states, but these pools have none: build them "
        "with the manager's layout");
  }
  check_checkpoints(save_rows, save_lengths, save_ids, "save");
  check_checkpoints(restore_rows, restore_lengths, restore_ids, "restore");
  require_rows(resets, "reset_rows");
  require_rows(sources, "state_sources");
  require_rows(targets, "state_targets");
  std::vector<int32_t> written(save_ids.data, save_ids.data + save_ids.size);
  if (has_duplicate(written)) throw BadArgument("delta: a checkpoint is the target of two saves");
  written.clear();
  append(written, restore_rows);
  append(written, resets);
  append(written, targets);
  if (has_duplicate(written)) {
    throw BadArgument("delta: the state of a row is written twice by restores, resets and state copies");
  }
  written.assign(targets.data, targets.data + targets.size);
  std::sort(written.begin(), written.end());
  for (int64_t i = 0; i < sources.size; ++i) {
    if (std::binary_search(written.begin(), written.end(), sources[i])) {
      throw BadArgument("delta: row " + text(sources[i]) + " is source and target of state copies");
    }
  }
  return states;
}

void Rank::require_rows(Ids rows, const char* what) const {
  for (int64_t i = 0; i < rows.size; ++i) {
    if (rows[i] >= 1 && rows[i] <= table_.num_rows()) continue;
    throw BadId{IdFault::kOutOfRange, rows[i], i,
                what + ("[" + text(i)) + "] = " + text(rows[i]) + " is out of range: rows are 1 to " +
                    text(table_.num_rows()) + ": build the pools with the manager's num_rows"};
  }
}

void Rank::check_checkpoints(Ids rows, Ids lengths, Ids ids, const std::string& what) const {
  require_rows(rows, (what + "_rows").c_str());
  for (int64_t i = 0; i < rows.size; ++i) {
    if (ids[i] < 1 || ids[i] > num_checkpoints_) {
      throw BadId{
          IdFault::kOutOfRange, ids[i], i,
          what + "_ids[" + text(i) + "] = " + text(ids[i]) + " is out of range: " +
              (num_checkpoints_ == 0 ? "there are no checkpoints" : "checkpoints are 1 to " + text(num_checkpoints_)) +
              ": build the pools with the manager's capacity"};
    }
    if (lengths[i] < 1 || lengths[i] > max_tokens_) {
      throw BadArgument("delta: " + what + "_lengths[" + text(i) + "] = " + text(lengths[i]) +
                        ", but a state has 1 to " + text(max_tokens_) +
                        " tokens: build the pools with the manager's max_tokens");
    }
  }
}

void Rank::check_range(Ids ids, const PageTable::Group& group, const char* what) const {
  for (int64_t i = 0; i < ids.size; ++i) {
    if (ids[i] >= 1 && ids[i] <= group.num_pages) continue;
    throw BadId{IdFault::kOutOfRange, ids[i], i,
                what + (" of group " + group.name) + "[" + text(i) + "] = " + text(ids[i]) +
                    " is out of range: page ids of the group are 1 to " + text(group.num_pages)};
  }
}

bool Rank::is_disjoint(Ids sources, Ids targets, const PageTable::Group& group) const {
  std::vector<int32_t> written(targets.data, targets.data + targets.size);
  if (has_duplicate(written)) {
    throw BadArgument("delta: a page of group " + group.name + " is the target of two copies");
  }
  return std::none_of(sources.data, sources.data + sources.size,
                      [&](int32_t page) { return std::binary_search(written.begin(), written.end(), page); });
}

void Rank::follow(Ids packed) {
  const DeltaView delta(packed);
  table_.write(delta.section(Section::kPlaces), delta.section(Section::kPageIds));
}

void Rank::fill(Ids packed, int64_t num_rows, int64_t num_tokens, const BatchBuffers& shared,
                const std::vector<GroupBuffers>& groups) const {
  const DeltaView delta(packed);
  const Ids rows = delta.section(Section::kRows), lengths = delta.section(Section::kLengths);
  const Ids starts = delta.section(Section::kStarts);
  const int64_t n = rows.size, end = n == 0 ? 0 : starts[n];
  check_rows(rows, lengths, delta.section(Section::kCounts), starts);
  check_work(delta, lengths, delta.section(Section::kCounts));
  if (n > num_rows || end > num_tokens) throw BadArgument("delta: its array was changed after it was applied");
  std::fill(std::copy_n(rows.data, n, shared.rows), shared.rows + num_rows, 0);
  std::fill(std::copy_n(lengths.data, n, shared.lengths), shared.lengths + num_rows, 0);
  std::copy_n(starts.data, starts.size, shared.query_start_loc);
  std::fill(shared.query_start_loc + n, shared.query_start_loc + num_rows + 1, static_cast<int32_t>(end));
  for (int64_t i = 0; i < n; ++i) {
    const int64_t first = lengths[i] - (starts[i + 1] - starts[i]);  // position of the row's first query
    for (int64_t t = starts[i]; t < starts[i + 1]; ++t) {
      shared.positions[t] = first + (t - starts[i]);
      shared.batch_indices[t] = static_cast<int32_t>(i);
    }
  }
  int32_t* extend = shared.extends + 2;
  int32_t extend_tokens = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (starts[i + 1] - starts[i] <= kDecodeQueries) continue;
    *extend++ = static_cast<int32_t>(i);
    *extend++ = extend_tokens;
    extend_tokens += starts[i + 1] - starts[i];
  }
  shared.extends[0] = static_cast<int32_t>((extend - shared.extends) / 2 - 1);
  shared.extends[1] = extend_tokens;
  std::fill(extend, shared.extends + 2 * (num_rows + 1), 0);
  std::fill(shared.positions + end, shared.positions + num_tokens, 0);
  std::fill(shared.batch_indices + end, shared.batch_indices + num_tokens, -1);
  for (size_t g = 0; g < groups.size(); ++g) {
    fill_group(g, rows, lengths, starts, num_rows, num_tokens, groups[g]);
    if (pages_[g].target > 0) fill_work(g, delta.work(static_cast<int64_t>(g)), lengths, starts, num_rows, groups[g]);
  }
}

void Rank::fill_group(size_t g, Ids rows, Ids lengths, Ids starts, int64_t num_rows, int64_t num_tokens,
                      const GroupBuffers& out) const {
  const KernelPages& pages = pages_[g];
  const PageMath page(pages.page_tokens), kernel_page(pages.kernel_page_tokens);
  const int64_t split = pages.page_tokens / pages.kernel_page_tokens;
  const int64_t width = table_.group(static_cast<int64_t>(g)).max_pages * split;
  const int64_t n = rows.size;
  int64_t wanted = 0, listed = 0;
  out.indptr[0] = 0;
  for (int64_t i = 0; i < num_rows; ++i) {
    int32_t* columns = out.page_table + i * width;
    if (i >= n) {
      std::fill_n(columns, width, 0);
      out.begins[i] = out.last_page_len[i] = 0;
      out.indptr[i + 1] = static_cast<int32_t>(listed);
      continue;
    }
    const int32_t* ids = table_.row(g, rows[i]);
    const int64_t length = lengths[i], first_query = length - (starts[i + 1] - starts[i]);
    const int64_t oldest = pages.window > 0 ? std::max<int64_t>(0, first_query - pages.window + 1) : 0;
    const int64_t first = kernel_page.page(oldest), end = kernel_page.pages_for(length);
    std::fill_n(columns, first, 0);
    for (int64_t c = first; c < end; ++c) {
      const int64_t id = ids[split == 1 ? c : c / split];
      columns[c] = static_cast<int32_t>(id > 0 ? id * split + (split == 1 ? 0 : c % split) : 0);
    }
    std::fill(columns + end, columns + width, 0);
    wanted += end - first;
    const bool fits = wanted <= pages.max_indices;
    if (fits) {
      std::copy(columns + first, columns + end, out.indices + listed);
      listed += end - first;
    }
    out.begins[i] = static_cast<int32_t>(kernel_page.first_slot(first));
    out.last_page_len[i] = end > first && fits ? static_cast<int32_t>(kernel_page.offset(length - 1) + 1) : 0;
    out.indptr[i + 1] = static_cast<int32_t>(listed);
    for (int64_t t = starts[i]; t < starts[i + 1]; ++t) {
      const int64_t position = first_query + (t - starts[i]), id = ids[page.page(position)];
      out.slot_mapping[t] = id > 0 ? page.first_slot(id) + page.offset(position) : -1;
    }
  }
  std::fill(out.slot_mapping + (n == 0 ? 0 : starts[n]), out.slot_mapping + num_tokens, -1);
}

void Rank::fill_work(size_t g, const WorkView& work, Ids lengths, Ids starts, int64_t num_rows,
                     const GroupBuffers& out) const {
  const int64_t target = pages_[g].target;
  std::fill(std::copy_n(work.runs.data, work.runs.size, out.runs), out.runs + target + 1,
            static_cast<int32_t>(work.segments.size / 4));
  int32_t* task = out.tasks;
  for (int64_t s = 0; s < work.segments.size / 4; ++s, task += 8) {
    const int32_t* segment = work.segments.data + 4 * s;
    const int32_t* member = work.members.data + 2 * segment[2];
    const int32_t row = member[0], part = member[1];
    const bool is_first = part >= 0 && part == work.splits[2 * row + 1];
    const int32_t words[] = {segment[0],   segment[1],
                             row,          part,
                             starts[row],  starts[row + 1] - starts[row],
                             lengths[row], is_first ? work.splits[2 * row] : 0};
    std::copy_n(words, 8, task);
  }
  std::fill(task, out.tasks + 8 * (num_rows + target), 0);
  std::copy_n(work.splits.data, work.splits.size, out.splits);
  for (int64_t i = work.splits.size / 2; i < num_rows; ++i) {
    out.splits[2 * i] = 0;
    out.splits[2 * i + 1] = -1;
  }
}

}  // namespace pagoda
