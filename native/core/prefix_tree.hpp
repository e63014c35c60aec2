// What is already computed. In: tokens, out: the ids of the pages that hold them. docs/tree.md says what
// each call does; here is how.
//
// Nodes are entries of one array, addressed by index; a freed entry is used again, a node's number
// never. The root of a namespace is a node without tokens. `locks` of a node counts the leases that end there and the
// children that are locked, so locking stops at the first ancestor that is locked already, and a node is protected
// exactly while it is not zero. A lease always ends where its node ends.
//
// A match is a value that may be locked much later. What makes that safe: tokens before a node's
// end never change while the node lives (a trimmed node does not grow again), a split leaves the
// lower half its number, and both halves have the family of the run they came from.
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

// A node of a match's path, and how far the match goes by its end.
struct Step {
  int64_t number;
  int64_t family;
  int32_t node;
  int32_t end;
  uint32_t hash;
};

// Most paths are short: the first steps need no memory of their own.
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
  int64_t made = 0;   // the next family when it was made
  int32_t root = -1;  // -1: the namespace was not there
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
  std::vector<std::vector<int32_t>> filled;  // page numbers, a column; empty: there were none
  std::vector<int32_t> states;
};

// What listeners are told. A reset has no pages.
enum class EventKind { kStored, kRemoved, kReset };
struct TreeEvent {
  EventKind kind;
  bool ids_only = false;  // the pages themselves were there before, or stay: only ids or states came or went
  std::string space{};
  int64_t position = 0;
  uint64_t parent = 0;           // content key of the page before; at position 0 of the namespace
  std::vector<uint64_t> keys{};  // of the pages
  std::vector<int32_t> tokens{};
  std::vector<KeyRange> ranges{};  // over the tokens
  std::vector<std::vector<int32_t>> columns{};
  std::vector<Checkpoint> states{};
};

struct NodeInfo {
  int64_t number, parent;  // parent 0: a root
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

  // windows: one entry a column, 0 for a column without holes. hash_mask makes keys collide, for tests.
  PrefixTree(int64_t page_tokens, std::vector<int64_t> windows, bool has_states, int64_t capacity,
             uint32_t hash_mask = ~uint32_t{0});

  // Addresses for so many tokens, which cost nothing until they are written: what is there need not move as it grows.
  void expect(int64_t tokens);

  int64_t page_tokens() const { return math_.size(); }
  const std::vector<int64_t>& windows() const { return windows_; }
  int num_columns() const { return static_cast<int>(windows_.size()); }
  bool has_states() const { return has_states_; }
  // Whatever is there is usable.
  bool is_plain() const { return !has_states_ && !has_windows_; }
  Tally tokens() const { return tokens_; }
  Tally pages(int column) const;
  Tally states() const { return states_; }
  int64_t num_nodes() const { return num_nodes_; }
  int64_t num_leaves() const { return num_leaves_; }
  int64_t num_leases() const { return num_leases_; }
  std::vector<std::string> namespaces() const;

  // In a plain tree, ids takes the pages of column 0 too: room for all of the sequence's.
  void match(const Sequence& sequence, Match& match, int32_t* ids) const;
  int64_t match_length(const Sequence& sequence) const;
  // The page ids of a match that was made just now: [length / page_tokens].
  void copy_pages(const Match& match, int column, int32_t* out) const { copy_pages(match, column, 0, out); }
  // Those from page `first` on; out takes all of them.
  void copy_pages(const Match& match, int column, int64_t first, int32_t* out) const;

