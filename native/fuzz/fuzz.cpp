// Random calls on the core against a plain model, for a build with ASan and UBSan.
//
//     fuzz SEED STEPS
//
// Prints "ok" and ends with 0, or says at which step the core and the model part and ends with 1.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <random>
#include <set>
#include <vector>

#include "core/free_list.hpp"
#include "core/page_table.hpp"

namespace {

using pagoda::FreeList;
using pagoda::Ids;
using pagoda::PageMath;
using pagoda::PageTable;

int64_t g_step = 0;

void require(bool holds, const char* what) {
  if (holds) return;
  std::printf("step %lld: %s\n", static_cast<long long>(g_step), what);
  std::exit(1);
}

// What an id space is, said plainly.
struct Model {
  std::set<int32_t> free, held;
  std::map<int64_t, std::vector<int32_t>> waiting;
};

Ids view(const std::vector<int32_t>& ids) { return {ids.data(), static_cast<int64_t>(ids.size())}; }

// Whether a call threw one of the core's errors.
template <typename Call>
bool throws(Call call) {
  try {
    call();
    return false;
  } catch (const pagoda::OutOfIds&) {
  } catch (const pagoda::BadId&) {
  } catch (const pagoda::BadArgument&) {
  }
  return true;
}

class Fuzz {
 public:
  Fuzz(uint64_t seed, int64_t num_ids, int64_t first_id, int64_t page_tokens)
      : random_(seed), num_ids_(num_ids), first_(first_id), pages_(page_tokens), list_(num_ids, first_id, "pages") {
    refill();
  }

  void step() {
    switch (below(9)) {
      case 0:
        return alloc();
      case 1:
        return take();
      case 2:
        return free();
      case 3:
        return free_slots();
      case 4:
        return pass();
      case 5:
        return recall();
      case 6:
        return grow();
      case 7:
        return misuse();
      default:
        if (below(200) == 0) {
          list_.reset();
          refill();
          fence_ = passed_ = 0;
        }
    }
  }

  void compare() {
    list_.check();
    size_t waiting = 0;
    for (const auto& [fence, ids] : model_.waiting) waiting += ids.size();
    require(list_.num_free() == static_cast<int64_t>(model_.free.size()), "num_free differs");
    require(list_.num_held() == static_cast<int64_t>(model_.held.size()), "num_held differs");
    require(list_.num_quarantined() == static_cast<int64_t>(waiting), "num_quarantined differs");
    for (int64_t id = first_; id < first_ + num_ids_; ++id) {
      require(list_.is_free(id) == (model_.free.count(static_cast<int32_t>(id)) > 0), "is_free differs");
      require(list_.is_held(id) == (model_.held.count(static_cast<int32_t>(id)) > 0), "is_held differs");
    }
  }

 private:
  int64_t below(int64_t n) { return n <= 0 ? 0 : static_cast<int64_t>(random_() % static_cast<uint64_t>(n)); }

  void refill() {
    model_ = Model();
    for (int64_t id = first_; id < first_ + num_ids_; ++id) model_.free.insert(static_cast<int32_t>(id));
  }

  std::vector<int32_t> some(const std::set<int32_t>& from) {
    std::vector<int32_t> all(from.begin(), from.end()), picked;
    std::shuffle(all.begin(), all.end(), random_);
    picked.assign(all.begin(), all.begin() + below(static_cast<int64_t>(std::min<size_t>(all.size(), 80)) + 1));
    return picked;
  }

  // Takes the n lowest of the model.
  std::vector<int32_t> lowest(int64_t n) {
    std::vector<int32_t> ids(model_.free.begin(), std::next(model_.free.begin(), n));
    for (int32_t id : ids) {
      model_.free.erase(id);
      model_.held.insert(id);
    }
    return ids;
  }

  void alloc() {
    const int64_t n = below(130);
    std::vector<int32_t> got(static_cast<size_t>(n) + 1, -7);
    const bool threw = throws([&] { list_.alloc(n, got.data()); });
    require(threw == (n > static_cast<int64_t>(model_.free.size())),
            "alloc throws when it should not, or not when it should");
    if (threw) return;
    require(got.back() == -7, "alloc wrote past its end");
    got.pop_back();
    require(got == lowest(n), "alloc does not give the lowest ids");
  }

  void take() {
    const std::vector<int32_t> ids = some(model_.free);
    list_.take(view(ids));
    for (int32_t id : ids) {
      model_.free.erase(id);
      model_.held.insert(id);
    }
  }

