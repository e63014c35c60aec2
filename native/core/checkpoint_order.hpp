// Which checkpoint is given up first. In: what happens to checkpoints; out: the next one to go.
//
// Checkpoints are of two classes. The first holds those that requests are likely to resume from: tails, where a path
// ended, and branch points, where paths part. The second holds interval points, saved along the way, and tails that a
// deeper tail has superseded. The second class goes first, the closest to the checkpoint before it first, by powers of
// two, and the oldest of those. In the first class the one of the least worth goes: inflation at its last use + p(kind)
// * gap, where gap is the number of tokens since the checkpoint before it, and p(kind) the share of checkpoints of its
// kind that were ever resumed from, learned as it runs. Inflation rises to the worth of what goes, so worth ages. Where
// everything else is worth little, that takes too long: what was not used during 8 n saves of tails and branch points
// goes first, for n checkpoints.
//
// Worths are stored in two heaps and recomputed when they come to the top, since gaps and shares change. If a share has
// risen, that may be true of all of them; so at most kMostUpdates come to the top per eviction, and the least of these
// goes. Those that have fallen would never come to the top, so each eviction also recomputes one id, all of them in
// turn. A call takes O(log n) and allocates nothing. The same calls give the same order.
#pragma once

#include <cstdint>
#include <vector>

#include "core/lazy_array.hpp"

namespace pagoda {

enum class CheckpointKind : uint8_t {
  kFresh,      // the tail of a path that begins anew or parts from others
  kContinued,  // the tail of a path that goes on where another ended
  kBranch,     // where paths part
  kInterval,   // saved along the way
};

// A binary heap of ids, the least key first; of equal keys, the lowest order. Ids are 1 ... num_ids.
class IdHeap {
 public:
  explicit IdHeap(int64_t num_ids) : at_(num_ids + 1), keys_(num_ids + 1) {
    ids_.reserve(static_cast<size_t>(num_ids));
  }

  struct Key {
    double worth;
    int64_t order;
    bool operator<(const Key& other) const {
      return worth < other.worth || (worth == other.worth && order < other.order);
    }
  };

  int64_t size() const { return static_cast<int64_t>(ids_.size()); }
  int32_t first() const { return ids_.front(); }
  const Key& key(int32_t id) const { return keys_[id]; }
  bool contains(int32_t id) const { return at_[id] > 0; }
  void add(int32_t id, Key key);
  void remove(int32_t id);
  void change(int32_t id, Key key);
  void clear();
  bool is_right() const;  // a check of the heap

 private:
  void put(size_t place, int32_t id) {
    ids_[place] = id;
    at_[id] = static_cast<int32_t>(place) + 1;
  }
  void rise(size_t place);
  void sink(size_t place);

  std::vector<int32_t> ids_;
  LazyArray<int32_t> at_;  // place of each id, counted from 1; 0 if it is not in the heap
  LazyArray<Key> keys_;
};

class CheckpointOrder {
 public:
  // Ids are 1 ... num_ids.
  explicit CheckpointOrder(int64_t num_ids);

  int64_t size() const { return first_.size() + second_.size(); }
  bool contains(int32_t id) const { return first_.contains(id) || second_.contains(id); }
  bool has_second() const { return second_.size() > 0; }
  CheckpointKind kind(int32_t id) const { return entries_[id].kind; }
  bool is_second(int32_t id) const { return second_.contains(id); }

  // A checkpoint, `gap` tokens after the one before it, can be resumed from now on.
  void add(int32_t id, CheckpointKind kind, int64_t gap);
  void remove(int32_t id);
  // A request resumed from it. is_near: its pages matched little further, so that it used what it could. parts: it
  // leaves the path of others soon after.
  void resume(int32_t id, int64_t gap, bool is_near, bool parts);
  // A deeper tail continues it.
  void supersede(int32_t id, int64_t gap);

  // The one to give up next, 0 if there is none: of the second class, or also of the first. gap(id) → tokens since the
  // checkpoint before it. The caller removes it.
  template <typename Gap>
  int32_t next(bool also_first, Gap gap) {
    hand_ = hand_ % num_ids_ + 1;
    if (contains(hand_)) update(hand_, gap(hand_));
    const auto top = [&] {
      if (second_.size() > 0) return second_.first();
      return also_first && first_.size() > 0 ? first_.first() : 0;
    };
    int32_t least = 0;
    for (int i = 0; i < kMostUpdates; ++i) {
      const int32_t id = top();
      if (id == 0) return 0;
      update(id, gap(id));
      if (top() == id) return id;
      if (least == 0 || goes_before(id, least)) least = id;
    }
    return least;
  }
  // What goes raises inflation.
  void give_up(int32_t id) {
    if (first_.contains(id) && first_.key(id).worth > inflation_) inflation_ = first_.key(id).worth;
    remove(id);
  }

  void reset();
  bool is_right() const { return first_.is_right() && second_.is_right(); }

 private:
  struct Entry {
    CheckpointKind kind;
    bool is_resumed;
    uint32_t used;     // saves_ at its last use
    double inflation;  // at its last use
  };
  // Checkpoints of a kind: how many were saved, and how many of these were resumed from.
  struct Reuse {
    double saved, resumed;
    double share() const { return resumed / saved; }
  };
  static double closeness(int64_t gap) { return gap > 0 ? 63 - __builtin_clzll(static_cast<uint64_t>(gap)) : -1; }
  double worth_of(int32_t id, int64_t gap) const {
    const Entry& entry = entries_[id];
    return entry.inflation + reuse_[static_cast<size_t>(entry.kind)].share() * static_cast<double>(gap);
  }
  // Recomputes the key of a listed checkpoint. One that was not used for long goes next.
  void update(int32_t id, int64_t gap) {
    const bool is_first = first_.contains(id);
    if (uint64_t{saves_ - entries_[id].used} > kLifetime * static_cast<uint64_t>(num_ids_)) {
      const int64_t order = (is_first ? first_ : second_).key(id).order;
      remove(id);
      second_.add(id, {-1, order});
    } else if (is_first) {
      first_.change(id, {worth_of(id, gap), first_.key(id).order});
    } else {
      second_.change(id, {closeness(gap), second_.key(id).order});
    }
  }
  // Of two listed checkpoints.
  bool goes_before(int32_t id, int32_t other) const {
    const bool is_second = second_.contains(id);
    if (is_second != second_.contains(other)) return is_second;
    const IdHeap& heap = is_second ? second_ : first_;
    return heap.key(id) < heap.key(other);
  }
  void count_saved(CheckpointKind kind);
  void list(int32_t id, int64_t gap, bool is_second);

  // Saves of tails and branch points, times the number of checkpoints, that an unused checkpoint survives.
  static constexpr uint64_t kLifetime = 8;
  static constexpr int kMostUpdates = 64;

  int32_t num_ids_;
  int32_t hand_ = 0;  // the id recomputed last
  IdHeap first_, second_;
  LazyArray<Entry> entries_;  // [num_ids + 1]
  Reuse reuse_[4];            // by kind
  double inflation_ = 0;
  int64_t clock_ = 0;
  uint32_t saves_ = 0;  // of tails and branch points; it may wrap around
};

}  // namespace pagoda
