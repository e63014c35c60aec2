// Random steps against what a work list must be, for a build with ASan and UBSan.
//
//     fuzz_work SEED STEPS
//
// Every key that a query of a decode row reads is in exactly one segment, every partial result has a part of its own,
// programs have about equal work, and nothing exceeds the bounds that buffers are made for. The list passes its own
// check, also for buffers of more programs, and a list with one number changed is refused or is right as well. Prints
// "ok" and ends with 0, or says at which step and ends with 1.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <stdexcept>
#include <vector>

#include "core/work_list.hpp"

namespace {

using namespace pagoda;
using Words = std::vector<int32_t>;

int64_t g_step = 0;

void require(bool holds, const char* what) {
  if (holds) return;
  std::printf("step %lld: %s\n", static_cast<long long>(g_step), what);
  std::exit(1);
}

Ids view(const Words& words) { return {words.data(), static_cast<int64_t>(words.size())}; }

class Fuzz {
 public:
  explicit Fuzz(uint64_t seed) : random_(seed) {
    for (int64_t g = below(3); g >= 0; --g) {
      groups_.push_back({below(2) == 0 ? 0 : 1 + below(3000), below(4) == 0 ? 0 : 1 + below(1 + below(300))});
    }
    lists_ = std::make_unique<WorkLists>(groups_);
  }

  void step() {
    Words rows, lengths, counts, starts{0};
    const int64_t most = below(4) == 0 ? 60000 : 1 + below(2000), extend = below(3);
    for (int64_t n = below(1 + below(40)); n > 0; --n) {
      const int64_t length = below(most + 1);
      const int64_t wanted = extend > 0 && below(5) == 0 ? below(700) : below(3) == 0 ? below(10) : 1;
      rows.push_back(static_cast<int32_t>(rows.size() + 1));
      lengths.push_back(static_cast<int32_t>(length));
      counts.push_back(static_cast<int32_t>(std::min(wanted, length)));
      starts.push_back(starts.back() + counts.back());
    }
    const Ids section = lists_->make(view(lengths), view(counts));
    const Words packed = pack(rows, lengths, counts, starts, section);
    const DeltaView delta(view(packed));
    for (size_t g = 0; g < groups_.size(); ++g) {
      const WorkView work = delta.work(static_cast<int64_t>(g));
      if (groups_[g].target == 0 || rows.empty()) {
        require(work.target == 0, "a list that nobody asked for");
        continue;
      }
      judge(work, groups_[g], lengths, counts);
      check_work(work, groups_[g], "it", view(lengths), view(counts));
      check_work(work, {groups_[g].window, groups_[g].target + 1}, "it", view(lengths), view(counts));
    }
    if (section.size > 0) change_one(packed, section, lengths, counts);
  }

 private:
  int64_t below(int64_t n) { return static_cast<int64_t>(random_() % static_cast<uint64_t>(n)); }

  Words pack(const Words& rows, const Words& lengths, const Words& counts, const Words& starts, Ids work) const {
    DeltaLayout layout(static_cast<int64_t>(groups_.size()));
    const int64_t n = static_cast<int64_t>(rows.size());
    for (const Section kind : {Section::kRows, Section::kLengths, Section::kCounts}) layout.add(kind, 0, n);
    layout.add(Section::kStarts, 0, n > 0 ? n + 1 : 0);
    layout.add(Section::kWork, 0, work.size);
    Words packed(static_cast<size_t>(layout.size()));
    layout.write(1, packed.data(), [&](Section kind, int64_t, int32_t* at) {
      const Ids from = kind == Section::kRows      ? view(rows)
                       : kind == Section::kLengths ? view(lengths)
                       : kind == Section::kCounts  ? view(counts)
                       : kind == Section::kStarts  ? view(starts)
                                                   : work;
      std::copy_n(from.data, from.size, at);
    });
    return packed;
  }

  void judge(const WorkView& work, const WorkGroup& group, const Words& lengths, const Words& counts) {
    const size_t n = lengths.size();
    std::vector<std::vector<int>> keys(n);
    for (size_t i = 0; i < n; ++i) keys[i].assign(static_cast<size_t>(lengths[i]), 0);
    std::vector<int> results(static_cast<size_t>(work.num_parts), 0);
    int64_t tokens = 0, most_queries = 0;
    for (int64_t s = 0; s < work.segments.size / 4; ++s) {
      const int32_t* segment = work.segments.data + 4 * s;
      require(segment[3] == 1 && segment[2] == s, "a segment has one member, its own");
      const int32_t row = work.members[2 * s], part = work.members[2 * s + 1];
      const size_t i = static_cast<size_t>(row);
      require(counts[i] >= 1 && counts[i] <= kDecodeQueries, "segments belong to decode rows");
      for (int64_t key = segment[0]; key < segment[1]; ++key) ++keys[i].at(static_cast<size_t>(key));
      for (int32_t q = 0; part >= 0 && q < counts[i]; ++q) ++results.at(static_cast<size_t>(part + q));
      require((part >= 0) == (work.splits[2 * row] > 1), "a part for a row that is split, and no other");
      require(part < 0 || segment[0] % 64 == 0 || s == 0 || work.members[2 * s - 2] != row, "parts begin at 64s");
    }
    for (size_t i = 0; i < n; ++i) {
      const int64_t count = counts[i], read = group.window > 0 ? count + group.window - 1 : lengths[i];
      const bool is_decode = count >= 1 && count <= kDecodeQueries;
      for (int64_t key = 0; key < lengths[i]; ++key) {
        const bool is_read = is_decode && key >= lengths[i] - read;
        require(keys[i][static_cast<size_t>(key)] == is_read, "a key is covered once if it is read");
      }
      const int32_t parts = work.splits[2 * static_cast<int64_t>(i)];
      const int32_t first = work.splits[2 * static_cast<int64_t>(i) + 1];
      require((parts == 0) == (count == 0), "rows without queries have no parts");
      if (count > kDecodeQueries) {
        require(parts >= 1 && parts <= std::min(kExtendParts, work.extend_parts), "an extend row has too many parts");
        for (int64_t p = 0; parts > 1 && p < parts * count; ++p) ++results.at(static_cast<size_t>(first + p));
      }
      tokens += count;
      most_queries = std::max(most_queries, count);
    }
    for (const int times : results) require(times == 1, "a part has one result");
    const int64_t num_rows = static_cast<int64_t>(n);
    require(work.segments.size / 4 <= num_rows + work.target, "more segments than buffers have room for");
    require(work.num_parts <= most_parts(num_rows, tokens, most_queries, work.target), "more parts than the bound");
    judge_runs(work);
  }

