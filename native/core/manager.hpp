// From requests to steps. In: tokens of requests; out: rows, and what one step computes and changes. docs/manager.md
// says what each call does; this file says how.
//
// Each group has a free-list; all groups share one page table and one tree. The tree has one column of page ids for
// each page of a group that one page of the tree covers. `own` says which of a row's pages belong to the row; the
// others, from its first live page on, are leased in the tree.
//
//     [0, stored)            the tree, leased by the row; except duplicates of what another row stored first
//     [stored, committed)    the row: tokens known, not yet a whole page of the tree
//     [committed, computed)  the row: planned into steps, tokens not known yet
//     [computed, reserved)   the row: still to be computed
//
// What a row leaves behind waits for a fence, its lease included, so no step reads what the tree can evict, and evicted
// pages can be used at once. It is the fence of the last planned step, since a row that ends takes no part in the next
// one. But if the next delta already names the row or its pages, because it was admitted, forked or given pages since,
// the row is `touched` and waits for the fence of the step being prepared.
//
// With states, row r has running state r, and a hit ends at a checkpoint. A save copies the state of a row that ends a
// step at a planned length; it is in the next delta, before anything can change that state. Only deltas read and write
// checkpoints, in their order, and ids of checkpoints are given out only by `plan`, after it has written its delta. So
// an id can be reused as soon as it is given up, and no delta saves over what it restores. The checkpoint belongs to
// the row until its tokens are committed, then to the tree; `order_` says which one the tree gives up.
//
// Every call first checks whether all of it can be done, for all groups and rows, and then does it. The result of the
// check is a value (`Needs`, `Admission`, `DeltaLayout`) that it passes on.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "core/checkpoint_order.hpp"
#include "core/delta.hpp"
#include "core/fence_queue.hpp"
#include "core/free_list.hpp"
#include "core/lazy_array.hpp"
#include "core/page_math.hpp"
#include "core/page_table.hpp"
#include "core/prefix_tree.hpp"
#include "core/window.hpp"
#include "core/window_pages.hpp"
#include "core/work_list.hpp"

namespace pagoda {

struct GroupSpec {
  std::string name;
  int64_t page_tokens;
  int64_t window;  // 0 if every token is kept
  int64_t num_pages;
  int64_t target = 0;  // of its work list; 0: it has none
};

// The states of a layout.
struct StateSpec {
  bool has_states;
  int64_t num_checkpoints;
  int64_t interval;  // tokens between the saves of a prefill
};

// A number of tokens for each row of a call: one for all rows, or one per row.
struct PerRow {
  Ids each;     // used if `is_each`
  int64_t all;  // used otherwise
  bool is_each;
  int64_t operator[](int64_t i) const { return is_each ? each[i] : all; }
};

class Manager {
 public:
  // resume_step: a common multiple of the groups' page sizes, at which requests resume.
  Manager(std::vector<GroupSpec> groups, StateSpec states, int64_t resume_step, int64_t num_rows, int64_t max_tokens,
          int64_t watermark);

  struct Group {
    Group(GroupSpec spec, int number, int32_t* table, int64_t num_rows, int64_t max_tokens, int first_column,
          int64_t step);
    GroupSpec spec;
    int number;  // of the groups
    PageMath math;
    FreeList pages;
    int64_t max_pages;       // per row
    int first_column;        // of the tree
    int num_columns;         // pages of this group that a page of the tree covers
    int32_t* table;          // [num_rows + 1, max_pages]: the group's part of the page table
    LazyArray<uint8_t> own;  // [num_rows + 1, max_pages]: 1 if the row owns the page
    int64_t num_own = 0;
    LazyArray<uint8_t> given_out;  // [num_pages + 1]: 1 for pages of `alloc_pages`; empty before its first call
    int64_t num_given_out = 0;
    std::vector<int32_t> sources, targets;  // page copies of the step
    LazyArray<int32_t> source_of;           // [num_pages + 1]: source of each copy, by target page; 0 if not a target
    std::vector<int32_t> given_up[2];       // scratch: ids to free; [1] of touched rows
    WindowPages cached;                     // for a window group

    int32_t* ids(int64_t row) { return table + row * max_pages; }
    const int32_t* ids(int64_t row) const { return table + row * max_pages; }
    uint8_t* owned(int64_t row) { return own.data() + row * max_pages; }
    const uint8_t* owned(int64_t row) const { return own.data() + row * max_pages; }
    int32_t place(int64_t row, int64_t page) const { return static_cast<int32_t>(row * max_pages + page); }
    bool has_window() const { return spec.window > 0; }
    int64_t num_evictable(const PrefixTree& tree) const;
    int64_t num_cached(const PrefixTree& tree) const;
  };

