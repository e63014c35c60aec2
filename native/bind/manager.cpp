#include "core/manager.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <limits>
#include <optional>

#include "bind/arrays.hpp"
#include "bind/module.hpp"
#include "bind/tree.hpp"

// The interpreter's lock serialises calls: arguments are read and results allocated first, and no Python runs
// after that until the call has finished.

namespace pagoda::bind {

namespace {

constexpr int64_t kMaxId = std::numeric_limits<int32_t>::max();

// The base of pagoda.manager.Manager: the core's manager and the listeners of its tree.
struct Managed : Listeners {
  Managed(std::vector<GroupSpec> groups, StateSpec states, int64_t resume_step, int64_t num_rows, int64_t max_tokens,
          int64_t watermark)
      : core(std::move(groups), states, resume_step, num_rows, max_tokens, watermark) {}
  Manager core;
};

PyType_Slot manager_slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(traverse_listeners<Managed>)},
                               {Py_tp_clear, reinterpret_cast<void*>(clear_listeners<Managed>)},
                               {0, nullptr}};

// Results that are named tuples.
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
  return {to_text(parts[0], "group name"), to_int(parts[1], "page_tokens", 1, kMaxId),
          parts[2].is_none() ? 0 : to_int(parts[2], "window", 1, kMaxId), to_int(parts[3], "capacity", 0, kMaxId - 1),
          to_int(parts[4], "workers", 0, kMaxTarget)};
}

// checkpoints: None for a layout without states.
void construct(Managed* self, nb::handle groups, nb::handle resume_step, nb::handle num_rows, nb::handle max_tokens,
               nb::handle watermark, nb::handle checkpoints, nb::handle interval) {
  to_config([&] {
    std::vector<GroupSpec> specs;
    for (const nb::object& group : to_items(groups, "groups", "groups")) specs.push_back(to_spec(group));
    const bool has_states = !checkpoints.is_none();
    if (specs.empty() && !has_states) throw BadArgument("groups: give at least one");
    const StateSpec states{has_states, has_states ? to_int(checkpoints, "capacity of checkpoint", 0, kMaxId - 1) : 0,
                           to_int(interval, "checkpoint_interval", 1, kMaxId)};
    const int64_t step = to_int(resume_step, "resume_step", 1, std::numeric_limits<int64_t>::max());
    const int64_t rows = to_int(num_rows, "num_rows", 1, kMaxId - 1);
    const int64_t tokens = to_int(max_tokens, "max_tokens", 1, kMaxId - 1);
    const int64_t kept = to_int(watermark, "watermark", 0, kMaxId);
    new (self) Managed(std::move(specs), states, step, rows, tokens, kept);
  });
}

// One row, or an array of them.
class RowsArgument {
 public:
  explicit RowsArgument(nb::handle rows) {
    if (is_number(rows)) {
      is_one_ = true;
      one_ = static_cast<int32_t>(to_int(rows, "rows", std::numeric_limits<int32_t>::min(), kMaxId));
    } else {
      many_.emplace(rows, "rows");
    }
  }
  Ids borrow() { return many_ ? many_->borrow() : Ids{&one_, 1}; }
  bool is_one() const { return is_one_; }

 private:
  bool is_one_ = false;
  int32_t one_ = 0;
  std::optional<IdArray> many_;
};

// One count for all rows, or one per row.
class CountsArgument {
 public:
  CountsArgument(nb::handle counts, const char* name) {
    if (is_number(counts)) {
      all_ = to_int(counts, name, 0, kMaxId);
    } else {
      each_.emplace(counts, name);
    }
  }
  PerRow borrow() { return each_ ? PerRow{each_->borrow(), 0, true} : PerRow{{nullptr, 0}, all_, false}; }

 private:
  int64_t all_ = 0;
  std::optional<IdArray> each_;
};

// A number of tokens; -1 for None.
int64_t to_tokens(nb::handle value, const char* name) { return value.is_none() ? -1 : to_int(value, name, 0, kMaxId); }

bool to_bool(nb::handle value, const char* name) {
  if (!PyBool_Check(value.ptr())) throw BadArgument(std::string(name) + ": give True or False");
  return value.is(nb::handle(Py_True));
}

