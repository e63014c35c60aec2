#include "core/checkpoint_order.hpp"

#include <algorithm>

namespace pagoda {

namespace {

// What is assumed about a kind before anything is known: as many observations, and the share that was resumed from.
constexpr double kPrior = 16, kFreshShare = 0.4, kOtherShare = 0.8;
constexpr double kMostObservations = 2000;  // beyond it, both counts are halved, so that old ones fade

}  // namespace

void IdHeap::add(int32_t id, Key key) {
  keys_[id] = key;
  ids_.push_back(id);
  at_[id] = static_cast<int32_t>(ids_.size());
  rise(ids_.size() - 1);
}

void IdHeap::remove(int32_t id) {
  const size_t place = static_cast<size_t>(at_[id] - 1);
  const int32_t last = ids_.back();
  ids_.pop_back();
  at_[id] = 0;
  if (last == id) return;
  put(place, last);
  rise(place);
  sink(static_cast<size_t>(at_[last] - 1));
}

void IdHeap::change(int32_t id, Key key) {
  keys_[id] = key;
  rise(static_cast<size_t>(at_[id] - 1));
  sink(static_cast<size_t>(at_[id] - 1));
}

void IdHeap::rise(size_t place) {
  const int32_t id = ids_[place];
  for (; place > 0 && keys_[id] < keys_[ids_[(place - 1) / 2]]; place = (place - 1) / 2) {
    put(place, ids_[(place - 1) / 2]);
  }
  put(place, id);
}

void IdHeap::sink(size_t place) {
  const int32_t id = ids_[place];
  for (size_t below; (below = 2 * place + 1) < ids_.size(); place = below) {
    if (below + 1 < ids_.size() && keys_[ids_[below + 1]] < keys_[ids_[below]]) ++below;
    if (!(keys_[ids_[below]] < keys_[id])) break;
    put(place, ids_[below]);
  }
  put(place, id);
}

void IdHeap::clear() {
  for (const int32_t id : ids_) at_[id] = 0;
  ids_.clear();
}

bool IdHeap::is_right() const {
  for (size_t i = 0; i < ids_.size(); ++i) {
    if (at_[ids_[i]] != static_cast<int32_t>(i) + 1) return false;
    if (i > 0 && keys_[ids_[i]] < keys_[ids_[(i - 1) / 2]]) return false;
  }
  return true;
}

CheckpointOrder::CheckpointOrder(int64_t num_ids)
    : num_ids_(static_cast<int32_t>(num_ids)), first_(num_ids), second_(num_ids), entries_(num_ids + 1) {
  reset();
}

void CheckpointOrder::reset() {
  first_.clear();
  second_.clear();
  for (size_t kind = 0; kind < 4; ++kind) {
    const bool is_fresh = kind == static_cast<size_t>(CheckpointKind::kFresh);
    reuse_[kind] = {kPrior, kPrior * (is_fresh ? kFreshShare : kOtherShare)};
  }
  inflation_ = 0;
  clock_ = 0;
  saves_ = 0;
  hand_ = 0;
}

void CheckpointOrder::list(int32_t id, int64_t gap, bool is_second) {
  if (is_second) {
    second_.add(id, {closeness(gap), ++clock_});
  } else {
    first_.add(id, {worth_of(id, gap), ++clock_});
  }
}

void CheckpointOrder::count_saved(CheckpointKind kind) {
  Reuse& reuse = reuse_[static_cast<size_t>(kind)];
  if (++reuse.saved > kMostObservations) reuse = {reuse.saved / 2, reuse.resumed / 2};
}

void CheckpointOrder::add(int32_t id, CheckpointKind kind, int64_t gap) {
  if (kind != CheckpointKind::kInterval) ++saves_;
  entries_[id] = {kind, false, saves_, inflation_};
  count_saved(kind);
  list(id, gap, kind == CheckpointKind::kInterval);
}

void CheckpointOrder::remove(int32_t id) { (first_.contains(id) ? first_ : second_).remove(id); }

void CheckpointOrder::resume(int32_t id, int64_t gap, bool is_near, bool parts) {
  Entry& entry = entries_[id];
  const bool is_second = second_.contains(id) && !parts;
  if (is_near && !entry.is_resumed) {
    entry.is_resumed = true;
    ++reuse_[static_cast<size_t>(entry.kind)].resumed;
  }
  if (parts && entry.kind != CheckpointKind::kBranch) {
    entry.kind = CheckpointKind::kBranch;
    count_saved(entry.kind);
    ++reuse_[static_cast<size_t>(entry.kind)].resumed;
  }
  entry.inflation = inflation_;
  entry.used = saves_;
  remove(id);
  list(id, gap, is_second);
}

void CheckpointOrder::supersede(int32_t id, int64_t gap) {
  if (second_.contains(id)) return;
  first_.remove(id);
  list(id, gap, true);
}

}  // namespace pagoda
