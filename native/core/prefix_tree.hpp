// Finds prefixes that are already computed. In: tokens; out: the ids of the pages that hold them. docs/tree.md says
// what each call does; this file says how.
//
// Nodes are entries of one array, addressed by index; a freed entry is reused, a node's number never is. The root of a
// namespace is a node without tokens. `locks` of a node counts the leases that end there and the children that are
// locked, so locking stops at the first ancestor that is already locked, and a node is protected exactly while `locks`
// is not zero. A lease always ends where its node ends.
//
// A match is a value that may be locked much later. This is safe because the tokens before a node's end never change
// while the node exists (a trimmed node does not grow again), the lower half of a split keeps its number, and both
// halves have the family of the run they came from.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <map>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/child_table.hpp"
#include "core/errors.hpp"
#include "core/eviction_order.hpp"
#include "core/extra_keys.hpp"
#include "core/free_list.hpp"
#include "core/grow_array.hpp"
#include "core/lazy_array.hpp"
#include "core/page_math.hpp"
#include "core/runs.hpp"

namespace pagoda {

// A node on the path of a match, and the length of the match at its end.
struct Step {
  int64_t number;
  int64_t family;
  int32_t node;
  int32_t end;
  uint32_t hash;
};

// Most paths are short: the first steps are stored inline.
class Path {
 public:
  int64_t size() const { return size_; }
  const Step& operator[](int64_t i) const { return i < kFew ? few_[i] : many_[static_cast<size_t>(i - kFew)]; }
  Step& back() { return size_ <= kFew ? few_[size_ - 1] : many_.back(); }
  void push(const Step& step) {
    if (size_ < kFew) {
      few_[size_] = step;
    } else {
      many_.push_back(step);
    }
    ++size_;
  }
  void pop() {
    if (size_-- > kFew) many_.pop_back();
  }

 private:
  static constexpr int64_t kFew = 5;
  int64_t size_ = 0;
  Step few_[kFew];
  std::vector<Step> many_;
};

struct Match {
  std::string space;
  int64_t length = 0;
  int64_t found = 0;
  int32_t state_id = -1;
  bool goes_on = false;  // with states: the tree has pages after `found`
  int64_t made = 0;      // the next free family at the time of the match
  int32_t root = -1;     // -1 if the namespace did not exist
  int64_t root_number = 0;
  Path path;  // down to `length`
};

// Tokens of a namespace, from position `base` on.
struct Sequence {
  std::string_view space;
  Ids tokens;
  const std::vector<KeyRange>* ranges;  // null: no extra keys
};

struct Checkpoint {
  int32_t length;
  int32_t state_id;
};

struct LeaseId {
  int32_t slot;
  int64_t number;
};

struct Inserted {
  int64_t present = 0;
  int64_t stored = 0;
  int64_t length = 0;
  std::vector<std::vector<int32_t>> filled;  // page numbers per column; empty if there were none
  std::vector<int32_t> states;
};

// An event for listeners. A reset has no pages.
enum class EventKind { kStored, kRemoved, kReset };
struct TreeEvent {
  EventKind kind;
  bool ids_only = false;  // only ids or states changed; the pages were cached before, or stay cached
  std::string space{};
  int64_t position = 0;
  uint64_t parent = 0;           // content key of the page before; that of the namespace at position 0
  std::vector<uint64_t> keys{};  // of the pages
  std::vector<int32_t> tokens{};
  std::vector<KeyRange> ranges{};  // over the tokens
  std::vector<std::vector<int32_t>> columns{};
  std::vector<Checkpoint> states{};
};

struct NodeInfo {
  int64_t number, parent;  // parent 0 for a root
  const std::string* space;
  bool is_dropped;
  int64_t level, begin, end;
  std::vector<int32_t> tokens;
  std::vector<std::vector<int32_t>> columns;
  int64_t num_children, leases, used;
  std::vector<Checkpoint> checkpoints;
  bool is_lost;
};

struct Tally {
  int64_t total = 0;
  int64_t locked = 0;
};

class PrefixTree {
 public:
  static constexpr int32_t kMaxLength = std::numeric_limits<int32_t>::max();

