// The parts of the extension module, one per file.
#pragma once

#include <nanobind/nanobind.h>

namespace pagoda::bind {

namespace nb = nanobind;

void init_errors();
void bind_attention(nb::module_& m);
void bind_free_list(nb::module_& m);
void bind_prefix_tree(nb::module_& m);
void bind_manager(nb::module_& m);
void bind_rank(nb::module_& m);

}  // namespace pagoda::bind
