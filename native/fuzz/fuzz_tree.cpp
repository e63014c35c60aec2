// Random calls on the tree against a plain model, for a build with ASan and UBSan.
//
//     fuzz_tree SEED STEPS
//
// The model is a map of prefixes, one entry per page. Hashes are cut to a few bits, so that entries of the table of
// children collide. A follower that knows only events has to see what nodes() shows. The same is done for
// trees whose window pages are followed: pages are punched, replaced and discarded under running leases.
// Prints "ok" and ends with 0, or says at which step the tree and the model part and ends with 1.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "core/prefix_tree.hpp"

namespace {

using namespace pagoda;
using Tokens = std::vector<int32_t>;

int64_t g_step = 0;

void require(bool holds, const char* what) {
  if (holds) return;
  std::printf("step %lld: %s\n", static_cast<long long>(g_step), what);
  std::exit(1);
}

Ids view(const Tokens& ids) { return {ids.data(), static_cast<int64_t>(ids.size())}; }

// Whether a call threw one of the core's errors.
template <typename Call>
bool throws(Call call) {
  try {
    call();
    return false;
  } catch (const OutOfIds&) {
  } catch (const BadId&) {
  } catch (const BadArgument&) {
  } catch (const Stale&) {
  }
  return true;
}

// Knows a tree from its events alone.
class Follower {
 public:
  using Picture = std::map<std::pair<std::string, Tokens>, Tokens>;  // (namespace, tokens to a page's end) → its ids

  void hear(const TreeEvent& event, int64_t page_tokens) {
    if (event.kind == EventKind::kReset) return known_.clear();
    const bool is_stored = event.kind == EventKind::kStored;
    uint64_t parent = event.parent;
    if (is_stored && event.position > 0) require(known_.count(parent) > 0, "a stored run cannot be attached");
    for (size_t p = 0; p < event.keys.size(); ++p) {
      const auto begin = event.tokens.begin() + static_cast<std::ptrdiff_t>(p) * page_tokens;
      Known page{event.space, event.position == 0 && p == 0, parent, Tokens(begin, begin + page_tokens), {}};
      for (const Tokens& column : event.columns) page.ids.push_back(column[p]);
      parent = event.keys[p];
      const auto at = known_.find(parent);
      if (!event.ids_only) {
        require(is_stored == (at == known_.end()), "a page is told twice");
        if (is_stored) {
          known_.emplace(parent, page);
        } else {
          require(at->second.ids == page.ids, "a page goes with other ids");
          known_.erase(at);
        }
        continue;
      }
      require(at != known_.end(), "ids of a page that is not there");
      for (size_t c = 0; c < page.ids.size(); ++c) {
        int32_t& id = at->second.ids[c];
        if (page.ids[c] < 0) continue;
        require(id == (is_stored ? -1 : page.ids[c]), "ids of a page are told twice");
        id = is_stored ? page.ids[c] : -1;
      }
    }
  }

  Picture picture() const {
    Picture all;
    for (const auto& [key, page] : known_) {
      Tokens tokens;
      for (const Known* at = &page;; at = &known_.at(at->parent)) {
        tokens.insert(tokens.begin(), at->tokens.begin(), at->tokens.end());
        if (at->is_first) break;
      }
      require(all.emplace(std::pair{page.space, tokens}, page.ids).second, "two keys for one page");
    }
    return all;
  }

  static Picture shown(const PrefixTree& tree) {
    Picture all;
    std::map<int64_t, Tokens> paths;
    constexpr int64_t kAll = 1 << 30;
    for (const NodeInfo& node : tree.nodes(kAll, kAll, nullptr)) {
      Tokens& path = paths[node.number];
      if (node.parent != 0) path = paths[node.parent];
      path.insert(path.end(), node.tokens.begin(), node.tokens.end());
      for (size_t p = 0; !node.is_lost && !node.columns.empty() && p < node.columns[0].size(); ++p) {
        Tokens ids;
        for (const Tokens& column : node.columns) ids.push_back(column[p]);
        const auto end = path.begin() + node.begin + static_cast<std::ptrdiff_t>(p + 1) * tree.page_tokens();
        require(all.emplace(std::pair{*node.space, Tokens(path.begin(), end)}, ids).second, "a page is found twice");
      }
    }
    return all;
  }

