#include "core/prefix_tree.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <limits>

#include "bind/arrays.hpp"
#include "bind/module.hpp"
#include "bind/tree.hpp"

namespace pagoda::bind {

namespace {

constexpr int64_t kMaxId = std::numeric_limits<int32_t>::max();
constexpr int64_t kMaxCount = std::numeric_limits<int64_t>::max() / 2;

PyType_Slot tree_slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(traverse_listeners<Tree>)},
                            {Py_tp_clear, reinterpret_cast<void*>(clear_listeners<Tree>)},
                            {0, nullptr}};
void construct(Tree* self, nb::handle page_tokens, nb::handle windows, nb::handle states, nb::handle capacity) {
  to_config([&] {
    const int64_t size = to_int(page_tokens, "page_tokens", 1, kMaxId);
    std::vector<int64_t> columns = to_windows(windows);
    if (!PyBool_Check(states.ptr())) throw BadArgument("states: give True or False");
    const int64_t tokens = to_int(capacity, "capacity", 0, kMaxId);
    new (self) Tree(size, std::move(columns), states.ptr() == Py_True, tokens);
  });
}

HeldLease& to_lease(const Tree& tree, nb::handle value) {
  if (!nb::isinstance<HeldLease>(value) || !nb::inst_ready(value))
    throw BadArgument("lease: give a Lease returned by lock()");
  HeldLease& lease = *nb::inst_ptr<HeldLease>(value);
  if (lease.tree != &tree) throw BadArgument("lease: it belongs to another tree");
  return lease;
}

// A lease that has not been released.
HeldLease& to_held_lease(const Tree& tree, nb::handle value) {
  HeldLease& lease = to_lease(tree, value);
  if (lease.is_released) {
    throw BadId{IdFault::kNotHeld, lease.id.number, 0, "lease " + text(lease.id.number) + " was already released"};
  }
  return lease;
}

int to_column(const Tree& tree, nb::handle column) {
  return static_cast<int>(to_int(column, "column", 0, tree.core.num_columns() - 1));
}

// ── matching ────────────────────────────────────────────────────────────────────────────────────────

nb::object match_one(const Tree& self, nb::handle tokens, nb::handle space, nb::handle extra_keys) {
  SequenceArgument argument(tokens, space, extra_keys);
  auto [object, made] = make<FoundMatch>();
  made->tree = self.id;
  made->num_columns = self.core.num_columns();
  const Sequence sequence = argument.borrow();
  const PrefixTree& core = self.core;
  if (core.is_plain() && made->num_columns == 1) {  // compares tokens and copies ids in one pass
    made->page_ids.reset(new int32_t[static_cast<size_t>(sequence.tokens.size / core.page_tokens())]);
    core.match(sequence, made->match, made->page_ids.get());
    made->num_pages = made->match.length / core.page_tokens();
  } else {
    core.match(sequence, made->match, nullptr);
    made->num_pages = made->match.length / core.page_tokens();
    made->page_ids.reset(new int32_t[static_cast<size_t>(made->num_columns * made->num_pages)]);
    for (int c = 0; c < made->num_columns; ++c) {
      core.copy_pages(made->match, c, made->page_ids.get() + c * made->num_pages);
    }
  }
  return std::move(object);
}

// The prompts of a queue, each with its namespace and extra keys.
template <typename Each>
void for_prompts(nb::handle prompts, nb::handle namespaces, nb::handle extra_keys, Each each) {
  const auto all = to_items(prompts, "prompts", "token arrays");
  const bool is_one = PyBytes_Check(namespaces.ptr()) || PyUnicode_Check(namespaces.ptr());
  std::vector<nb::object> spaces, keys;
  if (!namespaces.is_none() && !is_one) spaces = to_items(namespaces, "namespaces", "namespaces, one per prompt");
  if (!extra_keys.is_none()) keys = to_items(extra_keys, "extra_keys", "lists of extra keys, one per prompt");
  if ((!namespaces.is_none() && !is_one && spaces.size() != all.size()) ||
      (!extra_keys.is_none() && keys.size() != all.size())) {
    throw BadArgument("prompts: give one namespace and one list of extra keys per prompt");
  }
  const nb::object plain = nb::bytes("", 0), no_keys = nb::make_tuple();
  for (size_t i = 0; i < all.size(); ++i) {
    const nb::handle space = is_one ? namespaces : spaces.empty() ? nb::handle(plain) : nb::handle(spaces[i]);
    each(static_cast<int64_t>(i), all[i], space, keys.empty() ? nb::handle(no_keys) : nb::handle(keys[i]));
  }
}