  // windows: one entry per column, 0 for full attention. hash_mask makes hashes collide, for tests.
  PrefixTree(int64_t page_tokens, std::vector<int64_t> windows, bool has_states, int64_t capacity,
             uint32_t hash_mask = ~uint32_t{0});

  // Reserves address space for so many tokens, which costs nothing until it is written, so that growing moves nothing.
  void expect(int64_t tokens);

  int64_t page_tokens() const { return math_.size(); }
  const std::vector<int64_t>& windows() const { return windows_; }
  int num_columns() const { return static_cast<int>(windows_.size()); }
  bool has_states() const { return has_states_; }
  // Whether everything that is cached is usable.
  bool is_plain() const { return !has_states_ && !has_windows_; }
  Tally tokens() const { return tokens_; }
  Tally pages(int column) const;
  Tally states() const { return states_; }
  int64_t num_nodes() const { return num_nodes_; }
  int64_t num_leaves() const { return num_leaves_; }
  int64_t num_leases() const { return num_leases_; }
  std::vector<std::string> namespaces() const;

  // In a plain tree, `ids` also gets the pages of column 0; it has room for all pages of the sequence.
  void match(const Sequence& sequence, Match& match, int32_t* ids) const;
  int64_t match_length(const Sequence& sequence) const;
  // The page ids of a match made just before: [length / page_tokens].
  void copy_pages(const Match& match, int column, int32_t* out) const { copy_pages(match, column, 0, out); }
  // Page ids from page `first` on.
  void copy_pages(const Match& match, int column, int64_t first, int32_t* out) const;

  LeaseId lock(const Match& match);
  // The same for a match made just before: no call has changed the tree since.
  LeaseId lock_fresh(const Match& match);
  // A second lease that ends where this one does.
  LeaseId lease_again(LeaseId lease);
  // Allocates for n leases, so that taking them cannot fail.
  void reserve_leases(int64_t n);
  // How many pages of a column without a window would become unprotected if all of these were released.
  int64_t count_released(const std::vector<LeaseId>& leases) const;
  // How many unprotected tokens a lock of this match, made just before, would protect.
  int64_t count_unlocked(const Match& match) const;
  void release(LeaseId lease);
  void demote(LeaseId lease);
  bool is_held(LeaseId lease) const;
  int64_t length(LeaseId lease) const;
  int32_t state_id(LeaseId lease) const;  // of the checkpoint where it ends; -1 if there is none
  void copy_pages(LeaseId lease, int column, int32_t* out) const { copy_pages(lease, column, 0, out); }
  void copy_pages(LeaseId lease, int column, int64_t first, int32_t* out) const;

  // lease: null if there is none. columns: one entry per column.
  Inserted insert(const Sequence& sequence, const std::vector<Ids>& columns, const LeaseId* lease,
                  const std::vector<Checkpoint>& checkpoints);

  // Prefetches what an insert after a lease will touch: first its node, and once that has arrived, the end of its run.
  void prefetch_node(LeaseId lease) const;
  void prefetch_tail(LeaseId lease) const;

  // Removals are planned first, which changes nothing and tells how many ids they free, and then carried out, which
  // cannot fail. A plan is good for one carry_out, before anything else changes the tree. Reusing a plan object saves
  // allocations.
  class Removal;
  class Punch;
  class Replacement;
  void plan_evict(int64_t n, int column, Removal& plan) const;
  void plan_evict_states(int64_t n, Removal& plan) const;
  void plan_drop(std::string_view space, Removal& plan) const;
  void carry_out(Removal& plan, const std::vector<int32_t*>& columns, int32_t* states);