  // Hears what the last call told, and compares.
  void follow(PrefixTree& tree) {
    for (const TreeEvent& event : tree.take_events()) hear(event, tree.page_tokens());
    require(picture() == shown(tree), "a follower sees something else");
  }

  // Listens from now on, or no longer.
  void listen(PrefixTree& tree, bool on) {
    if (on == is_on) return;
    is_on = on;
    tree.listen(on);
    known_.clear();
    if (!on) return;
    for (const TreeEvent& event : tree.retell()) hear(event, tree.page_tokens());
  }

  bool is_on = false;

 private:
  struct Known {
    std::string space;
    bool is_first;
    uint64_t parent;
    Tokens tokens, ids;
  };
  std::map<uint64_t, Known> known_;
};

struct Page {
  int32_t id;
  int64_t used;
  int64_t birth;
};

struct HeldLease {
  LeaseId id;
  std::string space;
  Tokens tokens;
  bool is_demoted;
  bool is_dropped;
};

struct OldMatch {
  Match match;
  std::string space;
  Tokens tokens;
  std::vector<int64_t> births;
};

class Fuzz {
 public:
  Fuzz(uint64_t seed, int64_t page_tokens, uint32_t hash_mask)
      : random_(seed), page_(page_tokens), tree_(page_tokens, {0}, false, seed % 2 == 0 ? 4096 : 0, hash_mask) {}

  void step() {
    switch (below(13)) {
      case 0:
      case 1:
      case 2:
        insert();
        break;
      case 3:
        match();
        break;
      case 4:
      case 5:
        lock();
        break;
      case 6:
      case 7:
        grow();
        break;
      case 8:
        release();
        break;
      case 9:
        evict();
        break;
      case 10:
        misuse();
        break;
      case 11:
        relock();
        break;
      default:
        rare();
    }
    compare();
  }

 private:
  using Key = std::pair<std::string, Tokens>;

  int64_t below(int64_t n) { return std::uniform_int_distribution<int64_t>(0, n - 1)(random_); }

  // A sequence that often shares a prefix with another: few distinct pages.
  Tokens tokens(int64_t max_pages) {
    Tokens all;
    const int64_t pages = below(max_pages + 1);
    for (int64_t p = 0; p < pages; ++p) {
      const int32_t kind = static_cast<int32_t>(below(4) == 0 ? below(3) : 0);
      for (int64_t t = 0; t < page_; ++t) all.push_back(t + 1 == page_ ? kind : 7);
    }
    return all;
  }
  std::string space() { return std::string(static_cast<size_t>(below(2)), 'x'); }
  Tokens ids(int64_t n) {
    Tokens all;
    while (n-- > 0) all.push_back(next_id_++);
    return all;
  }
  Tokens prefix(const Tokens& all, int64_t pages) const { return Tokens(all.begin(), all.begin() + pages * page_); }
  int64_t pages(const Tokens& all) const { return static_cast<int64_t>(all.size()) / page_; }

  int64_t found(const std::string& space, const Tokens& all) const {
    int64_t n = 0;
    while (n < pages(all) && model_.count({space, prefix(all, n + 1)}) > 0) ++n;
    return n;
  }
  bool is_protected(const std::string& space, const Tokens& at, const HeldLease* but = nullptr) const {
    return std::any_of(leases_.begin(), leases_.end(), [&](const HeldLease& lease) {
      return &lease != but && !lease.is_dropped && lease.space == space && lease.tokens.size() >= at.size() &&
             std::equal(at.begin(), at.end(), lease.tokens.begin());
    });
  }
  int64_t num_continued(const std::string& space, const Tokens& at) const {
    int64_t n = 0;
    for (auto it = model_.upper_bound({space, at}); it != model_.end() && it->first.first == space; ++it) {
      if (it->first.second.size() < at.size() || !std::equal(at.begin(), at.end(), it->first.second.begin())) break;
      n += it->first.second.size() == at.size() + static_cast<size_t>(page_);
    }
    return n;
  }
  void use(const std::string& space, const Tokens& all, int64_t num_pages) {
    for (int64_t p = 1; p <= num_pages; ++p) {
      if (!is_protected(space, prefix(all, p))) model_[{space, prefix(all, p)}].used = now_;
    }
  }

