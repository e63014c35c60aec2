#include "core/prefix_tree.hpp"

#include <algorithm>
#include <cstring>
#include <limits>
#include <random>

#include "core/scan.hpp"

namespace pagoda {

PrefixTree::PrefixTree(int64_t page_tokens, std::vector<int64_t> windows, bool has_states, int64_t capacity,
                       uint32_t hash_mask)
    : math_(page_tokens),
      windows_(std::move(windows)),
      has_states_(has_states),
      hash_mask_(hash_mask),
      runs_(page_tokens, num_columns(),
            capacity + capacity / 4),  // a quarter more for chunks that are only partly used
      held_(windows_.size()),
      window_pages_(windows_.size()) {
  for (int64_t window : windows_) (window > 0 ? has_windows_ : has_full_) = true;
  std::random_device random;  // so that no caller can choose tokens whose hashes collide
  seed_ = (uint64_t{random()} << 32) | random();
  const int64_t nodes = capacity / 128;
  if (nodes == 0) return;
  nodes_.commit(nodes);
  order_.commit(nodes);
  children_.reserve(nodes);
  names_.reserve(64);
  reserve(nodes, 0);
}

void PrefixTree::expect(int64_t tokens) {
  const int64_t nodes = tokens / 128;
  nodes_.reserve(nodes);
  order_.expect(nodes);
  for (auto& held : held_) held.reserve(nodes);
  children_.reserve(nodes / 8);  // reserving writes the table; from an eighth it grows three times
  runs_.expect(tokens);
  if (has_states_) checkpoints_.reserve(static_cast<size_t>(nodes));
  if (!set_of_.empty()) owners_.reserve(tokens / (runs_.pages_per_chunk() * math_.size()));
}

Tally PrefixTree::pages(int column) const {
  if (is_window(column)) return window_pages_[static_cast<size_t>(column)];
  return {math_.page(tokens_.total), math_.page(tokens_.locked)};
}

std::vector<std::string> PrefixTree::namespaces() const {
  std::vector<std::string> names;
  for (const auto& [name, root] : roots_) names.push_back(name);
  return names;
}

// ── reading arguments ───────────────────────────────────────────────────────────────────────────────

const PrefixTree::Lease& PrefixTree::require(LeaseId lease) const {
  if (!is_held(lease)) throw Stale("lease " + text(lease.number) + " is from before the tree was reset");
  return leases_[static_cast<size_t>(lease.slot)];
}

void PrefixTree::require_tokens(Ids tokens, int64_t from) const {
  const int64_t bad = from + first_outside(tokens.data + from, tokens.size - from, 0, kMaxLength);
  if (bad == tokens.size) return;
  throw BadId{IdFault::kOutOfRange, tokens[bad], bad,
              "tokens[" + text(bad) + "] = " + text(tokens[bad]) + " is out of range: token ids are 0 to 2^31 - 1"};
}

void PrefixTree::require_columns(Ids tokens, const std::vector<Ids>& columns) const {
  const int64_t whole = math_.page(tokens.size), all = math_.pages_for(tokens.size);
  const int32_t last = static_cast<int32_t>((int64_t{kMaxLength} + 1) / math_.size() - 1);  // its slots end below 2^31
  for (int c = 0; c < num_columns(); ++c) {
    const Ids ids = columns[static_cast<size_t>(c)];
    const auto name = [&] { return num_columns() == 1 ? "page_ids" : "page_ids[" + text(c) + "]"; };
    if (ids.size != whole && ids.size != all) {
      throw BadArgument(name() + " has " + text(ids.size) + " ids, but " + text(tokens.size) + " tokens fill " +
                        text(whole) + " pages of " + text(math_.size()) + ": give one id per page");
    }
    const bool has_holes = is_window(c);
    for (int64_t p = 0; (p += first_outside(ids.data + p, ids.size - p, 1, last)) < ids.size; ++p) {
      if (has_holes && ids[p] == -1) continue;
      throw BadId{IdFault::kOutOfRange, ids[p], p,
                  name() + "[" + text(p) + "] = " + text(ids[p]) + " is out of range: page ids are 1 to " + text(last) +
                      (has_holes ? ", or -1 for a hole" : ", and this column has no holes")};
    }
  }
}

void PrefixTree::require_checkpoints(const std::vector<Checkpoint>& checkpoints, int64_t base, int64_t end) const {
  if (!checkpoints.empty() && !has_states_) throw BadArgument("checkpoints: this tree was built without states");
  int64_t before = base;
  for (size_t i = 0; i < checkpoints.size(); ++i) {
    const auto [length, state_id] = checkpoints[i];
    const std::string name = "checkpoints[" + text(static_cast<int64_t>(i)) + "]";
    if (length <= before || length > end || math_.offset(length) != 0) {
      throw BadArgument(name + " is at " + text(length) + ": give ascending lengths at whole pages, greater than " +
                        text(base) + " and at most " + text(end));
    }
    if (state_id < 0) {
      throw BadId{IdFault::kOutOfRange, state_id, static_cast<int64_t>(i),
                  name + " has state id " + text(state_id) + ": state ids must not be negative"};
    }
    before = length;
  }
}

// ── nodes ───────────────────────────────────────────────────────────────────────────────────────────

void PrefixTree::reserve(int64_t nodes, int64_t chunks) {
  const int64_t all = num_nodes_ + static_cast<int64_t>(names_.size()) + nodes;
  if (all > nodes_.size()) {
    nodes_.reserve(all);
    order_.reserve(all);
    for (int c = 0; c < num_columns(); ++c) {
      if (!is_window(c)) continue;
      auto& held = held_[static_cast<size_t>(c)];
      held.reserve(all);
      if (all > held.size()) held.extend(all - held.size());
    }
    if (has_states_ && checkpoints_.size() < static_cast<size_t>(all)) checkpoints_.resize(static_cast<size_t>(all));
  }
  if (has_states_) {
    if (spares_.size() < static_cast<size_t>(nodes)) spares_.resize(static_cast<size_t>(nodes));
    for (auto& spare : spares_) spare.reserve(most_checkpoints_);
  }
  children_.reserve(num_nodes_ + nodes);
  runs_.reserve(chunks);
  if (set_of_.empty()) return;
  if ((runs_.num_chunks() + chunks) * runs_.pages_per_chunk() > int64_t{1} << 32) throw std::bad_alloc();
  owners_.reserve(runs_.num_chunks() + chunks);
}

int32_t PrefixTree::new_node(int32_t parent, int64_t begin) {
  int32_t node = free_node_;
  if (node >= 0) {
    free_node_ = nodes_[node].parent;
  } else {
    node = static_cast<int32_t>(nodes_.size());
    nodes_.extend(1);
  }
  Node fresh{};
  fresh.parent = parent;
  fresh.root = parent < 0 ? node : nodes_[parent].root;
  fresh.first_child = fresh.next_sibling = fresh.prev_sibling = -1;
  fresh.run = Run{};
  fresh.begin = static_cast<int32_t>(begin);
  fresh.number = next_number_++;
  fresh.family = next_family_++;
  fresh.used = now_;
  nodes_[node] = fresh;
  for (int c = 0; c < num_columns(); ++c) {
    if (is_window(c)) held_[static_cast<size_t>(c)][node] = 0;
  }
  return node;
}

void PrefixTree::free_node(int32_t node) {
  num_lost_ -= nodes_[node].is_lost;
  if (has_states_) std::vector<Checkpoint>().swap(checkpoints_[static_cast<size_t>(node)]);
  nodes_[node].number = 0;
  nodes_[node].parent = free_node_;
  free_node_ = node;
}

int32_t PrefixTree::find_or_make_root(std::string_view space) {
  const int32_t found = find_root(space);
  if (found >= 0) return found;
  const auto it = roots_.emplace(space, -1).first;
  const int32_t next = free_node_ >= 0 ? free_node_ : static_cast<int32_t>(nodes_.size());
  try {
    names_.emplace(next, it->first);
  } catch (...) {
    roots_.erase(it);
    throw;
  }
  const int32_t root = it->second = new_node(-1, 0);
  if (space.empty()) default_root_ = root;
  return root;
}

void PrefixTree::free_root_if_empty(int32_t root) {
  const Node& at = nodes_[root];
  if (at.first_child >= 0 || at.locks > 0) return;
  if (!at.is_dropped) {
    const std::string& name = names_.find(root)->second;
    if (name.empty()) default_root_ = -1;
    roots_.erase(roots_.find(name));
  }
  names_.erase(root);
  free_node(root);
}

void PrefixTree::link(int32_t node) {
  Node& at = nodes_[node];
  Node& parent = nodes_[at.parent];
  if (parent.is_root() || parent.first_child >= 0) ++num_leaves_;
  at.prev_sibling = -1;
  at.next_sibling = parent.first_child;
  if (parent.first_child >= 0) nodes_[parent.first_child].prev_sibling = node;
  parent.first_child = node;
  ++parent.num_children;
  at.hash = hash(at.parent, runs_.first_page(at.run));
  children_.insert(at.hash, node);
  ++num_nodes_;
}

void PrefixTree::remove(int32_t node) {
  const Node at = nodes_[node];
  children_.erase(at.hash, node);
  order_.remove(node);
  Node& parent = nodes_[at.parent];
  (at.prev_sibling < 0 ? parent.first_child : nodes_[at.prev_sibling].next_sibling) = at.next_sibling;
  if (at.next_sibling >= 0) nodes_[at.next_sibling].prev_sibling = at.prev_sibling;
  --parent.num_children;
  --num_nodes_;
  if (parent.is_root() || parent.first_child >= 0) --num_leaves_;
  free_node(node);
  if (parent.is_root()) free_root_if_empty(at.parent);
}

int32_t PrefixTree::split(int32_t node, int64_t depth) {
  const int32_t upper = new_node(nodes_[node].parent, nodes_[node].begin);
  Node& low = nodes_[node];
  Node& up = nodes_[upper];
  const int64_t at = depth - low.begin;
  if (has_states_) {
    auto& all = checkpoints_[static_cast<size_t>(node)];
    const auto below = std::upper_bound(all.begin(), all.end(), depth,
                                        [](int64_t at, const Checkpoint& each) { return at < each.length; });
    if (below != all.begin()) {
      // The shorter half gets memory of its own, so that many splits of a long list take little.
      auto& above = checkpoints_[static_cast<size_t>(upper)];
      const bool is_above = below - all.begin() <= all.end() - below;
      const auto first = is_above ? all.begin() : below, last = is_above ? below : all.end();
      try {
        above.reserve(static_cast<size_t>(last - first));
      } catch (const std::bad_alloc&) {
        above.swap(spares_.back());  // has room for them, and for many more
        spares_.pop_back();
      }
      above.assign(first, last);
      all.erase(first, last);
      if (!is_above) above.swap(all);
      if (follows_states_) note_checkpoints(above, upper);
    }
  }
  for (int c = 0; c < num_columns(); ++c) {
    if (!is_window(c)) continue;
    auto& held = held_[static_cast<size_t>(c)];
    // Only the shorter half is counted, and neither if there are no holes.
    const int64_t above = math_.page(at), all = math_.page(low.run.length);
    held[upper] = static_cast<int32_t>(held[node] == all  ? above
                                       : 2 * above <= all ? count_held(low.run, c, 0, above)
                                                          : held[node] - count_held(low.run, c, above, all));
    held[node] -= held[upper];
  }
  Run rest = runs_.split(low.run, at);
  up.run = low.run;
  low.run = rest;
  low.begin = static_cast<int32_t>(depth);
  if (!set_of_.empty()) {
    note_owner(upper);
    note_places(node, 0, std::min(runs_.pages_per_chunk(), math_.page(rest.length)));  // the split may have moved them
  }
  up.family = low.family;
  up.used = low.used;
  up.is_trimmed = true;
  std::swap(up.is_lost, low.is_lost);
  up.locks = low.locks > 0 ? 1 : 0;
  up.hash = low.hash;
  children_.replace(low.hash, node, upper);
  up.next_sibling = low.next_sibling;
  up.prev_sibling = low.prev_sibling;
  if (up.next_sibling >= 0) nodes_[up.next_sibling].prev_sibling = upper;
  (up.prev_sibling < 0 ? nodes_[up.parent].first_child : nodes_[up.prev_sibling].next_sibling) = upper;
  up.first_child = node;
  up.num_children = 1;
  low.parent = upper;
  low.next_sibling = low.prev_sibling = -1;
  low.hash = hash(upper, runs_.first_page(low.run));
  children_.insert(low.hash, node);
  ++num_nodes_;
  if (up.locks == 0) order_.add_upper(upper, node);
  return upper;
}

void PrefixTree::rejoin(int32_t node) {
  while (nodes_[node].locks == 0 && !nodes_[node].is_root()) {
    const int32_t parent = nodes_[node].parent;
    const Node &low = nodes_[node], &up = nodes_[parent];
    if (up.is_root() || up.locks > 0 || up.used != low.used || low.is_lost) return;
    if (up.num_children == 1 && up.family == low.family && runs_.can_join(up.run, low.run)) {
      if (!join(parent, node)) return;
    } else {
      node = parent;
    }
  }
}

bool PrefixTree::join(int32_t upper, int32_t lower) {
  if (has_states_) {
    auto& all = checkpoints_[static_cast<size_t>(lower)];
    auto& above = checkpoints_[static_cast<size_t>(upper)];
    try {
      above.reserve(above.size() + all.size());
    } catch (const std::bad_alloc&) {
      return false;
    }
    if (follows_states_) note_checkpoints(above, lower);
    above.insert(above.end(), all.begin(), all.end());
    all.swap(above);
    above.clear();
    most_checkpoints_ = std::max(most_checkpoints_, all.size());
  }
  Node& up = nodes_[upper];
  Node& low = nodes_[lower];
  children_.erase(low.hash, lower);
  children_.replace(up.hash, upper, lower);
  low.hash = up.hash;
  std::swap(low.is_lost, up.is_lost);
  const int64_t first = math_.page(up.run.length), pages = math_.page(low.run.length);
  low.run = runs_.join(up.run, low.run);
  low.begin = up.begin;
  if (!set_of_.empty()) {
    note_owner(lower);
    note_places(lower, first, first + std::min(runs_.pages_per_chunk(), pages));
  }
  low.parent = up.parent;
  low.next_sibling = up.next_sibling;
  low.prev_sibling = up.prev_sibling;
  if (low.next_sibling >= 0) nodes_[low.next_sibling].prev_sibling = lower;
  (low.prev_sibling < 0 ? nodes_[low.parent].first_child : nodes_[low.prev_sibling].next_sibling) = lower;
  for (int c = 0; c < num_columns(); ++c) {
    if (is_window(c)) held_[static_cast<size_t>(c)][lower] += held_[static_cast<size_t>(c)][upper];
  }
  order_.remove(upper);
  --num_nodes_;
  free_node(upper);
  return true;
}

// ── where pages and checkpoints are ─────────────────────────────────────────────────────────────────────────────────

void PrefixTree::follow(std::vector<int> set_of, const std::vector<int64_t>& num_ids) {
  for (int64_t n : num_ids) places_.emplace_back(n + 1);
  columns_of_.resize(num_ids.size());
  for (int c = 0; c < num_columns(); ++c) {
    const int set = set_of[static_cast<size_t>(c)];
    if (set >= 0) columns_of_[static_cast<size_t>(set)].push_back(c);
  }
  set_of_ = std::move(set_of);
}

void PrefixTree::note_owner(int32_t node) {
  const Run& run = nodes_[node].run;
  runs_.for_places(run, 0, math_.page(run.length),
                   [&](int32_t chunk, int64_t, int64_t) { owners_[chunk].node = node; });
}

void PrefixTree::note_places(int32_t node, int64_t begin, int64_t end) {
  int64_t page = math_.page(nodes_[node].begin) + begin;
  runs_.for_places(nodes_[node].run, begin, end, [&](int32_t chunk, int64_t place, int64_t n) {
    owners_[chunk] = {node, static_cast<int32_t>(page - place % runs_.pages_per_chunk())};
    page += n;
    for (int c = 0; c < num_columns(); ++c) {
      const int set = set_of_[static_cast<size_t>(c)];
      if (set < 0) continue;
      uint32_t* places = places_[static_cast<size_t>(set)].data();
      const int32_t* ids = &runs_.id_at(c, place);
      for (int64_t i = 0; i < n; ++i) {
        if (ids[i] >= 0) places[ids[i]] = static_cast<uint32_t>(place + i);
      }
    }
  });
}

void PrefixTree::follow_states(int64_t num_states) {
  spots_ = LazyArray<Spot>(num_states + 1);
  follows_states_ = true;
}

TreeEvent PrefixTree::checkpoint_event(EventKind kind, int32_t node, Checkpoint checkpoint) const {
  TreeEvent event{kind, true, space_of(node), checkpoint.length, key_at(node, checkpoint.length)};
  event.columns.resize(windows_.size());
  event.states.push_back(checkpoint);
  return event;
}

bool PrefixTree::add_checkpoint(LeaseId lease, Checkpoint checkpoint) {
  const int32_t node = climb({require(lease).node, checkpoint.length}).node;
  if (is_lost(node)) return false;
  auto& all = checkpoints_[static_cast<size_t>(node)];
  const auto at = std::lower_bound(all.begin(), all.end(), checkpoint.length,
                                   [](const Checkpoint& each, int32_t length) { return each.length < length; });
  if (at != all.end() && at->length == checkpoint.length) return false;
  std::vector<TreeEvent> news;
  if (is_listened_) {
    news.push_back(checkpoint_event(EventKind::kStored, node, checkpoint));
    events_.reserve(events_.size() + 1);
  }
  all.insert(at, checkpoint);
  most_checkpoints_ = std::max(most_checkpoints_, all.size());
  spots_[checkpoint.state_id] = {node, checkpoint.length};
  ++states_.total;
  if (nodes_[node].locks > 0) ++states_.locked;
  tell(news);
  return true;
}

void PrefixTree::remove_checkpoint(int32_t state_id) {
  const auto [node, length] = spots_[state_id];
  if (is_listened_ && !is_lost(node)) {
    events_.push_back(checkpoint_event(EventKind::kRemoved, node, {length, state_id}));
  }
  auto& all = checkpoints_[static_cast<size_t>(node)];
  all.erase(std::lower_bound(all.begin(), all.end(), length,
                             [](const Checkpoint& each, int32_t at) { return each.length < at; }));
  spots_[state_id] = {};
  --states_.total;
  if (nodes_[node].locks > 0) --states_.locked;
  if (!has_full_) prune(node);
}

Checkpoint PrefixTree::last_checkpoint_up(int32_t node, int64_t length) const {
  for (; !nodes_[node].is_root(); node = nodes_[node].parent) {
    const auto& all = checkpoints_[static_cast<size_t>(node)];
    const auto after = std::upper_bound(all.begin(), all.end(), length,
                                        [](int64_t at, const Checkpoint& each) { return at < each.length; });
    if (after != all.begin()) return *std::prev(after);
  }
  return {0, -1};
}

PrefixTree::Hole PrefixTree::find_page(int set, int32_t id) const {
  const int64_t place = places_[static_cast<size_t>(set)][id];
  const auto [node, first_page] = owners_[runs_.chunk_of(place)];
  const auto& columns = columns_of_[static_cast<size_t>(set)];
  int column = columns[0];  // almost always the only one
  for (size_t i = 1; runs_.id_at(column, place) != id; ++i) column = columns[i];
  return {node, column, first_page + place % runs_.pages_per_chunk(), place};
}

void PrefixTree::punch_page(int set, int32_t id) {
  const Hole at = find_page(set, id);
  if (is_listened_ && !is_lost(at.node)) events_.push_back(page_event(EventKind::kRemoved, at, id));
  runs_.id_at(at.column, at.place) = -1;
  add_held(at.node, at.column, -1);
  if (!has_full_) prune(at.node);
}

void PrefixTree::replace_page(int set, int32_t old_id, int32_t new_id) {
  const Hole at = find_page(set, old_id);
  tell_exchange(at, old_id, new_id);
  runs_.id_at(at.column, at.place) = new_id;
  places_[static_cast<size_t>(set)][new_id] = static_cast<uint32_t>(at.place);
}

void PrefixTree::tell_exchange(const Hole& at, int32_t old_id, int32_t new_id) {
  if (!is_listened_ || is_lost(at.node)) return;
  std::vector<TreeEvent> news;
  if (old_id >= 0) news.push_back(page_event(EventKind::kRemoved, at, old_id));
  news.push_back(page_event(EventKind::kStored, at, new_id));
  events_.reserve(events_.size() + news.size());
  tell(news);
}

void PrefixTree::prune(int32_t node) {
  while (!nodes_[node].is_root() && nodes_[node].first_child < 0 && nodes_[node].locks == 0) {
    for (int c = 0; c < num_columns(); ++c) {
      if (held(c, node) > 0) return;
    }
    if (has_states_ && !checkpoints_[static_cast<size_t>(node)].empty()) return;
    const int32_t parent = nodes_[node].parent;
    const bool is_last = nodes_[parent].is_root();  // an empty root is removed as well
    if (is_listened_ && !is_lost(node)) {
      try {
        events_.push_back(event(EventKind::kRemoved, node, nodes_[node].begin, nodes_[node].end()));
      } catch (const std::bad_alloc&) {
        return;  // no memory for the event: the node stays, and holds no page
      }
    }
    apply({node, nodes_[node].run.length, 0});
    if (is_last) return;
    node = parent;
  }
}

int64_t PrefixTree::count_held(const Run& run, int column, int64_t begin, int64_t end) const {
  int64_t n = 0;
  runs_.for_pages(run, column, begin, end, [&](const int32_t* ids, int64_t size) {
    for (int64_t i = 0; i < size; ++i) n += ids[i] >= 0;
  });
  return n;
}

void PrefixTree::add_held(int32_t node, int column, int64_t n) {
  held_[static_cast<size_t>(column)][node] += static_cast<int32_t>(n);
  Tally& tally = window_pages_[static_cast<size_t>(column)];
  tally.total += n;
  if (nodes_[node].locks > 0) tally.locked += n;
}

}  // namespace pagoda
