// The Python objects around the core's tree.
#pragma once

#include <nanobind/nanobind.h>

#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "bind/arrays.hpp"
#include "core/prefix_tree.hpp"

namespace pagoda::bind {

// pagoda.PrefixTree: the core's tree and who listens to it.
struct Tree {
  Tree(int64_t page_size, std::vector<int64_t> windows, bool has_states, int64_t capacity)
      : core(page_size, std::move(windows), has_states, capacity) {
    static int64_t next = 1;
    id = next++;
  }
  PrefixTree core;
  int64_t id;  // tells a match of another tree
  std::vector<nb::object> listeners;
  std::deque<TreeEvent> news;  // not delivered yet
  bool is_delivering = false;
};

// Hands the events of a call that is done to the listeners. Their exceptions are reported, not raised.
void deliver(Tree& tree);

// ── arguments, read in two steps as arrays.hpp says: construct all, then borrow all ─────────────────

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

// Page ids: one array for one column, else a list or tuple of one array a column.
class ColumnsArgument {
 public:
  ColumnsArgument(nb::handle page_ids, int num_columns);
  std::vector<Ids> borrow();

 private:
  std::optional<IdArray> one_;
  std::deque<IdArray> many_;
  std::vector<nb::object> kept_;  // what many_ looks into
};

std::vector<Checkpoint> to_checkpoints(nb::handle value);
std::vector<int64_t> to_windows(nb::handle value);

// The items of a list, a tuple or another sequence, each with a reference of its own.
std::vector<nb::object> to_items(nb::handle value, const char* name, const char* what);

// An array with these entries, and a tuple of arrays.
nb::object to_array(const std::vector<int32_t>& entries);
nb::object to_tuple(const std::vector<std::vector<int32_t>>& columns);
nb::object to_tuple(const std::vector<Checkpoint>& checkpoints);

}  // namespace pagoda::bind
