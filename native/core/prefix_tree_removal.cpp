// What takes pages out of the tree, or gives them other ids. Each call is planned first, which changes nothing,
// and then carried out, which cannot fail.
#include <algorithm>

#include "core/prefix_tree.hpp"

namespace pagoda {

void PrefixTree::require_evictable(int64_t wanted, const std::string& what, Tally tally) const {
  const int64_t evictable = tally.total - tally.locked;
  if (wanted > evictable) throw OutOfIds{what, wanted, evictable, tally.total};
}

void PrefixTree::begin_plan(bool is_drop) {
  is_drop_ = is_drop;
  cuts_.clear();
  cut_events_.clear();
  std::fill(sizes_.columns.begin(), sizes_.columns.end(), 0);
  sizes_.states = 0;
}

// Calls each(checkpoint) for those that go with a cut, in order.
template <typename Each>
void PrefixTree::for_checkpoints(const Cut& cut, Each each) const {
  if (!has_states_) return;
  const int64_t begin = nodes_[cut.node].begin;
  for (const Checkpoint& checkpoint : checkpoints_[static_cast<size_t>(cut.node)]) {
    if (checkpoint.length > begin + cut.to && checkpoint.length <= begin + cut.from) each(checkpoint);
  }
}

// Adds a cut to the plan.
void PrefixTree::cut(int32_t node, int64_t from, int64_t to) {
  cuts_.push_back({node, static_cast<int32_t>(from), static_cast<int32_t>(to)});
  const Node& at = nodes_[node];
  for (int c = 0; c < num_columns(); ++c) {
    const int64_t begin = math_.page(to), end = math_.page(from);
    const bool is_whole = to == 0 && from == at.run.length;
    sizes_.columns[static_cast<size_t>(c)] += !is_window(c) ? end - begin
                                              : is_whole    ? held(c, node)
                                                            : count_held(at.run, c, begin, end);
  }
  for_checkpoints(cuts_.back(), [&](const Checkpoint&) { ++sizes_.states; });
  if (is_listened_) {
    TreeEvent gone = event(false, node, at.begin + to, at.begin + from);
    for_checkpoints(cuts_.back(), [&](const Checkpoint& checkpoint) { gone.states.push_back(checkpoint); });
    cut_events_.push_back(std::move(gone));
  }
}

// Walks the order, cutting nodes until what the plan frees, as `counted` says, reaches the target. keep(node, length,
// missing) → how many of `length` tokens stay, so that `missing` come free if the node has them.
template <typename Counted, typename Keep>
void PrefixTree::plan(int64_t target, Counted counted, Keep keep) {
  if (planned_.bucket_count() > 1024) planned_ = {};  // clearing pays for the largest plan there ever was
  planned_.clear();
  const auto state = [this](int32_t node) -> std::pair<int32_t, int32_t>& {
    return planned_.try_emplace(node, nodes_[node].run.length, nodes_[node].num_children).first->second;
  };
  for (int32_t node = order_.coldest(); counted() < target;) {
    if (state(node).first == 0) {  // went with its children
      node = order_.after(node);
      continue;
    }
    const int32_t length = state(node).first;
    const int32_t kept = keep(node, length, target - counted());
    cut(node, length, kept);
    state(node).first = kept;
    if (kept > 0) continue;
    // A parent that becomes a leaf keeps only what a checkpoint can resume from.
    for (int32_t parent = nodes_[node].parent; has_states_; parent = nodes_[parent].parent) {
      if (nodes_[parent].is_root() || --state(parent).second > 0 || nodes_[parent].locks > 0) break;
      int32_t& left = state(parent).first;
      const int32_t last = last_checkpoint(parent, left);
      if (last < left) cut(parent, left, last);
      left = last;
      if (last > 0) break;
    }
  }
}

const PrefixTree::Sizes& PrefixTree::plan_evict(int64_t n, int column) {
  const int64_t pages = math_.pages_for(n);
  if (column == 0 && !is_window(0)) {
    require_evictable(n, "evictable tokens", tokens_);
  } else {
    require_evictable(pages, "evictable pages of column " + text(column), this->pages(column));
  }
  begin_plan(false);
  if (is_plain()) {
    int64_t left = math_.first_slot(pages);
    for (int32_t node = order_.coldest(); left > 0;) {
      const Node& at = nodes_[node];
      const int32_t next = order_.after(node);
      // What removing this one and looking at the next will touch.
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
      cut(node, at.run.length, keep);
      node = next;
    }
    return sizes_;
  }
  const auto counted = [&] { return sizes_.columns[static_cast<size_t>(column)]; };
  plan(pages, counted, [&](int32_t node, int32_t length, int64_t missing) {
    // The last page that has to go, and back to the checkpoint before it.
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
    return has_states_ ? last_checkpoint(node, kept) : kept;
  });
  return sizes_;
}

const PrefixTree::Sizes& PrefixTree::plan_evict_states(int64_t n) {
  require_evictable(n, "evictable states", states_);
  begin_plan(false);
  plan(
      n, [&] { return sizes_.states; },
      [&](int32_t node, int32_t length, int64_t missing) {
        int32_t kept = last_checkpoint(node, length);
        for (; kept > 0 && missing > 0; --missing) kept = last_checkpoint(node, kept - 1);
        return kept;
      });
  return sizes_;
}

template <typename Each>
void PrefixTree::for_subtree(int32_t top, Each each) const {
  for (int32_t node = top;; node = nodes_[node].next_sibling) {
    for (each(node); nodes_[node].first_child >= 0; each(node)) node = nodes_[node].first_child;
    while (node != top && nodes_[node].next_sibling < 0) node = nodes_[node].parent;
    if (node == top) return;
  }
}

const PrefixTree::Sizes& PrefixTree::plan_drop(std::string_view space) {
  begin_plan(true);
  dropped_root_ = find_root(space);
  if (dropped_root_ < 0) return sizes_;
  for_subtree(dropped_root_, [&](int32_t node) {
    if (nodes_[node].locks == 0 && !nodes_[node].is_root()) cut(node, nodes_[node].run.length, 0);
  });
  return sizes_;
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
    all.erase(first, all.end());
  }
  runs_.trim(at.run, cut.to);
  at.is_trimmed = true;
  if (cut.to == 0) remove(cut.node);
}

