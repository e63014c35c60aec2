// Calls that take pages out of the tree or change their ids. Each is planned first, which changes nothing, and then
// carried out, which cannot fail.
#include <algorithm>

#include "core/prefix_tree.hpp"

namespace pagoda {

void PrefixTree::require_evictable(int64_t wanted, const char* what, Tally tally, int column) const {
  const int64_t evictable = tally.total - tally.locked;
  if (wanted <= evictable) return;
  throw OutOfIds{column < 0 ? what : what + (" of column " + text(column)), wanted, evictable, tally.total};
}

void PrefixTree::begin(Removal& plan) const {
  plan.cuts_.clear();
  plan.news_.clear();
  plan.columns_.assign(windows_.size(), 0);
  plan.states_ = 0;
  plan.dropped_ = -1;
}

void PrefixTree::tell(std::vector<TreeEvent>& news) {
  for (TreeEvent& each : news) events_.push_back(std::move(each));
  news.clear();
}

// Adds a cut to the plan.
void PrefixTree::cut(int32_t node, int64_t from, int64_t to, Removal& plan) const {
  plan.cuts_.push_back({node, static_cast<int32_t>(from), static_cast<int32_t>(to)});
  const Node& at = nodes_[node];
  for (int c = 0; c < num_columns(); ++c) {
    const int64_t begin = math_.page(to), end = math_.page(from);
    const bool is_whole = to == 0 && from == at.run.length;
    plan.columns_[static_cast<size_t>(c)] += !is_window(c) ? end - begin
                                             : is_whole    ? held(c, node)
                                                           : count_held(at.run, c, begin, end);
  }
  for_checkpoints(plan.cuts_.back(), [&](const Checkpoint&) { ++plan.states_; });
  if (is_listened_ && !is_lost(node)) {
    plan.news_.push_back(event(EventKind::kRemoved, node, at.begin + to, at.begin + from));
  }
}

// Walks the eviction order and cuts nodes until the plan frees `target`, as measured by `counted`. keep(node, length,
// missing) → how many of the node's `length` tokens stay so that `missing` are freed, if it has as many.
template <typename Counted, typename Keep>
void PrefixTree::plan(int64_t target, Removal& plan, Counted counted, Keep keep) const {
  if (plan.left_.bucket_count() > 1024) plan.left_ = {};  // clear() would cost as much as the largest plan so far
  plan.left_.clear();
  const auto state = [&](int32_t node) -> std::pair<int32_t, int32_t>& {
    return plan.left_.try_emplace(node, nodes_[node].run.length, nodes_[node].num_children).first->second;
  };
  for (int32_t node = order_.coldest(); counted() < target;) {
    if (state(node).first == 0) {  // already cut with its children
      node = order_.after(node);
      continue;
    }
    const int32_t length = state(node).first;
    const int32_t kept = keep(node, length, target - counted());
    cut(node, length, kept, plan);
    state(node).first = kept;
    if (kept > 0) continue;
    // A parent that becomes a leaf keeps only what ends at a checkpoint.
    for (int32_t parent = nodes_[node].parent; has_states_ && !is_followed(); parent = nodes_[parent].parent) {
      if (nodes_[parent].is_root() || --state(parent).second > 0 || nodes_[parent].locks > 0) break;
      int32_t& left = state(parent).first;
      const int32_t last = last_checkpoint(parent, left);
      if (last < left) cut(parent, left, last, plan);
      left = last;
      if (last > 0) break;
    }
  }
}

void PrefixTree::plan_evict(int64_t n, int column, Removal& plan) const {
  const int64_t pages = math_.pages_for(n);
  if (column == 0 && !is_window(0)) {
    require_evictable(n, "evictable tokens", tokens_);
  } else {
    require_evictable(pages, "evictable pages", this->pages(column), column);
  }
  begin(plan);
  if (is_plain() || (is_followed() && !is_window(column))) {
    int64_t left = math_.first_slot(pages);
    for (int32_t node = order_.coldest(); left > 0;) {
      const Node& at = nodes_[node];
      const int32_t next = order_.after(node);
      // What removing this node and visiting the next will touch.
      children_.prefetch(at.hash);
      runs_.prefetch_links(at.run);
      __builtin_prefetch(&nodes_[at.parent]);
      if (at.next_sibling >= 0) __builtin_prefetch(&nodes_[at.next_sibling].prev_sibling);
      if (at.prev_sibling >= 0) __builtin_prefetch(&nodes_[at.prev_sibling].next_sibling);
      if (next >= 0) {
        __builtin_prefetch(&nodes_[next]);
        __builtin_prefetch(reinterpret_cast<const char*>(&nodes_[next]) + 64);
        order_.prefetch(next);
      }
      const int64_t keep = std::max<int64_t>(0, at.run.length - left);
      left -= at.run.length - keep;
      cut(node, at.run.length, keep, plan);
      node = next;
    }
    return;
  }
  const auto counted = [&] { return plan.columns_[static_cast<size_t>(column)]; };
  this->plan(pages, plan, counted, [&](int32_t node, int32_t length, int64_t missing) {
    // From the last page that has to go back to the checkpoint before it.
    int64_t page = math_.page(length);
    if (!is_window(column)) {
      page -= std::min(page, missing);
    } else {
      runs_.for_pages_backward(nodes_[node].run, column, 0, page, [&](const int32_t* ids, int64_t n) {
        for (; n > 0 && missing > 0; --page) missing -= ids[--n] >= 0;
        return missing > 0;
      });
    }
    const int32_t kept = static_cast<int32_t>(math_.first_slot(page));
    return has_states_ && !is_followed() ? last_checkpoint(node, kept) : kept;
  });
}

void PrefixTree::plan_evict_states(int64_t n, Removal& plan) const {
  require_evictable(n, "evictable states", states_);
  begin(plan);
  this->plan(
      n, plan, [&] { return plan.states_; },
      [&](int32_t node, int32_t length, int64_t missing) {
        int32_t kept = last_checkpoint(node, length);
        for (; kept > 0 && missing > 0; --missing) kept = last_checkpoint(node, kept - 1);
        return kept;
      });
}

void PrefixTree::plan_drop(std::string_view space, Removal& plan) const {
  begin(plan);
  plan.dropped_ = find_root(space);
  if (plan.dropped_ < 0) return;
  for_subtree(plan.dropped_, [&](int32_t node) {
    const Node& at = nodes_[node];
    if (at.is_root()) return;
    if (at.locks == 0) {
      cut(node, at.run.length, 0, plan);
    } else if (is_listened_ && !is_lost(node)) {  // it stays, but cannot be found
      plan.news_.push_back(event(EventKind::kRemoved, node, at.begin, at.end()));
    }
  });
}

void PrefixTree::apply(const Cut& cut) {
  Node& at = nodes_[cut.node];
  if (!extra_keys_.empty()) {
    runs_.for_tokens(at.run, cut.to, cut.from, [&](const int32_t* gone, int64_t n) { extra_keys_.remove(gone, n); });
  }
  tokens_.total -= cut.from - cut.to;
  for (int c = 0; c < num_columns(); ++c) {
    if (is_window(c)) add_held(cut.node, c, -count_held(at.run, c, math_.page(cut.to), math_.page(cut.from)));
  }
  if (has_states_) {
    auto& all = checkpoints_[static_cast<size_t>(cut.node)];
    const auto first =
        std::find_if(all.begin(), all.end(), [&](const Checkpoint& c) { return c.length > at.begin + cut.to; });
    states_.total -= all.end() - first;
    if (follows_states_) {
      for (auto each = first; each != all.end(); ++each) spots_[each->state_id] = {};
    }
    all.erase(first, all.end());
  }
  runs_.trim(at.run, cut.to);
  at.is_trimmed = true;
  if (cut.to == 0) remove(cut.node);
}

void PrefixTree::carry_out(Removal& plan, const std::vector<int32_t*>& columns, int32_t* states) {
  if (!plan.news_.empty()) events_.reserve(events_.size() + plan.news_.size());
  const std::vector<Cut>& cuts = plan.cuts_;
  for (size_t c = 0; c < columns.size(); ++c) {
    int32_t* out = columns[c];
    for (const Cut& cut : cuts) {
      const Run& run = nodes_[cut.node].run;
      const int64_t begin = math_.page(cut.to), end = math_.page(cut.from);
      if (!is_window(static_cast<int>(c))) {
        runs_.copy_pages(run, static_cast<int>(c), begin, end, out);
        out += end - begin;
        continue;
      }
      runs_.for_pages(run, static_cast<int>(c), begin, end, [&](const int32_t* ids, int64_t n) {
        out = std::copy_if(ids, ids + n, out, [](int32_t id) { return id >= 0; });
      });
    }
  }
  for (const Cut& cut : cuts) {
    for_checkpoints(cut, [&](const Checkpoint& checkpoint) { *states++ = checkpoint.state_id; });
  }
  if (plan.dropped_ < 0) {
    for (const Cut& cut : cuts) apply(cut);
  } else {
    Node& root = nodes_[plan.dropped_];
    ++root.locks;  // keeps the root until its children are removed
    for (auto cut = cuts.rbegin(); cut != cuts.rend(); ++cut) apply(*cut);
    const auto name = names_.find(plan.dropped_);
    if (name->second.empty()) default_root_ = -1;
    roots_.erase(name->second);
    root.is_dropped = true;
    --root.locks;
    free_root_if_empty(plan.dropped_);
  }
  if (!plan.news_.empty()) tell(plan.news_);
}

void PrefixTree::discard(int first, int count, const BitSet& bad, std::vector<std::vector<int32_t>>& freed,
                         std::vector<int32_t>& states) {
  struct Found {
    int32_t node;
    int64_t page;
  };
  std::vector<Found> found;
  for (int64_t i = 0; i < nodes_.size(); ++i) {
    const Node& node = nodes_[i];
    if (node.number <= 0 || node.is_root()) continue;
    int64_t worst = math_.page(node.run.length);
    for (int c = first; c < first + count; ++c) {
      int64_t page = 0;
      runs_.for_pages(node.run, c, 0, worst, [&](const int32_t* ids, int64_t n) {
        for (int64_t k = 0; k < n; ++k, ++page) {
          if (ids[k] >= 0 && bad.contains(ids[k])) worst = std::min(worst, page);
        }
      });
    }
    if (worst < math_.page(node.run.length)) found.push_back({static_cast<int32_t>(i), worst});
  }
  // What continues a bad page goes with it, so parents come first.
  std::sort(found.begin(), found.end(),
            [&](const Found& a, const Found& b) { return nodes_[a.node].begin < nodes_[b.node].begin; });
  BitSet is_top(nodes_.size());
  std::vector<Found> tops;
  for (const Found& each : found) {
    int32_t above = each.node;
    while (!nodes_[above].is_root() && !nodes_[above].is_lost && !is_top.contains(above)) above = nodes_[above].parent;
    if (!nodes_[above].is_root()) continue;
    is_top.insert(each.node);
    tops.push_back(each);
  }
  // Unprotected nodes are removed, the others marked as lost. Everything that may fail comes first.
  Removal plan;
  begin(plan);
  for (const Found& top : tops) {
    for_subtree(top.node, [&](int32_t node) {
      const Node& at = nodes_[node];
      const int64_t from = node == top.node ? math_.first_slot(top.page) : 0;
      if (at.locks == 0) {
        cut(node, at.run.length, from, plan);
      } else if (is_listened_ && !is_lost(node)) {
        plan.news_.push_back(event(EventKind::kRemoved, node, at.begin + from, at.end()));
      }
    });
  }
  std::reverse(plan.cuts_.begin(), plan.cuts_.end());  // children before their parents
  std::vector<int32_t*> columns;
  freed.resize(windows_.size());
  for (size_t c = 0; c < freed.size(); ++c) {
    freed[c].resize(static_cast<size_t>(plan.columns_[c]));
    columns.push_back(freed[c].data());
  }
  states.resize(static_cast<size_t>(plan.states_));
  std::vector<std::pair<int32_t, int64_t>> rests;  // (node, number): cut, or parent of a cut node
  rests.reserve(plan.cuts_.size());
  reserve(static_cast<int64_t>(tops.size()), static_cast<int64_t>(tops.size()));
  events_.reserve(events_.size() + plan.news_.size());
  for (const Found& top : tops) {
    if (nodes_[top.node].locks == 0) continue;
    if (top.page > 0) split(top.node, nodes_[top.node].begin + math_.first_slot(top.page));
    nodes_[top.node].is_lost = true;
    ++num_lost_;
    // Earlier matches must not find it: give it a new number and a new family.
    for_subtree(top.node, [&](int32_t node) {
      nodes_[node].number = next_number_++;
      nodes_[node].family = next_family_++;
    });
  }
  for (const Cut& cut : plan.cuts_) {
    const int32_t rest = cut.to > 0 ? cut.node : nodes_[cut.node].parent;
    if (!nodes_[rest].is_root()) rests.emplace_back(rest, nodes_[rest].number);
  }
  carry_out(plan, columns, states.data());
  if (!is_followed() || has_full_) return;
  for (const auto& [node, number] : rests) {
    if (nodes_[node].number == number) prune(node);
  }
}

void PrefixTree::plan_punch(LeaseId id, int column, int64_t end, Punch& plan) const {
  if (!is_window(column))
    throw BadArgument("column: " + text(column) + " has no window, so all of its pages are needed");
  int32_t node = require(id).node;
  plan.path_.clear();
  plan.news_.clear();
  plan.column_ = column;
  plan.end_ = math_.page(end);  // a page that reaches past `end` stays
  plan.num_pages_ = 0;
  const bool is_told = is_listened_ && !is_lost(node);
  for (; !nodes_[node].is_root() && nodes_[node].locks == 1; node = nodes_[node].parent) {
    const Node& at = nodes_[node];
    const int64_t first = math_.page(at.begin);
    if (first >= plan.end_) continue;
    plan.path_.push_back(node);
    plan.num_pages_ += count_held(at.run, column, 0, std::min(plan.end_, math_.page(at.end())) - first);
  }
  std::reverse(plan.path_.begin(), plan.path_.end());
  if (!is_told) return;
  for (int32_t each : plan.path_) {
    const Node& at = nodes_[each];
    const int64_t first = math_.page(at.begin);
    int64_t page = first;
    const auto tell_page = [&](int32_t, int64_t place, int64_t n) {
      for (const int64_t last = place + n; place < last; ++place, ++page) {
        const int32_t id = runs_.id_at(column, place);
        if (id >= 0) plan.news_.push_back(page_event(EventKind::kRemoved, {each, column, page, place}, id));
      }
    };
    runs_.for_places(at.run, 0, std::min(plan.end_, math_.page(at.end())) - first, tell_page);
  }
}

void PrefixTree::carry_out(Punch& plan, int32_t* out) {
  events_.reserve(events_.size() + plan.news_.size());
  for (int32_t node : plan.path_) {
    const Node& at = nodes_[node];
    int64_t punched = 0;
    runs_.for_pages(at.run, plan.column_, 0, std::min(plan.end_, math_.page(at.end())) - math_.page(at.begin),
                    [&](int32_t* ids, int64_t n) {
                      for (int64_t i = 0; i < n; ++i) {
                        if (ids[i] < 0) continue;
                        *out++ = ids[i];
                        ids[i] = -1;
                        ++punched;
                      }
                    });
    add_held(node, plan.column_, -punched);
  }
  tell(plan.news_);
}

void PrefixTree::plan_replace(const Sequence& sequence, const std::vector<Ids>& columns, Replacement& plan) const {
  require_tokens(sequence.tokens, 0);
  require_columns(sequence.tokens, columns);
  const int64_t end = math_.first_slot(math_.page(sequence.tokens.size));
  std::vector<int32_t> translated;
  const int32_t* entries = sequence.tokens.data;
  if (sequence.ranges != nullptr) {
    translated = extra_keys_.find(entries, sequence.tokens.size, 0, *sequence.ranges);
    entries = translated.data();
  }
  plan.path_.clear();
  plan.news_.clear();
  const int32_t root = find_root(sequence.space);
  const auto step = [&](int32_t node, int64_t) { plan.path_.push_back(node); };
  const int64_t found = root < 0 ? 0 : walk<false>({root, 0}, entries, 0, end, nullptr, step).depth;
  if (found != end) {
    throw BadArgument("tokens: only " + text(found) + " of " + text(end) +
                      " are in the tree: give a prefix that match() finds");
  }
  plan.num_pages_ = math_.page(end);
  if (!is_listened_ || end == 0) return;
  TreeEvent gone{EventKind::kRemoved, true, std::string(sequence.space)};
  gone.parent = key_at(root, 0);
  gone.keys.resize(static_cast<size_t>(plan.num_pages_));
  make_keys(gone.parent, entries, plan.num_pages_, gone.keys.data());
  describe(gone, entries, end);
  TreeEvent news = gone;
  news.kind = EventKind::kStored;
  for (int c = 0; c < num_columns(); ++c) {
    const Ids ids = columns[static_cast<size_t>(c)];
    news.columns.emplace_back(ids.data, ids.data + plan.num_pages_);
    std::vector<int32_t> old(static_cast<size_t>(plan.num_pages_));
    for (int32_t node : plan.path_) {
      const Node& at = nodes_[node];
      const int64_t n = math_.page(std::min<int64_t>(at.end(), end) - at.begin);
      runs_.copy_pages(at.run, c, 0, n, old.data() + math_.page(at.begin));
    }
    gone.columns.push_back(std::move(old));
  }
  plan.news_.push_back(std::move(gone));
  plan.news_.push_back(std::move(news));
}

void PrefixTree::carry_out(Replacement& plan, const std::vector<Ids>& columns, const std::vector<int32_t*>& out) {
  events_.reserve(events_.size() + plan.news_.size());
  for (int32_t node : plan.path_) {
    const Node& at = nodes_[node];
    const int64_t first = math_.page(at.begin);
    const int64_t n = std::min(math_.page(at.run.length), plan.num_pages_ - first);
    for (int c = 0; c < num_columns(); ++c) {
      const Ids ids = columns[static_cast<size_t>(c)];
      int64_t page = first, more = 0;
      runs_.for_pages(at.run, c, 0, n, [&](int32_t* mine, int64_t size) {
        for (int64_t i = 0; i < size; ++i, ++page) {
          more += (ids[page] >= 0) - (mine[i] >= 0);
          out[static_cast<size_t>(c)][page] = mine[i];
          mine[i] = ids[page];
        }
      });
      if (is_window(c)) add_held(node, c, more);
    }
    nodes_[node].family = replaced_ = next_family_++;
  }
  tell(plan.news_);
}

void PrefixTree::reset() {
  if (is_listened_ && !names_.empty()) events_.push_back(TreeEvent{EventKind::kReset});
  nodes_.clear();
  free_node_ = -1;
  runs_.clear();
  children_.clear();
  order_.clear();
  extra_keys_.clear();
  for (auto& held : held_) held.clear();
  for (const auto& all : checkpoints_) {
    for (const Checkpoint& each : all) {
      if (follows_states_) spots_[each.state_id] = {};
    }
  }
  checkpoints_.clear();
  roots_.clear();
  names_.clear();
  default_root_ = -1;
  for (Lease& lease : leases_) lease.number = 0;
  free_leases_.clear();
  for (size_t slot = leases_.size(); slot-- > 0;) free_leases_.push_back(static_cast<int32_t>(slot));
  tokens_ = states_ = {};
  std::fill(window_pages_.begin(), window_pages_.end(), Tally{});
  num_lost_ = num_nodes_ = num_leaves_ = num_leases_ = 0;
}

}  // namespace pagoda
