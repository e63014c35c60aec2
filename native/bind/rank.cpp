#include "core/rank.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <limits>

#include "bind/arrays.hpp"
#include "bind/module.hpp"
#include "bind/tree.hpp"

namespace pagoda::bind {

namespace {

constexpr int64_t kMaxId = std::numeric_limits<int32_t>::max();

void construct(Rank* self, nb::handle groups, nb::handle num_rows, nb::handle max_tokens, nb::handle num_checkpoints) {
  to_config([&] {
    std::vector<PageTable::Group> tables;
    std::vector<KernelPages> pages;
    const int64_t tokens = to_int(max_tokens, "max_tokens", 1, kMaxId);
    for (const nb::object& group : to_items(groups, "groups", "groups")) {
      const nb::tuple parts = nb::cast<nb::tuple>(group);
      const int64_t page_tokens = to_int(parts[2], "page_tokens", 1, kMaxId);
      tables.push_back({to_text(parts[0], "group name"), PageMath(page_tokens).pages_for(tokens),
                        to_int(parts[1], "capacity", 0, kMaxId)});
      pages.push_back({page_tokens, to_int(parts[3], "kernel_page_tokens", 1, page_tokens),
                       parts[4].is_none() ? 0 : to_int(parts[4], "window", 1, int64_t{1} << 40),
                       to_int(parts[5], "max_indices", 0, kMaxId), to_int(parts[6], "workers", 0, kMaxTarget)});
    }
    const int64_t checkpoints =
        num_checkpoints.is_none() ? Rank::kNoStates : to_int(num_checkpoints, "num_checkpoints", 0, kMaxId);
    new (self)
        Rank(std::move(tables), std::move(pages), to_int(num_rows, "num_rows", 1, kMaxId - 1), tokens, checkpoints);
  });
}

nb::tuple check(const Rank& self, nb::handle packed, nb::handle step) {
  IdArray array(packed, "packed");
  const int64_t next = to_int(step, "step", 0, std::numeric_limits<int64_t>::max());
  const Rank::Content found = self.check(array.borrow(), next);
  nb::list copies;
  for (const Rank::Copies& each : found.copies) {
    copies.append(nb::make_tuple(each.group, each.sources, each.targets, each.n, each.is_disjoint));
  }
  nb::object states = nb::none();
  if (!found.states.is_empty()) {
    const Rank::States& at = found.states;
    states = nb::make_tuple(nb::make_tuple(at.save_rows, at.save_lengths, at.save_ids, at.num_saves),
                            nb::make_tuple(at.restore_rows, at.restore_lengths, at.restore_ids, at.num_restores),
                            nb::make_tuple(at.reset_rows, at.num_resets),
                            nb::make_tuple(at.sources, at.targets, at.num_copies));
  }
  nb::list parts;
  for (const Rank::Parts& each : found.parts) parts.append(nb::make_tuple(each.num_parts, each.extend_parts));
  return nb::make_tuple(found.num_rows, found.num_tokens, found.max_count, found.rows, found.lengths, found.starts,
                        found.work, found.num_writes, found.places, found.page_ids, copies, states, parts);
}

void follow(Rank& self, nb::handle packed) {
  IdArray array(packed, "packed");
  self.follow(array.borrow());
}

template <typename T>
T* at(const nb::list& addresses, size_t i) {
  return reinterpret_cast<T*>(nb::cast<uintptr_t>(addresses[i]));
}

void fill(const Rank& self, nb::handle packed, int64_t num_rows, int64_t num_tokens, const nb::list& addresses) {
  IdArray array(packed, "packed");
  const BatchBuffers shared{at<int32_t>(addresses, 0), at<int32_t>(addresses, 1), at<int32_t>(addresses, 2),
                            at<int64_t>(addresses, 3), at<int32_t>(addresses, 4), at<int32_t>(addresses, 5)};
  std::vector<GroupBuffers> groups;
  for (size_t i = 6; i < addresses.size(); i += 9) {
    groups.push_back({at<int64_t>(addresses, i), at<int32_t>(addresses, i + 1), at<int32_t>(addresses, i + 2),
                      at<int32_t>(addresses, i + 3), at<int32_t>(addresses, i + 4), at<int32_t>(addresses, i + 5),
                      at<int32_t>(addresses, i + 6), at<int32_t>(addresses, i + 7), at<int32_t>(addresses, i + 8)});
  }
  self.fill(array.borrow(), num_rows, num_tokens, shared, groups);
}

// The step, the number of groups, and (name, group, begin, size) of each section that is not empty.
nb::tuple read_delta(nb::handle packed) {
  static const char* const names[] = {
      "rows",          "lengths",      "counts",          "starts",      "save_rows",  "save_lengths",
      "save_ids",      "restore_rows", "restore_lengths", "restore_ids", "reset_rows", "state_sources",
      "state_targets", "places",       "page_ids",        "sources",     "targets",    "work"};
  IdArray array(packed, "packed");
  const DeltaView delta(array.borrow());
  nb::list sections;
  delta.for_sections([&](Section kind, int64_t group, int64_t begin, int64_t size) {
    sections.append(nb::make_tuple(names[static_cast<int>(kind) - 1], group, begin, size));
  });
  return nb::make_tuple(delta.step(), delta.num_groups(), sections);
}

// Where the arrays of a group's work list are: (begin, number of rows) of segments, members, splits and runs, the
// number of parts, the most of an extend row, and the target; None if the group has no list.
nb::object read_work(nb::handle packed, int64_t group) {
  IdArray array(packed, "packed");
  const Ids ids = array.borrow();
  const DeltaView delta(ids);
  if (group < 0 || group >= delta.num_groups()) {
    throw BadArgument("group: the delta has " + text(delta.num_groups()) + " groups, there is no group " + text(group));
  }
  const WorkView work = delta.work(group);
  if (work.target == 0) return nb::none();
  const auto place = [&](Ids words, int64_t width) {
    return nb::make_tuple(words.data - ids.data, words.size / width);
  };
  return nb::make_tuple(place(work.segments, 4), place(work.members, 2), place(work.splits, 2), place(work.runs, 1),
                        work.num_parts, work.extend_parts, work.target);
}

}  // namespace

void bind_rank(nb::module_& m) {
  m.def("read_delta", &read_delta, nb::arg("packed").none(),
        "Return the step of a delta, its number of groups, and its sections as (name, group, begin, size).");
  m.def("read_work", &read_work, nb::arg("packed").none(), nb::arg("group"),
        "Return where the arrays of a group's work list begin and how many rows they have, its number of parts, the "
        "most parts of an extend row and the target; None without a list.");
  m.def("most_parts", &most_parts, nb::arg("num_rows"), nb::arg("num_tokens"), nb::arg("max_queries"),
        nb::arg("target"), "Return the most parts of a work list, over all steps of this size.");
  m.attr("DECODE_QUERIES") = kDecodeQueries;
  m.attr("EXTEND_PARTS") = kExtendParts;
  m.attr("EXTEND_TILE") = kExtendTile;
  m.attr("EXTEND_SHARE") = kExtendShare;
  m.attr("MAX_TARGET") = kMaxTarget;
  nb::class_<Rank>(m, "Rank", "The host side of pagoda.pools.Pools.")
      .def("__init__", &construct, nb::arg("groups").none(), nb::arg("num_rows").none(), nb::arg("max_tokens").none(),
           nb::arg("num_checkpoints") = nb::none())
      .def("check", &check, nb::arg("packed").none(), nb::arg("step").none(),
           R"(Check every number of a delta and return what it asks for: rows and tokens of the step, the most tokens
that a row computes, where rows, lengths, starts and work begin, the number of table writes and where they begin, the
page copies of each group, what happens to states: where saves, restores, resets and copies begin, and the number of
each, None if nothing does; and for each group the parts of its work list and the most of an extend row.

Errors: ArgumentError, OutOfRangeError.)")
      .def("follow", &follow, nb::arg("packed").none(),
           "Write the table changes of a checked delta into the tables on the host.")
      .def("fill", &fill, nb::arg("packed").none(), nb::arg("num_rows"), nb::arg("num_tokens"), nb::arg("addresses"),
           "Fill the host buffers of a batch, given by their addresses in the order of their declaration.");
}

}  // namespace pagoda::bind