// The arguments of an admission, which live as long as this.
struct PromptArgument {
  PromptArgument(nb::handle tokens, nb::handle space, nb::handle extra_keys, nb::handle reserve, nb::handle max_hit,
                 nb::handle read, nb::handle store)
      : sequence(tokens, space, extra_keys) {
    prompt.reserve = to_tokens(reserve, "reserve");
    prompt.max_hit = to_tokens(max_hit, "max_hit");
    prompt.read = to_bool(read, "read");
    prompt.store = to_bool(store, "store");
  }
  const Manager::Prompt& borrow() {
    prompt.sequence = sequence.borrow();
    return prompt;
  }
  SequenceArgument sequence;
  Manager::Prompt prompt{};
};

int64_t to_group(const Managed& self, nb::handle name) {
  const std::string wanted = to_text(name, "group");
  std::string names;
  for (int64_t g = 0; g < self.core.num_groups(); ++g) {
    if (self.core.group(g).spec.name == wanted) return g;
    names += (g > 0 ? ", " : "") + self.core.group(g).spec.name;
  }
  throw BadArgument("group: there is no group '" + wanted + "'" +
                    (names.empty() ? ", and none has pages" : ", only " + names));
}

// ── requests ────────────────────────────────────────────────────────────────────────────────────────

bool can_admit(Managed& self, nb::handle tokens, nb::handle space, nb::handle extra_keys, nb::handle reserve,
               nb::handle max_hit, nb::handle read, nb::handle store) {
  PromptArgument argument(tokens, space, extra_keys, reserve, max_hit, read, store);
  return self.core.can_admit(argument.borrow());
}

int64_t hit(const Managed& self, nb::handle tokens, nb::handle space, nb::handle extra_keys) {
  SequenceArgument argument(tokens, space, extra_keys);
  return self.core.hit(argument.borrow());
}

nb::object admit(Managed& self, nb::handle tokens, nb::handle space, nb::handle extra_keys, nb::handle reserve,
                 nb::handle max_hit, nb::handle read, nb::handle store) {
  PromptArgument argument(tokens, space, extra_keys, reserve, max_hit, read, store);
  const Manager::Admitted done = self.core.admit(argument.borrow());
  nb::object cuts = nb::steal(PyTuple_New(static_cast<Py_ssize_t>(done.cuts.size())));
  if (!cuts.is_valid()) throw nb::python_error();
  for (size_t i = 0; i < done.cuts.size(); ++i) {
    PyTuple_SetItem(cuts.ptr(), static_cast<Py_ssize_t>(i), nb::int_(done.cuts[i]).release().ptr());
  }
  nb::object result =
      make_tuple(admitted_type, {nb::int_(done.row), nb::int_(done.hit), nb::int_(done.reserved), cuts});
  deliver(self.core.tree(), self);
  return result;
}

nb::object pending(const Managed& self, nb::handle tokens, nb::handle space, nb::handle extra_keys) {
  SequenceArgument argument(tokens, space, extra_keys);
  const Manager::Pending found = self.core.pending(argument.borrow());
  if (found.row == 0) return nb::none();
  return make_tuple(pending_type, {nb::int_(found.row), nb::int_(found.length)});
}

int64_t num_reservable(Managed& self, nb::handle rows, nb::handle n) {
  RowsArgument which(rows);
  CountsArgument counts(n, "n");
  return self.core.num_reservable(which.borrow(), counts.borrow());
}

bool can_reserve(Managed& self, nb::handle rows, nb::handle n) {
  RowsArgument which(rows);
  CountsArgument counts(n, "n");
  const Ids ids = which.borrow();
  return self.core.num_reservable(ids, counts.borrow()) == ids.size;
}

void reserve(Managed& self, nb::handle rows, nb::handle n) {
  RowsArgument which(rows);
  CountsArgument counts(n, "n");
  self.core.reserve(which.borrow(), counts.borrow());
  deliver(self.core.tree(), self);
}