  void store(const std::string& space, const Tokens& all, int64_t from, const Tokens& page_ids) {
    for (int64_t p = from; p < pages(all); ++p) {
      model_[{space, prefix(all, p + 1)}] = {page_ids[static_cast<size_t>(p)], now_, next_birth_++};
    }
  }

  void insert() { insert(space(), tokens(12)); }
  void insert(const std::string& name, const Tokens& all) {
    const Tokens page_ids = ids(pages(all));
    const int64_t there = found(name, all);
    const Inserted result = tree_.insert({name, view(all), nullptr}, {view(page_ids)}, nullptr, {});
    ++now_;
    require(result.present == there * page_, "insert: what was there");
    require(result.length == pages(all) * page_ && result.stored == result.length, "insert: what is there");
    store(name, all, there, page_ids);
    use(name, all, pages(all));
  }

  void match() { match(space(), tokens(14)); }
  void match(const std::string& name, const Tokens& all) {
    Match match;
    Tokens copied(all.size() / static_cast<size_t>(page_));
    tree_.match({name, view(all), nullptr}, match, copied.data());
    const int64_t there = found(name, all);
    require(match.length == there * page_, "match: length");
    require(tree_.match_length({name, view(all), nullptr}) == match.length, "match_length");
    Tokens page_ids(static_cast<size_t>(there));
    tree_.copy_pages(match, 0, page_ids.data());
    OldMatch old{match, name, prefix(all, there), {}};
    for (int64_t p = 0; p < there; ++p) {
      const Page& page = model_[{name, prefix(all, p + 1)}];
      require(page.id == page_ids[static_cast<size_t>(p)], "match: ids");
      require(page.id == copied[static_cast<size_t>(p)], "match: ids copied on the way");
      old.births.push_back(page.birth);
    }
    matches_.push_back(old);
  }

  void lock() {
    if (!matches_.empty()) lock(static_cast<size_t>(below(static_cast<int64_t>(matches_.size()))));
  }

  // What was matched is evicted and stored again, in the same runs or others, before it is locked.
  void relock() {
    const std::string name = space();
    const Tokens all = tokens(6);
    insert(name, all);
    match(name, all);
    while (!leases_.empty() && below(8) != 0) release();
    evict();
    insert(name, all);
    lock(matches_.size() - 1);
  }

  void lock(size_t which) {
    const OldMatch old = matches_[which];
    matches_.erase(matches_.begin() + static_cast<std::ptrdiff_t>(which));
    if (below(2) == 0 && matches_.size() < 8) matches_.push_back(old);
    int64_t there = 0;
    while (there < pages(old.tokens)) {
      const auto it = model_.find({old.space, prefix(old.tokens, there + 1)});
      if (it == model_.end() || it->second.birth != old.births[static_cast<size_t>(there)]) break;
      ++there;
    }
    const LeaseId lease = tree_.lock(old.match);
    ++now_;
    require(tree_.length(lease) == there * page_, "lock: what is still there of a match");
    leases_.push_back({lease, old.space, prefix(old.tokens, there), false, false});
  }

