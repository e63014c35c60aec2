#include "core/page_table.hpp"

#include <algorithm>
#include <limits>
#include <utility>

namespace pagoda {

namespace {

std::vector<int64_t> table_begins(const std::vector<PageTable::Group>& groups, int64_t num_rows) {
  std::vector<int64_t> begins{0};
  for (const PageTable::Group& group : groups) {
    begins.push_back(begins.back() + (num_rows + 1) * group.max_pages);
    if (begins.back() > std::numeric_limits<int32_t>::max()) {
      throw BadConfig("page tables of " + text(num_rows) +
                      " rows exceed 2^31 places: give fewer rows, fewer tokens per row or larger pages");
    }
  }
  return begins;
}

}  // namespace

PageTable::PageTable(std::vector<Group> groups, int64_t num_rows)
    : groups_(std::move(groups)), num_rows_(num_rows), begins_(table_begins(groups_, num_rows)), ids_(begins_.back()) {}

PageTable::Interval PageTable::interval_of(int64_t place) const {
  constexpr int64_t far = std::numeric_limits<int64_t>::max();
  if (place < 0) return {-far, 0, -1, nullptr};
  if (place >= num_places()) return {num_places(), far, -1, nullptr};
  const auto next = std::upper_bound(begins_.begin(), begins_.end(), place);
  const Group& group = groups_[static_cast<size_t>(next - begins_.begin() - 1)];
  const int64_t begin = *(next - 1), first_row = begin + group.max_pages;
  if (place < first_row) return {begin, first_row, -1, &group};
  return {first_row, *next, group.num_pages, &group};
}

void PageTable::require_writes(Ids places, Ids page_ids) const {
  Interval interval{0, 0, -1, nullptr};  // of the previous write: the writes of a group are adjacent
  for (int64_t i = 0; i < places.size; ++i) {
    const int64_t place = places[i];
    if (place < interval.begin || place >= interval.end) interval = interval_of(place);
    const int64_t id = static_cast<uint32_t>(page_ids[i]);  // a negative id exceeds every limit
    if (id > interval.limit) refuse(interval, place, page_ids[i], i);
  }
}

void PageTable::write(Ids places, Ids page_ids) {
  for (int64_t i = 0; i < places.size; ++i) ids_[places[i]] = page_ids[i];
}

void PageTable::refuse(const Interval& interval, int64_t place, int64_t id, int64_t position) const {
  if (interval.limit < 0) {
    throw BadId{IdFault::kOutOfRange, place, position,
                "places[" + text(position) + "] = " + text(place) + " is out of range: the tables of " +
                    text(num_rows_) + " rows have " + text(num_places()) +
                    " places, and row 0 is padding: build the pools with the manager's num_rows and "
                    "max_tokens"};
  }
  throw BadId{IdFault::kOutOfRange, id, position,
              "page_ids[" + text(position) + "] = " + text(id) + " is out of range: page ids of group " +
                  interval.group->name + " are 1 to " + text(interval.group->num_pages) +
                  ": build the pools with the manager's capacity"};
}

}  // namespace pagoda