nb::list match_many(const Tree& self, nb::handle prompts, nb::handle namespaces, nb::handle extra_keys) {
  nb::list matches;
  for_prompts(prompts, namespaces, extra_keys, [&](int64_t, nb::handle tokens, nb::handle space, nb::handle keys) {
    matches.append(match_one(self, tokens, space, keys));
  });
  return matches;
}

int64_t match_length(const Tree& self, nb::handle tokens, nb::handle space, nb::handle extra_keys) {
  SequenceArgument argument(tokens, space, extra_keys);
  return self.core.match_length(argument.borrow());
}

nb::object match_lengths(const Tree& self, nb::handle prompts, nb::handle namespaces, nb::handle extra_keys) {
  std::vector<int32_t> lengths;
  for_prompts(prompts, namespaces, extra_keys, [&](int64_t, nb::handle tokens, nb::handle space, nb::handle keys) {
    lengths.push_back(static_cast<int32_t>(match_length(self, tokens, space, keys)));
  });
  return to_array(lengths);
}

// ── leases ──────────────────────────────────────────────────────────────────────────────────────────

nb::object lock(nb::handle owner, nb::handle match) {
  Tree& self = to_self<Tree>(owner);
  if (!nb::isinstance<FoundMatch>(match) || !nb::inst_ready(match))
    throw BadArgument("match: give a Match returned by match()");
  const FoundMatch& found = *nb::inst_ptr<FoundMatch>(match);
  if (found.tree != self.id) throw BadArgument("match: it belongs to another tree");
  auto [object, made] = make<HeldLease>();
  made->owner = nb::borrow(owner);
  made->tree = &self;
  made->is_released = true;  // until the core has made it
  made->id = self.core.lock(found.match);
  made->is_released = false;
  return std::move(object);
}

void release(Tree& self, nb::handle value) { release_lease(self, to_lease(self, value)); }

// ── storing and removing ────────────────────────────────────────────────────────────────────────────

nb::object insert(Tree& self, nb::handle tokens, nb::handle page_ids, nb::handle lease, nb::handle space,
                  nb::handle extra_keys, nb::handle checkpoints) {
  const bool has_space = !space.is_none();
  const nb::object plain = nb::bytes("", 0);
  SequenceArgument sequence(tokens, has_space ? space : nb::handle(plain), extra_keys);
  ColumnsArgument columns(page_ids, self.core.num_columns());
  const std::vector<Checkpoint> states = to_checkpoints(checkpoints);
  const LeaseId* id = nullptr;
  if (!lease.is_none()) {
    id = &to_held_lease(self, lease).id;
    if (has_space) throw BadArgument("namespace: leave it out, the lease has its own");
  }
  auto [object, made] = make<InsertedPages>();
  made->num_columns = self.core.num_columns();
  static_cast<Inserted&>(*made) = self.core.insert(sequence.borrow(), columns.borrow(), id, states);
  deliver(self);
  return std::move(object);
}

// A tuple of arrays. Making one may run the garbage collector, and with it any Python code, so it is made only
// when the tree is in a consistent state.
nb::object tuple_of(const std::vector<nb::object>& arrays) {
  nb::list items;
  for (const nb::object& array : arrays) items.append(array);
  return nb::tuple(items);
}