  void grow() {
    if (leases_.empty()) return;
    HeldLease& lease = leases_[static_cast<size_t>(below(static_cast<int64_t>(leases_.size())))];
    const Tokens more = tokens(3), more_ids = ids(pages(more));
    if (lease.is_dropped) {
      require(throws([&] { tree_.insert({"", view(more), nullptr}, {view(more_ids)}, &lease.id, {}); }),
              "insert: a lease of a dropped namespace");
      return;
    }
    Tokens all = lease.tokens, page_ids(lease.tokens.size() / static_cast<size_t>(page_));
    all.insert(all.end(), more.begin(), more.end());
    page_ids.insert(page_ids.end(), more_ids.begin(), more_ids.end());
    const int64_t there = found(lease.space, all);
    const Inserted result = tree_.insert({"", view(more), nullptr}, {view(more_ids)}, &lease.id, {});
    ++now_;
    require(result.present == there * page_, "grow: what was there");
    require(tree_.length(lease.id) == pages(all) * page_, "grow: the lease's length");
    store(lease.space, all, there, page_ids);
    lease.tokens = all;
    Tokens read(page_ids.size());
    tree_.copy_pages(lease.id, 0, read.data());
    for (int64_t p = 0; p < pages(all); ++p) {
      require(model_[{lease.space, prefix(all, p + 1)}].id == read[static_cast<size_t>(p)], "the pages of a lease");
    }
  }

  void release() {
    if (leases_.empty()) return;
    const size_t which = static_cast<size_t>(below(static_cast<int64_t>(leases_.size())));
    if (below(4) == 0) {
      tree_.demote(leases_[which].id);
      leases_[which].is_demoted = true;
    }
    const HeldLease lease = leases_[which];
    tree_.release(lease.id);
    ++now_;
    require(throws([&] { tree_.release(lease.id); }), "a second release");
    leases_.erase(leases_.begin() + static_cast<std::ptrdiff_t>(which));
    if (lease.is_dropped) {
      orphans_ = true;
      return;
    }
    int64_t own = pages(lease.tokens);
    if (lease.is_demoted) {
      --cold_;
      // The own tail: from the end up, what nothing else continues and nobody else protects.
      while (own > 0 && !is_protected(lease.space, prefix(lease.tokens, own)) &&
             num_continued(lease.space, prefix(lease.tokens, own)) == (own == pages(lease.tokens) ? 0 : 1)) {
        model_[{lease.space, prefix(lease.tokens, own)}].used = cold_;
        --own;
      }
    }
    use(lease.space, lease.tokens, own);
  }

  void evict() {
    const int64_t evictable = tree_.tokens().total - tree_.tokens().locked;
    require(throws([&] { tree_.plan_evict(evictable + 1, 0, plan_); }), "evict: more than there is");
    const int64_t n = std::min(below((below(2) == 0 ? 2 : 8) * page_), evictable);
    tree_.plan_evict(n, 0, plan_);
    Tokens freed(static_cast<size_t>(plan_.columns()[0]));
    tree_.carry_out(plan_, {freed.data()}, nullptr);
    const int64_t num = (n + page_ - 1) / page_;
    require(static_cast<int64_t>(freed.size()) == num, "evict: how many");
    if (orphans_) {  // pages that the model no longer knows may come first
      Tokens known;
      std::map<int32_t, int> ids;
      for (const auto& [key, page] : model_) ids[page.id] = 1;
      std::copy_if(freed.begin(), freed.end(), std::back_inserter(known),
                   [&](int32_t id) { return ids.count(id) > 0; });
      freed = known;
    }
    Tokens expected;
    while (expected.size() < freed.size()) {
      auto coldest = model_.end();
      for (auto it = model_.begin(); it != model_.end(); ++it) {
        if (is_protected(it->first.first, it->first.second) || num_continued(it->first.first, it->first.second) > 0) {
          continue;
        }
        if (coldest == model_.end() || it->second.used < coldest->second.used) coldest = it;
      }
      require(coldest != model_.end(), "evict: the model has nothing left");
      expected.push_back(coldest->second.id);
      model_.erase(coldest);
    }
    std::sort(freed.begin(), freed.end());
    std::sort(expected.begin(), expected.end());
    require(freed == expected, "evict: which pages");
  }