  LeaseId lock(const Match& match);
  // The same for a match that was made just now: no call has changed the tree since.
  LeaseId lock_fresh(const Match& match);
  // Another lease that ends where this one does.
  LeaseId lease_again(LeaseId lease);
  // Room for n leases: giving them does not fail.
  void reserve_leases(int64_t n);
  // How many pages a column without a window would be protected no longer if all of these were released.
  int64_t count_released(const std::vector<LeaseId>& leases) const;
  // How many tokens a lock of this match, made just now, would protect that nobody protects yet.
  int64_t count_unlocked(const Match& match) const;
  void release(LeaseId lease);
  void demote(LeaseId lease);
  bool is_held(LeaseId lease) const;
  int64_t length(LeaseId lease) const;
  int32_t state_id(LeaseId lease) const;  // of the checkpoint where it ends; -1: none
  void copy_pages(LeaseId lease, int column, int32_t* out) const { copy_pages(lease, column, 0, out); }
  void copy_pages(LeaseId lease, int column, int64_t first, int32_t* out) const;

  // lease: null for none. columns: one entry a column.
  Inserted insert(const Sequence& sequence, const std::vector<Ids>& columns, const LeaseId* lease,
                  const std::vector<Checkpoint>& checkpoints);

  // What an insert behind a lease will touch is on its way: first its node, and when that is there, the end of its run.
  void prefetch_node(LeaseId lease) const;
  void prefetch_tail(LeaseId lease) const;

  // What takes pages out is planned first, which changes nothing and says how much room the ids need, and then carried
  // out, which cannot fail. A plan is good for one carry_out, before anything else changes the tree; whoever keeps it
  // for the next plan saves asking for memory.
  class Removal;
  class Punch;
  class Replacement;
  void plan_evict(int64_t n, int column, Removal& plan) const;
  void plan_evict_states(int64_t n, Removal& plan) const;
  void plan_drop(std::string_view space, Removal& plan) const;
  void carry_out(Removal& plan, const std::vector<int32_t*>& columns, int32_t* states);

  // From now on knows where the pages of window columns lie: set_of[c] is the id space of column c, -1 for one that is
  // not followed; num_ids[s] its ids. The tree has to be empty.
  void follow(std::vector<int> set_of, const std::vector<int64_t>& num_ids);
  // Makes a hole of a page that is followed, whoever protects it. O(1).
  void punch_page(int set, int32_t id);
  // Gives a page that is followed another id, which is in no tree, whoever protects it. O(1).
  void replace_page(int set, int32_t old_id, int32_t new_id);

  // Exchanges ids of pages [first, end) of a lease's path that no other lease protects. offer(page, column, id) is the
  // id to have there, or the same one; a hole is -1, and may be filled. took(page, column, id, new_id) is called once
  // it is there. From the first page on that is returned, no other lease protects anything. May throw bad_alloc between
  // two exchanges, if listened to.
  template <typename Offer, typename Took>
  int64_t exchange(LeaseId lease, int64_t first, int64_t end, Offer offer, Took took);

  // Forgets pages whose contents are bad, in columns [first, first + count), and all that continues them. What nobody
  // protects comes free, by column; the rest cannot be found any more, and is the coldest once released.
  void discard(int first, int count, const BitSet& bad, std::vector<std::vector<int32_t>>& freed);
  // Whether something is there that nobody can find any more: lost, or of a dropped namespace.
  bool has_lost() const { return num_lost_ > 0 || names_.size() > roots_.size(); }
  bool is_lost(LeaseId lease) const;
  // Whether a lease lies below what was discarded.
  bool is_discarded(LeaseId lease) const;
  // Whether a page that is followed lies there.
  bool is_lost(int set, int32_t id) const;

  void plan_punch(LeaseId lease, int column, int64_t end, Punch& plan) const;
  void carry_out(Punch& plan, int32_t* out);

  void plan_replace(const Sequence& sequence, const std::vector<Ids>& columns, Replacement& plan) const;
  // The same columns as in the plan; out takes the old ids of each.
  void carry_out(Replacement& plan, const std::vector<Ids>& columns, const std::vector<int32_t*>& out);

  void reset();
  void check() const;

  std::vector<NodeInfo> nodes(int64_t max_nodes, int64_t max_tokens, const std::string_view* space) const;