  // From now on the tree knows where each page of the window columns is. set_of[c] is the id space of column c, -1 if
  // it is not followed; num_ids[s] is the number of ids of space s. The tree must be empty.
  void follow(std::vector<int> set_of, const std::vector<int64_t>& num_ids);
  // From now on the tree knows where each of checkpoints 1 ... num_states is. Its caller adds and removes them one by
  // one; the tree stores all pages it is given, also those after the last checkpoint of a path, and a lease covers all
  // that its insert stored. The tree must be empty.
  void follow_states(int64_t num_states);
  // Adds a checkpoint on the path of a lease, at a length of whole pages that the lease covers. Returns false if there
  // is one already, or if the path cannot be found any more. May throw bad_alloc before it changes anything.
  bool add_checkpoint(LeaseId lease, Checkpoint checkpoint);
  // Removes a followed checkpoint. Its pages stay. May throw bad_alloc before it changes anything if there are
  // listeners.
  void remove_checkpoint(int32_t state_id);
  // Whether a followed checkpoint is in the tree, whether it can be found, where it is, and the one before it on its
  // path (state_id -1 and length 0 if there is none).
  bool has_checkpoint(int32_t state_id) const { return spots_[state_id].length > 0; }
  bool is_lost_checkpoint(int32_t state_id) const { return is_lost(spots_[state_id].node); }
  int64_t checkpoint_length(int32_t state_id) const { return spots_[state_id].length; }
  Checkpoint checkpoint_before(int32_t state_id) const {
    return last_checkpoint_up(spots_[state_id].node, spots_[state_id].length - 1);
  }
  // The last followed checkpoint on the path of a lease, at most at this length; {0, -1} if there is none.
  Checkpoint last_checkpoint(LeaseId lease, int64_t length) const {
    return last_checkpoint_up(require(lease).node, length);
  }
  // Turns a followed page into a hole, even if it is protected. O(1).
  void punch_page(int set, int32_t id);
  // Gives a followed page another id, which is not in the tree, even if it is protected. O(1).
  void replace_page(int set, int32_t old_id, int32_t new_id);

  // Exchanges ids of pages [first, end) of a lease's path that no other lease protects. offer(page, column, id) returns
  // the new id, or the same one; holes have id -1 and may be filled. took(page, column, id, new_id) is called after
  // each exchange. Returns the first page from which on no other lease protects anything. May throw bad_alloc between
  // two exchanges if there are listeners.
  template <typename Offer, typename Took>
  int64_t exchange(LeaseId lease, int64_t first, int64_t end, Offer offer, Took took);

  // Forgets pages whose contents are bad, in columns [first, first + count), and everything that continues them.
  // Unprotected pages are freed, by column; the others cannot be found any more and are the coldest once released.
  // `states` gets the checkpoints that went with them.
  void discard(int first, int count, const BitSet& bad, std::vector<std::vector<int32_t>>& freed,
               std::vector<int32_t>& states);
  // Whether the tree has nodes that cannot be found any more: lost, or of a dropped namespace.
  bool has_lost() const { return num_lost_ > 0 || names_.size() > roots_.size(); }
  bool is_lost(LeaseId lease) const;
  // Whether the path of a lease was discarded.
  bool is_discarded(LeaseId lease) const;
  // Whether a followed page is in a node that cannot be found any more.
  bool is_lost(int set, int32_t id) const;

  void plan_punch(LeaseId lease, int column, int64_t end, Punch& plan) const;
  void carry_out(Punch& plan, int32_t* out);

  void plan_replace(const Sequence& sequence, const std::vector<Ids>& columns, Replacement& plan) const;
  // `columns` as given to the plan; `out` gets the old ids of each.
  void carry_out(Replacement& plan, const std::vector<Ids>& columns, const std::vector<int32_t*>& out);

  void reset();
  void check() const;

  std::vector<NodeInfo> nodes(int64_t max_nodes, int64_t max_tokens, const std::string_view* space) const;

