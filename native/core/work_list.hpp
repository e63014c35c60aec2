// The work list of attention: what the queries of a step read, cut into segments that keep a device busy. In: lengths
// and counts of the rows of a step; out: the section of a delta, or an error if a given one is wrong.
//
// A row's span is what its queries read: keys [begin, length), where a window moves `begin`. A row that computes at
// most kDecodeQueries tokens is a decode row and gets segments; other rows are extend rows, whose queries kernels tile
// themselves. Each program computes a run of segments, and all runs have about as many keys. A span that several runs
// share is split into parts, whose results a kernel merges: part p of query q of a row is number first + p * count + q
// of all parts. delta.hpp has the format.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "core/delta.hpp"

namespace pagoda {

constexpr int64_t kDecodeQueries = 8;          // the most tokens that a decode row computes
constexpr int64_t kExtendParts = 16;           // the most parts of an extend row
constexpr int64_t kExtendTile = 32;            // queries of a tile of an extend row, about
constexpr int64_t kExtendShare = 4;            // a program of an extend row takes the place of so many others
constexpr int64_t kMaxTarget = (1 << 16) - 1;  // the largest grid of programs in one dimension

// How the spans of one group are split.
struct WorkGroup {
  int64_t window;  // 0 if all tokens are read
  int64_t target;  // programs that keep the device busy, for each KV head; 0: the group has no list
};

// The first key that the queries of a row read.
inline int64_t span_begin(int64_t length, int64_t count, int64_t window) {
  return window > 0 ? std::max<int64_t>(0, length - count - window + 1) : 0;
}

// The most parts of a list, over all steps of so many rows and tokens whose rows compute at most max_queries tokens.
int64_t most_parts(int64_t num_rows, int64_t num_tokens, int64_t max_queries, int64_t target);

// Makes the lists of all groups, in memory that is kept.
class WorkLists {
 public:
  explicit WorkLists(std::vector<WorkGroup> groups);

  // Returns the section for a step of these rows; empty if there are no rows or no lists. The section is valid until
  // the next call. Allocates only for more rows than any call before.
  Ids make(Ids lengths, Ids counts);

 private:
  // Writes the list of a group and its entry of the directory, and returns where the list ends.
  int64_t make_group(const WorkGroup& group, Ids lengths, Ids counts, int64_t begin, WorkEntry& entry);

  std::vector<WorkGroup> groups_;
  bool has_lists_ = false;
  std::vector<int32_t> section_;
};

// Checks that a list is right for these rows and fits a group; `name` is that of the group. Throws BadArgument.
void check_work(const WorkView& work, const WorkGroup& group, const std::string& name, Ids lengths, Ids counts);

}  // namespace pagoda
