#include "core/parallel.hpp"

#include <dlfcn.h>

#include <system_error>
#include <thread>
#include <vector>

namespace pagoda {

namespace {

// What GCC calls for `#pragma omp parallel`. The runtimes of LLVM and Intel have it, too.
using Parallel = void (*)(void (*)(void*), void*, unsigned, unsigned);

Parallel openmp() {
  static const Parallel found = reinterpret_cast<Parallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
  return found;
}

}  // namespace

bool has_openmp() { return openmp() != nullptr; }

void run_on_threads(int64_t num_threads, void (*body)(void*), void* context) {
  if (num_threads <= 1) return body(context);
  if (has_openmp()) return openmp()(body, context, static_cast<unsigned>(num_threads), 0);
  std::vector<std::thread> others;
  others.reserve(static_cast<size_t>(num_threads - 1));
  try {
    for (int64_t i = 1; i < num_threads; ++i) others.emplace_back(body, context);
  } catch (const std::system_error&) {  // the system has no more threads: fewer do the work
  }
  body(context);
  for (std::thread& other : others) other.join();
}

}  // namespace pagoda