  // Starts or stops collecting events and keeping content keys. Starting walks over the whole tree.
  void listen(bool on);
  bool has_events() const { return !events_.empty(); }
  std::vector<TreeEvent> take_events() { return std::exchange(events_, {}); }
  // Everything that can be found, as Stored events, parents before children.
  std::vector<TreeEvent> retell() const;

 private:
  struct Node {
    int32_t parent;  // of a freed entry, the next freed one
    int32_t first_child, next_sibling, prev_sibling;
    int32_t num_children;
    int32_t locks;
    Run run;
    int32_t begin;
    uint32_t hash;   // of (parent, first page)
    int64_t number;  // 0 if freed
    int64_t family;
    int64_t used;
    int32_t root;
    bool is_trimmed;  // it lost its tail and never grows in place again
    bool is_dropped;  // it is a root whose namespace was dropped
    bool is_lost;     // its contents are bad: neither it nor what continues it can be found
    int32_t end() const { return begin + run.length; }
    bool is_root() const { return parent < 0; }
  };
  struct Lease {
    int64_t number;  // 0 if free
    int32_t node;
    bool is_demoted;
  };
  // Tokens [to, from) of a node are removed; with to == 0, the node is.
  struct Cut {
    int32_t node;
    int32_t from;
    int32_t to;
  };
  // Where a walk ended: `depth` tokens down, in `node` (at its end, or inside it).
  struct Place {
    int32_t node;
    int64_t depth;
  };
  struct Hole {
    int32_t node;
    int column;
    int64_t page;   // of the sequence
    int64_t place;  // in the column
  };
  struct Insertion;  // an insert in progress

  // Whether the caller decides what is protected, and when checkpoints go.
  bool is_followed() const { return !set_of_.empty() || follows_states_; }
  bool is_window(int column) const { return windows_[static_cast<size_t>(column)] > 0; }
  const Lease& require(LeaseId lease) const;
  void require_tokens(Ids tokens, int64_t from) const;
  void require_columns(Ids tokens, const std::vector<Ids>& columns) const;
  void require_checkpoints(const std::vector<Checkpoint>& checkpoints, int64_t base, int64_t end) const;
  void require_evictable(int64_t wanted, const char* what, Tally tally, int column = -1) const;

  uint32_t hash(int32_t parent, const int32_t* page) const;
  int32_t find_root(std::string_view space) const;
  int32_t child_of(int32_t parent, const int32_t* page, uint32_t key) const;
  // Follows entries [depth - base, ...) down from a place at the end of a node and calls each(node, depth) for every
  // node it enters.
  template <bool with_ids, typename Each>
  Place walk(Place from, const int32_t* entries, int64_t base, int64_t end, int32_t* ids, Each each) const;
  // The deepest usable place at or above a place.
  Place usable(Place place) const;
  // The same for one window column.
  Place seen_through(Place place, int column) const;
  Place climb(Place place) const;
  // What is still cached of a match.
  Place survivor(const Match& match) const;