  // What a request asks for.
  struct Prompt {
    Sequence sequence;
    int64_t reserve = -1;  // tokens after the hit that get slots; -1 for all of the sequence
    int64_t max_hit = -1;  // the longest hit wanted; -1 for any
    bool read = true;      // cached pages are used
    bool store = true;     // what it commits is cached
    // The longest hit it may have: at least one token is left to compute.
    int64_t most_hit() const {
      const int64_t most = read ? sequence.tokens.size - 1 : 0;
      return max_hit < 0 ? most : std::min(most, max_hit);
    }
  };
  struct Admitted {
    int64_t row, hit, reserved;
    std::vector<int32_t> cuts;  // where the prefill should end a step, ascending
  };
  struct Pending {
    int64_t row, length;  // row 0 if there is none
  };
  struct Lengths {
    int64_t reserved, computed, committed, stored;
  };
  // Pages of a group by state; they add up to all its pages.
  struct Pages {
    int64_t free, evictable, leased, running, waiting;
  };
  struct Stats {
    int64_t rows, waiting_rows, admitted, tokens, hits, evicted;
  };
  // Checkpoints by state, which add up to all, and what has happened to them.
  struct Checkpoints {
    int64_t free, cached, running;
    int64_t saved, resumed, evicted;
  };

  int64_t num_rows() const { return num_rows_; }
  int64_t max_tokens() const { return max_tokens_; }
  int64_t step() const { return step_; }
  int64_t resume_step() const { return math_.size(); }
  int64_t num_groups() const { return static_cast<int64_t>(groups_.size()); }
  const Group& group(int64_t g) const { return groups_[static_cast<size_t>(g)]; }
  bool has_states() const { return states_.has_states; }
  int64_t num_checkpoints() const { return states_.num_checkpoints; }
  const PageTable& table() const { return table_; }
  PrefixTree& tree() { return tree_; }
  const PrefixTree& tree() const { return tree_; }

  bool can_admit(const Prompt& prompt);
  Admitted admit(const Prompt& prompt);
  int64_t hit(const Sequence& sequence) const;
  Pending pending(const Sequence& sequence) const;

  // How many of the rows, starting with the first, `reserve` could serve together.
  int64_t num_reservable(Ids rows, const PerRow& counts);
  void reserve(Ids rows, const PerRow& counts);
  // `tokens` are listed row after row.
  void commit(Ids rows, Ids tokens, const PerRow& counts);
  void rollback(Ids rows, const PerRow& counts);
  void release(Ids rows);
  // Gives a row n more pages of one group, ahead of what it reserves. out: [n].
  void extend(int64_t row, int64_t g, int64_t n, int32_t* out);
  // Takes back the last n pages of a row in one group, which are behind its reserved tokens.
  void trim(int64_t row, int64_t g, int64_t n);
  // Gives out n pages of a group that belong to no row and are not cached. out: [n].
  void alloc_pages(int64_t g, int64_t n, int32_t* out);
  void free_pages(int64_t g, Ids page_ids);
  // rows_out: [n].
  void fork(int64_t row, int64_t n, int32_t* rows_out);

  // Forgets bad pages of a group. out: [num_rows], gets the running rows whose contents may depend on them.
  int64_t invalidate(int64_t g, Ids page_ids, int32_t* rows_out);
  void drop(std::string_view space);

  // Ends the step, which computes the next counts[i] tokens of each row. `lay_out` changes nothing; `plan` writes the
  // delta.
  DeltaLayout lay_out(Ids rows, const PerRow& counts);
  void plan(Ids rows, const PerRow& counts, const DeltaLayout& layout, int32_t* out);
  void pass_fence(int64_t fence);

  Lengths lengths(int64_t row) const;
  int64_t first_page(int64_t row, int64_t g) const;  // that is not given up
  int64_t end_page(int64_t row, int64_t g) const;
  Stats stats() const;
  Checkpoints checkpoints() const;
  Pages pages(const Group& group) const;
  // Throws BadArgument while a planned step has not passed its fence.
  void reset();
  void check() const;

