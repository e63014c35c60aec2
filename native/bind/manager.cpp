#include "core/manager.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <limits>
#include <optional>

#include "bind/arrays.hpp"
#include "bind/module.hpp"
#include "bind/tree.hpp"

// Calls are serialised by the interpreter's lock: arguments are read and results made first, and from then on no
// Python runs until the call is done.

namespace pagoda::bind {

namespace {

constexpr int64_t kMaxId = std::numeric_limits<int32_t>::max();

// pagoda.manager's base: the core's manager and who listens to its tree.
struct Managed : Listeners {
  Managed(std::vector<GroupSpec> groups, int64_t num_rows, int64_t max_tokens, int64_t watermark, int64_t capacity)
      : core(std::move(groups), num_rows, max_tokens, watermark, capacity) {}
  Manager core;
};

PyType_Slot manager_slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(traverse_listeners<Managed>)},
                               {Py_tp_clear, reinterpret_cast<void*>(clear_listeners<Managed>)},
                               {0, nullptr}};

// Results that are tuples with names.
PyTypeObject* admitted_type = nullptr;
PyTypeObject* pending_type = nullptr;

PyTypeObject* make_type(nb::module_& m, const char* name, const char* full_name, const char* doc,
                        PyStructSequence_Field* fields, int n) {
  PyStructSequence_Desc desc{full_name, doc, fields, n};
  PyTypeObject* type = PyStructSequence_NewType(&desc);
  if (type == nullptr) throw nb::python_error();
  m.attr(name) = nb::borrow(reinterpret_cast<PyObject*>(type));
  return type;
}

nb::object make_tuple(PyTypeObject* type, std::initializer_list<nb::object> values) {
  nb::object made = nb::steal(PyStructSequence_New(type));
  if (!made.is_valid()) throw nb::python_error();
  Py_ssize_t i = 0;
  for (const nb::object& value : values) PyStructSequence_SetItem(made.ptr(), i++, value.inc_ref().ptr());
  return made;
}

GroupSpec to_spec(nb::handle value) {
  const nb::tuple parts = nb::cast<nb::tuple>(value);
  return {to_text(parts[0], "name of a group"), to_int(parts[1], "page_tokens", 1, kMaxId),
          parts[2].is_none() ? 0 : to_int(parts[2], "window", 1, kMaxId), to_int(parts[3], "capacity", 0, kMaxId - 1)};
}

void construct(Managed* self, nb::handle groups, nb::handle num_rows, nb::handle max_tokens, nb::handle watermark,
               nb::handle capacity) {
  to_config([&] {
    std::vector<GroupSpec> specs;
    for (const nb::object& group : to_items(groups, "groups", "groups")) specs.push_back(to_spec(group));
    if (specs.empty()) throw BadArgument("groups: give at least one");
    const int64_t rows = to_int(num_rows, "num_rows", 1, kMaxId - 1);
    const int64_t tokens = to_int(max_tokens, "max_tokens", 1, kMaxId - 1);
    const int64_t kept = to_int(watermark, "watermark", 0, kMaxId);
    new (self) Managed(std::move(specs), rows, tokens, kept, to_int(capacity, "capacity", 0, kMaxId));
  });
}

// One row, or an array of them.
class RowsArgument {
 public:
  explicit RowsArgument(nb::handle rows) {
    if (is_number(rows)) {
      one_ = static_cast<int32_t>(to_int(rows, "rows", std::numeric_limits<int32_t>::min(), kMaxId));
    } else {
      many_.emplace(rows, "rows");
    }
  }
  Ids borrow() { return many_ ? many_->borrow() : Ids{&one_, 1}; }

 private:
  int32_t one_ = 0;
  std::optional<IdArray> many_;
};

// One count for all rows, or one each.
class CountsArgument {
 public:
  CountsArgument(nb::handle counts, const char* name) {
    if (is_number(counts)) {
      all_ = to_int(counts, name, 0, kMaxId);
    } else {
      each_.emplace(counts, name);
    }
  }
  Counts borrow() { return each_ ? Counts{each_->borrow(), 0, true} : Counts{{nullptr, 0}, all_, false}; }

 private:
  int64_t all_ = 0;
  std::optional<IdArray> each_;
};