  LeaseId new_lease(int32_t node);
  // Allocates for nodes and chunks, so that what follows cannot fail.
  void reserve(int64_t nodes, int64_t chunks);
  int32_t new_node(int32_t parent, int64_t begin);
  int32_t find_or_make_root(std::string_view space);
  void free_node(int32_t node);
  void link(int32_t node);    // into its parent's children and the table
  void remove(int32_t node);  // an unprotected leaf
  void free_root_if_empty(int32_t root);
  // Splits a node and returns the upper half. Memory has been reserved.
  int32_t split(int32_t node, int64_t at);
  // Joins halves of a run again, from a node upwards, if nothing distinguishes them any more. Otherwise a prompt that
  // was found at many lengths would stay in many pieces.
  void rejoin(int32_t node);
  // False if there is no memory for it.
  bool join(int32_t upper, int32_t lower);
  int32_t end_at(Place place) {
    return place.depth < nodes_[place.node].end() ? split(place.node, place.depth) : place.node;
  }
  void hold(int32_t node);
  void let_go(int32_t node);
  void let_go_coldest(int32_t node);
  void let_go_dropped(int32_t node);
  bool is_below_lost(int32_t node) const;
  bool is_lost(int32_t node) const { return nodes_[nodes_[node].root].is_dropped || is_below_lost(node); }
  // Calls each(node) for a node and all below it, parents before children, the newest child first.
  template <typename Each>
  void for_subtree(int32_t top, Each each) const;
  void touch(int32_t node);
  // Notes where pages [begin, end) of a node's run are, and that they belong to this node.
  void note_places(int32_t node, int64_t begin, int64_t end);
  void note_owner(int32_t node);
  // Removes unprotected leaves without pages, from this one upwards.
  void prune(int32_t node);
  // Adds the contents of a node to the locked counts, or subtracts them.
  void count_locked(int32_t node, int64_t sign);
  int64_t held(int column, int32_t node) const {
    return is_window(column) ? held_[static_cast<size_t>(column)][node] : math_.page(nodes_[node].run.length);
  }
  int64_t count_held(const Run& run, int column, int64_t begin, int64_t end) const;
  void add_held(int32_t node, int column, int64_t n);

  int32_t given_id(const Insertion& job, int column, int64_t page) const;
  void find_holes(Insertion& job) const;
  void find_checkpoints(Insertion& job, const std::vector<Checkpoint>& checkpoints) const;
  void write_news(Insertion& job) const;
  bool grows_in_place(const Insertion& job) const;
  void fill(const Insertion& job);
  void store(Insertion& job, bool grows);
  void store_keys(const Insertion& job, const Run& run);
  void add_checkpoints(const Insertion& job);
  Checkpoint last_checkpoint_up(int32_t node, int64_t length) const;
  // Moves the lease and renews what was used; returns how far the sequence is usable now.
  int64_t settle(const Insertion& job);

  template <typename Counted, typename Keep>
  void plan(int64_t target, Removal& plan, Counted counted, Keep keep) const;
  void begin(Removal& plan) const;
  // Calls each(checkpoint) for the checkpoints that a cut removes, in order.
  template <typename Each>
  void for_checkpoints(const Cut& cut, Each each) const;
  void cut(int32_t node, int64_t from, int64_t to, Removal& plan) const;
  void apply(const Cut& cut);
  // Records an event of a finished call. Memory has been reserved.
  void tell(std::vector<TreeEvent>& news);
  int32_t last_checkpoint(int32_t node, int64_t length) const;  // relative to the node's begin; 0 if none
  // Notes that these checkpoints are in a node.
  void note_checkpoints(const std::vector<Checkpoint>& checkpoints, int32_t node) {
    for (const Checkpoint& each : checkpoints) spots_[each.state_id].node = node;
  }
  TreeEvent checkpoint_event(EventKind kind, int32_t node, Checkpoint checkpoint) const;
  // The event for all columns of tokens [begin, end) of a node and the checkpoints among them.
  TreeEvent event(EventKind kind, int32_t node, int64_t begin, int64_t end) const;
  // The event for one page of a column at a place of a node's run. O(1), however long the run.
  TreeEvent page_event(EventKind kind, const Hole& at, int32_t id) const;
  // Where a followed page is.
  Hole find_page(int set, int32_t id) const;
  // The content key of the page that ends at a position, in a node or above it; at 0, that of the namespace.
  uint64_t key_at(int32_t node, int64_t position) const;
  // The content keys of pages with these entries that follow a page with this key.
  void make_keys(uint64_t before, const int32_t* entries, int64_t num_pages, uint64_t* out) const;
  void describe(TreeEvent& event, const int32_t* entries, int64_t n) const;
  // Reports that a page gets another id, if there are listeners and it can be found. old_id is -1 for a hole.
  void tell_exchange(const Hole& at, int32_t old_id, int32_t new_id);
  std::vector<int32_t> decode(const int32_t* entries, int64_t n) const;
  const std::string& space_of(int32_t node) const;
  [[noreturn]] void broken(int number, int32_t node, const std::string& what) const;
  void check_node(int32_t index, std::vector<bool>& chunks) const;
  void check_order() const;