 private:
  // What a decode step touches of a row, separate from the rest: 256 of these fit into the L1 cache.
  struct Row {
    int32_t reserved = 0;
    int32_t computed = 0;
    int32_t committed = 0;
    int32_t stored = 0;  // tokens the tree has, leased
    // With states: the least length at which a save may be due, and that of a save whose tokens are not yet committed.
    int32_t next_save = kNever;
    int32_t next_kept = kNever;
    bool is_running = false;
    bool is_stored = true;  // what it commits goes into the tree
    int64_t seen = 0;       // the last call that named it
  };
  static constexpr int32_t kNever = std::numeric_limits<int32_t>::max();
  // A length at which a prefill should end a step, so that its state can be saved.
  struct Cut {
    int32_t length;
    CheckpointKind kind;
  };
  // A checkpoint of a row that is not in the tree. A rolling one stays with the row until it ends or passes the next.
  struct Save {
    int32_t length, id;
    CheckpointKind kind;
    bool is_rolling;
  };
  // Rows, lengths and checkpoints of the next delta's saves or restores.
  struct Moves {
    std::vector<int32_t> rows, lengths, ids;
    void grow(size_t n) {
      for (auto* each : {&rows, &lengths, &ids}) Manager::grow(*each, rows.size() + n);
    }
    void add(int64_t row, int64_t length, int32_t id) {
      rows.push_back(static_cast<int32_t>(row));
      lengths.push_back(static_cast<int32_t>(length));
      ids.push_back(id);
    }
    void clear() {
      for (auto* each : {&rows, &lengths, &ids}) each->clear();
    }
  };
  struct Copy {
    int group;
    int32_t source, target;
  };
  struct Request {
    LeaseId lease{};
    std::vector<int32_t> prompt;  // the tokens it was admitted with, until they are computed
    std::string space;
    std::vector<KeyRange> ranges;
    std::vector<Copy> copies;                        // pages of its own copied from another row
    int64_t first_duplicate = 0, end_duplicate = 0;  // tree pages among which it has duplicates
    // With states:
    std::vector<Cut> cuts;  // still to come, the next one last
    std::vector<Save> saves;
    int64_t prompt_length = 0;  // beyond it, it decodes: every whole page is saved, over the one before
    bool is_continued = false;  // it goes on where another path ended
  };
  // What a call needs of one group: pages to allocate, and evictable pages that it locks.
  struct Need {
    int64_t pages = 0;
    int64_t locked = 0;
  };
  using Needs = std::vector<Need>;
  // What an admission would do.
  struct Admission {
    Match match;
    int64_t target = 0;  // tokens that get slots
    Needs needs;
    std::vector<Cut> cuts;  // the last one first
  };

  // ── arguments
  const Row& row_at(int64_t row, int64_t position) const;
  Row& row(int64_t number) { return rows_[static_cast<size_t>(number)]; }
  const Row& row(int64_t number) const { return rows_[static_cast<size_t>(number)]; }
  Request& request(int64_t number) { return requests_[static_cast<size_t>(number)]; }
  const Request& request(int64_t number) const { return requests_[static_cast<size_t>(number)]; }
  // Pages [first, end) of a row are in a group's table and not given up.
  int32_t& first(int64_t number, size_t g) { return firsts_[static_cast<size_t>(number) * groups_.size() + g]; }
  int32_t& end(int64_t number, size_t g) { return ends_[static_cast<size_t>(number) * groups_.size() + g]; }
  int32_t first(int64_t number, size_t g) const { return firsts_[static_cast<size_t>(number) * groups_.size() + g]; }
  int32_t end(int64_t number, size_t g) const { return ends_[static_cast<size_t>(number) * groups_.size() + g]; }
  // Committed tokens after `stored`: fewer than a page of the tree.
  int32_t* tail(int64_t number) { return tails_.data() + number * math_.size(); }
  // Row i of a call, which names each row once.
  Row& require_row(Ids rows, int64_t i) {
    const int64_t number = rows[i];
    if (number < 1 || number > num_rows_ || !row(number).is_running || row(number).seen == call_) refuse_row(rows, i);
    Row& found = row(number);
    found.seen = call_;
    return found;
  }
  void require_rows(Ids rows) {
    ++call_;
    for (int64_t i = 0; i < rows.size; ++i) require_row(rows, i);
  }
  [[noreturn]] void refuse_row(Ids rows, int64_t i) const;
  static void require_tokens(Ids tokens, int64_t from = 0);  // at least one, none negative from `from` on
  void require_counts(Ids rows, const PerRow& counts, const char* name) const;