  // Programs have an equal share of all keys, and at most a sixteenth or 63 keys more. Only the last may have less, or,
  // where no program has two rows, the last of each row.
  void judge_runs(const WorkView& work) {
    require(work.runs.size == work.target + 1, "a run for each program");
    require(work.runs[0] == 0 && work.runs[work.target] == work.segments.size / 4, "runs have all segments");
    Words loads;
    int64_t total = 0;
    bool has_shared = false;
    for (int64_t p = 0; p < work.target; ++p) {
      int32_t load = 0;
      for (int64_t s = work.runs[p]; s < work.runs[p + 1]; ++s) {
        load += work.segments[4 * s + 1] - work.segments[4 * s];
        has_shared = has_shared || s > work.runs[p];
      }
      if (load > 0) loads.push_back(load);
      total += load;
    }
    const int64_t share = std::max<int64_t>(256, (total + work.target - 1) / work.target);
    for (size_t p = 0; p < loads.size(); ++p) {
      require(loads[p] <= share + std::max<int64_t>(share / 16, 63), "a program has too much work");
      const bool is_last = p + 1 == loads.size() || (!has_shared && work.members[2 * p] != work.members[2 * p + 2]);
      require(loads[p] >= share || is_last, "a program has too little work");
    }
  }

  // A list with one wrong number is refused, or is another list of the same rows that is right as well.
  void change_one(Words packed, Ids section, const Words& lengths, const Words& counts) {
    const Ids inside = DeltaView(view(packed)).section(Section::kWork);
    const int64_t at = inside.data - packed.data() + below(section.size);
    const int32_t change[] = {1, -1, 64, -1000000, 1 << 30};
    packed[static_cast<size_t>(at)] = static_cast<int32_t>(packed[static_cast<size_t>(at)] ^ change[below(5)]);
    try {
      const DeltaView delta(view(packed));
      for (size_t g = 0; g < groups_.size(); ++g) {
        if (groups_[g].target == 0) continue;
        const WorkView work = delta.work(static_cast<int64_t>(g));
        check_work(work, groups_[g], "it", view(lengths), view(counts));
        judge_cover(work, lengths, counts);
      }
    } catch (const BadArgument&) {
    }
  }

  // What a kernel does with a list stays inside of its memory.
  void judge_cover(const WorkView& work, const Words& lengths, const Words& counts) {
    std::vector<int> results(static_cast<size_t>(work.num_parts), 0);
    for (int64_t s = 0; s < work.segments.size / 4; ++s) {
      const int32_t* segment = work.segments.data + 4 * s;
      for (int64_t m = segment[2]; m < segment[2] + segment[3]; ++m) {
        require(m < work.members.size / 2, "a member that is not there");
        const size_t row = static_cast<size_t>(work.members[2 * m]);
        require(segment[0] >= 0 && segment[1] <= lengths.at(row), "keys that are not there");
        const int32_t part = work.members[2 * m + 1];
        for (int32_t q = 0; part >= 0 && q < counts[row]; ++q) ++results.at(static_cast<size_t>(part + q));
      }
    }
    for (const int times : results) require(times <= 1, "two results in one part");
    int64_t done = 0;
    for (int64_t p = 0; p < work.target; ++p) {
      for (int64_t s = work.runs[p]; s < work.runs[p + 1]; ++s) require(s == done++, "a segment out of turn");
    }
    require(done == work.segments.size / 4, "a segment that no program computes");
  }

  std::mt19937_64 random_;
  std::vector<WorkGroup> groups_;
  std::unique_ptr<WorkLists> lists_;
};

}  // namespace

int main(int argc, char** argv) {
  const uint64_t seed = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 1;
  const int64_t steps = argc > 2 ? std::strtoll(argv[2], nullptr, 10) : 10000;
  for (int64_t done = 0; done < steps / 10;) {
    Fuzz fuzz(seed * 1000 + static_cast<uint64_t>(done));
    for (int64_t i = 0; i < 20; ++i, ++done) {
      g_step = done;
      try {
        fuzz.step();
      } catch (const BadArgument& e) {
        require(false, e.what());
      } catch (const std::out_of_range&) {
        require(false, "a number beyond what it counts");
      }
    }
  }
  std::printf("ok: %lld steps\n", static_cast<long long>(steps / 10));
  return 0;
}
