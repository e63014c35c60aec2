// Which pages the tokens of each row are in. In: group, row, page of the row; out: page id.
//
// The tables of all groups follow one another in one array, [num_rows + 1, max_pages] int32 each, so that a write is
// one place and one id for any group. Row 0 of each table is padding; id 0 means no page. The manager's table is
// authoritative; every rank keeps copies on the host and on its device, updated by the writes of deltas. A running row
// only grows at its end, so a step running on a device never sees a place change.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/errors.hpp"
#include "core/free_list.hpp"
#include "core/lazy_array.hpp"

namespace pagoda {

class PageTable {
 public:
  struct Group {
    std::string name;
    int64_t max_pages;  // per row
    int64_t num_pages;  // ids are 1 ... num_pages
  };

  // Rows 1 ... num_rows. Throws BadConfig if places exceed 2^31.
  PageTable(std::vector<Group> groups, int64_t num_rows);

  int64_t num_rows() const { return num_rows_; }
  int64_t num_groups() const { return static_cast<int64_t>(groups_.size()); }
  const Group& group(int64_t g) const { return groups_[static_cast<size_t>(g)]; }
  int64_t num_places() const { return begins_.back(); }

  // Where the pages of a row begin: among all places, and in memory.
  int64_t place(size_t g, int64_t row) const { return begins_[g] + row * groups_[g].max_pages; }
  int32_t* row(size_t g, int64_t row) { return ids_.data() + place(g, row); }
  const int32_t* row(size_t g, int64_t row) const { return ids_.data() + place(g, row); }

  // Throws BadId for the first place or id that is out of range.
  void require_writes(Ids places, Ids page_ids) const;
  // Sets each place to its id. Both are in range.
  void write(Ids places, Ids page_ids);

 private:
  // Places [begin, end) of one table, and the largest id that may be written there; -1 if none may: in row 0, and
  // before and after the tables.
  struct Interval {
    int64_t begin, end, limit;
    const Group* group;
  };
  Interval interval_of(int64_t place) const;
  [[noreturn]] void refuse(const Interval& interval, int64_t place, int64_t id, int64_t position) const;

  std::vector<Group> groups_;
  int64_t num_rows_;
  std::vector<int64_t> begins_;  // [groups + 1], of the tables, and where the last one ends
  LazyArray<int32_t> ids_;       // [num_places]
};

}  // namespace pagoda