  void misuse() {
    const auto before = tree_.tokens().total;
    const Tokens two(static_cast<size_t>(2 * page_), 1), one_id{5}, bad_id{0, 3};
    Tokens negative = two;
    negative.back() = -3;
    require(throws([&] { tree_.insert({"", view(two), nullptr}, {view(one_id)}, nullptr, {}); }), "too few ids");
    require(throws([&] { tree_.insert({"", view(two), nullptr}, {view(bad_id)}, nullptr, {}); }), "id 0");
    require(throws([&] { tree_.insert({"", view(negative), nullptr}, {view({5, 6})}, nullptr, {}); }), "a token < 0");
    require(throws([&] { tree_.release({static_cast<int32_t>(below(3)), 1 << 30}); }), "no such lease");
    require(throws([&] { tree_.insert({"", view(two), nullptr}, {view({5, 6})}, nullptr, {{8, 1}}); }), "no states");
    require(tree_.tokens().total == before, "a failed call changed something");
  }

  void rare() {
    if (below(20) == 0) {
      const std::string name = space();
      tree_.plan_drop(name, plan_);
      Tokens freed(static_cast<size_t>(plan_.columns()[0])), expected;
      tree_.carry_out(plan_, {freed.data()}, nullptr);
      for (const auto& [key, page] : model_) {
        if (key.first == name && !is_protected(key.first, key.second)) expected.push_back(page.id);
      }
      for (auto it = model_.begin(); it != model_.end();)
        it = it->first.first == name ? model_.erase(it) : std::next(it);
      for (HeldLease& lease : leases_) lease.is_dropped = lease.is_dropped || lease.space == name;
      std::sort(freed.begin(), freed.end());
      std::sort(expected.begin(), expected.end());
      require(freed == expected, "drop: which pages");
    } else if (below(40) == 0) {
      tree_.reset();
      for (const HeldLease& lease : leases_) {
        require(throws([&] { tree_.release(lease.id); }), "a lease from before a reset");
      }
      model_.clear();
      leases_.clear();
      orphans_ = false;
    } else if (tree_.tokens().total > 60 * page_) {
      tree_.plan_evict(tree_.tokens().total - tree_.tokens().locked, 0, plan_);
      Tokens freed(static_cast<size_t>(plan_.columns()[0]));
      tree_.carry_out(plan_, {freed.data()}, nullptr);
      for (auto it = model_.begin(); it != model_.end();) {
        it = is_protected(it->first.first, it->first.second) ? std::next(it) : model_.erase(it);
      }
      orphans_ = false;
    }
  }

  void compare() {
    tree_.check();
    if (below(30) == 0) follower_.listen(tree_, below(3) > 0);
    if (follower_.is_on) follower_.follow(tree_);
    if (std::any_of(leases_.begin(), leases_.end(), [](const HeldLease& l) { return l.is_dropped; }) || orphans_)
      return;
    int64_t locked = 0, leaves = 0;
    for (const auto& [key, page] : model_) {
      locked += is_protected(key.first, key.second);
      leaves += num_continued(key.first, key.second) == 0;
    }
    require(tree_.tokens().total == static_cast<int64_t>(model_.size()) * page_, "tokens");
    require(tree_.tokens().locked == locked * page_, "protected tokens");
    require(tree_.num_leaves() == leaves, "leaves");
    require(tree_.num_leases() == static_cast<int64_t>(leases_.size()), "leases");
  }

  std::mt19937_64 random_;
  int64_t page_;
  PrefixTree tree_;
  PrefixTree::Removal plan_;
  Follower follower_;
  std::map<Key, Page> model_;
  std::vector<HeldLease> leases_;
  std::vector<OldMatch> matches_;
  int32_t next_id_ = 1;
  int64_t next_birth_ = 0, now_ = 0, cold_ = 0;
  bool orphans_ = false;  // evictable pages of a dropped namespace
};

// A tree as the manager uses it: pages of window columns are followed, and leave one by one.
class FollowedFuzz {
 public:
  FollowedFuzz(uint64_t seed, int64_t page_tokens, bool has_full)
      : random_(seed), page_(page_tokens), tree_(page_tokens, windows(has_full), false, 0), is_in_(kNumIds) {
    const int first = has_full ? 1 : 0;
    std::vector<int> sets(static_cast<size_t>(first + 2), 0);
    if (has_full) sets[0] = -1;
    tree_.follow(sets, {kNumIds});
  }

