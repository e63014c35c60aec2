// Looking through arguments, at the width of the machine.
#pragma once

#include <cstdint>

namespace pagoda {

// Where the first of n entries stands that is not in [low, high]; n when there is none.
int64_t first_outside(const int32_t* entries, int64_t n, int32_t low, int32_t high);

}  // namespace pagoda
