#include "core/work_list.hpp"

#include <cstring>

namespace pagoda {

namespace {

constexpr int64_t kBoundary = 64;   // a row is cut at multiples of it
constexpr int64_t kMinQuota = 256;  // keys of a program: fewer are not worth a merge
constexpr int64_t kSlack = 16;      // a program may have one part in so many more keys if that saves a cut
constexpr int64_t kMinExtendPart = 1024;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The most parts of an extend row in a step whose extend rows have so many tiles.
int64_t most_extend_parts(int64_t tiles, int64_t target) {
  return tiles > 0 ? std::clamp<int64_t>(target / kExtendShare / tiles, 1, kExtendParts) : 1;
}

}  // namespace

int64_t most_parts(int64_t num_rows, int64_t num_tokens, int64_t max_queries, int64_t target) {
  // A row in n parts crosses the ends of n - 1 runs, of which there are target - 1 inside the list.
  const int64_t queries = std::min({kDecodeQueries, max_queries, num_tokens});
  const int64_t split_rows = std::min(num_rows, target - 1);
  const int64_t decode = queries * (target - 1) + std::min(num_tokens, queries * split_rows);
  // An extend row has at most target / kExtendShare / tiles parts, or one, and at most kExtendTile tokens per tile.
  const int64_t extend =
      max_queries > kDecodeQueries ? std::min(kExtendTile * (target / kExtendShare), kExtendParts * num_tokens) : 0;
  return decode + extend;
}

WorkLists::WorkLists(std::vector<WorkGroup> groups) : groups_(std::move(groups)) {
  for (const WorkGroup& group : groups_) has_lists_ = has_lists_ || group.target > 0;
}

Ids WorkLists::make(Ids lengths, Ids counts) {
  const int64_t num_groups = static_cast<int64_t>(groups_.size());
  if (!has_lists_ || lengths.size == 0) return {nullptr, 0};
  int64_t most = kWorkEntry * num_groups;
  for (const WorkGroup& group : groups_) {
    if (group.target > 0) most += 6 * (lengths.size + group.target) + 2 * lengths.size + group.target + 4;
  }
  if (static_cast<size_t>(most) > section_.size()) section_.resize(static_cast<size_t>(most));
  int64_t end = kWorkEntry * num_groups;
  for (int64_t g = 0; g < num_groups; ++g) {
    const WorkGroup& group = groups_[static_cast<size_t>(g)];
    WorkEntry entry{};
    if (group.target > 0) end = make_group(group, lengths, counts, end, entry);
    std::memcpy(section_.data() + kWorkEntry * g, &entry, sizeof(entry));
  }
  return {section_.data(), end};
}

int64_t WorkLists::make_group(const WorkGroup& group, Ids lengths, Ids counts, int64_t begin, WorkEntry& entry) {
  const int64_t n = lengths.size;
  int64_t total = 0, tiles = 0, num_decode = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (counts[i] > kDecodeQueries) {
      tiles += ceil_div(counts[i], kExtendTile);
    } else if (counts[i] > 0) {
      total += lengths[i] - span_begin(lengths[i], counts[i], group.window);
      ++num_decode;
    }
  }
  const int64_t quota = std::max(kMinQuota, ceil_div(total, group.target)), slack = quota / kSlack;
  // Rows share no program where there are enough of them: short rows then run at once.
  int64_t num_alone = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (counts[i] < 1 || counts[i] > kDecodeQueries) continue;
    const int64_t span = lengths[i] - span_begin(lengths[i], counts[i], group.window);
    num_alone += std::max<int64_t>(1, ceil_div(span - slack, quota));
  }
  const bool is_alone = num_alone <= group.target;
  const int64_t extend_parts = most_extend_parts(tiles, group.target);

  // Members, splits and runs are made behind the longest list of segments, from where they are moved.
  const int64_t most_segments = num_decode + group.target;
  int32_t* const segments = section_.data() + begin;
  int32_t* const members = segments + 4 * most_segments;
  int32_t* const splits = members + 2 * most_segments;
  int32_t* const runs = splits + 2 * n;
  int64_t num_segments = 0, num_runs = 0, num_parts = 0, most_extend = 1, load = 0;
  runs[0] = 0;
  for (int64_t i = 0; i < n; ++i) {
    const int64_t count = counts[i], length = lengths[i], first = span_begin(length, count, group.window);
    const int64_t before = num_segments;
    int64_t parts = 0;
    if (count > kDecodeQueries) {
      parts = std::min(extend_parts, ceil_div(length - first, kMinExtendPart));
      most_extend = std::max(most_extend, parts);
    } else if (count > 0) {
      for (int64_t from = first; from < length;) {
        // All of the row if the program has room for it, else up to the end of its room.
        const int64_t room = quota - load;
        const int64_t cut = std::min(length, ceil_div(from + room, kBoundary) * kBoundary);
        const int64_t to = length - from <= room + slack ? length : cut;
        int32_t* const segment = segments + 4 * num_segments;
        segment[0] = static_cast<int32_t>(from);
        segment[1] = static_cast<int32_t>(to);
        segment[2] = static_cast<int32_t>(num_segments);
        segment[3] = 1;
        members[2 * num_segments] = static_cast<int32_t>(i);
        members[2 * num_segments + 1] = static_cast<int32_t>(num_parts + (num_segments - before) * count);
        ++num_segments;
        load += to - from;
        from = to;
        if (load >= quota || (is_alone && from == length)) {
          runs[++num_runs] = static_cast<int32_t>(num_segments);
          load = 0;
        }
      }
      parts = num_segments - before;
      if (parts == 1) members[2 * before + 1] = -1;
    }
    splits[2 * i] = static_cast<int32_t>(parts);
    splits[2 * i + 1] = static_cast<int32_t>(parts > 1 ? num_parts : -1);
    if (parts > 1) num_parts += parts * count;
  }
  // Shared runs have at least `quota` keys each, but for the last, so there are no more than `target`. A row alone has
  // a run for each `quota` keys, and one for more than `slack` that are left.
  while (num_runs < group.target) runs[++num_runs] = static_cast<int32_t>(num_segments);

  const int64_t members_at = begin + 4 * num_segments, splits_at = members_at + 2 * num_segments;
  std::memmove(section_.data() + members_at, members, static_cast<size_t>(2 * num_segments) * sizeof(int32_t));
  std::memmove(section_.data() + splits_at, splits, static_cast<size_t>(2 * n + group.target + 1) * sizeof(int32_t));
  int64_t end = splits_at + 2 * n + group.target + 1;
  while (end % 4 != 0) section_[static_cast<size_t>(end++)] = 0;
  entry = {static_cast<int32_t>(group.target), static_cast<int32_t>(begin),        static_cast<int32_t>(num_segments),
           static_cast<int32_t>(members_at),   static_cast<int32_t>(num_segments), static_cast<int32_t>(splits_at),
           static_cast<int32_t>(num_parts),    static_cast<int32_t>(most_extend)};
  return end;
}

