// What waits for fences. Something given while step s is planned waits for the fence of s, or for the one before:
// of each kind the fences never fall, so that each is a queue, and nothing is ever sorted.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

namespace pagoda {

template <typename T>
class FenceQueue {
 public:
  // Room for n more of a kind. is_late: they wait for the fence of the step being planned.
  void reserve(int64_t n, bool is_late) { (is_late ? late_ : early_).reserve(static_cast<size_t>(n)); }

  // There is room.
  void push(int64_t fence, bool is_late, const T& it) { (is_late ? late_ : early_).items.emplace_back(fence, it); }

  // Takes out what waits for this fence or an earlier one: by fence, of one fence what was pushed first. `each` pushes
  // nothing.
  template <typename Each>
  void pass(int64_t fence, Each each) {
    // Of one fence, what is late was pushed a step before the other.
    while (std::min(early_.next(), late_.next()) <= fence) {
      if (late_.next() <= early_.next()) {
        late_.pass(std::min(fence, early_.next()), each);
      } else {
        early_.pass(std::min(fence, late_.next() - 1), each);
      }
    }
  }

  template <typename Each>
  void for_each(Each each) const {
    for (const Queue* queue : {&early_, &late_}) {
      for (size_t i = queue->head; i < queue->items.size(); ++i) each(queue->items[i].first, queue->items[i].second);
    }
  }

  int64_t size() const { return early_.size() + late_.size(); }

  void clear() {
    early_.clear();
    late_.clear();
  }

 private:
  struct Queue {
    std::vector<std::pair<int64_t, T>> items;  // those before `head` are gone
    size_t head = 0;

    void reserve(size_t n) {
      if (items.size() + n <= items.capacity()) return;
      // Where half of it is gone, the rest moves up; else it grows.
      if (2 * head < items.size() || items.size() - head + n > items.capacity()) {
        items.reserve(std::max(items.size() + n, 2 * items.capacity()));
        return;
      }
      items.erase(items.begin(), items.begin() + static_cast<std::ptrdiff_t>(head));
      head = 0;
    }
    // The fence that passes next.
    int64_t next() const { return head < items.size() ? items[head].first : std::numeric_limits<int64_t>::max(); }
    template <typename Each>
    void pass(int64_t fence, Each each) {
      const std::pair<int64_t, T>*it = items.data() + head, *end = items.data() + items.size();
      for (; it != end && it->first <= fence; ++it) each(it->second);
      head = static_cast<size_t>(it - items.data());
      if (it == end) clear();
    }
    int64_t size() const { return static_cast<int64_t>(items.size() - head); }
    void clear() {
      items.clear();
      head = 0;
    }
  };

  Queue early_, late_;
};

}  // namespace pagoda
