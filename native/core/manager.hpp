// From requests to table writes. In: tokens of requests; out: rows, and what one step changes. docs/manager.md says
// what each call does; here is how.
//
// A group has a free-list and a table; one tree has a column of page ids for each page of a group that one page of the
// tree covers. Of a row's pages, `own` says which are the row's: all others, from its first live one on, are leased in
// the tree. What a row leaves behind waits for a fence, leases too: so whatever the tree can evict, nobody reads, and
// room that is counted is there at once. It is the fence of the step before the one being planned, for a row that ends
// is no part of that step; unless the step's delta names the row or its pages, because it was admitted, forked, or
// given pages in it: then it is `touched`, and the fence is that of the step itself.
//
// Every call finds out first whether all of it can be done, for all groups and rows, and then does it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "core/fence_queue.hpp"
#include "core/free_list.hpp"
#include "core/lazy_array.hpp"
#include "core/page_math.hpp"
#include "core/prefix_tree.hpp"

namespace pagoda {

struct GroupSpec {
  std::string name;
  int64_t page_tokens;
  int64_t window;  // 0: every token is kept
  int64_t num_pages;
};

// Counts of tokens, one a row or one for all.
struct Counts {
  Ids each;     // used if `is_each`
  int64_t all;  // used otherwise
  bool is_each;
  int64_t operator[](int64_t i) const { return is_each ? each[i] : all; }
};

class Manager {
 public:
  Manager(std::vector<GroupSpec> groups, int64_t num_rows, int64_t max_tokens, int64_t watermark, int64_t capacity);

  // Pages of a window group that are in the tree: how many running rows read each, and those that nobody reads, in the
  // order in which the last reader went. Steps that may still read a page count until their fence has passed.
  struct Readers {
    explicit Readers(int64_t num_pages)
        : count(num_pages + 1), is_cached(num_pages + 1), next(num_pages + 1), prev(num_pages + 1) {}
    LazyArray<int32_t> count;
    LazyArray<uint8_t> is_cached;
    LazyArray<int32_t> next, prev;  // of those that nobody reads; 0 is the end of the ring
    int64_t num_loose = 0;          // that nobody reads
    int64_t num_cached = 0;
    FenceQueue<int32_t> leaving;  // readers that go when their fence has passed

    void add(int32_t page);   // the tree has it, and a row reads it
    void read(int32_t page);  // one more
    void read(const int32_t* ids, int64_t n);
    void leave(int32_t page, bool is_lost);  // one less; what cannot be found is listed first
    void forget(int32_t page);               // the tree has it no longer; nobody read it
    void put_first(int32_t page);            // of those that nobody reads

   private:
    void link(int32_t page, int32_t before);  // 0: last
    void unlink(int32_t page);
  };

  struct Group {
    Group(GroupSpec spec, int number, int64_t num_rows, int64_t max_tokens, int64_t offset, int first_column,
          int64_t step);
    GroupSpec spec;
    int number;  // of the groups
    PageMath math;
    FreeList pages;
    int64_t max_pages;         // of a row
    int64_t offset;            // of its table in the flat one
    int first_column;          // of the tree
    int num_columns;           // pages of this group that a page of the tree covers
    LazyArray<int32_t> table;  // [num_rows + 1, max_pages]
    LazyArray<uint8_t> own;    // likewise: 1 if the page is the row's
    int64_t num_own = 0;
    std::vector<int32_t> sources, targets;  // page copies of the step
    LazyArray<int32_t> source_of;           // likewise, by target; 0: the page is none
    std::vector<int32_t> given_up[2];       // scratch: ids to free, of rows that were touched in the step apart
    int64_t needed = 0;                     // scratch: of a plan
    // Likewise: pages that it would take out of what can be evicted; more only where there is room.
    int64_t locked = 0;
    Readers readers;  // of a window

    int32_t* entries(int64_t row) { return table.data() + row * max_pages; }
    const int32_t* entries(int64_t row) const { return table.data() + row * max_pages; }
    uint8_t* owned(int64_t row) { return own.data() + row * max_pages; }
    const uint8_t* owned(int64_t row) const { return own.data() + row * max_pages; }
    bool has_window() const { return spec.window > 0; }
    int64_t evictable(const PrefixTree& tree) const;
    int64_t cached(const PrefixTree& tree) const;
  };

  struct Admitted {
    int64_t row, hit, reserved, lease;
  };
  struct Pending {
    int64_t row, length;  // row 0: none
  };
  struct Lengths {
    int64_t reserved, committed, stored;
  };
  // Pages of a group: their sum is all there are.
  struct Pages {
    int64_t free, evictable, leased, running, waiting;
  };
  struct Stats {
    int64_t rows, waiting_rows, admitted, tokens, hits, evicted;
  };