  // ── capacity (manager_room.cpp)
  // Pages that a group can provide at once: free and evictable ones, less what a match would lock.
  int64_t available(const Group& group, const Need& need) const {
    return group.pages.num_free() + group.num_evictable(tree_) - need.locked;
  }
  // Throws OutOfIds for the first group that cannot provide what is needed and keep `spare` pages.
  void require_room(const Needs& needs, int64_t spare) const;
  bool has_room(const Needs& needs, int64_t spare) const;
  void require_row_ids(int64_t n) const;
  // The rows with the most pages of a group, in words.
  std::string holders(const Group& group) const;
  // Evicts until every free-list has what is needed. The caller has checked that the tree can provide it.
  void make_room(const Needs& needs);
  void evict(Group& group, int64_t num_pages);
  // Sees to it that n pages of a group are free, or throws OutOfIds.
  void provide(Group& group, int64_t n);
  // Throws BadArgument while a planned step has not passed its fence.
  void require_no_step(const char* call) const;
  void evict_window_page(Group& group);
  // Carries out `removal_` and frees the pages.
  void carry_out_removal();
  void free_columns();
  // Adds the page of the tree behind which everything depends on a bad page of the row's own.
  bool blame(const Group& group, int64_t number, BitSet& bad);
  // Moves unread window pages that cannot be found any more to the front of the eviction order.
  void put_lost_first();

  // ── admission (manager_admit.cpp)
  Admission find_hit(const Prompt& prompt);
  // How many unread window pages a match would read.
  int64_t count_unread(const Group& group, const Match& match);
  void start(int64_t number, LeaseId lease, int64_t length, int64_t reserved);
  void take_hit(Group& group, size_t g, int64_t number);
  // Undoes an admission that has its hit but no pages of its own.
  void abandon(int32_t number, size_t num_writes);
  void inherit(Group& group, size_t g, int64_t parent, int64_t child);

  // ── states (manager_states.cpp)
  // Whether a prompt leaves what is cached where others go on.
  bool parts(const Prompt& prompt, const Match& match) const;
  // Where a prompt should be saved while it is computed, the last length first.
  std::vector<Cut> plan_cuts(const Prompt& prompt, const Match& match) const;
  // Gives a new row its state, and records how far its pages matched. Memory has been reserved.
  void start_state(int64_t number, const Prompt& prompt, const Match& match, std::vector<Cut>&& cuts);
  void start_fork_state(int64_t parent, int64_t child);
  // Allocates for the saves of the rows that a step computes.
  void grow_saves(Ids rows, const PerRow& counts);
  // Plans the save of a row that has just been planned up to a length where one may be due.
  void plan_save(int64_t number);
  int32_t take_checkpoint(int64_t number, const Save& wanted);
  int32_t give_up_checkpoint(bool also_first);
  void free_checkpoint(int32_t id) { checkpoint_ids_.free({&id, 1}, std::nullopt); }
  // Gives the tree the saves whose tokens are committed.
  void keep_saves(int64_t number);
  void keep(int64_t number, const Save& save);
  void supersede_tail(int32_t id);
  // The row ends: the tree gets its last rolling save.
  void end_saves(int64_t number);
  // The row's saves are of no use any more.
  void forget_saves(int64_t number);
  // The length of the last planned save of a row that is at most `length`; 0 if there is none.
  int64_t last_planned(int64_t number, int64_t length) const;
  // Frees checkpoints that went with pages of the tree, and those that can no longer be found.
  void free_states();
  void give_up_lost();
  int64_t gap(int32_t id) const { return tree_.checkpoint_length(id) - tree_.checkpoint_before(id).length; }
  void set_next_save(int64_t number, int64_t above);
  void require_settled(int64_t number, const char* what) const;
  void check_states() const;

  // ── growth (manager_grow.cpp)
  // Allocates pages [end, to) of a row and writes them into a group's table.
  void add_pages(Group& group, size_t g, int64_t number, int64_t to);
  // Forgets a prompt that is computed, or that the row has departed from.
  void compare_prompt(int64_t number, const int32_t* tokens, int64_t n);
  // The first page of a group that is read once `committed` tokens are committed.
  int64_t live_from(const Group& group, int64_t committed) const {
    return group.has_window() ? first_live_page(committed, group.spec.window, math_) * group.num_columns : 0;
  }
  // Prefetches what storing pages will touch; `filling_` are the rows to store, of which i is next.
  void prefetch_stores(size_t i) const;
  void store_all(int64_t number, const int32_t* tokens, int64_t waiting, int64_t n);
  void store(int64_t number, const int32_t* tokens, int64_t num_pages);
  void link_duplicates(Group& group, int64_t number, int64_t tree_begin, int64_t tree_end);
  // Exchanges pages of the tree that no other row reads for the row's duplicates.
  void exchange_duplicates(int64_t number) noexcept;
  void exchange_all_duplicates() noexcept;
  // The row's duplicates are never offered to the tree any more.
  void forget_duplicates(int64_t number) {
    Request& request = this->request(number);
    num_duplicating_ -= request.end_duplicate > request.first_duplicate;
    request.end_duplicate = request.first_duplicate;
  }
  void give_up(int64_t number);