// Plans a removal, allocates the arrays for what it frees, and carries it out. In between nothing but plain
// arrays is allocated, so no Python runs.
template <typename Plan>
nb::object remove(Tree& self, Plan plan) {
  auto [object, made] = make<FreedIds>();
  PrefixTree::Removal& removal = self.removal;
  plan(removal);
  std::vector<nb::object> arrays;
  std::vector<int32_t*> data;
  for (int64_t size : removal.columns()) {
    auto ids = new_int32(size);
    data.push_back(ids.data);
    arrays.push_back(std::move(ids.array));
  }
  int32_t* states = nullptr;
  if (self.core.has_states()) {
    auto ids = new_int32(removal.states());
    states = ids.data;
    made->state_ids = std::move(ids.array);
  }
  self.core.carry_out(removal, data, states);
  made->page_ids = arrays[0];
  if (arrays.size() > 1) made->columns = tuple_of(arrays);
  deliver(self);
  return std::move(object);
}

nb::object evict(Tree& self, nb::handle n, nb::handle column) {
  const int64_t tokens = to_int(n, "n", 0, kMaxCount);
  const int which = to_column(self, column);
  return remove(self, [&](auto& plan) { self.core.plan_evict(tokens, which, plan); });
}

nb::object evict_states(Tree& self, nb::handle n) {
  if (!self.core.has_states()) throw BadArgument("evict_states: this tree was built without states");
  const int64_t states = to_int(n, "n", 0, kMaxCount);
  return remove(self, [&](auto& plan) { self.core.plan_evict_states(states, plan); });
}

nb::object drop(Tree& self, nb::handle space) {
  const std::string_view name = to_space(space);
  return remove(self, [&](auto& plan) { self.core.plan_drop(name, plan); });
}

nb::object punch(Tree& self, nb::handle lease, nb::handle column, nb::handle end) {
  const int which = to_column(self, column);
  const int64_t until = to_int(end, "end", 0, kMaxCount);
  PrefixTree::Punch plan;
  self.core.plan_punch(to_held_lease(self, lease).id, which, until, plan);
  auto ids = new_int32(plan.num_pages());
  self.core.carry_out(plan, ids.data);
  deliver(self);
  return ids.array;
}

nb::object replace(Tree& self, nb::handle tokens, nb::handle page_ids, nb::handle space, nb::handle extra_keys) {
  SequenceArgument sequence(tokens, space, extra_keys);
  ColumnsArgument columns(page_ids, self.core.num_columns());
  const std::vector<Ids> ids = columns.borrow();
  PrefixTree::Replacement plan;
  self.core.plan_replace(sequence.borrow(), ids, plan);
  std::vector<nb::object> old;
  std::vector<int32_t*> data;
  for (int c = 0; c < self.core.num_columns(); ++c) {
    auto array = new_int32(plan.num_pages());
    data.push_back(array.data);
    old.push_back(std::move(array.array));
  }
  self.core.carry_out(plan, ids, data);
  nb::object result = tuple_of(old);
  deliver(self);
  return result;
}

nb::object page_ids(const Tree& self, nb::handle lease, nb::handle column) {
  const int which = to_column(self, column);
  const LeaseId id = to_held_lease(self, lease).id;
  auto ids = new_int32(self.core.length(id) / self.core.page_tokens());
  self.core.copy_pages(id, which, ids.data);
  return ids.array;
}

// ── inspecting ──────────────────────────────────────────────────────────────────────────────────────

nb::object to_bytes(const std::string& name) { return nb::bytes(name.data(), name.size()); }

nb::list namespaces(const Tree& self) {
  nb::list names;
  for (const std::string& name : self.core.namespaces()) names.append(to_bytes(name));
  return names;
}

nb::object windows(const Tree& self) {
  nb::list columns;
  for (int64_t window : self.core.windows()) columns.append(window == 0 ? nb::none() : nb::object(nb::int_(window)));
  return nb::tuple(columns);
}

std::string repr(const Tree& self) {
  const PrefixTree& core = self.core;
  const int64_t locked = core.tokens().locked;
  return "PrefixTree(" + text(core.tokens().total) + " tokens: " + text(locked) + " protected, " +
         text(core.tokens().total - locked) + " evictable; " + text(core.num_nodes()) + " nodes, pages of " +
         text(core.page_tokens()) + ")";
}

}  // namespace