void PrefixTree::carry_out(const std::vector<int32_t*>& columns, int32_t* states) {
  events_.reserve(events_.size() + cut_events_.size());
  for (size_t c = 0; c < columns.size(); ++c) {
    int32_t* out = columns[c];
    for (const Cut& cut : cuts_) {
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
  for (const Cut& cut : cuts_) {
    for_checkpoints(cut, [&](const Checkpoint& checkpoint) { *states++ = checkpoint.state_id; });
  }
  if (!is_drop_) {
    for (const Cut& cut : cuts_) apply(cut);
  } else if (dropped_root_ >= 0) {
    Node& root = nodes_[dropped_root_];
    ++root.locks;  // it outlives its children until here
    for (auto cut = cuts_.rbegin(); cut != cuts_.rend(); ++cut) apply(*cut);
    const auto name = names_.find(dropped_root_);
    if (name->second.empty()) default_root_ = -1;
    roots_.erase(name->second);
    root.is_dropped = true;
    --root.locks;
    free_root_if_empty(dropped_root_);
  }
  for (TreeEvent& gone : cut_events_) events_.push_back(std::move(gone));
  cut_events_.clear();
}

void PrefixTree::discard(int first, int count, const BitSet& bad, std::vector<std::vector<int32_t>>& freed) {
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
  // What continues a bad page goes with it: whoever stands above comes first.
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
  // What nobody protects goes, and of the rest it is noted that it is lost. All that may fail comes first.
  begin_plan(false);
  for (const Found& top : tops) {
    for_subtree(top.node, [&](int32_t node) {
      if (nodes_[node].locks > 0) return;
      cut(node, nodes_[node].run.length, node == top.node ? math_.first_slot(top.page) : 0);
    });
  }
  std::reverse(cuts_.begin(), cuts_.end());  // children before their parents
  std::vector<int32_t*> columns;
  freed.resize(windows_.size());
  for (size_t c = 0; c < freed.size(); ++c) {
    freed[c].resize(static_cast<size_t>(sizes_.columns[c]));
    columns.push_back(freed[c].data());
  }
  std::vector<int32_t> states(static_cast<size_t>(sizes_.states));
  std::vector<std::pair<int32_t, int64_t>> rests;  // what the cut runs leave, or continued, by node and number
  rests.reserve(cuts_.size());
  reserve(static_cast<int64_t>(tops.size()), static_cast<int64_t>(tops.size()));
  events_.reserve(events_.size() + cut_events_.size());
  for (const Found& top : tops) {
    if (nodes_[top.node].locks == 0) continue;
    if (top.page > 0) split(top.node, nodes_[top.node].begin + math_.first_slot(top.page));
    nodes_[top.node].is_lost = true;
    ++num_lost_;
    // Matches made before must not find it: other numbers, another family.
    for_subtree(top.node, [&](int32_t node) {
      nodes_[node].number = next_number_++;
      nodes_[node].family = next_family_++;
    });
  }
  for (const Cut& cut : cuts_) {
    const int32_t rest = cut.to > 0 ? cut.node : nodes_[cut.node].parent;
    if (!nodes_[rest].is_root()) rests.emplace_back(rest, nodes_[rest].number);
  }
  carry_out(columns, states.data());
  if (set_of_.empty() || has_full_) return;
  for (const auto& [node, number] : rests) {
    if (nodes_[node].number == number) prune(node);
  }
}

int64_t PrefixTree::plan_punch(LeaseId id, int column, int64_t end) {
  if (!is_window(column)) throw BadArgument("column " + text(column) + " has no window: its pages are all needed");
  int32_t node = require(id).node;
  path_.clear();
  cut_events_.clear();
  planned_column_ = column;
  planned_pages_ = math_.page(end);  // a page that reaches past `end` stays
  int64_t num = 0;
  for (; !nodes_[node].is_root() && nodes_[node].locks == 1; node = nodes_[node].parent) {
    const Node& at = nodes_[node];
    const int64_t first = math_.page(at.begin);
    if (first >= planned_pages_) continue;
    path_.push_back(node);
    num += count_held(at.run, column, 0, std::min(planned_pages_, math_.page(at.end())) - first);
  }
  std::reverse(path_.begin(), path_.end());
  if (is_listened_) {
    for (int32_t each : path_) {
      const Node& at = nodes_[each];
      const int64_t first = math_.page(at.begin);
      int64_t page = first;
      runs_.for_places(at.run, 0, std::min(planned_pages_, math_.page(at.end())) - first,
                       [&](int32_t, int64_t place, int64_t n) {
                         for (const int64_t end = place + n; place < end; ++place, ++page) {
                           const int32_t id = runs_.id_at(column, place);
                           if (id >= 0) cut_events_.push_back(page_event(false, {each, column, page, place}, id));
                         }
                       });
    }
    events_.reserve(events_.size() + cut_events_.size());
  }
  return num;
}

void PrefixTree::carry_out_punch(int32_t* out) {
  for (int32_t node : path_) {
    const Node& at = nodes_[node];
    int64_t punched = 0;
    runs_.for_pages(at.run, planned_column_, 0, std::min(planned_pages_, math_.page(at.end())) - math_.page(at.begin),
                    [&](int32_t* ids, int64_t n) {
                      for (int64_t i = 0; i < n; ++i) {
                        if (ids[i] < 0) continue;
                        *out++ = ids[i];
                        ids[i] = -1;
                        ++punched;
                      }
                    });
    add_held(node, planned_column_, -punched);
  }
  for (TreeEvent& gone : cut_events_) events_.push_back(std::move(gone));
  cut_events_.clear();
}

int64_t PrefixTree::plan_replace(const Sequence& sequence, const std::vector<Ids>& columns) {
  require_tokens(sequence.tokens, 0);
  require_columns(sequence.tokens, columns);
  const int64_t end = math_.first_slot(math_.page(sequence.tokens.size));
  std::vector<int32_t> translated;
  const int32_t* entries = sequence.tokens.data;
  if (sequence.ranges != nullptr) {
    translated = extra_keys_.find(entries, sequence.tokens.size, 0, *sequence.ranges);
    entries = translated.data();
  }
  path_.clear();
  cut_events_.clear();
  const int32_t root = find_root(sequence.space);
  const auto step = [&](int32_t node, int64_t) { path_.push_back(node); };
  const int64_t found = root < 0 ? 0 : walk<false>({root, 0}, entries, 0, end, nullptr, step).depth;
  if (found != end) {
    throw BadArgument("only " + text(found) + " of " + text(end) +
                      " tokens are in the tree: replace what a match finds");
  }
  if (is_listened_ && end > 0) {
    TreeEvent gone{false, std::string(sequence.space), 0, 0, {}, {}, {}};
    gone.tokens.assign(sequence.tokens.data, sequence.tokens.data + end);
    TreeEvent news = gone;
    news.is_stored = true;
    for (int c = 0; c < num_columns(); ++c) {
      const Ids ids = columns[static_cast<size_t>(c)];
      news.columns.emplace_back(ids.data, ids.data + math_.page(end));
      std::vector<int32_t> old(static_cast<size_t>(math_.page(end)));
      for (int32_t node : path_) {
        const Node& at = nodes_[node];
        const int64_t n = math_.page(std::min<int64_t>(at.end(), end) - at.begin);
        runs_.copy_pages(at.run, c, 0, n, old.data() + math_.page(at.begin));
      }
      gone.columns.push_back(std::move(old));
    }
    cut_events_.push_back(std::move(gone));
    cut_events_.push_back(std::move(news));
    events_.reserve(events_.size() + 2);
  }
  planned_pages_ = math_.page(end);
  return planned_pages_;
}

void PrefixTree::carry_out_replace(const std::vector<Ids>& columns, const std::vector<int32_t*>& out) {
  for (int32_t node : path_) {
    const Node& at = nodes_[node];
    const int64_t first = math_.page(at.begin);
    const int64_t n = std::min(math_.page(at.run.length), planned_pages_ - first);
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
  for (TreeEvent& each : cut_events_) events_.push_back(std::move(each));
  cut_events_.clear();
}

void PrefixTree::reset() {
  nodes_.clear();
  free_node_ = -1;
  runs_.clear();
  children_.clear();
  order_.clear();
  extra_keys_.clear();
  for (auto& held : held_) held.clear();
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
