// Random calls on a manager whose memory runs out, for a build with ASan and UBSan.
//
//     fuzz_memory SEED STEPS
//
// Each call is made with memory for no allocation, for one, for two, until it is enough. As long as it is not, the call
// has to throw and change nothing; only what is cached may have become less, where a call evicts. A commit does its
// rows one after the other, each wholly or not at all. States and checkpoints, as the tokens they have seen, follow the
// deltas: a row computes from the state of its own tokens, and the tree's checkpoints are those of their prefixes.
// Prints "ok" and ends with 0, or says which call did not and ends with 1.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <new>
#include <random>
#include <string>
#include <vector>

#include "core/manager.hpp"

namespace {

int64_t g_left = -1;  // allocations before memory runs out; -1: it does not

}  // namespace

void* operator new(size_t size) {
  if (g_left == 0) throw std::bad_alloc();
  if (g_left > 0) --g_left;
  void* p = std::malloc(std::max<size_t>(size, 1));
  if (p == nullptr) throw std::bad_alloc();
  return p;
}
void operator delete(void* p) noexcept { std::free(p); }
void operator delete(void* p, size_t) noexcept { std::free(p); }

namespace {

using namespace pagoda;
using Tokens = std::vector<int32_t>;

int64_t g_step = 0;

void require(bool holds, const char* call, const char* what) {
  if (holds) return;
  std::printf("step %lld: %s: %s\n", static_cast<long long>(g_step), call, what);
  std::exit(1);
}

struct Request {
  int32_t row;
  Tokens prompt;
  int32_t space;  // what else its contents depend on, as a number
  Tokens cuts;

  // The state after n tokens.
  Tokens state(int64_t n) const {
    Tokens all(prompt.begin(), prompt.begin() + n);
    if (n > 0) all.push_back(-space);
    return all;
  }
};

class Fuzz {
 public:
  explicit Fuzz(uint64_t seed) : random_(seed), manager_(specs(), states(), 4, kRows, kTokens, below(2)) {
    manager_.tree().listen(below(2) == 0);
  }

  void step() {
    switch (below(13)) {
      case 0:
      case 1:
        return admit();
      case 10:
        return admit_again();
      case 11:
        return move_pages();
      case 12:
        return serve();
      case 2:
      case 3:
        return grow();
      case 4:
        return commit();
      case 5:
        return fork();
      case 6:
        return release();
      case 7:
        return below(3) == 0 ? forget() : end_step();
      default:
        end_step();
        if (below(4) > 0) commit();
    }
  }

  int64_t num_failures() const { return num_failures_; }
  int64_t num_evicted() const { return manager_.stats().evicted; }
  int64_t num_duplicates() const { return num_duplicates_; }
  int64_t num_resumed() const { return manager_.checkpoints().resumed; }

 private:
  static constexpr int64_t kRows = 7, kTokens = 60;
  static constexpr PerRow kNone{{nullptr, 0}, 0, false};

  // Up to n, often all of it.
  int64_t up_to(int64_t n) { return below(2) == 0 ? n : below(n + 1); }
  int64_t below(int64_t n) { return static_cast<int64_t>(random_() % static_cast<uint64_t>(n)); }

  std::vector<GroupSpec> specs() {
    switch (below(4)) {
      case 0:
        return {{"full", 4, 0, 24, 3}};
      case 1:
        return {{"full", 2, 0, 50}, {"window", 4, 6, 14}};
      case 2:
        return {{"window", 4, 6, 14}};
      default:
        return {{"window", 2, 5, 24, 2}, {"full", 4, 0, 24}, {"latent", 2, 0, 50, 5}};
    }
  }

  StateSpec states() {
    const bool has_states = below(2) == 0;
    return {has_states, has_states ? below(6) : 0, 4 * (1 + below(4))};
  }

  // Words of the delta that a plan without rows would give.
  int64_t delta_size() const { return const_cast<Manager&>(manager_).lay_out({nullptr, 0}, kNone).size(); }

