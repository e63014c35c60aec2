// Work on the threads of the OpenMP runtime that the process has loaded.
#pragma once

#include <cstdint>

namespace pagoda {

// Call body(context) on up to `num_threads` threads at the same time, this one included, and return when all have
// returned. The body must not throw. The threads are those of the OpenMP runtime in the process, which torch brings
// and uses itself; without one they are made for the call.
void run_on_threads(int64_t num_threads, void (*body)(void* context), void* context);

// Whether the process has an OpenMP runtime. It is looked up once.
bool has_openmp();

}  // namespace pagoda
