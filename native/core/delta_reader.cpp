#include "core/delta_reader.hpp"

#include <algorithm>
#include <limits>
#include <utility>

namespace pagoda {

DeltaReader::DeltaReader(std::vector<Group> groups, int64_t num_rows)
    : groups_(std::move(groups)), num_rows_(num_rows), begins_{0} {
  for (const Group& group : groups_) begins_.push_back(begins_.back() + (num_rows_ + 1) * group.max_pages);
}

DeltaReader::Content DeltaReader::read(Ids packed, int64_t num_groups, int64_t step) const {
  const int64_t mine = static_cast<int64_t>(groups_.size()), head = 3 + mine;
  if (num_groups != mine) {
    std::string names;
    for (const Group& group : groups_) names += (names.empty() ? "" : ", ") + group.name;
    throw BadArgument("delta: it is of " + text(num_groups) + " groups, and these pools have " + text(mine) + ": " +
                      names);
  }
  const auto refuse_sizes = [&] {  // changed since it was made
    throw BadArgument("delta: " + text(packed.size) + " entries are no delta of " + text(mine) + " groups");
  };
  if (packed.size < head) refuse_sizes();
  const int64_t found = packed[0] | packed[1] * (int64_t{1} << 31);
  if (found != step) {
    throw BadArgument("delta: it is of step " + text(found) + ", and the next one is of step " + text(step) +
                      ": apply every delta once, in the order of take_delta");
  }
  int64_t size = 0;
  for (int64_t i = 2; i < head; ++i) {
    if (packed[i] < 0) refuse_sizes();
    size += packed[i];
  }
  if (head + 2 * size != packed.size) refuse_sizes();

  const int32_t* body = packed.data + head;
  Content content{packed[2], {}};
  check_writes({body, content.num_writes}, {body + content.num_writes, content.num_writes});
  int64_t begin = 2 * content.num_writes;
  for (int64_t g = 0; g < mine; ++g) {
    const int64_t n = packed[3 + g];
    if (n == 0) continue;
    const Group& group = groups_[static_cast<size_t>(g)];
    const Ids sources{body + begin, n}, targets{body + begin + n, n};
    check_range(sources, group, "sources");
    check_range(targets, group, "targets");
    content.copies.push_back({g, begin, n, is_disjoint(sources, targets, group)});
    begin += 2 * n;
  }
  return content;
}

DeltaReader::Interval DeltaReader::interval_of(int64_t place) const {
  constexpr int64_t far = std::numeric_limits<int64_t>::max();
  if (place < 0) return {-far, 0, nullptr, -1};
  if (place >= begins_.back()) return {begins_.back(), far, nullptr, -1};
  const auto next = std::upper_bound(begins_.begin(), begins_.end(), place);
  const Group& group = groups_[static_cast<size_t>(next - begins_.begin() - 1)];
  const int64_t begin = *(next - 1), first_row = begin + group.max_pages;
  if (place < first_row) return {begin, first_row, &group, -1};
  return {first_row, *next, &group, group.num_pages};
}

void DeltaReader::check_writes(Ids index, Ids page_ids) const {
  Interval interval{0, 0, nullptr, -1};  // of the last write: those of a group stand together
  for (int64_t i = 0; i < index.size; ++i) {
    const int64_t place = index[i];
    if (place < interval.begin || place >= interval.end) interval = interval_of(place);
    const int64_t page = static_cast<uint32_t>(page_ids[i]);  // a negative one is above every limit
    if (page > interval.limit) refuse_write(interval, place, page_ids[i], i);
  }
}

void DeltaReader::refuse_write(const Interval& interval, int64_t place, int64_t page, int64_t position) const {
  if (interval.limit < 0) {
    throw BadId{IdFault::kOutOfRange, place, position,
                "index[" + text(position) + "] = " + text(place) + " is out of range: tables of " + text(num_rows_) +
                    " rows have " + text(begins_.back()) +
                    " places, those of row 0 are padding: give the pools the rows, tokens and groups of the manager"};
  }
  const Group& group = *interval.group;
  throw BadId{IdFault::kOutOfRange, page, position,
              "page_ids[" + text(position) + "] = " + text(page) + " is out of range: pages of group " + group.name +
                  " are 1 to " + text(group.num_pages) + ": give the pools the capacity of the manager"};
}

void DeltaReader::check_range(Ids ids, const Group& group, const char* what) const {
  for (int64_t i = 0; i < ids.size; ++i) {
    if (ids[i] >= 1 && ids[i] <= group.num_pages) continue;
    throw BadId{IdFault::kOutOfRange, ids[i], i,
                what + (" of group " + group.name) + "[" + text(i) + "] = " + text(ids[i]) +
                    " is out of range: its pages are 1 to " + text(group.num_pages)};
  }
}

bool DeltaReader::is_disjoint(Ids sources, Ids targets, const Group& group) const {
  std::vector<int32_t> written(targets.data, targets.data + targets.size);
  std::sort(written.begin(), written.end());
  if (std::adjacent_find(written.begin(), written.end()) != written.end()) {
    throw BadArgument("delta: a target of group " + group.name + " stands twice");
  }
  return std::none_of(sources.data, sources.data + sources.size,
                      [&](int32_t page) { return std::binary_search(written.begin(), written.end(), page); });
}

}  // namespace pagoda
