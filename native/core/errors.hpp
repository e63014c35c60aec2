// What the core throws. The binding turns each into its Python twin in pagoda/errors.py.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace pagoda {

// Fewer ids are free than were asked for.
struct OutOfIds {
  std::string what;
  int64_t wanted;
  int64_t free;
  int64_t total;
};

enum class IdFault { kOutOfRange, kNotHeld, kDoubleFree, kAlreadyHeld };

// One id of a call is wrong; `position` is where it stands in the argument.
struct BadId {
  IdFault fault;
  int64_t id;
  int64_t position;
  std::string message;
};

// An argument that is wrong as a whole: lengths that differ, a row that would shrink.
struct BadArgument : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// What an earlier call gave is no longer there.
struct Stale : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Sizes that nothing can be built with.
struct BadConfig : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A bug in us. `number` is that of docs/invariants.md.
struct BrokenInvariant {
  int number;
  std::string message;
};

inline std::string text(int64_t n) { return std::to_string(n); }

}  // namespace pagoda
