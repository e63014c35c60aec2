// An array of plain values that grows by realloc: if the system can remap pages, a large array moves without being
// copied, and memory that was never written is not resident.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <type_traits>

namespace pagoda {

template <typename T>
class GrowArray {
  static_assert(std::is_trivially_copyable<T>::value, "moved by realloc");

 public:
  GrowArray() = default;
  GrowArray(const GrowArray&) = delete;
  GrowArray& operator=(const GrowArray&) = delete;
  ~GrowArray() { std::free(data_); }

  T& operator[](int64_t i) { return data_[i]; }
  const T& operator[](int64_t i) const { return data_[i]; }
  T* data() { return data_; }
  const T* data() const { return data_; }
  int64_t size() const { return size_; }

  // Room for n entries in all.
  void reserve(int64_t n) {
    if (n <= capacity_) return;
    const int64_t room = std::max(n, capacity_ + capacity_ / 2);
    T* moved = static_cast<T*>(std::realloc(static_cast<void*>(data_), static_cast<size_t>(room) * sizeof(T)));
    if (moved == nullptr) throw std::bad_alloc();
    data_ = moved;
    capacity_ = room;
  }

  // Room for n entries, each written once, so that no later write waits for the system.
  void commit(int64_t n) {
    reserve(n);
    if (n > size_) std::memset(static_cast<void*>(data_ + size_), 0, static_cast<size_t>(n - size_) * sizeof(T));
  }

  // Adds n entries, not written yet. The caller has reserved room.
  void extend(int64_t n) { size_ += n; }

  void clear() { size_ = 0; }

  // Returns the memory to the system.
  void free() {
    std::free(data_);
    data_ = nullptr;
    size_ = capacity_ = 0;
  }

 private:
  T* data_ = nullptr;
  int64_t size_ = 0;
  int64_t capacity_ = 0;
};

}  // namespace pagoda