  // What a caller can see. Only if `is_whole` are cached pages that nobody reads told apart from free ones, and a row's
  // own pages from those of the tree, since a duplicate takes the place of a page that is evicted.
  std::vector<int64_t> seen(bool is_whole) const {
    const Manager::Stats stats = manager_.stats();
    std::vector<int64_t> all{manager_.step(), stats.rows, stats.waiting_rows, delta_size(), stats.admitted};
    for (int64_t g = 0; g < manager_.num_groups(); ++g) {
      const Manager::Pages pages = manager_.pages(manager_.group(g));
      all.insert(all.end(), {pages.free + pages.evictable, pages.leased + pages.running, pages.waiting});
      if (is_whole) all.insert(all.end(), {pages.evictable, pages.running});
      for (const Request& request : running_) {
        const int32_t* ids = manager_.table().row(static_cast<size_t>(g), request.row);
        const int64_t first = manager_.first_page(request.row, g);
        all.insert(all.end(), ids + first, ids + manager_.end_page(request.row, g));
      }
    }
    for (const Request& request : running_) {
      const Manager::Lengths lengths = manager_.lengths(request.row);
      all.insert(all.end(), {lengths.reserved, lengths.computed, lengths.committed, lengths.stored});
    }
    if (!is_whole) return all;
    const Manager::Checkpoints checkpoints = manager_.checkpoints();
    all.insert(all.end(), {checkpoints.free, checkpoints.cached, checkpoints.running});
    for (const NodeInfo& node : manager_.tree().nodes(1 << 20, 1 << 20, nullptr)) {
      all.insert(all.end(), {node.begin, node.end, node.leases, node.is_dropped});
      all.insert(all.end(), node.tokens.begin(), node.tokens.end());
      for (const Checkpoint& each : node.checkpoints) all.insert(all.end(), {each.length, each.state_id});
      for (const auto& column : node.columns) all.insert(all.end(), column.begin(), column.end());
    }
    return all;
  }

  // Sometimes there is enough at once: without memory, calls that succeed leave checkpoints out.
  int64_t first_memory() { return below(2) == 0 ? 0 : 1 << 20; }

  // Whether the call did it, once there was memory for it.
  template <typename Call>
  bool call(const char* name, bool may_evict, Call make, int64_t memory = 0) {
    for (;; ++memory) {
      const std::vector<int64_t> before = seen(!may_evict);
      try {
        g_left = memory;
        make();
        g_left = -1;
        manager_.check();
        manager_.tree().take_events();
        return true;
      } catch (const std::bad_alloc&) {
        g_left = -1;
        ++num_failures_;
        manager_.check();
        require(seen(!may_evict) == before, name, "ran out of memory and changed something");
      } catch (const OutOfIds&) {
        g_left = -1;
        require(seen(!may_evict) == before, name, "failed and changed something");
        return false;
      }
    }
  }

  void admit() {
    Tokens prompt;
    if (!running_.empty() && below(2) == 0) {
      prompt = running_[static_cast<size_t>(below(num_running()))].prompt;
    } else if (below(4) > 0) {  // as one that ended, or a part of it
      prompt = past_;
      prompt.resize(static_cast<size_t>(up_to(static_cast<int64_t>(past_.size()))));
    }
    for (int64_t n = 1 + below(14); n > 0; --n) prompt.push_back(static_cast<int32_t>(below(2)));
    prompt.resize(std::min<size_t>(prompt.size(), kTokens - 8));
    const std::string space = below(4) == 0 ? "a name that is too long to be kept in place" : "";
    const std::vector<KeyRange> ranges{{0, 3, "another name that is too long to be kept in place"}};
    admit(prompt, space, below(5) == 0 ? &ranges : nullptr, below(6) > 0, below(6) > 0);
  }

  // From prompt to answer, so that the next one may resume from it.
  void serve() {
    admit();
    for (int64_t n = 3 + below(3); n > 0; --n) {
      end_step();
      commit();
    }
    release();
  }

  // What another row is computing too: both keep pages of their own, and what is stored first is the tree's.
  void admit_again() {
    if (running_.empty()) return;
    const Tokens prompt = running_[static_cast<size_t>(below(num_running()))].prompt;
    admit(prompt, "", nullptr, below(2) == 0, true);
  }

  void admit(const Tokens& prompt, const std::string& space, const std::vector<KeyRange>* ranges, bool read,
             bool store) {
    const int64_t n = static_cast<int64_t>(prompt.size());
    Manager::Prompt wanted{{space, {prompt.data(), n}, ranges}, -1, -1, read, store};
    if (below(4) == 0) wanted.max_hit = below(n + 2);
    if (below(4) == 0) wanted.reserve = below(8);
    bool can_admit = false;
    call("can_admit", false, [&] { can_admit = manager_.can_admit(wanted); });
    Manager::Admitted got{};
    const bool is_done = call("admit", true, [&] { got = manager_.admit(wanted); });
    require(is_done == can_admit, "admit", "does not do what can_admit said");
    if (!is_done) return;
    const int64_t most = wanted.max_hit < 0 ? n - 1 : std::min(n - 1, wanted.max_hit);
    require(got.hit <= (read ? most : 0), "admit", "hit more than it was to");
    running_.push_back({static_cast<int32_t>(got.row), prompt, (space.empty() ? 1 : 2) + (ranges == nullptr ? 0 : 2),
                        Tokens(got.cuts.begin(), got.cuts.end())});
  }