void bind_prefix_tree(nb::module_& m) {
  bind_tree_values(m);
  const nb::object plain = nb::bytes("", 0), none = nb::make_tuple();
  nb::class_<Tree>(m, "PrefixTree", nb::type_slots(tree_slots), nb::is_weak_referenceable(),
                   R"(Finds prefixes that are already computed: tokens in, the ids of their pages out.

`windows` has one entry per paged group, and so per column of page ids: None for full attention, else the
window in tokens. With `states`, prefixes are usable only at checkpoints. `capacity` is the number of tokens
whose storage is allocated up front, so that no call waits for memory. docs/tree.md describes each call. A
tree may be used from several threads. Memory: about 8.5 bytes per token with pages of 1 token and 4.5 with
pages of 16, if runs are long; each run takes at least one chunk of 64 tokens. Memory of evicted pages is
reused, not returned to the system.

Errors: ConfigError for invalid arguments; MemoryError.)")
      .def(
          "__init__", &construct, nb::arg("page_tokens").none() = 1, nb::kw_only(),
          nb::arg("windows").none() = nb::make_tuple(nb::none()), nb::arg("states").none() = false,
          nb::arg("capacity").none() = 0,
          nb::sig("def __init__(self, page_tokens: int = 1, *, windows: Sequence[int | None] = (None,), states: bool = "
                  "False, capacity: int = 0) -> None"))
      .def_prop_ro(
          "page_tokens", [](const Tree& self) { return self.core.page_tokens(); }, "Tokens per page.")
      .def_prop_ro("windows", &windows, "The window of each column in tokens; None for full attention.")
      .def_prop_ro(
          "has_states", [](const Tree& self) { return self.core.has_states(); },
          "Whether prefixes are usable only at checkpoints.")
      .def_prop_ro(
          "num_tokens", [](const Tree& self) { return self.core.tokens().total; }, "Number of cached tokens.")
      .def_prop_ro(
          "evictable_tokens", [](const Tree& self) { return self.core.tokens().total - self.core.tokens().locked; },
          "Number of tokens that no lease protects.")
      .def_prop_ro(
          "protected_tokens", [](const Tree& self) { return self.core.tokens().locked; },
          "Number of tokens that leases protect; a token with several leases counts once.")
      .def_prop_ro(
          "num_nodes", [](const Tree& self) { return self.core.num_nodes(); }, "Number of nodes, each a run of pages.")
      .def_prop_ro(
          "num_leaves", [](const Tree& self) { return self.core.num_leaves(); }, "Number of nodes without children.")
      .def_prop_ro(
          "num_leases", [](const Tree& self) { return self.core.num_leases(); },
          "Number of leases that are not released yet.")
      .def("match", &match_one, nb::arg("tokens").none(), nb::arg("namespace").none() = plain,
           nb::arg("extra_keys").none() = none,
           nb::sig("def match(self, tokens: IdsLike, namespace: bytes | str = b'', extra_keys: Sequence[ExtraKey] = "
                   "()) -> Match"),
           R"(Find the longest usable prefix of these tokens.

The tree does not change, nothing is protected, and the eviction order stays as it is. Costs little more
than comparing the tokens and copying the ids. Errors: OutOfRangeError for a negative token; ArgumentError.)")
      .def("match_length", &match_length, nb::arg("tokens").none(), nb::arg("namespace").none() = plain,
           nb::arg("extra_keys").none() = none,
           nb::sig("def match_length(self, tokens: IdsLike, namespace: bytes | str = b'', extra_keys: "
                   "Sequence[ExtraKey] = ()) -> int"),
           "Return the length of a match alone, without reading ids. Errors: as `match`.")
      .def("match_many", &match_many, nb::arg("prompts").none(), nb::arg("namespaces").none() = nb::none(),
           nb::arg("extra_keys").none() = nb::none(),
           nb::sig("def match_many(self, prompts: Sequence[IdsLike], namespaces: bytes | str | Sequence[bytes | str] | "
                   "None = None, extra_keys: Sequence[Sequence[ExtraKey]] | None = None) -> list[Match]"),
           R"(Match all prompts of a queue in one call.

`namespaces` is None, one for all prompts, or one per prompt. Errors: as `match`.)")
      .def("match_lengths", &match_lengths, nb::arg("prompts").none(), nb::arg("namespaces").none() = nb::none(),
           nb::arg("extra_keys").none() = nb::none(),
           nb::sig("def match_lengths(self, prompts: Sequence[IdsLike], namespaces: bytes | str | Sequence[bytes | "
                   "str] | None = None, extra_keys: Sequence[Sequence[ExtraKey]] | None = None) -> "
                   "npt.NDArray[np.int32]"),
           "Return the lengths of `match_many` alone: [prompts] int32. Errors: as `match`.")
      .def("lock", &lock, nb::arg("match").none(), nb::sig("def lock(self, match: Match) -> Lease"),
           R"(Protect what is still cached of a match until the lease is released.

If pages of the match were evicted meanwhile, the lease is shorter, possibly empty. A run is split if the
lease ends inside it. Errors: ArgumentError for a match of another tree.)")
      .def("release", &release, nb::arg("lease").none(), nb::sig("def release(self, lease: Lease) -> None"),
           R"(Release a lease: what no other lease protects becomes evictable, as the most recently used.

Errors: DoubleFreeError if it was already released; StaleError if the tree was reset since; ArgumentError
for a lease of another tree.)")
      .def(
          "demote", [](Tree& self, nb::handle lease) { self.core.demote(to_held_lease(self, lease).id); },
          nb::arg("lease").none(), nb::sig("def demote(self, lease: Lease) -> None"),
          R"(Let the tail that only this lease protects be evicted first, once the lease is released.

The tail ends where something else continues the path. Errors: NotHeldError, StaleError, ArgumentError.)")
      .def("insert", &insert, nb::arg("tokens").none(), nb::arg("page_ids").none(),
           nb::arg("lease").none() = nb::none(), nb::kw_only(), nb::arg("namespace").none() = nb::none(),
           nb::arg("extra_keys").none() = none, nb::arg("checkpoints").none() = none,
           nb::sig("def insert(self, tokens: IdsLike, page_ids: IdsLike | Sequence[IdsLike], lease: Lease | None = "
                   "None, *, namespace: bytes | str | None = None, extra_keys: Sequence[ExtraKey] = (), checkpoints: "
                   "Sequence[tuple[int, int]] = ()) -> Inserted"),
           R"(Store the whole pages of a sequence.

With a lease, `tokens` are those that follow the lease, which then covers them too. Afterwards the tree owns
the pages between `present` and `stored` of the result, and the caller keeps the others. Costs depend on the
tokens given, not on those the lease covers. Errors: OutOfRangeError for a token, page or state id;
ArgumentError for lengths that do not fit; StaleError for a lease of a dropped namespace; NotHeldError.)")
      .def("page_ids", &page_ids, nb::arg("lease").none(), nb::arg("column").none() = 0,
           nb::sig("def page_ids(self, lease: Lease, column: int = 0) -> npt.NDArray[np.int32]"),
           R"(Return the current page ids of a lease: [length / page_tokens] int32, -1 for holes.

Errors: NotHeldError, StaleError, ArgumentError.)")
      .def("evict", &evict, nb::arg("n").none(), nb::arg("column").none() = 0,
           nb::sig("def evict(self, n: int, column: int = 0) -> Freed"),
           R"(Evict n tokens, rounded up to pages of a column, from the tails of the coldest leaves.

The caller owns the returned ids. Errors: CapacityError if fewer are evictable; ArgumentError.)")
      .def("evict_states", &evict_states, nb::arg("n").none(), nb::sig("def evict_states(self, n: int) -> Freed"),
           R"(Evict n checkpoints, coldest first, with the pages that are of no use without them.

The caller owns the returned ids. Errors: CapacityError if fewer are evictable; ArgumentError.)")
      .def("punch", &punch, nb::arg("lease").none(), nb::arg("column").none(), nb::arg("end").none(),
           nb::sig("def punch(self, lease: Lease, column: int, end: int) -> npt.NDArray[np.int32]"),
           R"(Remove the pages before token `end` from a window column of a lease's path, which leaves holes.

Pages that another lease protects stay. The caller owns the returned ids. Errors: ArgumentError for a column
without a window; NotHeldError, StaleError.)")
      .def(
          "replace", &replace, nb::arg("tokens").none(), nb::arg("page_ids").none(), nb::kw_only(),
          nb::arg("namespace").none() = plain, nb::arg("extra_keys").none() = none,
          nb::sig("def replace(self, tokens: IdsLike, page_ids: IdsLike | Sequence[IdsLike], *, namespace: bytes | str "
                  "= b'', extra_keys: Sequence[ExtraKey] = ()) -> tuple[npt.NDArray[np.int32], ...]"),
          R"(Replace the ids of cached pages and return the old ids, one array per column.

The tree owns the new ids, the caller the old ones. Errors: ArgumentError if not all of the tokens are cached;
as `insert`.)")
      .def(
          "drop", &drop, nb::arg("namespace").none(), nb::sig("def drop(self, namespace: bytes | str) -> Freed"),
          R"(Forget a namespace: nothing of it can be found any more. Protected pages stay until their leases are released.

The caller owns the returned ids. Errors: ArgumentError.)")
      .def("namespaces", &namespaces, nb::sig("def namespaces(self) -> list[bytes]"),
           "Return the namespaces that have pages or leases, sorted.")
      .def(
          "reset",
          [](Tree& self) {
            self.core.reset();
            deliver(self);
          },
          nb::sig("def reset(self) -> None"), "Forget everything, leases included. The caller owns all ids again.")
      .def(
          "counts", [](const Tree& self) { return tree_counts(self.core); }, nb::sig("def counts(self) -> TreeCounts"),
          "Return how many tokens, pages, states, nodes and leases there are. Needs no walk over the tree.")
      .def(
          "check", [](const Tree& self) { self.core.check(); }, nb::sig("def check(self) -> None"),
          "Verify invariants 10 to 12, 14 and 15 by a walk over the whole tree. Errors: InvariantError.")
      .def(
          "listen", [](Tree& self, nb::handle listener) { listen(self.core, self, listener); },
          nb::arg("listener").none(),
          nb::sig("def listen(self, listener: Callable[[Stored | Removed | Reset], object]) -> None"),
          R"(Call `listener` with every event from now on, in order, after the call that caused it has finished.

It first gets Stored events for everything that can be found now, which costs a copy of the tree. Later calls
copy what they store or remove. Exceptions of a listener go to sys.unraisablehook. Errors: ArgumentError.)")
      .def(
          "unlisten", [](Tree& self, nb::handle listener) { unlisten(self.core, self, listener); },
          nb::arg("listener").none(),
          nb::sig("def unlisten(self, listener: Callable[[Stored | Removed | Reset], object]) -> None"),
          "Stop calling a listener. Errors: ArgumentError if it does not listen.")
      .def(
          "nodes",
          [](const Tree& self, nb::handle most, nb::handle run, nb::handle space) {
            return list_nodes(self.core, most, run, space);
          },
          nb::arg("max_nodes").none() = 1000, nb::arg("max_tokens").none() = 32,
          nb::arg("namespace").none() = nb::none(),
          nb::sig("def nodes(self, max_nodes: int = 1000, max_tokens: int = 32, namespace: bytes | str | None = None) "
                  "-> list[NodeView]"),
          R"(List nodes for display: parents before children, children in the order of their tokens.

Errors: ArgumentError.)")
      .def("__repr__", &repr);
}

}  // namespace pagoda::bind
