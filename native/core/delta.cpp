#include "core/delta.hpp"

#include <algorithm>
#include <cstring>
#include <limits>

namespace pagoda {

int64_t DeltaLayout::head_size() const { return aligned(DeltaView::kFixed + 4 * num_sections_); }

int64_t DeltaLayout::size() const {
  int64_t n = head_size();
  for (int64_t i = 0; i < num_sections_; ++i) n = aligned(n + (*this)[i].size);
  return n;
}

int64_t DeltaLayout::write_head(int64_t step, int32_t* out) const {
  const int64_t head = head_size();
  *out++ = DeltaView::kFormat;
  *out++ = static_cast<int32_t>(step & std::numeric_limits<int32_t>::max());
  *out++ = static_cast<int32_t>(step >> 31);
  *out++ = static_cast<int32_t>(num_groups_);
  *out++ = static_cast<int32_t>(num_sections_);
  const int32_t* const end = out - DeltaView::kFixed + head;
  int64_t at = head;
  for (int64_t i = 0; i < num_sections_; ++i) {
    const Entry& section = (*this)[i];
    *out++ = static_cast<int32_t>(section.kind);
    *out++ = static_cast<int32_t>(section.group);
    *out++ = static_cast<int32_t>(at);
    *out++ = static_cast<int32_t>(section.size);
    at = aligned(at + section.size);
  }
  while (out < end) *out++ = 0;
  return head;
}

DeltaView::DeltaView(Ids packed) : packed_(packed), step_(0) {
  const auto refuse = [&](const char* why) {
    throw BadArgument("packed: " + text(packed.size) + " integers are not a delta: " + why);
  };
  if (packed.size < kFixed || packed[0] != kFormat) refuse("they do not start with the format word");
  if (packed[1] < 0 || packed[2] < 0 || packed[3] < 0) refuse("the head contains a negative number");
  const int64_t num_sections = packed[4];
  if (packed[3] > kMaxGroups) refuse("the head names too many groups");
  if (num_sections < 0 || kFixed + 4 * num_sections > packed.size) refuse("the directory is truncated");
  step_ = packed[1] | int64_t{packed[2]} << 31;
  const char* const differ = "two sections that belong together differ in size";
  constexpr int64_t kShared =
      static_cast<int64_t>(Section::kPageIds);  // kinds up to this one, and work, are common to all groups
  int64_t last = 0;                             // rank of the last known section in the order of the directory
  int64_t sources = 0;                          // size of the sources whose targets come next
  for (int64_t i = 0; i < num_sections; ++i) {
    const int32_t* entry = packed.data + kFixed + 4 * i;
    const int64_t kind = entry[0], group = entry[1], begin = entry[2], size = entry[3];
    if (group < 0 || group >= std::max<int64_t>(1, num_groups())) refuse("a section belongs to no group");
    if (begin < kFixed + 4 * num_sections || size < 0 || begin + size > packed.size) refuse("a section is truncated");
    if (kind < 1 || kind > static_cast<int64_t>(Section::kWork)) continue;
    const bool is_work = kind == static_cast<int64_t>(Section::kWork), is_shared = kind <= kShared || is_work;
    const int64_t at = is_work ? std::numeric_limits<int32_t>::max() : is_shared ? kind : kind + 2 * group;
    if (at <= last || (is_shared && group > 0)) refuse("the sections are out of order");
    const bool is_targets = kind == static_cast<int64_t>(Section::kTargets);
    if (is_targets ? size != (at == last + 1 ? sources : 0) : sources > 0) refuse(differ);
    sources = kind == static_cast<int64_t>(Section::kSources) ? size : 0;
    last = at;
  }
  if (sources > 0) refuse(differ);
  const auto size = [&](Section kind) { return section(kind).size; };
  const int64_t num_rows = size(Section::kRows);
  if (size(Section::kLengths) != num_rows || size(Section::kCounts) != num_rows ||
      size(Section::kStarts) != (num_rows > 0 ? num_rows + 1 : 0) ||
      size(Section::kSaveLengths) != size(Section::kSaveRows) || size(Section::kSaveIds) != size(Section::kSaveRows) ||
      size(Section::kRestoreLengths) != size(Section::kRestoreRows) ||
      size(Section::kRestoreIds) != size(Section::kRestoreRows) ||
      size(Section::kStateTargets) != size(Section::kStateSources) ||
      size(Section::kPlaces) != size(Section::kPageIds)) {
    refuse(differ);
  }
  if (!has_valid_work()) refuse("the work list is truncated");
}

bool DeltaView::has_valid_work() const {
  const Ids section = this->section(Section::kWork);
  const int64_t num_rows = this->section(Section::kRows).size, head = kWorkEntry * num_groups();
  if (section.size == 0) return true;
  if (num_rows == 0 || section.size < head) return false;
  const auto is_inside = [&](int64_t begin, int64_t n, int64_t width) {
    return begin >= head && n >= 0 && begin + width * n <= section.size;
  };
  for (int64_t g = 0; g < num_groups(); ++g) {
    WorkEntry entry;
    std::memcpy(&entry, section.data + kWorkEntry * g, sizeof(entry));
    const WorkEntry absent{};
    if (std::memcmp(&entry, &absent, sizeof(entry)) == 0) continue;
    if (entry.target < 1 || entry.num_parts < 0 || entry.extend_parts < 1 ||
        !is_inside(entry.segments, entry.num_segments, 4) || !is_inside(entry.members, entry.num_members, 2) ||
        !is_inside(entry.splits, 2 * num_rows + entry.target + 1, 1)) {
      return false;
    }
  }
  return true;
}

WorkView DeltaView::work(int64_t group) const {
  const Ids section = this->section(Section::kWork);
  if (section.size == 0) return {};
  WorkEntry entry;
  std::memcpy(&entry, section.data + kWorkEntry * group, sizeof(entry));
  if (entry.target == 0) return {};
  WorkView work;
  work.target = entry.target;
  work.segments = {section.data + entry.segments, int64_t{4} * entry.num_segments};
  work.members = {section.data + entry.members, int64_t{2} * entry.num_members};
  work.splits = {section.data + entry.splits, 2 * this->section(Section::kRows).size};
  work.runs = {work.splits.data + work.splits.size, int64_t{entry.target} + 1};
  work.num_parts = entry.num_parts;
  work.extend_parts = entry.extend_parts;
  return work;
}

Ids DeltaView::section(Section kind, int64_t group) const {
  for (int64_t i = 0; i < packed_[4]; ++i) {
    const int32_t* entry = packed_.data + kFixed + 4 * i;
    if (entry[0] == static_cast<int32_t>(kind) && entry[1] == group) return {packed_.data + entry[2], entry[3]};
  }
  return {packed_.data, 0};
}

}  // namespace pagoda