  void grow() {
    Tokens rows;
    for (const Request& request : running_) {
      if (manager_.lengths(request.row).reserved + 6 <= kTokens && below(3) > 0) rows.push_back(request.row);
    }
    const PerRow counts{{nullptr, 0}, 1 + below(6), false};
    call("reserve", true, [&] { manager_.reserve({rows.data(), static_cast<int64_t>(rows.size())}, counts); });
  }

  void commit() {
    Tokens rows, tokens, counts, ends;
    for (Request& request : running_) {
      const Manager::Lengths lengths = manager_.lengths(request.row);
      const int64_t n = up_to(lengths.computed - lengths.committed), end = lengths.committed + n;
      rows.push_back(request.row);
      counts.push_back(static_cast<int32_t>(n));
      ends.push_back(static_cast<int32_t>(end));
      tokens.insert(tokens.end(), request.prompt.begin() + lengths.committed, request.prompt.begin() + end);
    }
    const auto view = [](const Tokens& all, size_t from) {
      return Ids{all.data() + from, static_cast<int64_t>(all.size() - from)};
    };
    size_t done = 0, said = 0;
    for (int64_t memory = first_memory(); done < rows.size(); ++memory) {
      const std::vector<int64_t> before = seen(true);
      try {
        g_left = memory;
        manager_.commit(view(rows, done), view(tokens, said), {view(counts, done), 0, true});
        g_left = -1;
        done = rows.size();
      } catch (const std::bad_alloc&) {
        g_left = -1;
        ++num_failures_;
        const size_t first = done;
        while (done < rows.size() && manager_.lengths(rows[done]).committed == ends[done]) {
          said += static_cast<size_t>(counts[done++]);
        }
        require(done > first || seen(true) == before, "commit", "ran out of memory and changed something");
      }
      manager_.check();
    }
    manager_.tree().take_events();
    for (int64_t g = 0; g < manager_.num_groups(); ++g) {
      num_duplicates_ = std::max(num_duplicates_, manager_.group(g).cached.num_duplicates());
    }
  }

  void roll_back() {
    Tokens rows, counts;
    for (const Request& request : running_) {
      const Manager::Lengths lengths = manager_.lengths(request.row);
      if (manager_.has_states() && lengths.computed > lengths.committed) continue;
      rows.push_back(request.row);
      counts.push_back(static_cast<int32_t>(below(lengths.reserved - lengths.committed + 1)));
    }
    const int64_t n = static_cast<int64_t>(rows.size());
    call("rollback", false, [&] { manager_.rollback({rows.data(), n}, {{counts.data(), n}, 0, true}); });
  }

  // Pages by number: to a row ahead of its tokens and back, to nobody's row and back.
  void move_pages() {
    const int64_t g = below(manager_.num_groups());
    int32_t ids[4];
    if (!running_.empty()) {
      const int32_t row = running_[static_cast<size_t>(below(num_running()))].row;
      const int64_t n = below(4), spare = manager_.group(g).max_pages - manager_.end_page(row, g);
      if (n <= spare) call("extend", true, [&] { manager_.extend(row, g, n, ids); });
      try {
        call("trim", false, [&] { manager_.trim(row, g, 1); });
      } catch (const BadArgument&) {  // it has none to spare, or a step may still read them
        g_left = -1;
      }
    }
    if (given_out_.empty() || below(2) == 0) {
      const int64_t n = 1 + below(2);
      if (!call("alloc_pages", true, [&] { manager_.alloc_pages(g, n, ids); })) return;
      for (int64_t i = 0; i < n; ++i) given_out_.push_back({g, ids[i]});
    } else {
      const auto [group, page] = given_out_.back();
      call("free_pages", false, [&, group = group, page = page] { manager_.free_pages(group, {&page, 1}); });
      given_out_.pop_back();
    }
  }

  void fork() {
    if (running_.empty()) return;
    const Request& parent = running_[static_cast<size_t>(below(num_running()))];
    const int64_t n = 1 + below(3);
    int32_t rows[3];
    bool is_done = false;
    try {
      is_done = call("fork", true, [&] { manager_.fork(parent.row, n, rows); });
    } catch (const BadArgument&) {  // it is not stored, or its state has moved on
      g_left = -1;
    }
    const Tokens prompt = parent.prompt;
    const int32_t space = parent.space;
    for (int64_t i = 0; is_done && i < n; ++i) running_.push_back({rows[i], prompt, space, {}});
  }

