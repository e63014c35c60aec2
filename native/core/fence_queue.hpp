// Items that wait for fences. In: items, each with its fence; out: the items whose fence has passed, ordered by fence
// and, within one fence, as they were pushed.
//
// Pushing and passing normally allocate nothing: memory of a passed fence is reused for a later one.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

namespace pagoda {

template <typename T>
class FenceQueue {
 public:
  // Allocates for n more items of a fence, so that pushing them cannot fail.
  void reserve(int64_t n, int64_t fence) {
    if (n == 0) return;
    std::vector<T>& items = items_of(fence);
    const size_t all = items.size() + static_cast<size_t>(n);
    if (all > items.capacity()) items.reserve(std::max(all, 2 * items.capacity()));
  }

  void push(int64_t fence, const T& item) {
    items_of(fence).push_back(item);
    ++size_;
  }
  void push(int64_t fence, const T* items, int64_t n) {
    if (n == 0) return;
    std::vector<T>& all = items_of(fence);
    all.insert(all.end(), items, items + n);
    size_ += n;
  }

  // Removes the items of this fence and earlier ones and calls each(item), which must not push. Returns their number.
  template <typename Each>
  int64_t pass(int64_t fence, Each each) {
    int64_t n = 0;
    while (!fences_.empty() && fences_.begin()->first <= fence) n += take(fences_.begin(), each);
    return n;
  }

  // Removes the items of exactly this fence and calls each(item). Returns their number.
  template <typename Each>
  int64_t recall(int64_t fence, Each each) {
    const auto at = fences_.find(fence);
    return at == fences_.end() ? 0 : take(at, each);
  }

  // Calls each(fence, item) for all items.
  template <typename Each>
  void for_each(Each each) const {
    for (const auto& [fence, items] : fences_) {
      for (const T& item : items) each(fence, item);
    }
  }

  int64_t size() const { return size_; }

  void clear() {
    fences_.clear();
    last_ = fences_.end();
    size_ = 0;
  }

  FenceQueue() : last_(fences_.end()) {}
  FenceQueue(FenceQueue&& other) noexcept : FenceQueue() { swap(other); }
  FenceQueue& operator=(FenceQueue&& other) noexcept {
    swap(other);
    return *this;
  }

 private:
  using Map = std::map<int64_t, std::vector<T>>;
  static constexpr size_t kMostSpare = 4096;

  std::vector<T>& items_of(int64_t fence) {
    if (last_ != fences_.end() && last_->first == fence) return last_->second;
    const auto at = fences_.lower_bound(fence);
    if (at != fences_.end() && at->first == fence) {
      last_ = at;
    } else if (!spare_) {
      last_ = fences_.try_emplace(at, fence);
    } else {
      spare_.key() = fence;
      last_ = fences_.insert(at, std::move(spare_));
    }
    return last_->second;
  }

  template <typename Each>
  int64_t take(typename Map::iterator at, Each each) {
    for (const T& item : at->second) each(item);
    const int64_t n = static_cast<int64_t>(at->second.size());
    size_ -= n;
    if (last_ == at) last_ = fences_.end();
    auto taken = fences_.extract(at);
    if (spare_ || taken.mapped().capacity() > kMostSpare) return n;
    taken.mapped().clear();
    spare_ = std::move(taken);
    return n;
  }

  void swap(FenceQueue& other) {
    fences_.swap(other.fences_);
    std::swap(spare_, other.spare_);
    std::swap(size_, other.size_);
    last_ = fences_.end();
    other.last_ = other.fences_.end();
  }

  Map fences_;
  typename Map::iterator last_;  // the fence last pushed to
  typename Map::node_type spare_;
  int64_t size_ = 0;
};

}  // namespace pagoda