  // Whether events are collected, and keys of contents kept: the first call to begin walks over all there is.
  void listen(bool on);
  bool has_events() const { return !events_.empty(); }
  std::vector<TreeEvent> take_events() { return std::exchange(events_, {}); }
  // All that can be found, as events that store it, parents before children.
  std::vector<TreeEvent> retell() const;

 private:
  struct Node {
    int32_t parent;  // of a freed entry: the next freed one
    int32_t first_child, next_sibling, prev_sibling;
    int32_t num_children;
    int32_t locks;
    Run run;
    int32_t begin;
    uint32_t hash;   // of (parent, first page)
    int64_t number;  // 0: freed
    int64_t family;
    int64_t used;
    int32_t root;
    bool is_trimmed;  // lost its tail: never grows in place again
    bool is_dropped;  // a root whose namespace was dropped
    bool is_lost;     // what it holds is bad: neither it nor what continues it is found
    int32_t end() const { return begin + run.length; }
    bool is_root() const { return parent < 0; }
  };
  struct Lease {
    int64_t number;  // 0: free
    int32_t node;
    bool is_demoted;
  };
  // Tokens [to, from) of a node go; to 0: the node goes.
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
  struct Insertion;  // an insert under way

  bool is_window(int column) const { return windows_[static_cast<size_t>(column)] > 0; }
  const Lease& require(LeaseId lease) const;
  void require_tokens(Ids tokens, int64_t from) const;
  void require_columns(Ids tokens, const std::vector<Ids>& columns) const;
  void require_checkpoints(const std::vector<Checkpoint>& checkpoints, int64_t base, int64_t end) const;
  void require_evictable(int64_t wanted, const char* what, Tally tally, int column = -1) const;

  uint32_t hash(int32_t parent, const int32_t* page) const;
  int32_t find_root(std::string_view space) const;
  int32_t child_of(int32_t parent, const int32_t* page, uint32_t key) const;
  // Follows entries [depth - base, ...) down from a place at the end of a node; each(node, depth) for every node
  // entered.
  template <bool with_ids, typename Each>
  Place walk(Place from, const int32_t* entries, int64_t base, int64_t end, int32_t* ids, Each each) const;
  // The deepest usable place at or above one.
  Place usable(Place place) const;
  // The same for one window column.
  Place seen_through(Place place, int column) const;
  Place climb(Place place) const;
  // What is left of a match.
  Place survivor(const Match& match) const;

  LeaseId new_lease(int32_t node);
  // Room for nodes and chunks: what follows does not fail.
  void reserve(int64_t nodes, int64_t chunks);
  int32_t new_node(int32_t parent, int64_t begin);
  int32_t find_or_make_root(std::string_view space);
  void free_node(int32_t node);
  void link(int32_t node);    // into its parent's children and the table
  void remove(int32_t node);  // an unprotected leaf
  void free_root_if_empty(int32_t root);
  // Cuts a node in two; the upper half is returned.
  int32_t split(int32_t node, int64_t at);
  // Joins halves of a run again, from a node upwards, where nothing tells them apart any more: so prefixes
  // of many lengths do not leave a node each.
  void rejoin(int32_t node);
  void join(int32_t upper, int32_t lower);
  int32_t end_at(Place place) {
    return place.depth < nodes_[place.node].end() ? split(place.node, place.depth) : place.node;
  }
  void hold(int32_t node);
  void let_go(int32_t node);
  void let_go_coldest(int32_t node);
  void let_go_dropped(int32_t node);
  bool is_below_lost(int32_t node) const;
  bool is_lost(int32_t node) const { return nodes_[nodes_[node].root].is_dropped || is_below_lost(node); }
  // Calls each(node) for a node and all below it, a run before its children, the newest child first.
  template <typename Each>
  void for_subtree(int32_t top, Each each) const;
  void touch(int32_t node);
  // Where pages [begin, end) of a node's run lie, and whose they are.
  void note_places(int32_t node, int64_t begin, int64_t end);
  void note_owner(int32_t node);
  // Removes leaves that hold no page and that nobody protects, from this one upwards.
  void prune(int32_t node);
  // Counts what a node holds in or out of the locked.
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
  // Moves the lease, renews what was used; how far the sequence is usable now.
  int64_t settle(const Insertion& job);

