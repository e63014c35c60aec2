#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <limits>

#include "bind/tree.hpp"

namespace pagoda::bind {

namespace {

int traverse_lease(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  if (nb::inst_ready(self)) Py_VISIT(nb::inst_ptr<HeldLease>(self)->owner.ptr());
  return 0;
}

// A lease that is being collected is never used again, so it may drop its tree.
int clear_lease(PyObject* self) {
  if (nb::inst_ready(self)) nb::object owner = std::move(nb::inst_ptr<HeldLease>(self)->owner);
  return 0;
}

int64_t length_of(const HeldLease& self) {
  const bool is_held = !self.is_released && self.tree->core.is_held(self.id);
  return is_held ? self.tree->core.length(self.id) : self.length;
}

void leave(nb::handle self, nb::args) {
  HeldLease& lease = to_self<HeldLease>(self);
  if (!lease.is_released && lease.tree->core.is_held(lease.id)) release_lease(*lease.tree, lease);
}

nb::object column_of(nb::handle object, int column) {
  const FoundMatch& self = to_self<FoundMatch>(object);
  return view_int32(object, self.page_ids.get() + column * self.num_pages, self.num_pages);
}

// Attributes that every request reads, as plain C getters: nanobind properties would cost as much as the walk down the
// tree. get(self, object) → an object.
template <typename T, nb::object (*get)(const T&, nb::handle)>
PyObject* getter(PyObject* object, void*) {
  try {
    return get(to_self<T>(object), object).release().ptr();
  } catch (nb::python_error& error) {
    error.restore();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_TypeError, error.what());
  }
  return nullptr;
}

template <typename T, auto value>
nb::object number_of(const T& self, nb::handle) {
  return nb::int_(value(self));
}

nb::object first_column(const FoundMatch&, nb::handle object) { return column_of(object, 0); }
nb::object freed_pages(const FreedIds& self, nb::handle) { return self.page_ids; }

int64_t match_length_of(const FoundMatch& self) { return self.match.length; }
int64_t match_found_of(const FoundMatch& self) { return self.match.found; }
int64_t present_of(const InsertedPages& self) { return self.present; }
int64_t stored_of(const InsertedPages& self) { return self.stored; }
int64_t usable_of(const InsertedPages& self) { return self.length; }

PyGetSetDef match_getters[] = {{"length", getter<FoundMatch, number_of<FoundMatch, match_length_of>>, nullptr,
                                "Length of the longest usable prefix in tokens, always whole pages.", nullptr},
                               {"found", getter<FoundMatch, number_of<FoundMatch, match_found_of>>, nullptr,
                                "Length of the longest cached prefix, usable or not; at least `length`.", nullptr},
                               {"page_ids", getter<FoundMatch, first_column>, nullptr,
                                "Page ids of column 0: [length / page_tokens] int32, -1 for holes.", nullptr},
                               {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyGetSetDef lease_getters[] = {
    {"length", getter<HeldLease, number_of<HeldLease, length_of>>, nullptr,
     "Number of tokens it protects, or protected until it was released; 0 after a reset.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyGetSetDef inserted_getters[] = {{"present", getter<InsertedPages, number_of<InsertedPages, present_of>>, nullptr,
                                   "Length of the prefix that was cached before the call.", nullptr},
                                  {"stored", getter<InsertedPages, number_of<InsertedPages, stored_of>>, nullptr,
                                   "Length of the prefix that is cached now.", nullptr},
                                  {"length", getter<InsertedPages, number_of<InsertedPages, usable_of>>, nullptr,
                                   "Length of the longest usable prefix, where the lease now ends.", nullptr},
                                  {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyGetSetDef freed_getters[] = {
    {"page_ids", getter<FreedIds, freed_pages>, nullptr, "Page ids of column 0: [n] int32, run after run.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyType_Slot match_slots[] = {{Py_tp_getset, match_getters}, {0, nullptr}};
PyType_Slot lease_slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(traverse_lease)},
                             {Py_tp_clear, reinterpret_cast<void*>(clear_lease)},
                             {Py_tp_getset, lease_getters},
                             {0, nullptr}};
PyType_Slot inserted_slots[] = {{Py_tp_getset, inserted_getters}, {0, nullptr}};
PyType_Slot freed_slots[] = {{Py_tp_getset, freed_getters}, {0, nullptr}};

nb::object columns_of(nb::handle object) {
  const int num_columns = to_self<FoundMatch>(object).num_columns;
  nb::list columns;
  for (int c = 0; c < num_columns; ++c) columns.append(column_of(object, c));
  return nb::tuple(columns);
}

}  // namespace

void release_lease(Tree& tree, HeldLease& lease) {
  if (lease.is_released) {
    throw BadId{IdFault::kDoubleFree, lease.id.number, 0, "lease " + text(lease.id.number) + " was already released"};
  }
  lease.length = tree.core.length(lease.id);
  tree.core.release(lease.id);
  lease.is_released = true;
}

void bind_tree_values(nb::module_& m) {
  nb::class_<FoundMatch>(m, "Match", nb::type_slots(match_slots),
                         R"(What `PrefixTree.match` found: a plain value that protects nothing.

Lock it before using its pages.)")
      .def_prop_ro("columns", &columns_of, "Page ids of every column: a tuple of arrays like `page_ids`.")
      .def_prop_ro(
          "state_id",
          [](const FoundMatch& self) -> nb::object {
            return self.match.state_id < 0 ? nb::none() : nb::object(nb::int_(self.match.state_id));
          },
          "State id of the checkpoint at `length`; None without states, and at length 0.")
      .def("__repr__", [](const FoundMatch& self) {
        return "Match(" + text(self.match.length) + " tokens usable, " + text(self.match.found) + " found)";
      });

  nb::class_<HeldLease>(
      m, "Lease", nb::type_slots(lease_slots),
      R"(A reference to a matched prefix, made by `PrefixTree.lock`: its pages stay until it is released.

As a context manager it releases itself at the end, if it is still held.)")
      .def_prop_ro(
          "state_id",
          [](const HeldLease& self) -> nb::object {
            const bool is_held = !self.is_released && self.tree->core.is_held(self.id);
            const int32_t state_id = is_held ? self.tree->core.state_id(self.id) : -1;
            return state_id < 0 ? nb::none() : nb::object(nb::int_(state_id));
          },
          "State id of the checkpoint where it ends; None without states, at length 0, and once released.")
      .def_prop_ro(
          "number", [](const HeldLease& self) { return self.id.number; },
          "Number of this lease; numbers are never reused.")
      .def_prop_ro(
          "is_held", [](const HeldLease& self) { return !self.is_released && self.tree->core.is_held(self.id); },
          "Whether it was neither released nor ended by a reset.")
      .def("__enter__", [](nb::object self) { return self; })
      .def("__exit__", &leave)
      .def("__repr__", [](const HeldLease& self) {
        const bool is_held = !self.is_released && self.tree->core.is_held(self.id);
        return "Lease(" + text(self.id.number) +
               (is_held ? ", " + text(self.tree->core.length(self.id)) + " tokens)" : ", released)");
      });

  nb::class_<InsertedPages>(m, "Inserted", nb::type_slots(inserted_slots),
                            R"(What an insert found, and which ids the tree took.

The tree now owns the page ids between `present` and `stored`, those at `filled`, and the state ids in
`states`; the caller keeps all others.)")
      .def_prop_ro(
          "filled",
          [](const InsertedPages& self) {
            return to_tuple(self.filled.empty() ? std::vector<std::vector<int32_t>>(self.num_columns) : self.filled);
          },
          "Page numbers of the holes that were filled: a tuple of one int32 array per column.")
      .def_prop_ro(
          "states", [](const InsertedPages& self) { return to_array(self.states); },
          "State ids that the tree took: [n] int32.")
      .def("__repr__", [](const InsertedPages& self) {
        return "Inserted(" + text(self.present) + " tokens present, " + text(self.stored) + " stored, " +
               text(self.length) + " usable)";
      });

  nb::class_<FreedIds>(m, "Freed", nb::type_slots(freed_slots), "Ids that the tree gave up. The caller owns them.")
      .def_prop_ro(
          "columns",
          [](const FreedIds& self) { return self.columns.is_valid() ? self.columns : nb::make_tuple(self.page_ids); },
          "Page ids of every column: a tuple of arrays like `page_ids`.")
      .def_prop_ro(
          "state_ids", [](const FreedIds& self) { return self.state_ids.is_valid() ? self.state_ids : to_array({}); },
          "State ids of checkpoints: [n] int32.")
      .def("__repr__", [](const FreedIds& self) {
        return "Freed(" + text(static_cast<int64_t>(nb::len(self.page_ids))) + " pages)";
      });
}

nb::object tree_counts(const PrefixTree& core) {
  nb::object values = nb::module_::import_("pagoda.tree._values");
  const auto tally = [&](Tally t) { return values.attr("Tally")(t.total, t.total - t.locked, t.locked); };
  nb::list columns;
  for (int c = 0; c < core.num_columns(); ++c) columns.append(tally(core.pages(c)));
  return values.attr("TreeCounts")(tally(core.tokens()), nb::tuple(columns), tally(core.states()), core.num_nodes(),
                                   core.num_leaves(), core.num_leases());
}

nb::list list_nodes(const PrefixTree& core, nb::handle max_nodes, nb::handle max_tokens, nb::handle space) {
  const int64_t most = to_int(max_nodes, "max_nodes", 0, std::numeric_limits<int64_t>::max() / 2);
  const int64_t run = to_int(max_tokens, "max_tokens", 0, std::numeric_limits<int64_t>::max() / 2);
  std::string_view name;
  if (!space.is_none()) name = to_space(space);
  nb::object view = nb::module_::import_("pagoda.tree._values").attr("NodeView");
  nb::list views;
  const std::string* last = nullptr;
  nb::object last_name;
  for (const NodeInfo& node : core.nodes(most, run, space.is_none() ? nullptr : &name)) {
    const nb::object parent = node.parent == 0 ? nb::none() : nb::object(nb::int_(node.parent));
    if (node.space != last) last_name = nb::bytes((last = node.space)->data(), node.space->size());
    views.append(view(node.number, parent, last_name, node.is_dropped, node.level, node.begin, node.end,
                      to_array(node.tokens), to_tuple(node.columns), node.num_children, node.leases, node.used,
                      to_tuple(node.checkpoints), node.is_lost));
  }
  return views;
}

}  // namespace pagoda::bind
