// An array of zeros whose memory the system commits when it is first written: making one of ten million entries takes
// microseconds, while filling it would stall a step for tens of milliseconds.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

namespace pagoda {

template <typename T>
class LazyArray {
 public:
  LazyArray() = default;
  explicit LazyArray(int64_t size) : data_(static_cast<T*>(std::calloc(static_cast<size_t>(size), sizeof(T)))) {
    if (!data_ && size > 0) throw std::bad_alloc();
  }
  explicit operator bool() const { return data_ != nullptr; }
  T& operator[](int64_t i) { return data_[i]; }
  const T& operator[](int64_t i) const { return data_[i]; }
  T* data() { return data_.get(); }
  const T* data() const { return data_.get(); }

 private:
  struct Free {
    void operator()(T* p) const { std::free(p); }
  };
  std::unique_ptr<T[], Free> data_;
};

}  // namespace pagoda