void commit(Managed& self, nb::handle rows, nb::handle tokens, nb::handle counts) {
  RowsArgument which(rows);
  const nb::object one = nb::int_(1);
  if (which.is_one()) {  // all tokens belong to that row
    if (!counts.is_none()) throw BadArgument("counts: leave it out for one row, which gets all tokens");
    const bool is_token = is_number(tokens);
    const nb::object listed = is_token ? nb::object(nb::make_tuple(tokens)) : nb::borrow(tokens);
    IdArray known(listed, "tokens");
    const Ids ids = known.borrow();
    self.core.commit(which.borrow(), ids, {{nullptr, 0}, ids.size, false});
  } else {
    IdArray known(tokens, "tokens");
    CountsArgument each(counts.is_none() ? nb::handle(one) : counts, "counts");
    self.core.commit(which.borrow(), known.borrow(), each.borrow());
  }
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

nb::object extend(Managed& self, nb::handle row, nb::handle group, nb::handle n) {
  const int64_t number = to_int(row, "row", std::numeric_limits<int32_t>::min(), kMaxId);
  const int64_t g = to_group(self, group), more = to_int(n, "n", 0, kMaxId);
  auto ids = new_int32(std::min(more, self.core.group(g).max_pages));
  self.core.extend(number, g, more, ids.data);
  deliver(self.core.tree(), self);
  return ids.array;
}

void trim(Managed& self, nb::handle row, nb::handle group, nb::handle n) {
  const int64_t number = to_int(row, "row", std::numeric_limits<int32_t>::min(), kMaxId);
  self.core.trim(number, to_group(self, group), to_int(n, "n", 0, kMaxId));
}

nb::object alloc_pages(Managed& self, nb::handle group, nb::handle n) {
  const int64_t g = to_group(self, group), wanted = to_int(n, "n", 0, kMaxId);
  auto ids = new_int32(std::min(wanted, self.core.group(g).spec.num_pages));
  self.core.alloc_pages(g, wanted, ids.data);
  deliver(self.core.tree(), self);
  return ids.array;
}

void free_pages(Managed& self, nb::handle group, nb::handle page_ids) {
  const int64_t g = to_group(self, group);
  IdArray ids(page_ids, "page_ids");
  self.core.free_pages(g, ids.borrow());
}

nb::object fork(Managed& self, nb::handle row, nb::handle n) {
  const int64_t parent = to_int(row, "row", std::numeric_limits<int32_t>::min(), kMaxId);
  const int64_t children = n.is_none() ? 1 : to_int(n, "n", 1, kMaxId);
  auto rows = new_int32(std::min(children, self.core.num_rows()));
  self.core.fork(parent, children, rows.data);
  nb::object result = n.is_none() ? nb::object(nb::int_(rows.data[0])) : rows.array;
  deliver(self.core.tree(), self);
  return result;
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

nb::object plan(Managed& self, nb::handle rows, nb::handle counts) {
  RowsArgument which(rows);
  CountsArgument each(counts, "counts");
  // The tuple is made before the layout: making it may run finalizers, which may call the manager.
  nb::object result = nb::steal(PyTuple_New(2));
  if (!result.is_valid()) throw nb::python_error();
  const Ids ids = which.borrow();
  const PerRow queries = each.borrow();
  const DeltaLayout layout = self.core.lay_out(ids, queries);
  auto packed = new_int32(layout.size());
  PyTuple_SetItem(result.ptr(), 0, nb::int_(self.core.step()).release().ptr());
  PyTuple_SetItem(result.ptr(), 1, packed.array.release().ptr());
  self.core.plan(ids, queries, layout, packed.data);
  deliver(self.core.tree(), self);
  return result;
}

void pass_fence(Managed& self, nb::handle step) {
  self.core.pass_fence(to_int(step, "step", 0, std::numeric_limits<int64_t>::max() / 2));
  deliver(self.core.tree(), self);
}

// ── inspecting ──────────────────────────────────────────────────────────────────────────────────────

nb::object page_ids(const Managed& self, nb::handle row, nb::handle group) {
  const int64_t number = to_int(row, "row", std::numeric_limits<int32_t>::min(), kMaxId);
  const int64_t g = to_group(self, group);
  const int64_t first = self.core.first_page(number, g), end = self.core.end_page(number, g);
  auto ids = new_int32(end);
  std::fill_n(ids.data, first, 0);
  const int32_t* table = self.core.table().row(static_cast<size_t>(g), number);
  std::copy(table + first, table + end, ids.data + first);
  return ids.array;
}

// One number per row: an integer for a single row, an array for an array of rows.
template <typename Get>
nb::object per_row(nb::handle rows, Get get) {
  RowsArgument which(rows);
  const Ids ids = which.borrow();
  if (which.is_one()) return nb::int_(get(ids[0]));
  auto found = new_int32(ids.size);
  for (int64_t i = 0; i < ids.size; ++i) found.data[i] = static_cast<int32_t>(get(ids[i]));
  return found.array;
}

nb::object first_pages(const Managed& self, nb::handle rows, nb::handle group) {
  const int64_t g = to_group(self, group);
  return per_row(rows, [&](int64_t row) { return self.core.first_page(row, g); });
}

template <int64_t Manager::Lengths::* field>
nb::object lengths(const Managed& self, nb::handle rows) {
  return per_row(rows, [&](int64_t row) { return self.core.lengths(row).*field; });
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
  nb::object checkpoints = nb::none();
  if (core.has_states()) {
    const Manager::Checkpoints found = core.checkpoints();
    checkpoints = nb::make_tuple(core.num_checkpoints(), found.free, found.cached, found.running, found.saved,
                                 found.resumed, found.evicted);
  }
  const nb::tuple rest = nb::make_tuple(stats.rows, stats.waiting_rows, core.num_rows(), stats.admitted, stats.tokens,
                                        stats.hits, stats.evicted, core.tree().tokens().total);
  return nb::make_tuple(groups, rest, checkpoints);
}

nb::list namespaces(const Managed& self) {
  nb::list names;
  for (const std::string& name : self.core.tree().namespaces()) names.append(nb::bytes(name.data(), name.size()));
  return names;
}

void reset(Managed& self) {
  self.core.reset();
  deliver(self.core.tree(), self);
}

PyStructSequence_Field admitted_fields[] = {{"row", "The request's row."},
                                            {"hit", "Number of tokens that need not be computed."},
                                            {"reserved", "Number of tokens that have a slot."},
                                            {"cuts", "Lengths at which the prefill should end a step, ascending."},
                                            {nullptr, nullptr}};
PyStructSequence_Field pending_fields[] = {
    {"row", "The row that computes them."}, {"length", "Number of tokens that will be cached."}, {nullptr, nullptr}};

}  // namespace

void bind_manager(nb::module_& m) {
  const nb::object plain = nb::bytes("", 0), none = nb::make_tuple();
  admitted_type =
      make_type(m, "Admitted", "pagoda.manager.Admitted",
                "An admitted request: its row, its hit, and how many tokens have a slot; `cuts` is an attribute.",
                admitted_fields, 3);
  pending_type = make_type(m, "Pending", "pagoda.manager.Pending",
                           "A running request that is about to compute a prefix.", pending_fields, 2);
  nb::class_<Managed>(m, "ManagerCore", nb::type_slots(manager_slots), nb::is_weak_referenceable(),
                      "The native part of pagoda.Manager.")
      .def("__init__", &construct, nb::arg("groups").none(), nb::arg("resume_step").none(), nb::arg("num_rows").none(),
           nb::arg("max_tokens").none(), nb::arg("watermark").none(), nb::arg("checkpoints").none(),
           nb::arg("checkpoint_interval").none())
      .def_prop_ro(
          "num_rows", [](const Managed& self) { return self.core.num_rows(); },
          "Maximum number of requests that run at once.")
      .def_prop_ro(
          "max_tokens", [](const Managed& self) { return self.core.max_tokens(); },
          "Maximum number of tokens of one row.")
      .def_prop_ro(
          "step", [](const Managed& self) { return self.core.step(); },
          "The number of the step that `plan` plans next.")
      .def_prop_ro(
          "resume_step", [](const Managed& self) { return self.core.resume_step(); },
          "Hits are multiples of this many tokens.")
      .def("can_admit", &can_admit, nb::arg("tokens").none(), nb::kw_only(), nb::arg("namespace").none() = plain,
           nb::arg("extra_keys").none() = none, nb::arg("reserve").none() = nb::none(),
           nb::arg("max_hit").none() = nb::none(), nb::arg("read").none() = true, nb::arg("store").none() = true,
           nb::sig("def can_admit(self, tokens: IdsLike, *, namespace: bytes | str = b'', extra_keys: "
                   "Sequence[ExtraKey] = (), reserve: int | None = None, max_hit: int | None = None, read: bool = "
                   "True, store: bool = True) -> bool"),
           R"(Return whether `admit` with these arguments would succeed now.

Pages that its own hit would lock do not count as evictable. Errors: as `admit`, except CapacityError.)")
      .def("admit", &admit, nb::arg("tokens").none(), nb::kw_only(), nb::arg("namespace").none() = plain,
           nb::arg("extra_keys").none() = none, nb::arg("reserve").none() = nb::none(),
           nb::arg("max_hit").none() = nb::none(), nb::arg("read").none() = true, nb::arg("store").none() = true,
           nb::sig("def admit(self, tokens: IdsLike, *, namespace: bytes | str = b'', extra_keys: Sequence[ExtraKey] "
                   "= (), reserve: int | None = None, max_hit: int | None = None, read: bool = True, store: bool = "
                   "True) -> Admitted"),
           R"(Admit a request: give it a row, the longest cached prefix, and slots for the rest.

At least one token is left to compute. `reserve` is the number of tokens after the hit that get slots, by default all
of `tokens`; `max_hit` limits the hit. With `read=False` the request uses no cached pages, and with `store=False` nothing
that it commits is cached. `cuts` are the lengths at which the prefill should end a step, so that its state can be saved.
The caller owns the row until `release`. Errors: CapacityError if rows or pages of a group run
out; ArgumentError; OutOfRangeError for a token.)")
      .def("hit", &hit, nb::arg("tokens").none(), nb::kw_only(), nb::arg("namespace").none() = plain,
           nb::arg("extra_keys").none() = none,
           nb::sig("def hit(self, tokens: IdsLike, *, namespace: bytes | str = b'', extra_keys: Sequence[ExtraKey] = "
                   "()) -> int"),
           R"(Return how many of these tokens `admit` would find cached. Changes nothing.

Errors: as `admit`, except CapacityError.)")
      .def("pending", &pending, nb::arg("tokens").none(), nb::kw_only(), nb::arg("namespace").none() = plain,
           nb::arg("extra_keys").none() = none,
           nb::sig("def pending(self, tokens: IdsLike, *, namespace: bytes | str = b'', extra_keys: "
                   "Sequence[ExtraKey] = ()) -> Pending | None"),
           R"(Return the running request that is about to compute most of these tokens beyond the present hit, or None.

Only tokens count that it was admitted with and has slots for, and with states only lengths at which a save is planned. Compares the tokens with every running request. Errors:
as `admit`, except CapacityError.)")
      .def("can_reserve", &can_reserve, nb::arg("rows").none(), nb::arg("n").none() = 1,
           nb::sig("def can_reserve(self, rows: IdsLike | int, n: IdsLike | int = 1) -> bool"),
           "Return whether `reserve` with these arguments would succeed now: False also where a row would exceed "
           "max_tokens. Errors: as `reserve` for rows.")
      .def("num_reservable", &num_reservable, nb::arg("rows").none(), nb::arg("n").none() = 1,
           nb::sig("def num_reservable(self, rows: IdsLike | int, n: IdsLike | int = 1) -> int"),
           "Return how many of the rows, starting with the first, `reserve` could serve together. Errors: as "
           "`can_reserve`.")
      .def("reserve", &reserve, nb::arg("rows").none(), nb::arg("n").none() = 1,
           nb::sig("def reserve(self, rows: IdsLike | int, n: IdsLike | int = 1) -> None"),
           R"(Give each of these rows slots for n more tokens, or row i slots for n[i] more.

Pages come from the free-lists first and then from the tree, coldest first. Errors: CapacityError, which names the group;
ArgumentError; OutOfRangeError, NotHeldError, AlreadyHeldError for a row.)")
      .def("commit", &commit, nb::arg("rows").none(), nb::arg("tokens").none(), nb::arg("counts").none() = nb::none(),
           nb::sig("def commit(self, rows: IdsLike | int, tokens: IdsLike | int, counts: IdsLike | int | None = None) "
                   "-> None"),
           R"(Report which tokens the next computed ones are.

A single row gets all of `tokens`. An array of rows gets one token per row, or counts[i] for row i, with `tokens` listed
row after row. The tree takes whole pages, and other requests can hit them at once. Pages that have left every window are
given up. Errors: ArgumentError for more tokens than are computed; OutOfRangeError for a token; as `reserve` for
rows.)")
      .def("rollback", &rollback, nb::arg("rows").none(), nb::arg("n").none(),
           nb::sig("def rollback(self, rows: IdsLike | int, n: IdsLike | int) -> None"),
           R"(Take back the last n reserved tokens of each row, or n[i] of row i, whether computed or not.

Committed tokens cannot be taken back. The row keeps its pages for what it reserves next. Errors: ArgumentError, with states
also for a row with computed tokens that are not committed; as `reserve` for rows.)")
      .def("extend", &extend, nb::arg("row").none(), nb::arg("group").none(), nb::arg("n").none() = 1,
           nb::sig("def extend(self, row: int, group: str, n: int = 1) -> npt.NDArray[np.int32]"),
           R"(Give a row n more pages of one group, ahead of what it reserves, and return them: [n] int32.

The row owns them, and `reserve` uses them first. Pages come as for `reserve`. Errors: CapacityError; ArgumentError, also
for more pages than `max_tokens` need; OutOfRangeError, NotHeldError for the row.)")
      .def(
          "trim", &trim, nb::arg("row").none(), nb::arg("group").none(), nb::arg("n").none() = 1,
          nb::sig("def trim(self, row: int, group: str, n: int = 1) -> None"),
          R"(Take back the last n pages of a row in one group, which are behind its reserved tokens: those that `extend`
gave, or that a rollback left. They are free at once.

Errors: ArgumentError, also while a planned step has not passed its fence, since it may still read the pages, and for a
row that was admitted or given pages since the last `plan`; OutOfRangeError, NotHeldError for the row.)")
      .def(
          "alloc_pages", &alloc_pages, nb::arg("group").none(), nb::arg("n").none(),
          nb::sig("def alloc_pages(self, group: str, n: int) -> npt.NDArray[np.int32]"),
          R"(Return n pages of a group that belong to no row and are not cached, [n] int32: scratch memory of the caller.

The caller owns them until `free_pages`. Pages come as for `reserve`. Errors: CapacityError; ArgumentError.)")
      .def("free_pages", &free_pages, nb::arg("group").none(), nb::arg("page_ids").none(),
           nb::sig("def free_pages(self, group: str, page_ids: IdsLike) -> None"),
           R"(Free pages that `alloc_pages` returned, once the last planned step has passed its fence.

Errors: NotHeldError, also for a page of a row or of the cache; DoubleFreeError, OutOfRangeError; ArgumentError.)")
      .def(
          "release", &release, nb::arg("rows").none(), nb::sig("def release(self, rows: IdsLike | int) -> None"),
          R"(End rows, be they finished, cancelled or preempted. What they committed stays cached until memory is needed.

They take no part in the step that is planned next. A row, its lease and its own pages are free once the last planned step
has passed its fence; if the row was admitted, forked or given pages since, once the next step has. Errors: as `reserve`
for rows.)")
      .def("fork", &fork, nb::arg("row").none(), nb::arg("n").none() = nb::none(),
           nb::sig("def fork(self, row: int, n: int | None = None) -> int | npt.NDArray[np.int32]"),
           R"(Start a new row that continues a row's committed tokens, and return it; with `n`, start n rows: [n] int32.

They share the pages of the tree; the next delta copies the others, and the state. The caller owns the rows. Errors:
CapacityError; ArgumentError for a row whose tokens are not cached, or, with states, not all committed; OutOfRangeError, NotHeldError for the row.)")
      .def("invalidate", &invalidate, nb::arg("group").none(), nb::arg("page_ids").none(),
           nb::sig("def invalidate(self, group: str, page_ids: IdsLike) -> npt.NDArray[np.int32]"),
           R"(Forget pages of a group whose contents are bad, and everything that continues them.

Returns the running rows whose contents may depend on these pages, [n] int32. They keep running, but nothing they commit
is cached; release them to compute their tokens again. Cached pages that nobody reads are free at once, the others when
their rows end. Free pages are ignored. Walks over everything that is cached. Errors: OutOfRangeError; ArgumentError.)")
      .def("drop", &drop, nb::arg("namespace").none(), nb::sig("def drop(self, namespace: bytes | str) -> None"),
           R"(Forget a namespace: nothing of it can be found any more, and what its running rows commit is not cached.

Errors: ArgumentError.)")
      .def("_plan", &plan, nb::arg("rows").none(), nb::arg("counts").none())
      .def("pass_fence", &pass_fence, nb::arg("step").none(), nb::sig("def pass_fence(self, step: int) -> None"),
           R"(Report that this step and all earlier ones have finished on every device, and free what waited for them.

Errors: ArgumentError for a step that has not been planned.)")
      .def("page_ids", &page_ids, nb::arg("row").none(), nb::arg("group").none(),
           nb::sig("def page_ids(self, row: int, group: str) -> npt.NDArray[np.int32]"),
           R"(Return the page ids of a row in a group: [pages] int32; 0 where a page has left the window.

Errors: ArgumentError, OutOfRangeError, NotHeldError.)")
      .def("first_pages", &first_pages, nb::arg("rows").none(), nb::arg("group").none(),
           nb::sig("def first_pages(self, rows: IdsLike | int, group: str) -> int | npt.NDArray[np.int32]"),
           "Return the number of the first page of each row that has not left the window. An integer for one row, "
           "[rows] int32 for an array. Errors: as `page_ids`.")
      .def("reserved", &lengths<&Manager::Lengths::reserved>, nb::arg("rows").none(),
           nb::sig("def reserved(self, rows: IdsLike | int) -> int | npt.NDArray[np.int32]"),
           "Return how many tokens of each row have a slot. An integer for one row, [rows] int32 for an array. Errors: "
           "OutOfRangeError, NotHeldError.")
      .def("computed", &lengths<&Manager::Lengths::computed>, nb::arg("rows").none(),
           nb::sig("def computed(self, rows: IdsLike | int) -> int | npt.NDArray[np.int32]"),
           "Return how many tokens of each row were planned into a step. Result and errors as for `reserved`.")
      .def("committed", &lengths<&Manager::Lengths::committed>, nb::arg("rows").none(),
           nb::sig("def committed(self, rows: IdsLike | int) -> int | npt.NDArray[np.int32]"),
           "Return how many tokens of each row are computed and known. Result and errors as for `reserved`.")
      .def("stored", &lengths<&Manager::Lengths::stored>, nb::arg("rows").none(),
           nb::sig("def stored(self, rows: IdsLike | int) -> int | npt.NDArray[np.int32]"),
           "Return how many tokens of each row are in the tree. Result and errors as for `reserved`.")
      .def("_counts", &counts)
      .def("_tree_counts", [](const Managed& self) { return tree_counts(self.core.tree()); })
      .def(
          "_tree_nodes",
          [](const Managed& self, nb::handle most, nb::handle run, nb::handle space) {
            return list_nodes(self.core.tree(), most, run, space);
          },
          nb::arg("max_nodes").none(), nb::arg("max_tokens").none(), nb::arg("namespace").none())
      .def(
          "_tree_listen", [](Managed& self, nb::handle listener) { listen(self.core.tree(), self, listener); },
          nb::arg("listener").none())
      .def(
          "_tree_unlisten", [](Managed& self, nb::handle listener) { unlisten(self.core.tree(), self, listener); },
          nb::arg("listener").none())
      .def("namespaces", &namespaces, nb::sig("def namespaces(self) -> list[bytes]"),
           "Return the namespaces that have cached pages or running rows, sorted.")
      .def("reset", &reset,
           R"(Forget everything: rows, leases, cached pages, and changes not planned yet. Steps start at 1 again.

Call `Pools.reset` as well. Errors: ArgumentError while a planned step has not passed its fence.)")
      .def(
          "check", [](const Managed& self) { self.core.check(); },
          "Verify invariants 5 and 17 and those of the manager's parts, by a walk over everything. Errors: "
          "InvariantError.");
}

}  // namespace pagoda::bind
