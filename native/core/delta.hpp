// The format of a delta: what one step computes and changes, as one int32 array that every rank gets.
//
//     [format, step in two halves of 31 bits, number of groups, number of sections]
//     [kind, group, begin, size] of each section: the directory
//     the sections, each at a multiple of four words, so that it is aligned wherever the array is copied to
//
// Sections are found through the directory, by kind and group. Known kinds are listed in the order below, each once,
// sources and targets group by group; an empty section may be omitted, and readers skip unknown kinds. Words between
// sections are 0. Only this file knows the format.
//
// The section of work has the lists of all groups (work_list.hpp says what they are for):
//
//     [target, segments, number of segments, members, number of members, splits, number of parts, extend parts]
//         of each group: where its arrays begin in the section; all 0 if the group has no list
//     the lists, each at a multiple of four words:
//         segments  [s, 4]: first key, end of the keys, first member, number of members
//         members   [m, 2]: a row, as its index in the step; its first part in this segment, or -1 if it is not split
//         splits    [rows, 2]: number of parts, 0 without queries; the row's first part, or -1 if it is not split
//         runs      [target + 1], right behind the splits: program p computes segments runs[p] ... runs[p + 1] - 1
//
// Members are listed segment by segment. The segments of a row are in the order of its keys, cover its span exactly
// once, and have its parts in this order. The first segment of a row that is split is the last one of its run. There
// are fewer segments than rows and programs together. Segments of several rows contain rows of one query only. Parts
// are numbered from 0 over the rows in order. `extend parts` is the most parts of an extend row, 1 if there is none.
#pragma once

#include <cstdint>
#include <vector>

#include "core/errors.hpp"
#include "core/free_list.hpp"

namespace pagoda {

enum class Section : int32_t {
  kRows = 1,            // [rows] rows of the step
  kLengths = 2,         // [rows] tokens of each once the step is computed
  kCounts = 3,          // [rows] tokens of each that the step computes
  kStarts = 4,          // [rows + 1] where each row's tokens begin among the step's: running sums of counts from 0
  kSaveRows = 5,        // [saves] rows whose state is saved
  kSaveLengths = 6,     // [saves] tokens in each of these states
  kSaveIds = 7,         // [saves] checkpoints to write
  kRestoreRows = 8,     // [restores] rows whose state is written
  kRestoreLengths = 9,  // [restores] tokens in each of these states
  kRestoreIds = 10,     // [restores] checkpoints to read
  kResetRows = 11,      // [resets] rows whose state becomes that of a new request
  kStateSources = 12,   // [state copies] rows whose state is copied
  kStateTargets = 13,   // [state copies] rows that get it
  kPlaces = 14,         // [writes] places in the page tables
  kPageIds = 15,        // [writes] what to write there
  kSources = 16,        // [copies] of one group: pages to copy
  kTargets = 17,        // [copies] of one group: pages to write
  kWork = 18,           // the work lists of attention, as described above
};

// A group in the directory of the section of work.
struct WorkEntry {
  int32_t target, segments, num_segments, members, num_members, splits, num_parts, extend_parts;
};
constexpr int64_t kWorkEntry = 8;  // words
static_assert(sizeof(WorkEntry) == kWorkEntry * sizeof(int32_t), "read and written as words");

// The work list of a group; target 0 if it has none.
struct WorkView {
  int64_t target = 0;
  Ids segments{nullptr, 0}, members{nullptr, 0}, splits{nullptr, 0}, runs{nullptr, 0};  // all words of each
  int64_t num_parts = 0, extend_parts = 1;
};

// Where the sections of a delta begin. In: kinds and sizes; out: an array with a head.
class DeltaLayout {
 public:
  explicit DeltaLayout(int64_t num_groups) : num_groups_(num_groups) {}

  // Empty sections are omitted.
  void add(Section kind, int64_t group, int64_t size) {
    if (size == 0) return;
    if (num_sections_ < kFew) {
      few_[num_sections_++] = {kind, group, size};
    } else {
      many_.push_back({kind, group, size});
      ++num_sections_;
    }
  }
  // Words of the whole array.
  int64_t size() const;
  // Writes the head, and calls fill(kind, group, where) for each section, in the order in which they were added.
  template <typename Fill>
  void write(int64_t step, int32_t* out, Fill fill) const {
    int64_t at = write_head(step, out);
    for (int64_t i = 0; i < num_sections_; ++i) {
      const Entry& section = (*this)[i];
      fill(section.kind, section.group, out + at);
      at += section.size;
      for (const int64_t next = aligned(at); at < next; ++at) out[at] = 0;
    }
  }

 private:
  struct Entry {
    Section kind;
    int64_t group, size;
  };
  static constexpr int64_t kFew = 12;  // enough for most steps: stored inline
  static int64_t aligned(int64_t words) { return (words + 3) / 4 * 4; }
  const Entry& operator[](int64_t i) const { return i < kFew ? few_[i] : many_[static_cast<size_t>(i - kFew)]; }
  int64_t head_size() const;
  int64_t write_head(int64_t step, int32_t* out) const;

  int64_t num_groups_;
  int64_t num_sections_ = 0;
  Entry few_[kFew];
  std::vector<Entry> many_;
};

// A view of a delta. Throws BadArgument if the array is not a delta.
class DeltaView {
 public:
  explicit DeltaView(Ids packed);

  int64_t step() const { return step_; }
  int64_t num_groups() const { return packed_[3]; }
  // A section; empty if it was omitted.
  Ids section(Section kind, int64_t group = 0) const;
  WorkView work(int64_t group) const;
  // Calls each(kind, group, begin, size) for every section of a known kind.
  template <typename Each>
  void for_sections(Each each) const {
    for (int64_t i = 0; i < packed_[4]; ++i) {
      const int32_t* entry = packed_.data + kFixed + 4 * i;
      if (entry[0] >= 1 && entry[0] <= static_cast<int32_t>(Section::kWork)) {
        each(static_cast<Section>(entry[0]), entry[1], entry[2], entry[3]);
      }
    }
  }

  static constexpr int64_t kFixed = 5;  // words before the directory
  static constexpr int32_t kFormat = 0x50474431;
  static constexpr int32_t kMaxGroups = 1 << 16;

 private:
  bool has_valid_work() const;

  Ids packed_;
  int64_t step_;
};

}  // namespace pagoda