  void release() {
    Tokens rows;
    std::vector<Request> rest;
    for (const Request& request : running_) {
      if (below(3) == 0) {
        rows.push_back(request.row);
        past_ = request.prompt;
      } else {
        rest.push_back(request);
      }
    }
    const Ids view{rows.data(), static_cast<int64_t>(rows.size())};
    call("release", false, [&] { manager_.release(view); }, first_memory());
    running_.swap(rest);
  }

  void forget() {
    if (below(3) == 0) {
      call("drop", false, [&] { manager_.drop(""); });
      return;
    }
    const int64_t g = below(manager_.num_groups());
    Tokens bad;
    for (int64_t n = 1 + below(3); n > 0; --n) {
      bad.push_back(static_cast<int32_t>(1 + below(manager_.group(g).spec.num_pages)));
    }
    int32_t rows[kRows];
    call("invalidate", false, [&] { manager_.invalidate(g, {bad.data(), static_cast<int64_t>(bad.size())}, rows); });
  }

  void end_step() {
    if (below(6) == 0) roll_back();
    Tokens rows, counts;
    for (Request& request : running_) {
      const Manager::Lengths lengths = manager_.lengths(request.row);
      if (below(5) == 0) continue;
      rows.push_back(request.row);
      int64_t count = up_to(lengths.reserved - lengths.computed);
      const auto cut = std::upper_bound(request.cuts.begin(), request.cuts.end(), lengths.computed);
      if (cut != request.cuts.end() && below(4) > 0) count = std::min(count, *cut - lengths.computed);
      counts.push_back(static_cast<int32_t>(count));
      while (static_cast<int64_t>(request.prompt.size()) < lengths.computed + count) {
        request.prompt.push_back(static_cast<int32_t>(below(2)));
      }
    }
    const int64_t n = static_cast<int64_t>(rows.size()), step = manager_.step();
    const Ids view{rows.data(), n};
    const PerRow each{{counts.data(), n}, 0, true};
    std::vector<int32_t> packed;
    call(
        "plan", false,
        [&] {
          const DeltaLayout layout = manager_.lay_out(view, each);
          packed.assign(static_cast<size_t>(layout.size()), -1);
          manager_.plan(view, each, layout, packed.data());
        },
        first_memory());
    const DeltaView delta({packed.data(), static_cast<int64_t>(packed.size())});
    const Ids lengths = delta.section(Section::kLengths), starts = delta.section(Section::kStarts);
    require(delta.step() == step && manager_.step() == step + 1, "plan", "is of another step");
    require(lengths.size == n && starts.size == (n > 0 ? n + 1 : 0), "plan", "names other rows");
    for (int64_t i = 0; i < n; ++i) {
      require(delta.section(Section::kRows)[i] == rows[static_cast<size_t>(i)] &&
                  delta.section(Section::kCounts)[i] == counts[static_cast<size_t>(i)] &&
                  lengths[i] == manager_.lengths(rows[static_cast<size_t>(i)]).computed &&
                  starts[i + 1] - starts[i] == counts[static_cast<size_t>(i)],
              "plan", "says something else");
    }
    if (manager_.has_states()) move_states(delta);
    if (below(40) == 0) return start_again();
    const int64_t fence = manager_.step() - 1 - below(3);
    if (fence > 0) call("pass_fence", false, [&] { manager_.pass_fence(fence); });
  }

