// What the core throws. The binding turns each into the corresponding class of pagoda/errors.py.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace pagoda {

// Fewer ids are free than a call needs.
struct OutOfIds {
  std::string what;
  int64_t wanted;
  int64_t free;
  int64_t total;
};

enum class IdFault { kOutOfRange, kNotHeld, kDoubleFree, kAlreadyHeld };

// One id of a call is wrong; `position` is its index in the argument.
struct BadId {
  IdFault fault;
  int64_t id;
  int64_t position;
  std::string message;
};

// An argument is wrong as a whole: sizes that differ, a row that would shrink.
struct BadArgument : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// What an earlier call returned no longer exists.
struct Stale : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// An object cannot be built with these arguments.
struct BadConfig : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A bug in Pagoda. `number` refers to docs/invariants.md.
struct BrokenInvariant {
  int number;
  std::string message;
};

inline std::string text(int64_t n) { return std::to_string(n); }

}  // namespace pagoda