int64_t to_reserve(nb::handle reserve) { return reserve.is_none() ? -1 : to_int(reserve, "reserve", 0, kMaxId); }

bool to_cached(nb::handle cached) {
  if (!PyBool_Check(cached.ptr())) throw BadArgument("cached: give True or False");
  return cached.is(nb::handle(Py_True));
}

int64_t to_group(const Managed& self, nb::handle name) {
  const std::string wanted = to_text(name, "group");
  std::string names;
  for (int64_t g = 0; g < self.core.num_groups(); ++g) {
    if (self.core.group(g).spec.name == wanted) return g;
    names += (g > 0 ? ", " : "") + self.core.group(g).spec.name;
  }
  throw BadArgument("group: there is no group of that name, only " + names);
}

// ── requests ────────────────────────────────────────────────────────────────────────────────────────

bool can_admit(Managed& self, nb::handle tokens, nb::handle space, nb::handle extra_keys, nb::handle reserve,
               nb::handle cached) {
  SequenceArgument argument(tokens, space, extra_keys);
  const int64_t n = to_reserve(reserve);
  const bool is_cached = to_cached(cached);
  return self.core.can_admit(argument.borrow(), n, is_cached);
}

int64_t hit(const Managed& self, nb::handle tokens, nb::handle space, nb::handle extra_keys) {
  SequenceArgument argument(tokens, space, extra_keys);
  return self.core.hit(argument.borrow());
}

nb::object admit(Managed& self, nb::handle tokens, nb::handle space, nb::handle extra_keys, nb::handle reserve,
                 nb::handle cached) {
  SequenceArgument argument(tokens, space, extra_keys);
  const int64_t n = to_reserve(reserve);
  const bool is_cached = to_cached(cached);
  auto cuts = new_int32(0);
  const Manager::Admitted done = self.core.admit(argument.borrow(), n, is_cached);
  nb::object result = make_tuple(admitted_type, {nb::int_(done.row), nb::int_(done.hit), nb::int_(done.reserved),
                                                 nb::int_(done.lease), std::move(cuts.array)});
  deliver(self.core.tree(), self);
  return result;
}

nb::object pending(const Managed& self, nb::handle tokens, nb::handle space, nb::handle extra_keys) {
  SequenceArgument argument(tokens, space, extra_keys);
  const Manager::Pending found = self.core.pending(argument.borrow());
  if (found.row == 0) return nb::none();
  return make_tuple(pending_type, {nb::int_(found.row), nb::int_(found.length)});
}

int64_t can_reserve(Managed& self, nb::handle rows, nb::handle n) {
  RowsArgument which(rows);
  CountsArgument counts(n, "n");
  return self.core.can_reserve(which.borrow(), counts.borrow());
}

void reserve(Managed& self, nb::handle rows, nb::handle n) {
  RowsArgument which(rows);
  CountsArgument counts(n, "n");
  self.core.reserve(which.borrow(), counts.borrow());
  deliver(self.core.tree(), self);
}

void commit(Managed& self, nb::handle rows, nb::handle tokens, nb::handle counts) {
  RowsArgument which(rows);
  IdArray known(tokens, "tokens");
  const nb::object one = nb::int_(1);
  CountsArgument each(counts.is_none() ? nb::handle(one) : counts, "counts");
  self.core.commit(which.borrow(), known.borrow(), each.borrow());
  deliver(self.core.tree(), self);
}

void rollback(Managed& self, nb::handle rows, nb::handle n) {
  RowsArgument which(rows);
  CountsArgument counts(n, "n");
  self.core.rollback(which.borrow(), counts.borrow());
}

void release(Managed& self, nb::handle rows) {
  RowsArgument which(rows);
  self.core.release(which.borrow());
  deliver(self.core.tree(), self);
}

nb::object fork(Managed& self, nb::handle row, nb::handle n) {
  const int64_t parent = to_int(row, "row", std::numeric_limits<int32_t>::min(), kMaxId);
  const int64_t children = to_int(n, "n", 1, kMaxId);
  auto rows = new_int32(std::min(children, self.core.num_rows()));
  self.core.fork(parent, children, rows.data);
  deliver(self.core.tree(), self);
  return rows.array;
}