  int64_t num_rows() const { return num_rows_; }
  int64_t max_tokens() const { return max_tokens_; }
  int64_t step() const { return step_; }
  int64_t resume_step() const { return math_.size(); }
  int64_t num_groups() const { return static_cast<int64_t>(groups_.size()); }
  const Group& group(int64_t g) const { return groups_[static_cast<size_t>(g)]; }
  PrefixTree& tree() { return tree_; }
  const PrefixTree& tree() const { return tree_; }

  // reserve: tokens behind the hit; -1: all there are. is_cached: what is cached is read, and what it commits becomes
  // so.
  bool can_admit(const Sequence& sequence, int64_t reserve, bool is_cached);
  Admitted admit(const Sequence& sequence, int64_t reserve, bool is_cached);
  int64_t hit(const Sequence& sequence) const;
  Pending pending(const Sequence& sequence) const;

  int64_t can_reserve(Ids rows, const Counts& counts);
  void reserve(Ids rows, const Counts& counts);
  // tokens: row after row.
  void commit(Ids rows, Ids tokens, const Counts& counts);
  void rollback(Ids rows, const Counts& counts);
  void release(Ids rows);
  // rows_out takes n rows.
  void fork(int64_t row, int64_t n, int32_t* rows_out);

  // Forgets what these pages of a group hold. out: running rows that read them, at most num_rows.
  int64_t invalidate(int64_t g, Ids page_ids, int32_t* rows_out);
  void drop(std::string_view space);

  // What the step changes, packed: step, number of writes, of copies of each group; then the arrays.
  int64_t delta_size() const;
  void take_delta(int32_t* out);
  void pass_fence(int64_t fence);

  Lengths lengths(int64_t row) const;
  int64_t first_page(int64_t row, int64_t g) const;  // of those that are not given up
  int64_t end_page(int64_t row, int64_t g) const;
  Stats stats() const;
  Pages pages(const Group& group) const;
  void reset();
  void check() const;

 private:
  // Of a row what a decode step touches, apart from the rest: 256 rows of it fit into the nearest cache.
  struct Row {
    int32_t reserved = 0;
    int32_t committed = 0;
    int32_t stored = 0;  // tokens the tree has, leased
    bool is_running = false;
    bool is_stored = true;  // what it commits becomes the tree's
  };
  struct Request {
    LeaseId lease{};
    std::vector<int32_t> prompt;  // what it was admitted with, while more of it is to come
    std::string space;
    std::vector<KeyRange> ranges;
    std::vector<std::pair<int, int32_t>> copied;  // group, page: what its tail was copied from, until it is stored
  };
  const Row& row_at(int64_t row, int64_t position) const;
  Row& row(int64_t number) { return rows_[static_cast<size_t>(number)]; }
  Request& request(int64_t number) { return requests_[static_cast<size_t>(number)]; }
  // Pages [first, end) of a row are in a group's table and not given up.
  int32_t& first(int64_t number, size_t g) { return firsts_[static_cast<size_t>(number) * groups_.size() + g]; }
  int32_t& end(int64_t number, size_t g) { return ends_[static_cast<size_t>(number) * groups_.size() + g]; }
  int32_t first(int64_t number, size_t g) const { return firsts_[static_cast<size_t>(number) * groups_.size() + g]; }
  int32_t end(int64_t number, size_t g) const { return ends_[static_cast<size_t>(number) * groups_.size() + g]; }
  // Committed tokens behind `stored`: fewer than a page of the tree.
  int32_t* tail(int64_t number) { return tails_.data() + number * math_.size(); }
  void require_rows(Ids rows);
  static void require_tokens(Ids tokens);  // at least one, none negative
  void require_counts(Ids rows, const Counts& counts, const char* name) const;
  // The match that an admission would lock, and what it needs: fills `needed` of each group.
  void find_hit(const Sequence& sequence, int64_t reserve, bool is_cached, Match& match);
  int64_t target_of(const Sequence& sequence, int64_t reserve, const Match& match) const;
  // Pages of a window that a match would read and nobody reads yet.
  int64_t count_loose(const Group& group, const Match& match);
  // Pages that a group can have at once: free ones, and those the tree can give, less what a match would lock.
  int64_t available(const Group& group) const;
  // Throws OutOfIds for the first group that cannot give what it `needed`, with so many to spare.
  void require_room(int64_t spare) const;
  bool has_room(int64_t spare) const;
  void require_row_ids(int64_t n) const;
  // The rows that have most pages of a group, in words.
  std::string holders(const Group& group) const;
  void clear_plan();
  // Evicts until every free-list has what its group `needed`. Room was required before.
  void make_room();
  void evict(Group& group, int64_t num_pages);
  // Gives pages [end, to) of a row places in a group's table.
  void add_pages(Group& group, size_t g, int64_t number, int64_t to);
  // Room for so many more writes, for the pages of a lease in columns, and for n entries: what follows does not fail.
  void grow_writes(int64_t n);
  void grow_columns(int64_t tree_pages);
  static void grow(std::vector<int32_t>& entries, size_t n) {
    if (n > entries.capacity()) entries.reserve(std::max(n, 2 * entries.capacity()));
  }
  // Table writes: n ids from a page of a row on.
  void write(const Group& group, int64_t row, int64_t page, const int32_t* ids, int64_t n);

