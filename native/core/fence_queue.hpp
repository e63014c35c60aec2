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
  // Room for n more of either kind: pushing them does not fail.
  void reserve(int64_t n) {
    early_.reserve(static_cast<size_t>(n));
    late_.reserve(static_cast<size_t>(n));
  }

  // is_late: the fence is that of the step being planned.
  void push(int64_t fence, bool is_late, const T& it) {
    Queue& queue = is_late ? late_ : early_;
    queue.reserve(1);
    queue.items.emplace_back(fence, it);
  }

  // Takes out what waits for this fence or an earlier one: by fence, of one fence what was pushed first.
  template <typename Each>
  void pass(int64_t fence, Each each) {
    for (;;) {
      // Of one fence, what is late was pushed a step before the other.
      Queue& next = late_.is_due(early_.next()) ? late_ : early_;
      if (!next.is_due(fence)) return;
      each(next.items[next.head++].second);
      if (next.head == next.items.size()) next.clear();
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
    bool is_due(int64_t fence) const { return next() <= fence; }
    int64_t size() const { return static_cast<int64_t>(items.size() - head); }
    void clear() {
      items.clear();
      head = 0;
    }
  };

  Queue early_, late_;
};

}  // namespace pagoda
