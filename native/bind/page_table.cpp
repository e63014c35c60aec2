#include "core/page_table.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <limits>

#include "bind/arrays.hpp"
#include "bind/module.hpp"

namespace pagoda::bind {

namespace {

constexpr int64_t kMaxId = std::numeric_limits<int32_t>::max();

void construct(PageTable* self, nb::handle num_rows, nb::handle max_pages_per_row, nb::handle page_tokens) {
  to_config([&] {
    const int64_t rows = to_int(num_rows, "num_rows", 0, kMaxId - 1);
    const int64_t pages = to_int(max_pages_per_row, "max_pages_per_row", 1, kMaxId);
    const int64_t size = to_int(page_tokens, "page_tokens", 1, kMaxId);
    new (self) PageTable(rows, pages, size);
  });
}

int64_t row_of(nb::handle row) {
  return to_int(row, "row", std::numeric_limits<int64_t>::min(), std::numeric_limits<int64_t>::max());
}

NewArray<int32_t> copy_pages(const PageTable& self, int64_t row) {
  const int64_t n = self.num_pages(row);
  auto out = new_int32(n);
  std::copy_n(self.pages(row), n, out.data);
  return out;
}

nb::object pages(const PageTable& self, nb::handle row) { return copy_pages(self, row_of(row)).array; }

nb::object release(PageTable& self, nb::handle row) {
  const int64_t r = row_of(row);
  auto held = copy_pages(self, r);
  self.release(r);
  return held.array;
}

nb::tuple grow(PageTable& self, nb::handle free_list, nb::handle rows, nb::handle new_lens) {
  if (!nb::isinstance<FreeList>(free_list)) throw BadArgument("free_list: give a FreeList of pages");
  FreeList& free_pages = nb::cast<FreeList&>(free_list);
  IdArray who(rows, "rows"), to(new_lens, "new_lens");
  const Ids row_ids = who.borrow(), lens = to.borrow();
  const FreeList::Need need = self.plan_growth(free_pages, row_ids, lens);
  auto slots = new_int32(need.tokens);
  auto index = new_int64(need.pages);
  auto page_ids = new_int32(need.pages);
  self.fill_growth(need, free_pages, row_ids, lens, slots.data, index.data, page_ids.data);
  return nb::make_tuple(slots.array, index.array, page_ids.array);
}

nb::tuple append(PageTable& self, nb::handle row, nb::handle page_ids, nb::handle num_tokens) {
  const int64_t r = row_of(row);
  IdArray array(page_ids, "page_ids");
  const int64_t tokens = to_int(num_tokens, "num_tokens", 0, kMaxId);
  const Ids ids = array.borrow();
  auto index = new_int64(ids.size);
  auto written = new_int32(ids.size);
  self.append(r, ids, tokens, index.data);
  std::copy_n(ids.data, ids.size, written.data);
  return nb::make_tuple(index.array, written.array);
}

}  // namespace

void bind_page_table(nb::module_& m) {
  nb::class_<PageTable>(m, "PageTable", nb::is_weak_referenceable(), "The native half of pagoda.tables.PageTable.")
      .def("__init__", &construct, nb::arg("num_rows").none(), nb::arg("max_pages_per_row").none(),
           nb::arg("page_tokens").none(),
           nb::sig("def __init__(self, num_rows: int, max_pages_per_row: int, page_tokens: int) -> None"))
      .def_prop_ro("num_rows", &PageTable::num_rows)
      .def_prop_ro("max_pages_per_row", &PageTable::max_pages_per_row)
      .def_prop_ro("page_tokens", &PageTable::page_tokens)
      .def(
          "num_tokens", [](const PageTable& self, nb::handle row) { return self.num_tokens(row_of(row)); },
          nb::arg("row").none())
      .def(
          "num_pages", [](const PageTable& self, nb::handle row) { return self.num_pages(row_of(row)); },
          nb::arg("row").none())
      .def("pages", &pages, nb::arg("row").none())
      .def("grow", &grow, nb::arg("free_list").none(), nb::arg("rows").none(), nb::arg("new_lens").none())
      .def("append", &append, nb::arg("row").none(), nb::arg("page_ids").none(), nb::arg("num_tokens").none())
      .def("release", &release, nb::arg("row").none())
      .def("check", &PageTable::check);
}

}  // namespace pagoda::bind