  PageMath math_;
  std::vector<int64_t> windows_;
  bool has_states_;
  bool has_windows_ = false;
  uint64_t seed_;
  uint32_t hash_mask_;

  GrowArray<Node> nodes_;
  int32_t free_node_ = -1;
  RunStore runs_;
  ChildTable children_;
  LeastRecentlyUsed order_;
  ExtraKeys extra_keys_;
  std::vector<GrowArray<int32_t>> held_;      // per window column: pages that are not holes, by node
  std::vector<int> set_of_;                   // empty if nothing is followed
  std::vector<LazyArray<uint32_t>> places_;   // per set: by page id
  std::vector<std::vector<int>> columns_of_;  // per set
  // By chunk: its node, and which page of the sequence is in its first place.
  struct Owner {
    int32_t node;
    int32_t first_page;
  };
  GrowArray<Owner> owners_;
  bool has_full_ = false;                             // whether some column has no window
  std::vector<std::vector<Checkpoint>> checkpoints_;  // with states: by node, ascending
  std::vector<std::vector<Checkpoint>> spares_;       // for splits: one per node that was reserved
  size_t most_checkpoints_ = 0;                       // of any node so far: the room in each spare
  // Where each followed checkpoint is; length 0 if it is not in the tree.
  struct Spot {
    int32_t node;
    int32_t length;
  };
  bool follows_states_ = false;
  LazyArray<Spot> spots_;  // [num_states + 1]
  std::map<std::string, int32_t, std::less<>> roots_;
  std::unordered_map<int32_t, std::string> names_;  // of all roots, dropped ones included
  int32_t default_root_ = -1;                       // of the namespace ""

  std::vector<Lease> leases_;
  std::vector<int32_t> free_leases_;

  Tally tokens_, states_;
  std::vector<Tally> window_pages_;  // of window columns, by column
  int64_t num_lost_ = 0;             // nodes that are lost
  int64_t num_nodes_ = 0, num_leaves_ = 0, num_leases_ = 0;
  int64_t next_number_ = 1, next_family_ = 1, next_lease_ = 1;
  int64_t now_ = 0, cold_ = 0;
  int64_t replaced_ = 0;  // the family given by the last replace

  bool is_listened_ = false;
  std::vector<TreeEvent> events_;

  // Scratch of an insert.
  std::vector<int32_t> path_;
  std::vector<const int32_t*> new_ids_;
};

// Runs to remove, whole or from their tails, and how many ids that frees.
class PrefixTree::Removal {
 public:
  const std::vector<int64_t>& columns() const { return columns_; }  // page ids of each column
  int64_t states() const { return states_; }

 private:
  friend class PrefixTree;
  std::vector<int64_t> columns_;
  int64_t states_ = 0;
  std::vector<Cut> cuts_;
  std::vector<TreeEvent> news_;
  int32_t dropped_ = -1;                                           // the root of a namespace to drop
  std::unordered_map<int32_t, std::pair<int32_t, int32_t>> left_;  // node: tokens left, children left
};

// Pages of a window column on a lease's path that become holes.
class PrefixTree::Punch {
 public:
  int64_t num_pages() const { return num_pages_; }

 private:
  friend class PrefixTree;
  int column_ = 0;
  int64_t end_ = 0;  // pages before this one of the sequence
  int64_t num_pages_ = 0;
  std::vector<int32_t> path_;
  std::vector<TreeEvent> news_;
};

// Pages that get new ids.
class PrefixTree::Replacement {
 public:
  int64_t num_pages() const { return num_pages_; }  // of each column