  void take_hit(Group& group, size_t g, int64_t number);
  void inherit(Group& group, size_t g, int64_t parent, int64_t child);
  // Forgets a prompt that went another way, or of which no more is to come.
  void compare_prompt(int64_t number, const int32_t* tokens, int64_t n);
  // The first page of a group that is read once `committed` tokens are there: by their last whole page in the tree,
  // whose window has to stay whole for whoever resumes there, and so by every later query. Whole pages of the tree, so
  // that its columns stay alike.
  int64_t live_from(const Group& group, int64_t committed) const {
    if (!group.has_window()) return 0;
    const int64_t whole = math_.first_slot(math_.page(committed));
    return math_.page(std::max<int64_t>(0, whole - group.spec.window + 1)) * group.num_columns;
  }
  void start(int64_t number, LeaseId lease, int64_t length, int64_t reserved);
  void clear(int64_t number);
  // Undoes an admission that has its hit and no pages of its own.
  void abandon(int32_t number, size_t num_writes);
  bool is_touched(int64_t number) const { return touched_[static_cast<size_t>(number)] == step_; }
  // What a row that was touched in this step leaves waits for its fence, else for that of the step before.
  int64_t fence(bool is_touched) const { return is_touched ? step_ : step_ - 1; }
  // A reader goes, now or with its fence. There is room among those that wait.
  void leave(Group& group, int32_t page, bool is_touched) {
    if (fence(is_touched) <= passed_) {
      let_go(group, page);
    } else {
      group.readers.leaving.push(fence(is_touched), page);
    }
  }
  void let_go(Group& group, int32_t page) {
    group.readers.leave(page, tree_.has_lost() && tree_.is_lost(group.number, page));
  }
  // Pages of windows that nobody reads or finds go before those that can be found.
  void put_lost_first();
  // What storing pages of a row will touch is on its way; `filling_` are those that will be, the next is number i.
  void prefetch_stores(size_t i) const;
  void store_all(int64_t number, const int32_t* tokens, int64_t waiting, int64_t n);
  void store(int64_t number, const int32_t* tokens, int64_t num_pages);
  void give_up(int64_t number);
  void clear_given_up();
  void free_given_up();
  void clear_delta();
  void carry_out_removal();
  void free_columns();
  void check_readers(const Group& group, size_t g) const;
  [[noreturn]] void broken(const std::string& what) const;

  int64_t num_rows_, max_tokens_, watermark_;
  PageMath math_;             // of the tree
  std::deque<Group> groups_;  // a free-list stays where it was made
  PrefixTree tree_;
  FreeList row_ids_;
  std::vector<Row> rows_;               // [num_rows + 1]
  std::vector<Request> requests_;       // likewise
  std::vector<int32_t> firsts_, ends_;  // [num_rows + 1, groups]
  LazyArray<int32_t> tails_;            // [num_rows + 1, tokens of a page of the tree]
  std::vector<int32_t> growing_;        // scratch: rows that need pages
  std::vector<int32_t> filling_;        // scratch: rows that fill a page of the tree
  std::vector<int32_t> joined_;         // scratch: a tail and what follows it
  std::vector<int32_t> ended_[2];       // scratch: rows that are released, those that were touched in the step apart
  std::vector<int64_t> touched_;        // [num_rows + 1]: the last step whose delta names a row, or pages of its own
  FenceQueue<LeaseId> waiting_;
  int64_t step_ = 1;
  int64_t passed_ = 0;  // the last fence that has passed
  bool has_windows_ = false;
  std::vector<int32_t> index_, ids_;  // table writes of the step
  BitSet seen_;
  std::vector<std::vector<int32_t>> columns_;  // scratch of an insert or an eviction
  std::vector<Ids> column_ids_;
  PrefixTree::Removal removal_;  // scratch of an eviction
  int64_t admitted_ = 0, tokens_ = 0, hits_ = 0, evicted_ = 0;
};

}  // namespace pagoda