nb::object invalidate(Managed& self, nb::handle group, nb::handle page_ids) {
  const int64_t g = to_group(self, group);
  IdArray bad(page_ids, "page_ids");
  std::vector<int32_t> rows(static_cast<size_t>(self.core.num_rows()));
  rows.resize(static_cast<size_t>(self.core.invalidate(g, bad.borrow(), rows.data())));
  nb::object result = to_array(rows);
  deliver(self.core.tree(), self);
  return result;
}

void drop(Managed& self, nb::handle space) {
  self.core.drop(to_space(space));
  deliver(self.core.tree(), self);
}

// ── steps ───────────────────────────────────────────────────────────────────────────────────────────

nb::object take_packed(Managed& self) {
  auto packed = new_int32(self.core.delta_size());
  nb::object result = nb::make_tuple(self.core.step(), std::move(packed.array));
  self.core.take_delta(packed.data);
  return result;
}

void pass_fence(Managed& self, nb::handle step) {
  self.core.pass_fence(to_int(step, "step", 0, std::numeric_limits<int64_t>::max() / 2));
  deliver(self.core.tree(), self);
}

// ── looking ─────────────────────────────────────────────────────────────────────────────────────────

nb::object pages(const Managed& self, nb::handle row, nb::handle group) {
  const int64_t number = to_int(row, "row", std::numeric_limits<int32_t>::min(), kMaxId);
  const int64_t g = to_group(self, group);
  const int64_t first = self.core.first_page(number, g), end = self.core.end_page(number, g);
  auto ids = new_int32(end);
  std::fill_n(ids.data, first, 0);
  const int32_t* entries = self.core.group(g).entries(number);
  std::copy(entries + first, entries + end, ids.data + first);
  return ids.array;
}

nb::object first_pages(const Managed& self, nb::handle rows, nb::handle group) {
  RowsArgument which(rows);
  const int64_t g = to_group(self, group);
  const Ids ids = which.borrow();
  auto first = new_int32(ids.size);
  for (int64_t i = 0; i < ids.size; ++i) first.data[i] = static_cast<int32_t>(self.core.first_page(ids[i], g));
  return first.array;
}

template <int64_t Manager::Lengths::* field>
nb::object lengths(const Managed& self, nb::handle rows) {
  RowsArgument which(rows);
  const Ids ids = which.borrow();
  auto found = new_int32(ids.size);
  for (int64_t i = 0; i < ids.size; ++i) found.data[i] = static_cast<int32_t>(self.core.lengths(ids[i]).*field);
  return found.array;
}

nb::object counts(const Managed& self) {
  const Manager& core = self.core;
  const Manager::Stats stats = core.stats();
  nb::list groups;
  for (int64_t g = 0; g < core.num_groups(); ++g) {
    const Manager::Group& group = core.group(g);
    const Manager::Pages pages = core.pages(group);
    groups.append(nb::make_tuple(group.spec.name, group.spec.num_pages, pages.free, pages.evictable, pages.leased,
                                 pages.running, pages.waiting));
  }
  return nb::make_tuple(groups, stats.rows, stats.waiting_rows, core.num_rows(), stats.admitted, stats.tokens,
                        stats.hits, stats.evicted, core.tree().tokens().total);
}

PyStructSequence_Field admitted_fields[] = {{"row", "The request's row."},
                                            {"hit", "Tokens that need no computing."},
                                            {"reserved", "Tokens that have a place."},
                                            {"lease", "The number of its lease."},
                                            {"cuts", "Lengths at which a prefill has to be cut: [n] int32."},
                                            {nullptr, nullptr}};
PyStructSequence_Field pending_fields[] = {
    {"row", "Who computes it."}, {"length", "Tokens that will be there."}, {nullptr, nullptr}};

}  // namespace

