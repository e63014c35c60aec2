#include "core/attention.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <optional>
#include <string>

#include "bind/module.hpp"
#include "core/parallel.hpp"

namespace pagoda::bind {

namespace {

template <typename T>
T* at(const nb::handle& address) {
  return reinterpret_cast<T*>(nb::cast<uintptr_t>(address));
}

// As declared in attention/_native.py. The caller has checked everything, and keeps the tensors alive.
void attend_call(const nb::tuple& pointers, const nb::tuple& sizes, const nb::tuple& numbers, bool is_bfloat16,
                 int64_t num_threads, const std::optional<std::string>& level) {
  const auto size = [&](size_t i) { return nb::cast<int64_t>(sizes[i]); };
  const auto number = [&](size_t i) { return nb::cast<float>(numbers[i]); };
  Attention call{};
  call.queries = at<const void>(pointers[0]);
  call.out = at<void>(pointers[1]);
  call.keys = at<const void>(pointers[2]);
  call.values = at<const void>(pointers[3]);
  call.starts = at<const int32_t>(pointers[4]);
  call.lengths = at<const int32_t>(pointers[5]);
  call.page_table = at<const int32_t>(pointers[6]);
  call.sinks = at<const float>(pointers[7]);
  call.num_tokens = size(0);
  call.heads = size(1);
  call.kv_heads = size(2);
  call.k_dim = size(3);
  call.v_dim = size(4);
  call.query_token_stride = size(5);
  call.query_head_stride = size(6);
  call.out_token_stride = size(7);
  call.out_head_stride = size(8);
  call.num_pages = size(9);
  call.page_tokens = size(10);
  call.num_rows = size(11);
  call.table_width = size(12);
  call.window = size(13);
  call.scale = number(0);
  call.value_scale = number(1);
  call.softcap = number(2);
  call.is_bfloat16 = is_bfloat16;
  nb::gil_scoped_release released;
  attend(call, num_threads, level ? level->c_str() : nullptr);
}

nb::list levels() {
  nb::list names;
  for (const AttentionKernels* const* level = attention_levels(); *level != nullptr; ++level) {
    names.append((*level)->name);
  }
  return names;
}

}  // namespace

void bind_attention(nb::module_& m) {
  m.def("attend", &attend_call, nb::arg("pointers"), nb::arg("sizes"), nb::arg("numbers"), nb::arg("is_bfloat16"),
        nb::arg("num_threads"), nb::arg("level").none() = nb::none(),
        "Compute attention; pagoda.attention._native checks and orders the arguments.");
  m.def("attention_levels", &levels, "Return the instruction sets that attention can use here, the best one first.");
  m.def("has_openmp", &has_openmp, "Return whether attention runs on the threads of an OpenMP runtime.");
}

}  // namespace pagoda::bind