  void step() {
    switch (below(12)) {
      case 0:
      case 1:
      case 2:
      case 3:
        insert();
        break;
      case 4:
      case 5:
        lock();
        break;
      case 6:
        release();
        break;
      case 7:
      case 8:
        if (const int32_t id = any_id(); id > 0) {
          tree_.punch_page(0, id);
          is_in_[static_cast<size_t>(id)] = false;
        }
        break;
      case 9:
        if (const int32_t id = any_id(), other = new_id(); id > 0) {
          is_in_[static_cast<size_t>(id)] = false;
          is_in_[static_cast<size_t>(other)] = true;
          tree_.replace_page(0, id, other);
        }
        break;
      case 10:
        evict();
        break;
      default:
        rare();
    }
    tree_.check();
    if (below(30) == 0) follower_.listen(tree_, below(3) > 0);
    if (follower_.is_on) follower_.follow(tree_);
  }

 private:
  static constexpr int32_t kNumIds = 4000;

  static std::vector<int64_t> windows(bool has_full) {
    return has_full ? std::vector<int64_t>{0, 7, 7} : std::vector<int64_t>{7, 7};
  }
  int64_t below(int64_t n) { return std::uniform_int_distribution<int64_t>(0, n - 1)(random_); }
  int32_t new_id() {
    int32_t id = 0;
    do id = static_cast<int32_t>(1 + below(kNumIds - 1));
    while (is_in_[static_cast<size_t>(id)]);
    return id;
  }
  // One that the tree holds; 0: it holds none that was met.
  int32_t any_id() {
    for (int tries = 0; tries < 4000; ++tries) {
      const int32_t id = static_cast<int32_t>(1 + below(kNumIds - 1));
      if (is_in_[static_cast<size_t>(id)]) return id;
    }
    return 0;
  }
  Tokens tokens(int64_t max_pages) {
    Tokens all;
    for (int64_t p = below(max_pages + 1); p > 0; --p) {
      const int32_t kind = static_cast<int32_t>(below(3) == 0);
      for (int64_t t = 0; t < page_; ++t) all.push_back(t + 1 == page_ ? kind : 7);
    }
    return all;
  }
  std::string space() { return std::string(static_cast<size_t>(below(2)), 'x'); }
  bool is_window(size_t column) const { return column + 2 >= static_cast<size_t>(tree_.num_columns()); }

  void insert() {
    const Tokens all = tokens(10);
    const std::string name = space();
    LeaseId* lease = nullptr;
    if (!leases_.empty() && below(2) == 0) {
      lease = &leases_[static_cast<size_t>(below(static_cast<int64_t>(leases_.size())))];
      if (tree_.is_lost(*lease)) return;  // the manager stores nothing behind these
    }
    std::vector<Tokens> columns(static_cast<size_t>(tree_.num_columns()));
    std::vector<Ids> ids;
    for (size_t c = 0; c < columns.size(); ++c) {
      for (int64_t p = 0; p < static_cast<int64_t>(all.size()) / page_; ++p) {
        if (!is_window(c)) {
          columns[c].push_back(next_full_++);
        } else if (below(4) == 0) {
          columns[c].push_back(-1);
        } else {
          columns[c].push_back(new_id());
          is_in_[static_cast<size_t>(columns[c].back())] = true;  // given once in a call
        }
      }
      ids.push_back(view(columns[c]));
    }
    const int64_t base = lease == nullptr ? 0 : tree_.length(*lease) / page_;
    const Inserted done = tree_.insert({lease == nullptr ? name : "", view(all), nullptr}, ids, lease, {});
    for (size_t c = 0; c < columns.size(); ++c) {
      if (!is_window(c)) continue;
      for (size_t p = 0; p < columns[c].size(); ++p) {
        const int32_t page = static_cast<int32_t>(base + static_cast<int64_t>(p));
        const bool is_filled =
            !done.filled.empty() && std::count(done.filled[c].begin(), done.filled[c].end(), page) > 0;
        const bool is_taken = page >= done.present / page_ || is_filled;
        if (columns[c][p] >= 0 && !is_taken) is_in_[static_cast<size_t>(columns[c][p])] = false;
      }
    }
  }

