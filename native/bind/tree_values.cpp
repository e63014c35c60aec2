#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "bind/tree.hpp"

namespace pagoda::bind {

namespace {

int traverse_lease(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  if (nb::inst_ready(self)) Py_VISIT(nb::inst_ptr<HeldLease>(self)->owner.ptr());
  return 0;
}

// A lease that is collected is never asked anything again: it may forget its tree.
int clear_lease(PyObject* self) {
  if (nb::inst_ready(self)) nb::object owner = std::move(nb::inst_ptr<HeldLease>(self)->owner);
  return 0;
}

PyType_Slot lease_slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(traverse_lease)},
                             {Py_tp_clear, reinterpret_cast<void*>(clear_lease)},
                             {0, nullptr}};

void leave(nb::handle self, nb::args) {
  HeldLease& lease = to_self<HeldLease>(self);
  if (!lease.is_released && lease.tree->core.is_held(lease.id)) release_lease(*lease.tree, lease);
}

nb::object column_of(nb::handle object, int column) {
  const FoundMatch& self = to_self<FoundMatch>(object);
  return view_int32(object, self.page_ids.get() + column * self.num_pages, self.num_pages);
}

nb::object columns_of(nb::handle object) {
  const int num_columns = to_self<FoundMatch>(object).num_columns;
  nb::list columns;
  for (int c = 0; c < num_columns; ++c) columns.append(column_of(object, c));
  return nb::tuple(columns);
}

}  // namespace

void release_lease(Tree& tree, HeldLease& lease) {
  if (lease.is_released) {
    throw BadId{IdFault::kDoubleFree, lease.id.number, 0, "lease " + text(lease.id.number) + " was released before"};
  }
  lease.length = tree.core.length(lease.id);
  tree.core.release(lease.id);
  lease.is_released = true;
}

void bind_tree_values(nb::module_& m) {
  nb::class_<FoundMatch>(m, "Match", R"(What was found: a value, which protects nothing and changes nothing.

Lock it to use its pages. Made by `PrefixTree.match`.)")
      .def_prop_ro(
          "length", [](const FoundMatch& self) { return self.match.length; },
          "Tokens of the longest usable prefix, whole pages. O(1).")
      .def_prop_ro(
          "found", [](const FoundMatch& self) { return self.match.found; },
          "Tokens whose pages are there, usable or not: at least `length`. O(1).")
      .def_prop_ro(
          "page_ids", [](nb::handle self) { return column_of(self, 0); },
          "The pages of column 0: [length / page_size] int32, holes -1. O(1).")
      .def_prop_ro("columns", &columns_of, "The pages of every column, a tuple of arrays like `page_ids`. O(columns).")
      .def_prop_ro(
          "state_id",
          [](const FoundMatch& self) -> nb::object {
            return self.match.state_id < 0 ? nb::none() : nb::object(nb::int_(self.match.state_id));
          },
          "The state of the checkpoint at `length`; None without states, and at length 0. O(1).")
      .def("__repr__", [](const FoundMatch& self) {
        return "Match(" + text(self.match.length) + " of " + text(self.match.found) + " tokens found)";
      });

  nb::class_<HeldLease>(m, "Lease", nb::type_slots(lease_slots),
                        R"(One held reference to a matched prefix: its pages stay until it is released.

Made by `PrefixTree.lock`; as a context manager it releases itself at the end, if still held.)")
      .def_prop_ro(
          "length",
          [](const HeldLease& self) {
            const bool is_held = !self.is_released && self.tree->core.is_held(self.id);
            return is_held ? self.tree->core.length(self.id) : self.length;
          },
          "Tokens it protects; once released, those it protected; 0 after a reset. O(1).")
      .def_prop_ro(
          "state_id",
          [](const HeldLease& self) -> nb::object {
            const bool is_held = !self.is_released && self.tree->core.is_held(self.id);
            const int32_t state_id = is_held ? self.tree->core.state_id(self.id) : -1;
            return state_id < 0 ? nb::none() : nb::object(nb::int_(state_id));
          },
          "The state of the checkpoint where it ends; None without states, at length 0, and once released. O(log "
          "checkpoints).")
      .def_prop_ro(
          "number", [](const HeldLease& self) { return self.id.number; }, "Its own, never used again. O(1).")
      .def_prop_ro(
          "is_held", [](const HeldLease& self) { return !self.is_released && self.tree->core.is_held(self.id); },
          "Whether it was neither released nor ended by a reset. O(1).")
      .def("__enter__", [](nb::object self) { return self; })
      .def("__exit__", &leave)
      .def("__repr__", [](const HeldLease& self) {
        const bool is_held = !self.is_released && self.tree->core.is_held(self.id);
        return "Lease(" + text(self.id.number) +
               (is_held ? ", " + text(self.tree->core.length(self.id)) + " tokens)" : ", released)");
      });

  nb::class_<InsertedPages>(m, "Inserted", R"(What an insert found and what the tree took.

The tree now owns the ids of pages from `present` to `stored`, those at `filled`, and `states`; all
others are still the caller's.)")
      .def_prop_ro(
          "present", [](const InsertedPages& self) { return self.present; },
          "Tokens that were there before, counted from the beginning. O(1).")
      .def_prop_ro(
          "stored", [](const InsertedPages& self) { return self.stored; }, "Tokens whose pages are there now. O(1).")
      .def_prop_ro(
          "length", [](const InsertedPages& self) { return self.length; },
          "Tokens of the longest usable prefix; where the lease ends. O(1).")
      .def_prop_ro(
          "filled",
          [](const InsertedPages& self) {
            return to_tuple(self.filled.empty() ? std::vector<std::vector<int32_t>>(self.num_columns) : self.filled);
          },
          "Holes that were filled: a tuple of one int32 array of page numbers a column. Cost: their number.")
      .def_prop_ro(
          "states", [](const InsertedPages& self) { return to_array(self.states); },
          "State ids that the tree took, int32. Cost: their number.")
      .def("__repr__", [](const InsertedPages& self) {
        return "Inserted(" + text(self.present) + " tokens present, " + text(self.stored) + " stored, " +
               text(self.length) + " usable)";
      });

  nb::class_<FreedIds>(m, "Freed", "Ids that the tree gave back: the caller frees them.")
      .def_prop_ro(
          "page_ids", [](const FreedIds& self) { return self.page_ids; },
          "Those of column 0: [n] int32, run after run. O(1).")
      .def_prop_ro(
          "columns",
          [](const FreedIds& self) { return self.columns.is_valid() ? self.columns : nb::make_tuple(self.page_ids); },
          "Those of every column, a tuple of arrays like `page_ids`. O(1).")
      .def_prop_ro(
          "state_ids", [](const FreedIds& self) { return self.state_ids.is_valid() ? self.state_ids : to_array({}); },
          "Those of checkpoints, int32. O(1).")
      .def("__repr__", [](const FreedIds& self) {
        return "Freed(" + text(static_cast<int64_t>(nb::len(self.page_ids))) + " pages)";
      });
}

}  // namespace pagoda::bind
