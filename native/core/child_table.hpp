// (parent, first page) → child, for all nodes of a tree in one flat table.
//
// An entry is a hash and a node, eight bytes; the caller compares parent and page. Open addressing with linear probing;
// erasing moves later entries up, so there are no tombstones.
#pragma once

#include <cstdint>
#include <vector>

namespace pagoda {

class ChildTable {
 public:
  ChildTable() { resize(64); }

  // Room for n entries in all.
  void reserve(int64_t n) {
    int64_t slots = static_cast<int64_t>(entries_.size());
    if (n * 8 <= slots * 5) return;
    while (n * 8 > slots * 5) slots *= 2;
    resize(slots);
  }

  // The node with this hash for which is_child(node) is true, or -1.
  template <typename IsChild>
  int32_t find(uint32_t hash, IsChild is_child) const {
    for (size_t i = hash & mask_; entries_[i].node >= 0; i = (i + 1) & mask_) {
      if (entries_[i].hash == hash && is_child(entries_[i].node)) return entries_[i].node;
    }
    return -1;
  }

  // The caller has reserved room.
  void insert(uint32_t hash, int32_t node) {
    size_t i = hash & mask_;
    while (entries_[i].node >= 0) i = (i + 1) & mask_;
    entries_[i] = {hash, node};
    ++size_;
  }

  void replace(uint32_t hash, int32_t node, int32_t by) { entries_[slot_of(hash, node)].node = by; }

  void erase(uint32_t hash, int32_t node) {
    size_t hole = slot_of(hash, node);
    for (size_t i = (hole + 1) & mask_; entries_[i].node >= 0; i = (i + 1) & mask_) {
      // An entry may move up to the hole unless its home is after the hole.
      if (((i - entries_[i].hash) & mask_) >= ((i - hole) & mask_)) {
        entries_[hole] = entries_[i];
        hole = i;
      }
    }
    entries_[hole].node = -1;
    --size_;
  }

  void prefetch(uint32_t hash) const { __builtin_prefetch(&entries_[hash & mask_]); }

  int64_t size() const { return size_; }

  void clear() {
    for (Entry& entry : entries_) entry.node = -1;
    size_ = 0;
  }

 private:
  struct Entry {
    uint32_t hash;
    int32_t node;
  };

  size_t slot_of(uint32_t hash, int32_t node) const {
    size_t i = hash & mask_;
    while (entries_[i].node != node) i = (i + 1) & mask_;
    return i;
  }

  void resize(int64_t slots) {
    std::vector<Entry> old(static_cast<size_t>(slots), Entry{0, -1});
    old.swap(entries_);
    mask_ = static_cast<size_t>(slots - 1);
    size_ = 0;
    for (const Entry& entry : old) {
      if (entry.node >= 0) insert(entry.hash, entry.node);
    }
  }

  std::vector<Entry> entries_;
  size_t mask_ = 0;
  int64_t size_ = 0;
};

}  // namespace pagoda