  // The model's half of freeing held ids.
  void put(const std::vector<int32_t>& ids, pagoda::Fence fence) {
    for (int32_t id : ids) {
      model_.held.erase(id);
      if (!fence || *fence <= passed_) {
        model_.free.insert(id);
      } else {
        model_.waiting[*fence].push_back(id);
      }
    }
  }

  pagoda::Fence any_fence() {
    if (below(2) == 0) return std::nullopt;
    fence_ += below(3);
    return std::max<int64_t>(1, fence_ - below(3));
  }

  void free() {
    const std::vector<int32_t> ids = some(model_.held);
    const pagoda::Fence fence = any_fence();
    list_.free(view(ids), fence);
    put(ids, fence);
  }

  void free_slots() {
    const std::vector<int32_t> ids = some(model_.held);
    std::vector<int32_t> slots;
    for (int32_t id : ids) {
      for (int64_t n = pages_.size() == 1 ? 1 : 1 + below(3); n > 0; --n) {
        slots.push_back(static_cast<int32_t>(pages_.first_slot(id) + below(pages_.size())));
      }
    }
    std::shuffle(slots.begin(), slots.end(), random_);
    const pagoda::Fence fence = any_fence();
    list_.free_slots(view(slots), pages_, fence);
    put(ids, fence);
    if (pages_.size() > 1 && fence && *fence > passed_) list_.free_slots(view(slots), pages_, fence);  // counts once
  }

  void pass() {
    const int64_t to = passed_ + below(3);
    int64_t n = 0;
    while (!model_.waiting.empty() && model_.waiting.begin()->first <= to) {
      for (int32_t id : model_.waiting.begin()->second) {
        model_.free.insert(id);
        ++n;
      }
      model_.waiting.erase(model_.waiting.begin());
    }
    require(list_.pass_fence(to) == n, "pass_fence frees another number");
    passed_ = to;
  }

  void recall() {
    const int64_t fence = passed_ + 1 + below(4);
    int64_t n = 0;
    for (int32_t id : model_.waiting[fence]) {
      model_.held.insert(id);
      ++n;
    }
    model_.waiting.erase(fence);
    require(list_.recall(fence) == n, "recall takes another number");
  }

  void grow() {
    std::vector<int32_t> from, to, last;
    int64_t tokens = 0, pages = 0;
    for (int32_t page : some(model_.held)) {
      const int64_t used = 1 + below(pages_.size()), more = below(3 * pages_.size());
      from.push_back(static_cast<int32_t>(5 * pages_.size() + used));
      to.push_back(static_cast<int32_t>(from.back() + more));
      last.push_back(static_cast<int32_t>(pages_.first_slot(page) + used - 1));
      tokens += more;
      pages += pages_.pages_for(used + more) - 1;
    }
    FreeList::Need need{0, 0};
    const bool threw = throws([&] { need = list_.plan_growth(view(from), view(to), view(last), pages_); });
    require(threw == (pages > static_cast<int64_t>(model_.free.size())), "plan_growth throws otherwise than it should");
    if (threw) return;
    require(need.tokens == tokens && need.pages == pages, "plan_growth counts otherwise");
    std::vector<int32_t> slots(static_cast<size_t>(tokens) + 1, -7);
    list_.fill_growth(need, view(from), view(to), view(last), pages_, slots.data());
    require(slots.back() == -7, "fill_growth wrote past its end");
    const std::vector<int32_t> fresh = lowest(pages);
    size_t at = 0, next = 0;
    for (size_t r = 0; r < from.size(); ++r) {
      int64_t slot = last[r];
      for (int64_t position = from[r]; position < to[r]; ++position) {
        slot = position % pages_.size() == 0 ? fresh[next++] * pages_.size() : slot + 1;
        require(slots[at++] == slot, "fill_growth gives another slot");
      }
    }
  }

  void misuse() {
    std::vector<int32_t> ids = some(model_.held);
    switch (below(4)) {
      case 0:
        ids.push_back(static_cast<int32_t>(first_ - 1));
        break;
      case 1:
        ids.push_back(static_cast<int32_t>(first_ + num_ids_));
        break;
      case 2:
        if (model_.free.empty()) return;
        ids.push_back(*model_.free.begin());
        break;
      default:
        if (ids.empty()) return;
        ids.push_back(ids[0]);
    }
    std::shuffle(ids.begin(), ids.end(), random_);
    require(throws([&] { list_.free(view(ids), any_fence()); }), "free takes a bad id");
    if (ids.size() > 1) require(throws([&] { list_.take(view(ids)); }), "take takes a held id");
  }

