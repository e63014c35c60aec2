// Range checks of arguments, vectorised.
#pragma once

#include <cstdint>

namespace pagoda {

// The index of the first of n entries that is not in [low, high]; n if there is none.
int64_t first_outside(const int32_t* entries, int64_t n, int32_t low, int32_t high);

}  // namespace pagoda