  template <typename Counted, typename Keep>
  void plan(int64_t target, Removal& plan, Counted counted, Keep keep) const;
  void begin(Removal& plan) const;
  // Calls each(checkpoint) for those that go with a cut, in order.
  template <typename Each>
  void for_checkpoints(const Cut& cut, Each each) const;
  void cut(int32_t node, int64_t from, int64_t to, Removal& plan) const;
  void apply(const Cut& cut);
  // Notes what a call that is done tells. There is room.
  void tell(std::vector<TreeEvent>& news);
  int32_t last_checkpoint(int32_t node, int64_t length) const;  // relative to its begin; 0: none
  // Of all columns of tokens [begin, end) of a node, and of the checkpoints among them.
  TreeEvent event(EventKind kind, int32_t node, int64_t begin, int64_t end) const;
  // Of one page of a column, which lies at a place of a node's run. O(1), however long the run.
  TreeEvent page_event(EventKind kind, const Hole& at, int32_t id) const;
  // Where a page that is followed lies.
  Hole find_page(int set, int32_t id) const;
  // The key of the page that ends at a position, in a node or above it; at 0 of the namespace.
  uint64_t key_at(int32_t node, int64_t position) const;
  // The keys of pages with these entries, behind one with this key.
  void make_keys(uint64_t before, const int32_t* entries, int64_t num_pages, uint64_t* out) const;
  void describe(TreeEvent& event, const int32_t* entries, int64_t n) const;
  // Tells that a page gets another id, if somebody listens and can find it. old_id -1: it was a hole.
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
  std::vector<GrowArray<int32_t>> held_;      // a window column: pages that are not holes, by node
  std::vector<int> set_of_;                   // empty: nothing is followed
  std::vector<LazyArray<uint32_t>> places_;   // a set: by page id
  std::vector<std::vector<int>> columns_of_;  // a set
  // By chunk: its node, and which page of the sequence stands in its first place.
  struct Owner {
    int32_t node;
    int32_t first_page;
  };
  GrowArray<Owner> owners_;
  bool has_full_ = false;                             // a column without a window
  std::vector<std::vector<Checkpoint>> checkpoints_;  // with states: by node, ascending
  std::map<std::string, int32_t, std::less<>> roots_;
  std::unordered_map<int32_t, std::string> names_;  // of roots, dropped ones too
  int32_t default_root_ = -1;                       // of the namespace ""

  std::vector<Lease> leases_;
  std::vector<int32_t> free_leases_;

  Tally tokens_, states_;
  std::vector<Tally> window_pages_;  // of window columns, by column
  int64_t num_lost_ = 0;             // nodes that are lost
  int64_t num_nodes_ = 0, num_leaves_ = 0, num_leases_ = 0;
  int64_t next_number_ = 1, next_family_ = 1, next_lease_ = 1;
  int64_t now_ = 0, cold_ = 0;
  int64_t replaced_ = 0;  // the family that the last replace gave

  bool is_listened_ = false;
  std::vector<TreeEvent> events_;

  // Scratch of an insert.
  std::vector<int32_t> path_;
  std::vector<const int32_t*> new_ids_;
};

// Runs that go, whole or their tails, and how many ids come free.
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
  int32_t dropped_ = -1;                                           // the root of a namespace that goes
  std::unordered_map<int32_t, std::pair<int32_t, int32_t>> left_;  // node: tokens left, children left
};

// Pages of a window column, on a lease's path, that become holes.
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

// Pages that get other ids.
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
    const int64_t left = end - at.depth - run.length;  // behind this run
    const bool goes_on = left >= math_.size() && nodes_[child].first_child >= 0;
    if (goes_on) {  // where to look next is on its way while this run is compared
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
          if (!is_new) {  // matches made before find other pages here
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
