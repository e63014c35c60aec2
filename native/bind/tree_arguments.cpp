#include <algorithm>
#include <limits>

#include "bind/tree.hpp"

namespace pagoda::bind {

namespace {

constexpr int64_t kMaxId = std::numeric_limits<int32_t>::max();

bool is_empty_tuple(nb::handle value) { return PyTuple_CheckExact(value.ptr()) && PyTuple_GET_SIZE(value.ptr()) == 0; }

std::vector<KeyRange> to_ranges(nb::handle value) {
  std::vector<KeyRange> ranges;
  if (is_empty_tuple(value)) return ranges;
  constexpr const char* kWhat = "(begin, end, key), in order, without overlap, 0 <= begin < end, key bytes or str";
  int64_t before = 0;
  for (const nb::object& item : to_items(value, "extra_keys", kWhat)) {
    const auto parts = to_items(item, "extra_keys", kWhat);
    if (parts.size() != 3) throw BadArgument(std::string("extra_keys: give ") + kWhat);
    const int64_t begin = to_int(parts[0], "extra_keys", 0, std::numeric_limits<int64_t>::max());
    const int64_t end = to_int(parts[1], "extra_keys", 0, std::numeric_limits<int64_t>::max());
    if (begin < before || end <= begin) throw BadArgument(std::string("extra_keys: give ") + kWhat);
    before = end;
    const bool is_key = PyBytes_Check(parts[2].ptr()) || PyUnicode_Check(parts[2].ptr());
    if (!is_key) throw BadArgument(std::string("extra_keys: give ") + kWhat);
    ranges.push_back({begin, end, std::string(to_space(parts[2]))});
  }
  return ranges;
}

}  // namespace

std::string_view to_space(nb::handle value) {
  if (PyBytes_Check(value.ptr())) {
    return {PyBytes_AS_STRING(value.ptr()), static_cast<size_t>(PyBytes_GET_SIZE(value.ptr()))};
  }
  Py_ssize_t size = 0;
  const char* text = PyUnicode_Check(value.ptr()) ? PyUnicode_AsUTF8AndSize(value.ptr(), &size) : nullptr;
  if (text == nullptr) {
    if (PyErr_Occurred() != nullptr) forgive();
    throw BadArgument("namespace: give bytes, or a str of valid characters");
  }
  return {text, static_cast<size_t>(size)};
}

std::vector<nb::object> to_items(nb::handle value, const char* name, const char* what) {
  nb::object items;
  if (!PyUnicode_Check(value.ptr()) && !PyBytes_Check(value.ptr()) && !PyDict_Check(value.ptr())) {
    items = nb::steal(PySequence_Fast(value.ptr(), ""));
    if (!items.is_valid()) forgive();
  }
  if (!items.is_valid()) throw BadArgument(std::string(name) + ": give a list or tuple of " + what);
  std::vector<nb::object> result;
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(items.ptr()); ++i) {
    result.push_back(nb::borrow(PySequence_Fast_GET_ITEM(items.ptr(), i)));
  }
  return result;
}

SequenceArgument::SequenceArgument(nb::handle tokens, nb::handle space, nb::handle extra_keys)
    : tokens_(tokens, "tokens"), space_(to_space(space)), ranges_(to_ranges(extra_keys)) {}

ColumnsArgument::ColumnsArgument(nb::handle page_ids, int num_columns) {
  if (num_columns == 1) {
    one_.emplace(page_ids, "page_ids");
    return;
  }
  constexpr const char* kWhat = "arrays of page ids, one per column";
  const auto items = to_items(page_ids, "page_ids", kWhat);
  if (static_cast<int>(items.size()) != num_columns) {
    throw BadArgument("page_ids: give a list or tuple of " + text(num_columns) + " arrays, one per column, not " +
                      text(static_cast<int64_t>(items.size())));
  }
  for (const nb::object& item : items) many_.emplace_back(item, "page_ids");
  kept_ = items;
}

std::vector<Ids> ColumnsArgument::borrow() {
  std::vector<Ids> columns;
  if (one_) columns.push_back(one_->borrow());
  for (IdArray& array : many_) columns.push_back(array.borrow());
  return columns;
}

std::vector<Checkpoint> to_checkpoints(nb::handle value) {
  std::vector<Checkpoint> checkpoints;
  if (is_empty_tuple(value)) return checkpoints;
  constexpr const char* kWhat = "(length, state id) pairs";
  for (const nb::object& item : to_items(value, "checkpoints", kWhat)) {
    const auto parts = to_items(item, "checkpoints", kWhat);
    if (parts.size() != 2) throw BadArgument(std::string("checkpoints: give ") + kWhat);
    const int64_t length = to_int(parts[0], "checkpoints", -kMaxId, kMaxId);
    const int64_t state_id = to_int(parts[1], "checkpoints", -kMaxId, kMaxId);
    checkpoints.push_back({static_cast<int32_t>(length), static_cast<int32_t>(state_id)});
  }
  return checkpoints;
}

std::vector<int64_t> to_windows(nb::handle value) {
  constexpr const char* kWhat = "windows, one per column: None, or 1 token or more";
  std::vector<int64_t> windows;
  for (const nb::object& item : to_items(value, "windows", kWhat)) {
    windows.push_back(item.is_none() ? 0 : to_int(item, "windows", 1, kMaxId));
  }
  if (windows.empty()) throw BadArgument(std::string("windows: give a list or tuple of ") + kWhat);
  return windows;
}

nb::object to_array(const std::vector<int32_t>& entries) {
  auto array = new_int32(static_cast<int64_t>(entries.size()));
  std::copy(entries.begin(), entries.end(), array.data);
  return array.array;
}

nb::object to_tuple(const std::vector<std::vector<int32_t>>& columns) {
  nb::list arrays;
  for (const auto& column : columns) arrays.append(to_array(column));
  return nb::tuple(arrays);
}

nb::object to_tuple(const std::vector<Checkpoint>& checkpoints) {
  nb::list pairs;
  for (const Checkpoint& each : checkpoints) pairs.append(nb::make_tuple(each.length, each.state_id));
  return nb::tuple(pairs);
}

nb::object to_tuple(const std::vector<KeyRange>& ranges) {
  nb::list all;
  for (const KeyRange& range : ranges) {
    all.append(nb::make_tuple(range.begin, range.end, nb::bytes(range.key.data(), range.key.size())));
  }
  return nb::tuple(all);
}

}  // namespace pagoda::bind