 private:
  friend class PrefixTree;
  int64_t num_pages_ = 0;
  std::vector<int32_t> path_;
  std::vector<TreeEvent> news_;
};

template <bool with_ids, typename Each>
PrefixTree::Place PrefixTree::walk(Place at, const int32_t* entries, int64_t base, int64_t end, int32_t* ids,
                                   Each each) const {
  if (end - at.depth < math_.size() || nodes_[at.node].first_child < 0) return at;
  uint32_t key = hash(at.node, entries + (at.depth - base));
  for (;;) {
    const int32_t* rest = entries + (at.depth - base);
    const int32_t child = child_of(at.node, rest, key);
    if (child < 0) break;
    const Run run = nodes_[child].run;
    const int64_t left = end - at.depth - run.length;  // after this run
    const bool goes_on = left >= math_.size() && nodes_[child].first_child >= 0;
    if (goes_on) {  // prefetch the next lookup while this run is compared
      key = hash(child, rest + run.length);
      children_.prefetch(key);
    }
    const int64_t n = std::min<int64_t>(run.length, math_.first_slot(math_.page(end - at.depth)));
    const int64_t pages = math_.page(runs_.common<with_ids>(run, rest, n, ids)), same = math_.first_slot(pages);
    if (with_ids) ids += pages;
    at = {child, at.depth + same};
    each(child, at.depth);
    if (same < run.length || !goes_on) break;
  }
  return at;
}

template <typename Each>
void PrefixTree::for_checkpoints(const Cut& cut, Each each) const {
  if (!has_states_) return;
  const int64_t begin = nodes_[cut.node].begin;
  for (const Checkpoint& checkpoint : checkpoints_[static_cast<size_t>(cut.node)]) {
    if (checkpoint.length > begin + cut.to && checkpoint.length <= begin + cut.from) each(checkpoint);
  }
}

template <typename Each>
void PrefixTree::for_subtree(int32_t top, Each each) const {
  for (int32_t node = top;; node = nodes_[node].next_sibling) {
    for (each(node); nodes_[node].first_child >= 0; each(node)) node = nodes_[node].first_child;
    while (node != top && nodes_[node].next_sibling < 0) node = nodes_[node].parent;
    if (node == top) return;
  }
}

template <typename Offer, typename Took>
int64_t PrefixTree::exchange(LeaseId lease, int64_t first, int64_t end, Offer offer, Took took) {
  int32_t node = require(lease).node;
  int64_t from = math_.page(nodes_[node].end());
  for (; !nodes_[node].is_root() && nodes_[node].locks == 1 && from > first; node = nodes_[node].parent) {
    const int64_t begin = math_.page(nodes_[node].begin), from_page = std::max(first, begin) - begin;
    const int64_t to_page = std::min(end, math_.page(nodes_[node].end())) - begin;
    bool is_new = false;
    for (int c = 0; c < num_columns() && from_page < to_page; ++c) {
      const int set = set_of_.empty() ? -1 : set_of_[static_cast<size_t>(c)];
      int64_t page = begin + from_page;
      runs_.for_places(nodes_[node].run, from_page, to_page, [&](int32_t, int64_t place, int64_t n) {
        for (const int64_t last = place + n; place < last; ++place, ++page) {
          const int32_t old_id = runs_.id_at(c, place), new_id = offer(page, c, old_id);
          if (new_id == old_id) continue;
          if (!is_new) {  // earlier matches must not find the new pages
            nodes_[node].family = replaced_ = next_family_++;
            is_new = true;
          }
          tell_exchange({node, c, page, place}, old_id, new_id);
          runs_.id_at(c, place) = new_id;
          if (set >= 0) places_[static_cast<size_t>(set)][new_id] = static_cast<uint32_t>(place);
          if (old_id < 0) add_held(node, c, 1);
          took(page, c, old_id, new_id);
        }
      });
    }
    from = begin;
  }
  return std::max(first, from);
}

}  // namespace pagoda
