// Looks through a manager's delta before a rank does anything with it. In: the packed array; out: what it asks for.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/free_list.hpp"

namespace pagoda {

class DeltaReader {
 public:
  // A group of the rank: columns of its table, and how many pages it has.
  struct Group {
    std::string name;
    int64_t max_pages;
    int64_t num_pages;
  };

  // Page copies of one group: n sources from `begin` on behind the head, then n targets.
  struct Copies {
    int64_t group;
    int64_t begin;
    int64_t n;
    bool is_disjoint;  // no page is source and target
  };

  struct Content {
    int64_t num_writes;
    std::vector<Copies> copies;  // of groups that have some
  };

  // Tables of num_rows + 1 rows lie one after the other; row 0 of each is padding.
  DeltaReader(std::vector<Group> groups, int64_t num_rows);

  // What a delta of so many groups asks for, once it is known to be that of `step` and right in every number.
  // Throws BadArgument and BadId.
  Content read(Ids packed, int64_t num_groups, int64_t step) const;

 private:
  // Places [begin, end) of the flat table, whose they are, and the largest id that may be written there; -1 where
  // none may: before, in row 0, behind.
  struct Interval {
    int64_t begin;
    int64_t end;
    const Group* group;
    int64_t limit;
  };

  Interval interval_of(int64_t place) const;
  void check_writes(Ids index, Ids page_ids) const;
  [[noreturn]] void refuse_write(const Interval& interval, int64_t place, int64_t page, int64_t position) const;
  void check_range(Ids ids, const Group& group, const char* what) const;
  bool is_disjoint(Ids sources, Ids targets, const Group& group) const;

  std::vector<Group> groups_;
  int64_t num_rows_;
  std::vector<int64_t> begins_;  // of the tables, and where the last one ends
};

}  // namespace pagoda