  void lock() {
    if (leases_.size() > 6) return;
    Match match;
    const Tokens all = tokens(10);
    const std::string name = space();
    tree_.match({name, view(all), nullptr}, match, nullptr);
    leases_.push_back(tree_.lock(match));
  }

  void release() {
    if (leases_.empty()) return;
    const auto which = leases_.begin() + below(static_cast<int64_t>(leases_.size()));
    tree_.release(*which);
    leases_.erase(which);
  }

  void carry_out() {
    std::vector<Tokens> freed;
    std::vector<int32_t*> out;
    for (int64_t size : plan_.columns()) out.push_back(freed.emplace_back(static_cast<size_t>(size)).data());
    tree_.carry_out(plan_, out, nullptr);
    forget(freed);
  }
  void forget(const std::vector<Tokens>& freed) {
    for (size_t c = 0; c < freed.size(); ++c) {
      for (int32_t id : freed[c]) {
        if (is_window(c)) is_in_[static_cast<size_t>(id)] = false;
      }
    }
  }

  void evict() {
    const Tally pages = tree_.pages(0);
    tree_.plan_evict(below(std::min<int64_t>(5, pages.total - pages.locked + 1)) * page_, 0, plan_);
    carry_out();
  }

  void rare() {
    if (below(4) == 0) {
      tree_.plan_drop(space(), plan_);
      carry_out();
    } else if (below(20) == 0) {
      tree_.reset();
      leases_.clear();
      is_in_.assign(kNumIds, false);
    } else if (const int32_t id = any_id(); id > 0) {
      BitSet bad(kNumIds + 1);
      bad.insert(id);
      std::vector<Tokens> freed;
      std::vector<int32_t> states;
      tree_.discard(tree_.num_columns() - 2, 2, bad, freed, states);
      forget(freed);
    }
  }

  std::mt19937_64 random_;
  int64_t page_;
  PrefixTree tree_;
  PrefixTree::Removal plan_;
  Follower follower_;
  std::vector<LeaseId> leases_;
  std::vector<bool> is_in_;  // by id: the tree holds it
  int32_t next_full_ = 1;
};

}  // namespace

int main(int argc, char** argv) {
  const uint64_t seed = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 1;
  const int64_t steps = argc > 2 ? std::strtoll(argv[2], nullptr, 10) : 10000;
  const int64_t page_tokenss[] = {1, 2, 3, 16, 64, 100};
  const uint32_t masks[] = {~uint32_t{0}, 3, 0};
  int64_t done = 0;
  try {
    for (int64_t page_tokens : page_tokenss) {
      for (uint32_t mask : masks) {
        Fuzz fuzz(seed * 1000 + static_cast<uint64_t>(page_tokens), page_tokens, mask);
        for (g_step = 0; g_step < steps / 18; ++g_step, ++done) fuzz.step();
      }
      if (page_tokens > 16) continue;
      for (const bool has_full : {false, true}) {
        FollowedFuzz fuzz(seed * 1000 + static_cast<uint64_t>(page_tokens), page_tokens, has_full);
        for (g_step = 0; g_step < steps / 18; ++g_step, ++done) fuzz.step();
      }
    }
  } catch (const BrokenInvariant& e) {
    std::printf("step %lld: invariant %d: %s\n", static_cast<long long>(g_step), e.number, e.message.c_str());
    return 1;
  }
  std::printf("ok: %lld steps\n", static_cast<long long>(done));
  return 0;
}