void bind_manager(nb::module_& m) {
  const nb::object plain = nb::bytes("", 0), none = nb::make_tuple();
  admitted_type = make_type(m, "Admitted", "pagoda.manager.Admitted",
                            "A request that runs: its row and what it need not compute.", admitted_fields, 5);
  pending_type = make_type(m, "Pending", "pagoda.manager.Pending", "Tokens that a running request will have computed.",
                           pending_fields, 2);
  nb::class_<Managed>(m, "ManagerCore", nb::type_slots(manager_slots), nb::is_weak_referenceable(),
                      "The native part of pagoda.Manager.")
      .def("__init__", &construct, nb::arg("groups").none(), nb::arg("num_rows").none(), nb::arg("max_tokens").none(),
           nb::arg("watermark").none(), nb::arg("capacity").none())
      .def_prop_ro(
          "num_rows", [](const Managed& self) { return self.core.num_rows(); }, "Requests that can run at once. O(1).")
      .def_prop_ro(
          "max_tokens", [](const Managed& self) { return self.core.max_tokens(); }, "Tokens of a row at most. O(1).")
      .def_prop_ro(
          "step", [](const Managed& self) { return self.core.step(); }, "The step that is being planned. O(1).")
      .def_prop_ro(
          "resume_step", [](const Managed& self) { return self.core.resume_step(); },
          "Hits are multiples of this many tokens. O(1).")
      .def("can_admit", &can_admit, nb::arg("tokens").none(), nb::kw_only(), nb::arg("namespace").none() = plain,
           nb::arg("extra_keys").none() = none, nb::arg("reserve").none() = nb::none(), nb::arg("cached").none() = true,
           R"(Whether `admit` with these arguments would do it now.

It counts the pages that its own hit would lock. Cost: a match. Errors: as `admit`, but for room.)")
      .def("admit", &admit, nb::arg("tokens").none(), nb::kw_only(), nb::arg("namespace").none() = plain,
           nb::arg("extra_keys").none() = none, nb::arg("reserve").none() = nb::none(), nb::arg("cached").none() = true,
           R"(Takes a request in: a row, the longest prefix that is already computed, places for the rest.

At least one token is left to compute. `reserve` is how many tokens behind the hit get places, all if left out. With
`cached` False it hits nothing, and nothing that it commits is cached. The row is the caller's until `release`. Cost: a match, and the pages. Errors: CapacityError when rows or pages of a group
run out; ArgumentError; OutOfRangeError for a token.)")
      .def("hit", &hit, nb::arg("tokens").none(), nb::kw_only(), nb::arg("namespace").none() = plain,
           nb::arg("extra_keys").none() = none,
           R"(How many of these tokens `admit` would not have to compute. Changes nothing.

Cost: a match. Errors: as `admit`, but for room.)")
      .def("pending", &pending, nb::arg("tokens").none(), nb::kw_only(), nb::arg("namespace").none() = plain,
           nb::arg("extra_keys").none() = none,
           R"(The running request that will have computed most of these tokens beyond what would hit, or None.

Only what it was admitted with and has places for counts. Cost: a match, and a comparison with each running request.
Errors: as `admit`.)")
      .def("can_reserve", &can_reserve, nb::arg("rows").none(), nb::arg("n").none() = 1,
           "How many of the rows, from the first on, `reserve` could give n tokens each. Cost O(rows). Errors: as "
           "`reserve`, but for room.")
      .def("reserve", &reserve, nb::arg("rows").none(), nb::arg("n").none() = 1,
           R"(Gives each of these rows places for n more tokens, or for n[i].

Pages come from free-lists and then from the tree, coldest first. Cost O(rows × groups), and the pages. Errors:
CapacityError, naming the group; ArgumentError; OutOfRangeError, NotHeldError, AlreadyHeldError for a row.)")
      .def("commit", &commit, nb::arg("rows").none(), nb::arg("tokens").none(), nb::arg("counts").none() = nb::none(),
           R"(Says what the next tokens of these rows were, now that they are computed: one each, or counts[i].

`tokens` has them row after row. Whole pages become the tree's and can be hit at once. Pages that left every
window are given up. Cost O(tokens). Errors: ArgumentError for more than is reserved; OutOfRangeError for a token; as
`reserve` for rows.)")
      .def("rollback", &rollback, nb::arg("rows").none(), nb::arg("n").none(),
           R"(Takes back the last n reserved tokens of these rows, or n[i]; none of them may be committed.

The pages stay the row's, for what it reserves next. Cost O(rows). Errors: ArgumentError; as `reserve` for rows.)")
      .def("release", &release, nb::arg("rows").none(),
           R"(Ends rows: finished, cancelled or preempted. What is committed stays in the tree while there is room.

It is no part of the step being planned. Row, lease and own pages are free when the step before has passed its fence, at
once if it has; of a row that was admitted, forked or given pages in this step, when this step has. Cost O(pages).
Errors: as `reserve` for rows.)")
      .def("fork", &fork, nb::arg("row").none(), nb::arg("n").none() = 1,
           R"(Makes n continuations of a row's committed tokens: [n] int32, the new rows, the caller's.

Pages of the tree are shared; those behind are copied by the delta. Cost O(pages × n). Errors: CapacityError;
ArgumentError; OutOfRangeError, NotHeldError for the row.)")
      .def(
          "invalidate", &invalidate, nb::arg("group").none(), nb::arg("page_ids").none(),
          R"(Forgets what these pages of a group hold, because it is bad, and all that continues it: [n] int32, the running
rows that read them.

Those rows go on, nothing they commit is cached; release them to compute anew. Cached pages that nobody reads come free at
once, the others as their rows end. Pages that hold nothing are ignored. Cost: a walk over all that is cached. Errors: OutOfRangeError;
ArgumentError.)")
      .def("drop", &drop, nb::arg("namespace").none(),
           R"(Forgets a namespace: nothing of it is found any more, and what its running rows commit is not cached.

Cost: its runs. Errors: ArgumentError.)")
      .def("_take_packed", &take_packed)
      .def("pass_fence", &pass_fence, nb::arg("step").none(),
           R"(Says that this step and those before it have finished on every device: what waited for them is free.

Cost: what comes free. Errors: ArgumentError for a step that was not taken yet.)")
      .def("pages", &pages, nb::arg("row").none(), nb::arg("group").none(),
           R"(The page ids of a row in a group: [pages] int32; 0 where a page left the window.

Cost O(pages). Errors: ArgumentError, OutOfRangeError, NotHeldError.)")
      .def("first_pages", &first_pages, nb::arg("rows").none(), nb::arg("group").none(),
           "The first page of each row that is still in the window, by its place in the row: [rows] int32. Cost "
           "O(rows). "
           "Errors: as `pages`.")
      .def("reserved", &lengths<&Manager::Lengths::reserved>, nb::arg("rows").none(),
           "Tokens of each row that have a place: [rows] int32. Cost O(rows). Errors: OutOfRangeError, NotHeldError.")
      .def("committed", &lengths<&Manager::Lengths::committed>, nb::arg("rows").none(),
           "Tokens of each row that are computed and known: [rows] int32. Cost O(rows). Errors: as `reserved`.")
      .def("stored", &lengths<&Manager::Lengths::stored>, nb::arg("rows").none(),
           "Tokens of each row that the tree has: [rows] int32. Cost O(rows). Errors: as `reserved`.")
      .def("_counts", &counts)
      .def_prop_ro(
          "page_tokens", [](const Managed& self) { return self.core.resume_step(); },
          "Tokens of a page of the tree: where the pages of all groups end. O(1).")
      .def(
          "counts", [](const Managed& self) { return tree_counts(self.core.tree()); },
          nb::sig("def counts(self) -> TreeCounts"),
          "What the tree holds, as PrefixTree.counts: a column for each page of a group. O(columns).")
      .def(
          "nodes",
          [](const Managed& self, nb::handle most, nb::handle run, nb::handle space) {
            return list_nodes(self.core.tree(), most, run, space);
          },
          nb::arg("max_nodes").none() = 1000, nb::arg("max_tokens").none() = 32,
          nb::arg("namespace").none() = nb::none(),
          "Nodes of the tree to look at, as PrefixTree.nodes. Cost O(nodes shown). Errors: ArgumentError.")
      .def(
          "listen", [](Managed& self, nb::handle listener) { listen(self.core.tree(), self, listener); },
          nb::arg("listener").none(), "As `PrefixTree.listen`: events of the tree. O(1). Errors: ArgumentError.")
      .def(
          "unlisten", [](Managed& self, nb::handle listener) { unlisten(self.core.tree(), self, listener); },
          nb::arg("listener").none(), "Ends what `listen` began. O(listeners). Errors: ArgumentError.")
      .def(
          "reset",
          [](Managed& self) {
            self.core.reset();
            deliver(self.core.tree(), self);
          },
          "Forgets everything: rows, leases, what is cached, the step's delta. Cost O(pages).")
      .def(
          "check", [](const Managed& self) { self.core.check(); },
          "Verifies invariant 17 and those of its parts. Cost: a walk over all of it. Errors: InvariantError.");
}

}  // namespace pagoda::bind