  // ── ends and steps (manager_step.cpp)
  void clear(int64_t number);
  bool is_touched(int64_t number) const { return touched_[static_cast<size_t>(number)] == step_; }
  // What a touched row leaves behind waits for the fence of the next step, else for that of the last one.
  int64_t fence(bool is_touched) const { return is_touched ? step_ : step_ - 1; }
  // Removes a reader, now or with its fence. Memory has been reserved.
  void leave(Group& group, const int32_t* pages, int64_t n, bool is_touched) {
    if (fence(is_touched) <= passed_) {
      for (int64_t i = 0; i < n; ++i) let_go(group, pages[i]);
    } else {
      group.cached.leaving.push(fence(is_touched), pages, n);
    }
  }
  void let_go(Group& group, int32_t page) {
    group.cached.leave(page, tree_.has_lost() && tree_.is_lost(group.number, page));
  }
  void clear_given_up();
  void free_given_up();
  void clear_delta();
  // Allocates for so many more writes, for the pages of a lease in columns, and for n ids: what follows cannot fail.
  void grow_writes(int64_t n);
  void grow_columns(int64_t tree_pages);
  static void grow(std::vector<int32_t>& ids, size_t n) {
    if (n > ids.capacity()) ids.reserve(std::max(n, 2 * ids.capacity()));
  }
  // Records table writes: n ids from a page of a row on.
  void write(size_t g, int64_t row, int64_t page, const int32_t* ids, int64_t n);

  void check_group(size_t g, const std::vector<NodeInfo>& nodes) const;
  void check_window(const Group& group, size_t g) const;
  [[noreturn]] void broken(const std::string& what) const;

  int64_t num_rows_, max_tokens_, watermark_;
  StateSpec states_;
  PageMath math_;             // of the tree
  std::deque<Group> groups_;  // free-lists cannot move
  PageTable table_;
  PrefixTree tree_;
  FreeList row_ids_;
  FreeList checkpoint_ids_;
  CheckpointOrder order_;
  std::vector<Row> rows_;               // [num_rows + 1]
  std::vector<Request> requests_;       // [num_rows + 1]
  std::vector<int32_t> firsts_, ends_;  // [num_rows + 1, groups]
  LazyArray<int32_t> tails_;            // [num_rows + 1, tokens of a page of the tree]
  std::vector<int64_t> touched_;        // [num_rows + 1]: last step whose delta names the row or pages of its own
  int64_t call_ = 0;
  FenceQueue<LeaseId> waiting_;
  int64_t step_ = 1;
  int64_t passed_ = 0;  // the last fence that has passed
  bool has_windows_ = false;
  int64_t num_duplicating_ = 0;             // rows that have duplicates
  std::vector<int32_t> places_, page_ids_;  // table writes of the step
  Moves saves_, restores_;                  // of the step's states
  std::vector<int32_t> resets_;
  std::vector<int32_t> state_sources_, state_targets_;
  std::vector<int32_t> state_source_of_;  // [num_rows + 1]: source of each copy, by target row; 0 if not a target
  // Scratch of one call, kept for its memory.
  std::vector<int32_t> growing_;   // rows that need pages
  std::vector<int32_t> filling_;   // rows that fill a page of the tree
  std::vector<int32_t> joined_;    // a tail and the tokens after it
  std::vector<int32_t> ended_[2];  // rows to release; [1] touched ones
  std::vector<int32_t> due_;       // rows that may have to be saved
  std::vector<int32_t> freed_states_;
  std::vector<int32_t> lengths_, counts_;  // of a step's rows
  WorkLists work_;
  Ids work_section_{nullptr, 0};               // of the step that was laid out last
  std::vector<std::vector<int32_t>> columns_;  // page ids of an insert or an eviction
  std::vector<Ids> column_ids_;
  PrefixTree::Removal removal_;
  int64_t admitted_ = 0, tokens_ = 0, hits_ = 0, evicted_ = 0;
  int64_t saved_ = 0, resumed_ = 0, evicted_states_ = 0;
};

}  // namespace pagoda