void check_work(const WorkView& work, const WorkGroup& group, const std::string& name, Ids lengths, Ids counts) {
  const auto refuse = [&](const std::string& why) {
    throw BadArgument("delta: the work list of group " + name + " " + why);
  };
  if (work.target == 0) {
    refuse("is missing, but these pools expect one: give the manager and the pools the same workers");
  }
  if (work.target > group.target) {
    refuse("is for " + text(work.target) + " programs, but these pools have room for " + text(group.target) +
           ": give the manager and the pools the same workers, and the manager the layout of one rank");
  }
  const int64_t n = lengths.size, num_segments = work.segments.size / 4, num_members = work.members.size / 2;
  int64_t num_parts = 0, most_extend = 1, num_tokens = 0, most_queries = 0, tiles = 0;
  for (int64_t i = 0; i < n; ++i) tiles += counts[i] > kDecodeQueries ? ceil_div(counts[i], kExtendTile) : 0;
  const int64_t extend_parts = most_extend_parts(tiles, work.target);
  std::vector<int32_t> next(static_cast<size_t>(2 * n));  // for each row, the first key not covered and the next part
  for (int64_t i = 0; i < n; ++i) {
    const int64_t count = counts[i], parts = work.splits[2 * i], first = work.splits[2 * i + 1];
    const bool is_extend = count > kDecodeQueries;
    if (count == 0 ? parts != 0 : parts < 1 || (is_extend && parts > extend_parts) || parts > n + group.target) {
      refuse("splits row " + text(i) + " of the step, which computes " + text(count) + " tokens, into " + text(parts));
    }
    if (first != (parts > 1 ? num_parts : -1)) refuse("numbers the parts of row " + text(i) + " of the step wrongly");
    if (parts > 1) num_parts += parts * count;
    if (is_extend) most_extend = std::max(most_extend, parts);
    num_tokens += count;
    most_queries = std::max(most_queries, count);
    next[static_cast<size_t>(2 * i)] = static_cast<int32_t>(span_begin(lengths[i], count, group.window));
  }
  if (num_parts != work.num_parts || most_extend != work.extend_parts) refuse("counts its parts wrongly");
  // One place is free: kernels read the task behind the last one of a run.
  if (num_segments >= n + work.target || num_members >= n + work.target ||
      num_parts > most_parts(n, num_tokens, most_queries, work.target)) {
    refuse("has " + text(num_segments) + " segments, " + text(num_members) + " members and " + text(num_parts) +
           " parts, too many for " + text(n) + " rows");
  }
  for (int64_t p = 0; p <= work.target; ++p) {
    if (work.runs[p] < (p == 0 ? 0 : work.runs[p - 1]) || (p == 0 && work.runs[p] != 0)) {
      refuse("has runs of segments that are out of order");
    }
  }
  if (work.runs[work.target] != num_segments) refuse("has segments that no program computes");
  int64_t listed = 0, after = 0;  // the members of earlier segments, and the first run that ends behind this one
  for (int64_t s = 0; s < num_segments; ++s) {
    const int32_t* segment = work.segments.data + 4 * s;
    const int64_t begin = segment[0], end = segment[1], num = segment[3];
    if (segment[2] != listed || num < 1 || num > num_members - listed) {
      refuse("does not list the members of segment " + text(s) + " after those of the one before");
    }
    if (num > 1) {
      refuse("has a segment of " + text(num) + " rows, but these pools compute segments of one row: give each row " +
             "segments of its own");
    }
    while (work.runs[after] <= s) ++after;
    for (; listed < segment[2] + num; ++listed) {
      const int64_t row = work.members[2 * listed], part = work.members[2 * listed + 1];
      if (row < 0 || row >= n) refuse("names row " + text(row) + " of a step of " + text(n));
      const int64_t count = counts[row];
      if (count < 1 || count > kDecodeQueries) {
        refuse("has row " + text(row) + " of the step, which computes " + text(count) + " tokens, in a segment");
      }
      int32_t* const covered = next.data() + 2 * row;
      if (begin != covered[0] || end <= begin || end > lengths[row]) {
        refuse("has keys " + text(begin) + " to " + text(end) + " for row " + text(row) +
               " of the step, but those from " + text(covered[0]) + " to " + text(lengths[row]) + " are next");
      }
      const int64_t first = work.splits[2 * row + 1];
      if (part != (first < 0 ? -1 : first + covered[1] * count)) {
        refuse("numbers the parts of row " + text(row) + " of the step wrongly");
      }
      if (first >= 0 && covered[1] == 0 && work.runs[after] != s + 1) {
        refuse("begins to split row " + text(row) + " of the step inside a run: the first part of a row ends one");
      }
      covered[0] = static_cast<int32_t>(end);
      ++covered[1];
    }
  }
  if (listed != num_members) refuse("has members that belong to no segment");
  for (int64_t i = 0; i < n; ++i) {
    if (counts[i] < 1 || counts[i] > kDecodeQueries) continue;
    if (next[static_cast<size_t>(2 * i)] != lengths[i] || next[static_cast<size_t>(2 * i + 1)] != work.splits[2 * i]) {
      refuse("does not cover row " + text(i) + " of the step in its " + text(work.splits[2 * i]) + " parts");
    }
  }
}

}  // namespace pagoda