  std::mt19937_64 random_;
  int64_t num_ids_, first_, fence_ = 0, passed_ = 0;
  PageMath pages_;
  FreeList list_;
  Model model_;
};

// Rows that grow, get a prefix, and end; every token's slot is checked against a plain list.
void fuzz_table(uint64_t seed, int64_t page_tokens, int64_t steps) {
  std::mt19937_64 random(seed);
  const auto below = [&](int64_t n) { return static_cast<int64_t>(random() % static_cast<uint64_t>(n)); };
  constexpr int64_t kRows = 9, kMaxPages = 12, kPages = 60;
  FreeList list(kPages, 1, "pages");
  PageTable table(kRows, kMaxPages, page_tokens);
  std::vector<std::vector<int32_t>> model(kRows + 1);  // page ids of each row
  std::vector<int64_t> lens(kRows + 1, 0);
  const PageMath math(page_tokens);
  for (int64_t i = 0; i < steps; ++i, ++g_step) {
    if (below(4) > 0) {
      std::vector<int32_t> rows, to;
      for (int32_t row = 1; row <= kRows; ++row) {
        if (below(2) == 0) continue;
        rows.push_back(row);
        to.push_back(static_cast<int32_t>(lens[row] + below(2 * page_tokens + 1)));
      }
      pagoda::FreeList::Need need{0, 0};
      if (throws([&] { need = table.plan_growth(list, view(rows), view(to)); })) continue;
      std::vector<int32_t> slots(static_cast<size_t>(need.tokens)), ids(static_cast<size_t>(need.pages));
      std::vector<int64_t> index(static_cast<size_t>(need.pages));
      table.fill_growth(need, list, view(rows), view(to), slots.data(), index.data(), ids.data());
      size_t at = 0, next = 0;
      for (size_t r = 0; r < rows.size(); ++r) {
        auto& pages = model[rows[r]];
        for (; lens[rows[r]] < to[r]; ++lens[rows[r]]) {
          const int64_t position = lens[rows[r]];
          if (position % page_tokens == 0) {
            require(index[next] == rows[r] * kMaxPages + static_cast<int64_t>(pages.size()),
                    "an entry is written elsewhere");
            pages.push_back(ids[next++]);
          }
          require(slots[at++] == pages.back() * page_tokens + position % page_tokens, "a token lies elsewhere");
        }
      }
    } else {
      const int32_t row = static_cast<int32_t>(1 + below(kRows));
      list.free(view(model[row]), std::nullopt);
      table.release(row);
      model[row].clear();
      lens[row] = 0;
      const std::vector<int32_t> none;
      std::vector<int64_t> index(1);
      int32_t page = 0;
      if (list.num_free() > 0 && below(2) == 0) {
        list.alloc(1, &page);
        table.append(row, {&page, 1}, page_tokens, index.data());
        model[row].push_back(page);
        lens[row] = page_tokens;
      }
    }
    if (i % 16 == 0) {
      table.check();
      list.check();
      for (int64_t row = 1; row <= kRows; ++row) {
        require(table.num_tokens(row) == lens[row], "a row's length differs");
        require(std::equal(model[row].begin(), model[row].end(), table.pages(row)), "a row's pages differ");
      }
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  const uint64_t seed = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 1;
  const int64_t steps = argc > 2 ? std::strtoll(argv[2], nullptr, 10) : 20000;
  struct Space {
    int64_t num_ids, first_id, page_tokens;
  };
  const Space spaces[] = {{0, 1, 1}, {1, 0, 1}, {63, 1, 1}, {64, 0, 2}, {65, 7, 16}, {5000, 1, 64}, {300, 1, 3}};
  try {
    for (const Space& space : spaces) {
      Fuzz fuzz(seed, space.num_ids, space.first_id, space.page_tokens);
      for (int64_t i = 0; i < steps; ++i, ++g_step) {
        fuzz.step();
        if (i % 64 == 0) fuzz.compare();
      }
      fuzz.compare();
    }
    for (int64_t page_tokens : {1, 2, 3, 16}) fuzz_table(seed, page_tokens, steps);
  } catch (const pagoda::BrokenInvariant& e) {
    std::printf("step %lld: invariant %d: %s\n", static_cast<long long>(g_step), e.number, e.message.c_str());
    return 1;
  } catch (const pagoda::BadId& e) {
    std::printf("step %lld: %s\n", static_cast<long long>(g_step), e.message.c_str());
    return 1;
  } catch (const pagoda::BadArgument& e) {
    std::printf("step %lld: %s\n", static_cast<long long>(g_step), e.what());
    return 1;
  }
  std::printf("ok: %lld steps\n", static_cast<long long>(g_step));
  return 0;
}
