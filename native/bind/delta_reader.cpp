#include "core/delta_reader.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <limits>

#include "bind/arrays.hpp"
#include "bind/module.hpp"
#include "bind/tree.hpp"

namespace pagoda::bind {

namespace {

constexpr int64_t kMaxId = std::numeric_limits<int32_t>::max();

void construct(DeltaReader* self, nb::handle groups, nb::handle num_rows) {
  to_config([&] {
    std::vector<DeltaReader::Group> read;
    for (const nb::object& group : to_items(groups, "groups", "groups")) {
      const nb::tuple parts = nb::cast<nb::tuple>(group);
      read.push_back({to_text(parts[0], "name of a group"), to_int(parts[1], "max_pages", 1, kMaxId),
                      to_int(parts[2], "num_pages", 0, kMaxId)});
    }
    new (self) DeltaReader(std::move(read), to_int(num_rows, "num_rows", 1, kMaxId - 1));
  });
}

nb::tuple read(const DeltaReader& self, nb::handle packed, nb::handle num_groups, nb::handle step) {
  IdArray array(packed, "packed");
  const int64_t groups = to_int(num_groups, "num_groups", 0, kMaxId);
  const int64_t next = to_int(step, "step", 0, std::numeric_limits<int64_t>::max());
  const DeltaReader::Content content = self.read(array.borrow(), groups, next);
  nb::list copies;
  for (const DeltaReader::Copies& each : content.copies) {
    copies.append(nb::make_tuple(each.group, each.begin, each.n, each.is_disjoint));
  }
  return nb::make_tuple(content.num_writes, copies);
}

}  // namespace

void bind_delta_reader(nb::module_& m) {
  nb::class_<DeltaReader>(m, "DeltaReader", "Looks through deltas for pagoda.pools.Pools.")
      .def("__init__", &construct, nb::arg("groups").none(), nb::arg("num_rows").none())
      .def("read", &read, nb::arg("packed").none(), nb::arg("num_groups").none(), nb::arg("step").none(),
           R"(How many table writes a delta has; and group, begin, number and disjointness of page copies, by group.

Begins count from behind the head. Cost O(entries). Errors: ArgumentError, OutOfRangeError.)");
}

}  // namespace pagoda::bind
