// The Python objects around the core's tree.
#pragma once

#include <nanobind/nanobind.h>

#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bind/arrays.hpp"
#include "core/prefix_tree.hpp"

namespace pagoda::bind {

// A callable that listens to a tree, and the number of the first event it gets.
struct Listener {
  nb::object call;
  int64_t since;
};

// An event still to be delivered: to all that were listening then, or only to the listener with since == only.
struct News {
  TreeEvent event;
  int64_t number;
  int64_t only;  // 0: to all
};

struct Listeners {
  std::vector<Listener> listeners;
  std::deque<News> news;
  int64_t next_number = 1;  // of the next event or listener
  bool is_delivering = false;
};

// pagoda.PrefixTree: the core's tree and its listeners.
struct Tree : Listeners {
  Tree(int64_t page_tokens, std::vector<int64_t> windows, bool has_states, int64_t capacity)
      : core(page_tokens, std::move(windows), has_states, capacity) {
    static int64_t next = 1;
    id = next++;
  }
  PrefixTree core;
  PrefixTree::Removal removal;  // scratch of one call, kept for its memory
  int64_t id;                   // tells matches of other trees apart
};

// ── what the tree's calls return ────────────────────────────────────────────────────────────────────

// pagoda.tree.Match. Its arrays are made on request: a queue is often matched for its lengths alone.
struct FoundMatch {
  int64_t tree;
  Match match;
  int64_t num_pages;
  int num_columns;
  std::unique_ptr<int32_t[]> page_ids;  // [num_columns * num_pages]
};

// pagoda.tree.Lease
struct HeldLease {
  nb::object owner;
  Tree* tree;
  LeaseId id;
  int64_t length;  // when it was released
  bool is_released;
};

// pagoda.tree.Inserted
struct InsertedPages : Inserted {
  int num_columns = 0;
};

// pagoda.tree.Freed
struct FreedIds {
  nb::object page_ids, columns, state_ids;
};

// A Python object with a T constructed in place.
template <typename T>
std::pair<nb::object, T*> make() {
  nb::object object = nb::inst_alloc(nb::type<T>());
  T* made = new (nb::inst_ptr<void>(object)) T();
  nb::inst_mark_ready(object);
  return {std::move(object), made};
}

// The T inside a Python object. TypeError if the object is of another type or was never initialised.
template <typename T>
T& to_self(nb::handle object) {
  if (!nb::isinstance<T>(object) || !nb::inst_ready(object)) throw nb::type_error("this object was not made by a tree");
  return *nb::inst_ptr<T>(object);
}

// Releases a lease. A second time throws.
void release_lease(Tree& tree, HeldLease& lease);

void bind_tree_values(nb::module_& m);

// Hands the events of a finished call to the listeners. Their exceptions are reported, not raised.
void deliver_events(PrefixTree& core, Listeners& to);
inline void deliver(PrefixTree& core, Listeners& to) {
  if (core.has_events()) deliver_events(core, to);
}
inline void deliver(Tree& tree) { deliver(tree.core, tree); }
// A new listener first gets everything that can be found now.
void listen(PrefixTree& core, Listeners& to, nb::handle listener);
void unlisten(PrefixTree& core, Listeners& to, nb::handle listener);

// For the garbage collector: the references that an object with listeners has.
template <typename T>
int traverse_listeners(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  if (!nb::inst_ready(self)) return 0;
  for (const Listener& listener : nb::inst_ptr<T>(self)->listeners) Py_VISIT(listener.call.ptr());
  return 0;
}

template <typename T>
int clear_listeners(PyObject* self) {
  if (nb::inst_ready(self)) {
    std::vector<Listener> listeners;
    listeners.swap(nb::inst_ptr<T>(self)->listeners);
  }
  return 0;
}

nb::object tree_counts(const PrefixTree& core);
nb::list list_nodes(const PrefixTree& core, nb::handle max_nodes, nb::handle max_tokens, nb::handle space);

// ── arguments, read in two steps as in arrays.hpp: construct all, then borrow all ───────────────────

// A namespace: bytes, or the UTF-8 of a str. Borrowed from the argument.
std::string_view to_space(nb::handle value);

// Tokens and what else is part of their identity.
class SequenceArgument {
 public:
  SequenceArgument(nb::handle tokens, nb::handle space, nb::handle extra_keys);
  Sequence borrow() { return {space_, tokens_.borrow(), ranges_.empty() ? nullptr : &ranges_}; }

 private:
  IdArray tokens_;
  std::string_view space_;
  std::vector<KeyRange> ranges_;
};

// Page ids: one array for one column, else a list or tuple of arrays, one per column.
class ColumnsArgument {
 public:
  ColumnsArgument(nb::handle page_ids, int num_columns);
  std::vector<Ids> borrow();

 private:
  std::optional<IdArray> one_;
  std::deque<IdArray> many_;
  std::vector<nb::object> kept_;  // keeps the arrays of many_ alive
};

std::vector<Checkpoint> to_checkpoints(nb::handle value);
std::vector<int64_t> to_windows(nb::handle value);

// The items of a list, a tuple or another sequence, as owned references.
std::vector<nb::object> to_items(nb::handle value, const char* name, const char* what);

// An array with these entries, and a tuple of arrays.
nb::object to_array(const std::vector<int32_t>& entries);
nb::object to_tuple(const std::vector<std::vector<int32_t>>& columns);
nb::object to_tuple(const std::vector<Checkpoint>& checkpoints);
nb::object to_tuple(const std::vector<KeyRange>& ranges);

}  // namespace pagoda::bind
