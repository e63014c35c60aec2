// How arrays of integers cross from Python into the core and back.
//
// In: numpy int32 and int64 through numpy's own interface, torch CPU tensors through the DLPack exchange API, and any
// other sequence of integers, which is slower. int32 is borrowed, int64 is narrowed with a range check. Out: new numpy
// arrays.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <string>
#include <vector>

#include "core/free_list.hpp"

namespace pagoda::bind {

namespace nb = nanobind;

// A Python buffer, released by the destructor.
struct Buffer {
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() {
    if (view.obj != nullptr) PyBuffer_Release(&view);
  }
  Py_buffer view{};
};

// An array argument, read in two steps. The constructor does everything that may run Python (an item's __index__, a
// foreign __dlpack__) and copies the result; numpy arrays and torch tensors it only recognises. `borrow` then reads
// those without running Python, so that reading one argument cannot free the memory of another. Construct all
// arguments first, then borrow all of them.
class IdArray {
 public:
  IdArray(nb::handle array, const char* name);

  // Valid while this object and the argument live and no Python runs.
  Ids borrow();

 private:
  enum class Source { kOwned, kNumpy, kTensor };

  void from_numpy(nb::handle array);
  void from_buffer(nb::handle array);
  void from_tensor(nb::handle array);
  void from_dlpack(nb::handle array);
  void from_sequence(nb::handle array);
  void own();
  void narrow(const int64_t* data);
  int32_t* room_for(int64_t size);

  nb::handle array_;
  const char* name_;
  Source source_ = Source::kOwned;
  const int32_t* data_ = nullptr;
  int64_t size_ = 0;
  int32_t few_[32];            // copied entries, if they are few
  std::vector<int32_t> many_;  // copied entries, if they are many
  Buffer buffer_;
};

// An integer argument within [low, high], or an ArgumentError that names it. Bools are refused.
int64_t to_int(nb::handle value, const char* name, int64_t low, int64_t high);

// Whether an argument is one number, Python's or numpy's. `to_int` refuses those that are not integers.
bool is_number(nb::handle value);

// Runs `read`, which reads the arguments of a constructor, and turns its BadArgument into BadConfig.
template <typename Read>
auto to_config(Read read) {
  try {
    return read();
  } catch (const BadArgument& e) {
    throw BadConfig(e.what());
  }
}

// Clears the Python error that a bad argument caused; others (Ctrl-C, no memory) are thrown.
void forgive();

// A str argument, or an ArgumentError that names it.
std::string to_text(nb::handle value, const char* name);

// A new one-dimensional numpy array and its data. Making one runs no Python: neither numpy arrays nor integers are
// tracked by the garbage collector.
template <typename T>
struct NewArray {
  nb::object array;
  T* data;
};
NewArray<int32_t> new_int32(int64_t size);
NewArray<uint64_t> new_uint64(int64_t size);

// An array over memory of `owner`, which the array keeps alive.
nb::object view_int32(nb::handle owner, int32_t* data, int64_t size);

// Imports numpy's C API; called when the module loads.
void init_arrays();

}  // namespace pagoda::bind
