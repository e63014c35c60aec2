// One rank's copy of the page tables on the host, and what kernels read about a step. In: deltas; out: checked
// sections, and batches.
//
// A rank follows the manager through deltas alone: it checks each delta before anything changes, applies it on its
// device, and then to the tables here. They serve back ends that want page lists on the host, and everything on a CPU.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/delta.hpp"
#include "core/page_math.hpp"
#include "core/page_table.hpp"
#include "core/work_list.hpp"

namespace pagoda {

// How kernels see the pages of one group.
struct KernelPages {
  int64_t page_tokens;         // of a page of the group
  int64_t kernel_page_tokens;  // of a page of the kernel; divides page_tokens
  int64_t window;              // 0 if all tokens are read
  int64_t max_indices;
  int64_t target;  // programs of a work list; 0: the group has none
};

// Buffers of a batch, [max_rows] and [max_step_tokens] long; docs/pools.md says what each holds.
struct BatchBuffers {
  int32_t* rows;             // [max_rows]
  int32_t* lengths;          // [max_rows]
  int32_t* query_start_loc;  // [max_rows + 1]
  int64_t* positions;        // [max_step_tokens]
  int32_t* batch_indices;    // [max_step_tokens]
  int32_t* extends;          // [max_rows + 1, 2]
};
struct GroupBuffers {
  int64_t* slot_mapping;   // [max_step_tokens]
  int32_t* page_table;     // [max_rows, width]
  int32_t* indptr;         // [max_rows + 1]
  int32_t* indices;        // [max_indices]
  int32_t* last_page_len;  // [max_rows]
  int32_t* begins;         // [max_rows]
  int32_t* runs;           // [target + 1]
  int32_t* tasks;          // [max_rows + target, 8]
  int32_t* splits;         // [max_rows, 2]
};

class Rank {
 public:
  // Page copies of one group: n sources and n targets, as offsets into the delta.
  struct Copies {
    int64_t group, sources, targets, n;
    bool is_disjoint;  // no page is both source and target
  };
  // What happens to states before the step computes, in this order.
  struct States {
    int64_t num_saves, save_rows, save_lengths, save_ids;
    int64_t num_restores, restore_rows, restore_lengths, restore_ids;
    int64_t num_resets, reset_rows;
    int64_t num_copies, sources, targets;

    bool is_empty() const { return num_saves + num_restores + num_resets + num_copies == 0; }
  };
  // Parts that the work list of a group has, and the most of an extend row.
  struct Parts {
    int64_t num_parts, extend_parts;
  };
  // What a delta asks for. Sections are given by where they begin in the delta; 0 for an empty one.
  struct Content {
    int64_t num_rows, num_tokens;  // of the step
    int64_t max_count;             // the most tokens of a row that it computes
    int64_t rows, lengths, starts, work;
    int64_t num_writes;
    int64_t places, page_ids;
    std::vector<Copies> copies;  // of groups that have some
    States states;
    std::vector<Parts> parts;  // of each group's work list
  };

  static constexpr int64_t kNoStates = -1;

  // Checkpoints are 1 ... num_checkpoints; kNoStates if rows have no states.
  Rank(std::vector<PageTable::Group> tables, std::vector<KernelPages> pages, int64_t num_rows, int64_t max_tokens,
       int64_t num_checkpoints);

  // Checks that a delta is that of `step` and that its numbers are valid, and returns what it asks for.
  Content check(Ids packed, int64_t step) const;
  // Applies the table writes of a checked delta.
  void follow(Ids packed);
  // Fills buffers for the rows of the delta that was followed last: num_rows rows and num_tokens tokens, padded after
  // the delta's own. Checks the rows again, since the caller owns the array and may have changed it.
  void fill(Ids packed, int64_t num_rows, int64_t num_tokens, const BatchBuffers& shared,
            const std::vector<GroupBuffers>& groups) const;

  const PageTable& table() const { return table_; }

 private:
  void check_rows(Ids rows, Ids lengths, Ids counts, Ids starts) const;
  void check_work(const DeltaView& delta, Ids lengths, Ids counts) const;
  States check_states(const DeltaView& delta, Ids packed) const;
  void require_rows(Ids rows, const char* what) const;
  void check_checkpoints(Ids rows, Ids lengths, Ids ids, const std::string& what) const;
  void check_range(Ids ids, const PageTable::Group& group, const char* what) const;
  bool is_disjoint(Ids sources, Ids targets, const PageTable::Group& group) const;
  void fill_group(size_t g, Ids rows, Ids lengths, Ids starts, int64_t num_rows, int64_t num_tokens,
                  const GroupBuffers& out) const;
  void fill_work(size_t g, const WorkView& work, Ids lengths, Ids starts, int64_t num_rows,
                 const GroupBuffers& out) const;

  PageTable table_;
  std::vector<KernelPages> pages_;
  int64_t max_tokens_, num_checkpoints_;
};

}  // namespace pagoda