  // Does what a delta says about states, and what its step computes.
  void move_states(const DeltaView& delta) {
    const auto part = [&](Section kind) { return delta.section(kind); };
    std::vector<bool> is_written(static_cast<size_t>(manager_.num_checkpoints() + 1)), is_begun(kRows + 1);
    const auto begin = [&](int32_t row) {
      require(!is_begun[static_cast<size_t>(row)], "plan", "writes a state twice");
      is_begun[static_cast<size_t>(row)] = true;
    };
    for (int64_t i = 0; i < part(Section::kSaveRows).size; ++i) {
      const Tokens& state = states_[part(Section::kSaveRows)[i]];
      const int32_t id = part(Section::kSaveIds)[i], length = part(Section::kSaveLengths)[i];
      require(static_cast<int64_t>(state.size()) == length + 1, "plan", "saves a state that has moved on");
      require(!is_written[static_cast<size_t>(id)], "plan", "saves twice to one checkpoint");
      is_written[static_cast<size_t>(id)] = true;
      checkpoints_[id] = state;
    }
    for (int64_t i = 0; i < part(Section::kRestoreRows).size; ++i) {
      const Tokens& state = checkpoints_[part(Section::kRestoreIds)[i]];
      const int32_t row = part(Section::kRestoreRows)[i], length = part(Section::kRestoreLengths)[i];
      require(static_cast<int64_t>(state.size()) == length + 1, "plan", "restores a state of another length");
      begin(row);
      states_[row] = state;
    }
    for (const int32_t row : Tokens(part(Section::kResetRows).data, end_of(part(Section::kResetRows)))) {
      begin(row);
      states_[row].clear();
    }
    const Ids sources = part(Section::kStateSources), targets = part(Section::kStateTargets);
    for (int64_t i = 0; i < targets.size; ++i) begin(targets[i]);
    for (int64_t i = 0; i < targets.size; ++i) {
      require(std::find(targets.data, end_of(targets), sources[i]) == end_of(targets), "plan", "copies a copy");
      states_[targets[i]] = states_[sources[i]];
    }
    const Ids rows = part(Section::kRows), lengths = part(Section::kLengths), counts = part(Section::kCounts);
    for (int64_t i = 0; i < rows.size; ++i) {
      const auto request =
          std::find_if(running_.begin(), running_.end(), [&](const Request& each) { return each.row == rows[i]; });
      require(states_[rows[i]] == request->state(lengths[i] - counts[i]), "plan", "computes from another state");
      states_[rows[i]] = request->state(lengths[i]);
    }
    check_checkpoints();
  }

  // The tree's checkpoints, all of which deltas have saved by now, are those of their prefixes.
  void check_checkpoints() const {
    std::map<int64_t, Tokens> paths;  // by the number of the node; extra keys make tokens negative
    for (const NodeInfo& node : manager_.tree().nodes(1 << 20, 1 << 20, nullptr)) {
      Tokens& path = paths[node.number];
      if (node.level > 0) path = paths[node.parent];
      path.insert(path.end(), node.tokens.begin(), node.tokens.end());
      for (const Checkpoint& each : node.checkpoints) {
        const Tokens& state = checkpoints_.at(each.state_id);
        bool is_right = static_cast<int64_t>(state.size()) == each.length + 1;
        for (int64_t i = 0; is_right && i < each.length; ++i) {
          const int32_t token = path[static_cast<size_t>(i)];
          is_right = token < 0 || token == state[static_cast<size_t>(i)];
        }
        require(is_right, "plan", "left a checkpoint of other tokens in the tree");
      }
    }
  }

  static const int32_t* end_of(Ids ids) { return ids.data + ids.size; }

  void start_again() {
    bool is_refused = false;
    try {
      manager_.reset();
    } catch (const BadArgument&) {
      is_refused = true;
    }
    manager_.check();
    require(is_refused, "reset", "was done while a step was running");
    call("pass_fence", false, [&] { manager_.pass_fence(manager_.step() - 1); });
    manager_.reset();
    manager_.check();
    running_.clear();
    given_out_.clear();
    require(manager_.stats().rows == 0 && manager_.step() == 1, "reset", "left something");
  }

  int64_t num_running() const { return static_cast<int64_t>(running_.size()); }

  std::mt19937_64 random_;
  Manager manager_;
  std::vector<Request> running_;
  Tokens past_;                                         // the prompt of a row that has ended
  std::map<int32_t, Tokens> states_, checkpoints_;      // by row and by id
  std::vector<std::pair<int64_t, int32_t>> given_out_;  // group and page, of no row
  int64_t num_failures_ = 0, num_duplicates_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  const uint64_t seed = std::strtoull(argv[1], nullptr, 10);
  const int64_t steps = std::atoll(argv[2]);
  int64_t num_failures = 0, num_evicted = 0, num_duplicates = 0, num_resumed = 0;
  try {
    // Managers of many kinds, each for a while.
    for (uint64_t kind = 0; g_step < steps; ++kind) {
      Fuzz fuzz(seed * 1000 + kind);
      for (int64_t end = std::min(steps, g_step + 150); g_step < end; ++g_step) fuzz.step();
      num_failures += fuzz.num_failures();
      num_evicted += fuzz.num_evicted();
      num_duplicates += fuzz.num_duplicates();
      num_resumed += fuzz.num_resumed();
    }
  } catch (const BrokenInvariant& e) {
    std::printf("step %lld: invariant %d: %s\n", static_cast<long long>(g_step), e.number, e.message.c_str());
    return 1;
  }
  std::printf(
      "ok: %lld steps, memory ran out %lld times, %lld pages were evicted, up to %lld were duplicates, %lld resumed\n",
      static_cast<long long>(steps), static_cast<long long>(num_failures), static_cast<long long>(num_evicted),
      static_cast<long long>(num_duplicates), static_cast<long long>(num_resumed));
}
