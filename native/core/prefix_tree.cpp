#include "core/prefix_tree.hpp"

#include <algorithm>
#include <cstring>
#include <limits>
#include <random>

#include "core/scan.hpp"

namespace pagoda {

namespace {

constexpr int32_t kMaxLength = std::numeric_limits<int32_t>::max();

uint64_t fold(uint64_t a, uint64_t b) {
  const unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

}  // namespace

PrefixTree::PrefixTree(int64_t page_size, std::vector<int64_t> windows, bool has_states, int64_t capacity,
                       uint32_t hash_mask)
    : math_(page_size),
      windows_(std::move(windows)),
      has_states_(has_states),
      hash_mask_(hash_mask),
      runs_(page_size, num_columns(), capacity + capacity / 4),  // half-used chunks of runs that end inside one
      held_(windows_.size()),
      window_pages_(windows_.size()),
      sizes_{std::vector<int64_t>(windows_.size()), 0} {
  for (int64_t window : windows_) has_windows_ = has_windows_ || window > 0;
  std::random_device random;  // nobody can choose tokens whose hashes collide
  seed_ = (uint64_t{random()} << 32) | random();
  const int64_t nodes = capacity / 128;
  if (nodes == 0) return;
  nodes_.commit(nodes);
  order_.commit(nodes);
  children_.reserve(nodes);
  names_.reserve(64);
  reserve(nodes, 0);
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
    const std::string name = num_columns() == 1 ? "page_ids" : "page_ids[" + text(c) + "]";
    if (ids.size != whole && ids.size != all) {
      throw BadArgument(name + " has " + text(ids.size) + " ids, but " + text(tokens.size) + " tokens fill " +
                        text(whole) + " pages of " + text(math_.size()));
    }
    const bool has_holes = is_window(c);
    for (int64_t p = 0; (p += first_outside(ids.data + p, ids.size - p, 1, last)) < ids.size; ++p) {
      if (has_holes && ids[p] == -1) continue;
      throw BadId{IdFault::kOutOfRange, ids[p], p,
                  name + "[" + text(p) + "] = " + text(ids[p]) +
                      " is not a page: ids begin at 1, slots stay below 2^31" +
                      (has_holes ? ", and -1 is a hole" : ", and this column has no holes")};
    }
  }
}

void PrefixTree::require_checkpoints(const std::vector<Checkpoint>& checkpoints, int64_t base, int64_t end) const {
  if (!checkpoints.empty() && !has_states_) throw BadArgument("checkpoints: this tree was made without states");
  int64_t before = base;
  for (size_t i = 0; i < checkpoints.size(); ++i) {
    const auto [length, state_id] = checkpoints[i];
    const std::string name = "checkpoints[" + text(static_cast<int64_t>(i)) + "]";
    if (length <= before || length > end || math_.offset(length) != 0) {
      throw BadArgument(name + " is at " + text(length) + ": give ascending lengths at whole pages, over " +
                        text(base) + " and up to " + text(end));
    }
    if (state_id < 0) {
      throw BadId{IdFault::kOutOfRange, state_id, static_cast<int64_t>(i),
                  name + " has state id " + text(state_id) + ": ids are not negative"};
    }
    before = length;
  }
}

// ── finding ─────────────────────────────────────────────────────────────────────────────────────────

uint32_t PrefixTree::hash(int32_t parent, const int32_t* page) const {
  uint64_t h = fold(seed_ ^ static_cast<uint32_t>(parent), 0x9E3779B97F4A7C15u);
  int64_t i = 0;
  for (; i + 2 <= math_.size(); i += 2) {
    uint64_t two;
    std::memcpy(&two, page + i, sizeof two);
    h = fold(h ^ two, 0xD1342543DE82EF95u ^ seed_);
  }
  if (i < math_.size()) h = fold(h ^ static_cast<uint32_t>(page[i]), 0xD1342543DE82EF95u ^ seed_);
  return static_cast<uint32_t>(h ^ (h >> 32)) & hash_mask_;
}

int32_t PrefixTree::find_root(std::string_view space) const {
  if (space.empty()) return default_root_;
  const auto it = roots_.find(space);
  return it == roots_.end() ? -1 : it->second;
}

int32_t PrefixTree::child_of(int32_t parent, const int32_t* page, uint32_t key) const {
  const size_t bytes = static_cast<size_t>(math_.size()) * sizeof(int32_t);
  return children_.find(key, [&](int32_t node) {
    return nodes_[node].parent == parent && std::memcmp(runs_.first_page(nodes_[node].run), page, bytes) == 0;
  });
}

PrefixTree::Place PrefixTree::climb(Place place) const {
  while (!nodes_[place.node].is_root() && place.depth <= nodes_[place.node].begin) {
    place.node = nodes_[place.node].parent;
  }
  return place;
}

int64_t PrefixTree::last_hole(Place place, int column) const {
  const int64_t low = math_.page(std::max<int64_t>(0, place.depth - windows_[static_cast<size_t>(column)] + 1));
  int64_t high = math_.page(place.depth);
  if (windows_[static_cast<size_t>(column)] == 1) return -1;
  for (int32_t node = place.node; !nodes_[node].is_root() && high > low; node = nodes_[node].parent) {
    const Node& at = nodes_[node];
    const int64_t first = math_.page(at.begin), begin = std::max(low, first);
    if (held(column, node) < math_.page(at.run.length)) {
      int64_t page = begin, hole = -1;
      runs_.for_pages(at.run, column, begin - first, high - first, [&](const int32_t* ids, int64_t n) {
        for (int64_t i = 0; i < n; ++i, ++page) {
          if (ids[i] < 0) hole = page;
        }
      });
      if (hole >= 0) return hole;
    }
    high = first;
  }
  return -1;
}

int32_t PrefixTree::last_checkpoint(int32_t node, int64_t length) const {
  const int64_t depth = nodes_[node].begin + length;
  const auto& all = checkpoints_[static_cast<size_t>(node)];
  const auto after = std::upper_bound(all.begin(), all.end(), depth,
                                      [](int64_t at, const Checkpoint& checkpoint) { return at < checkpoint.length; });
  return after == all.begin() ? 0 : std::prev(after)->length - nodes_[node].begin;
}

PrefixTree::Place PrefixTree::usable(Place place) const {
  if (is_plain()) return place;
  for (;;) {
    const int64_t before = place.depth;
    while (has_states_ && !nodes_[place.node].is_root()) {
      const int64_t begin = nodes_[place.node].begin;
      const int32_t length = last_checkpoint(place.node, place.depth - begin);
      place.depth = begin + length;
      if (length > 0) break;
      place.node = nodes_[place.node].parent;
    }
    for (int c = 0; c < num_columns(); ++c) {
      if (!is_window(c)) continue;
      const int64_t hole = last_hole(place, c);
      if (hole >= 0) place = climb({place.node, math_.first_slot(hole)});
    }
    if (place.depth == before) return place;
  }
}

void PrefixTree::match(const Sequence& sequence, Match& match) const {
  if (!extra_keys_.empty()) require_tokens(sequence.tokens, 0);  // a stored token may be negative
  match.space = sequence.space;
  match.made = next_family_;
  match.root = find_root(sequence.space);
  if (match.root < 0) return require_tokens(sequence.tokens, 0);
  match.root_number = nodes_[match.root].number;
  std::vector<int32_t> translated;
  const int32_t* entries = sequence.tokens.data;
  if (sequence.ranges != nullptr) {
    translated = extra_keys_.find(entries, sequence.tokens.size, 0, *sequence.ranges);
    entries = translated.data();
  }
  const Place found = walk<true>({match.root, 0}, entries, 0, sequence.tokens.size, [&](int32_t node, int64_t depth) {
    const Node& at = nodes_[node];
    match.path.push({at.number, at.family, node, static_cast<int32_t>(depth), at.hash});
  });
  require_tokens(sequence.tokens, found.depth);  // those before equal stored ones
  match.found = match.length = found.depth;
  if (is_plain()) return;
  const Place place = usable(found);
  match.length = place.depth;
  while (match.path.size() > 0 && nodes_[match.path.back().node].begin >= place.depth) match.path.pop();
  if (match.path.size() == 0) return;
  match.path.back().end = static_cast<int32_t>(place.depth);
  if (has_states_) {
    for (const Checkpoint& at : checkpoints_[static_cast<size_t>(place.node)]) {
      if (at.length == place.depth) match.state_id = at.state_id;
    }
  }
}

int64_t PrefixTree::match_length(const Sequence& sequence) const {
  if (sequence.ranges != nullptr) {
    Match full;
    match(sequence, full);
    return full.length;
  }
  if (!extra_keys_.empty()) require_tokens(sequence.tokens, 0);
  Place place{find_root(sequence.space), 0};
  if (place.node >= 0) {
    place = walk<false>(place, sequence.tokens.data, 0, sequence.tokens.size, [](int32_t, int64_t) {});
  }
  require_tokens(sequence.tokens, place.depth);
  return place.node < 0 ? 0 : usable(place).depth;
}

void PrefixTree::copy_pages(const Match& match, int column, int32_t* out) const {
  int64_t begin = 0;
  for (int64_t i = 0; i < match.path.size(); ++i) {
    const Step& step = match.path[i];
    const int64_t n = math_.page(step.end - begin);
    runs_.copy_pages(nodes_[step.node].run, column, 0, n, out);
    out += n;
    begin = step.end;
  }
}

// ── leases ──────────────────────────────────────────────────────────────────────────────────────────

PrefixTree::Place PrefixTree::survivor(const Match& match) const {
  // The root that the match began at. It lives: whoever calls has looked.
  Place place{match.root, 0};
  int64_t next = match.path.size();
  while (next > 0) {
    const Step& step = match.path[next - 1];
    const Node& node = nodes_[step.node];
    if (node.number == step.number) {
      place = climb({step.node, std::min(step.end, node.end())});
      if (place.depth < step.end) next = match.path.size() + 1;  // trimmed: nothing below it is left
      break;
    }
    --next;
  }
  // Of the steps that are gone an upper half may be left: where they began, of their family.
  for (; next < match.path.size(); ++next) {
    const Step& step = match.path[next];
    int32_t half = children_.find(step.hash, [&](int32_t node) {
      return nodes_[node].parent == place.node && nodes_[node].family == step.family;
    });
    while (half >= 0) {
      place = {half, std::min(step.end, nodes_[half].end())};
      if (place.depth == step.end) break;
      half = nodes_[half].first_child;
      while (half >= 0 && nodes_[half].family != step.family) half = nodes_[half].next_sibling;
    }
    if (place.depth < step.end) break;
  }
  if (match.made <= replaced_) {
    for (int32_t node = place.node; !nodes_[node].is_root(); node = nodes_[node].parent) {
      if (nodes_[node].family >= match.made) return {match.root, 0};  // it has other ids than the match says
    }
  }
  return place;
}

LeaseId PrefixTree::lock(const Match& match) {
  reserve(2, 1);
  if (free_leases_.empty()) {
    if (leases_.size() == leases_.capacity()) leases_.reserve(2 * leases_.size() + 64);
    free_leases_.reserve(leases_.capacity());  // a release cannot fail
    leases_.push_back({0, 0, false});
    free_leases_.push_back(static_cast<int32_t>(leases_.size() - 1));
  }
  const int32_t root = find_or_make_root(match.space);
  Place place{root, 0};
  if (match.root == root && nodes_[root].number == match.root_number) place = usable(survivor(match));
  const int32_t node = end_at(place);
  ++now_;
  hold(node);
  const int32_t slot = free_leases_.back();
  free_leases_.pop_back();
  leases_[static_cast<size_t>(slot)] = {next_lease_, node, false};
  ++num_leases_;
  return {slot, next_lease_++};
}

bool PrefixTree::is_held(LeaseId lease) const {
  return lease.slot < static_cast<int64_t>(leases_.size()) &&
         leases_[static_cast<size_t>(lease.slot)].number == lease.number;
}

int64_t PrefixTree::length(LeaseId lease) const { return nodes_[require(lease).node].end(); }

void PrefixTree::demote(LeaseId lease) {
  require(lease);
  leases_[static_cast<size_t>(lease.slot)].is_demoted = true;
}

void PrefixTree::release(LeaseId id) {
  const Lease lease = require(id);
  ++now_;
  leases_[static_cast<size_t>(id.slot)].number = 0;
  free_leases_.push_back(id.slot);
  --num_leases_;
  if (nodes_[nodes_[lease.node].root].is_dropped) {
    let_go_dropped(lease.node);
  } else if (lease.is_demoted) {
    let_go_coldest(lease.node);
  } else {
    let_go(lease.node);
  }
}

void PrefixTree::copy_pages(LeaseId lease, int column, int32_t* out) const {
  for (int32_t node = require(lease).node; !nodes_[node].is_root(); node = nodes_[node].parent) {
    const Node& at = nodes_[node];
    runs_.copy_pages(at.run, column, 0, math_.page(at.run.length), out + math_.page(at.begin));
  }
}

void PrefixTree::count_locked(int32_t node, int64_t sign) {
  tokens_.locked += sign * nodes_[node].run.length;
  if (is_plain()) return;
  for (int c = 0; c < num_columns(); ++c) {
    if (is_window(c)) window_pages_[static_cast<size_t>(c)].locked += sign * held(c, node);
  }
  if (has_states_) {
    states_.locked += sign * static_cast<int64_t>(checkpoints_[static_cast<size_t>(node)].size());
  }
}

void PrefixTree::hold(int32_t node) {
  while (nodes_[node].locks++ == 0 && !nodes_[node].is_root()) {
    order_.remove(node);
    count_locked(node, 1);
    nodes_[node].used = now_;
    node = nodes_[node].parent;
  }
}

void PrefixTree::let_go(int32_t node) {
  while (--nodes_[node].locks == 0) {
    if (nodes_[node].is_root()) return free_root_if_empty(node);
    order_.add(node);
    count_locked(node, -1);
    nodes_[node].used = now_;
    node = nodes_[node].parent;
  }
}

void PrefixTree::let_go_coldest(int32_t node) {
  --cold_;
  // The own tail: what only this lease protects and nothing else continues.
  path_.clear();
  for (int32_t child = -1; !nodes_[node].is_root(); child = node, node = nodes_[node].parent) {
    const Node& at = nodes_[node];
    if (at.locks != 1 || at.num_children != (child < 0 ? 0 : 1)) break;
    path_.push_back(node);
  }
  for (auto it = path_.rbegin(); it != path_.rend(); ++it) {
    nodes_[*it].locks = 0;
    order_.add_coldest(*it);
    count_locked(*it, -1);
    nodes_[*it].used = cold_;
  }
  let_go(node);
}

void PrefixTree::let_go_dropped(int32_t node) {
  --cold_;
  while (--nodes_[node].locks == 0) {
    if (nodes_[node].is_root()) return free_root_if_empty(node);
    // Nobody can find it any more: as cold as its children let it be.
    int32_t child = nodes_[node].first_child;
    for (int32_t other = child; other >= 0; other = nodes_[other].next_sibling) {
      if (nodes_[other].used > nodes_[child].used) child = other;
    }
    if (child < 0) {
      order_.add_coldest(node);
    } else {
      order_.add_upper(node, child);
    }
    nodes_[node].used = child < 0 ? cold_ : nodes_[child].used;
    count_locked(node, -1);
    node = nodes_[node].parent;
  }
}

void PrefixTree::touch(int32_t node) {
  for (; !nodes_[node].is_root() && nodes_[node].locks == 0; node = nodes_[node].parent) {
    order_.remove(node);
    order_.add(node);
    nodes_[node].used = now_;
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
  children_.reserve(num_nodes_ + nodes);
  runs_.reserve(chunks);
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
    auto first = std::find_if(all.begin(), all.end(), [&](const Checkpoint& c) { return c.length > depth; });
    checkpoints_[static_cast<size_t>(upper)].assign(all.begin(), first);
    all.erase(all.begin(), first);
  }
  for (int c = 0; c < num_columns(); ++c) {
    if (!is_window(c)) continue;
    auto& held = held_[static_cast<size_t>(c)];
    held[upper] = static_cast<int32_t>(count_held(low.run, c, 0, math_.page(at)));
    held[node] -= held[upper];
  }
  Run rest = runs_.split(low.run, at);
  up.run = low.run;
  low.run = rest;
  low.begin = static_cast<int32_t>(depth);
  up.family = low.family;
  up.used = low.used;
  up.is_trimmed = true;
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

// ── insert ──────────────────────────────────────────────────────────────────────────────────────────

Inserted PrefixTree::insert(const Sequence& sequence, const std::vector<Ids>& columns, const LeaseId* lease_id,
                            const std::vector<Checkpoint>& checkpoints) {
  Lease* lease = nullptr;
  int32_t from = -1;
  if (lease_id != nullptr) {
    from = require(*lease_id).node;
    lease = &leases_[static_cast<size_t>(lease_id->slot)];
    if (nodes_[nodes_[from].root].is_dropped) {
      throw Stale("lease " + text(lease->number) + " is of a namespace that was dropped: release it");
    }
  } else {
    from = find_root(sequence.space);
  }
  // Positions: [0, base) the lease's own, [base, end) the whole pages given.
  const int64_t base = from < 0 ? 0 : nodes_[from].end();
  const int64_t end = base + math_.first_slot(math_.page(sequence.tokens.size));
  if (end > kMaxLength) throw BadArgument("a sequence has fewer than 2^31 tokens");
  if (!extra_keys_.empty() || sequence.ranges != nullptr) require_tokens(sequence.tokens, 0);
  try {
    require_columns(sequence.tokens, columns);
    require_checkpoints(checkpoints, base, end);
  } catch (...) {
    require_tokens(sequence.tokens, 0);  // what is wrong first is said first
    throw;
  }

  struct Tidy {
    ExtraKeys& keys;
    bool is_on;
    ~Tidy() {
      if (is_on) keys.tidy();
    }
  } tidy{extra_keys_, sequence.ranges != nullptr};
  std::vector<int32_t> translated;
  const int32_t* entries = sequence.tokens.data;
  if (sequence.ranges != nullptr) {
    translated = extra_keys_.make(entries, sequence.tokens.size, base, *sequence.ranges);
    entries = translated.data();
  }

  // Where it leaves what is there.
  path_.clear();
  Place at{from, base};
  if (from >= 0) {
    at = walk<false>(at, entries, base, end, [&](int32_t node, int64_t) {
      if (!is_plain()) path_.push_back(node);
    });
  }
  require_tokens(sequence.tokens, at.depth - base);
  Inserted result;
  const int64_t present = result.present = at.depth;
  const int64_t stored = result.stored =
      has_states_ ? std::max<int64_t>(present, checkpoints.empty() ? 0 : checkpoints.back().length) : end;

  // Holes that the given ids fill.
  std::vector<Hole> holes;
  if (has_windows_) {
    result.filled.resize(windows_.size());
    for (int32_t node : path_) {
      const Run& run = nodes_[node].run;
      const int64_t first = math_.page(nodes_[node].begin),
                    last = math_.page(std::min<int64_t>(nodes_[node].end(), present));
      for (int c = 0; c < num_columns(); ++c) {
        if (held(c, node) == math_.page(run.length)) continue;
        int64_t page = first;
        runs_.for_pages(run, c, 0, last - first, [&](const int32_t* ids, int64_t n) {
          for (int64_t i = 0; i < n; ++i, ++page) {
            if (ids[i] >= 0 || columns[static_cast<size_t>(c)][page - math_.page(base)] < 0) continue;
            holes.push_back({c, page});
            result.filled[static_cast<size_t>(c)].push_back(static_cast<int32_t>(page));
          }
        });
      }
    }
  }

  // Checkpoints where there is none yet.
  std::vector<Checkpoint> taken;
  for (const Checkpoint& checkpoint : checkpoints) {
    if (checkpoint.length <= present) {
      const int32_t node = climb({at.node, checkpoint.length}).node;
      const int64_t begin = nodes_[node].begin;
      if (begin + last_checkpoint(node, checkpoint.length - begin) == checkpoint.length) continue;
    }
    taken.push_back(checkpoint);
    result.states.push_back(checkpoint.state_id);
  }

  // Everything that may fail comes before everything that changes something.
  // A lease holds its own node once; without one the node must be free.
  const bool grows = stored > present && from >= 0 && !nodes_[at.node].is_root() && nodes_[at.node].end() == present &&
                     nodes_[at.node].first_child < 0 && !nodes_[at.node].is_trimmed &&
                     nodes_[at.node].locks == (lease != nullptr && lease->node == at.node ? 1 : 0);
  const int64_t added = stored - present;
  reserve(4, 2 + runs_.chunks_to_append(grows ? nodes_[at.node].run : Run{}, added));
  std::vector<const int32_t*> new_ids;
  for (const Ids& column : columns) new_ids.push_back(column.data + math_.page(present - base));
  if (has_states_) {
    const auto make_room = [&](int32_t node) {
      auto& all = checkpoints_[static_cast<size_t>(node)];
      all.reserve(all.size() + checkpoints.size());
    };
    for (int32_t node : path_) make_room(node);
    if (from >= 0) make_room(at.node);
  }
  std::vector<TreeEvent> news;
  if (is_listened_) {
    const std::string space(lease == nullptr ? sequence.space : std::string_view(space_of(from)));
    // The page before may be a hole that this very call fills.
    const auto correct_parent = [&](TreeEvent& told) {
      const int64_t given = math_.page(told.position - base) - 1;
      if (told.parent < 0 && given >= 0) told.parent = columns[0][given];
    };
    for (const Hole& hole : holes) {
      const int32_t node = *std::find_if(path_.begin(), path_.end(),
                                         [&](int32_t n) { return math_.first_slot(hole.page) < nodes_[n].end(); });
      TreeEvent filled = event(true, node, math_.first_slot(hole.page), math_.first_slot(hole.page + 1));
      for (int c = 0; c < num_columns(); ++c) {
        filled.columns[static_cast<size_t>(c)][0] =
            c == hole.column ? columns[static_cast<size_t>(c)][hole.page - math_.page(base)] : -1;
      }
      correct_parent(filled);
      news.push_back(std::move(filled));
    }
    // A checkpoint among pages that are there; then the new run with its own.
    const auto add_event = [&](int64_t position, int64_t num_tokens) {
      TreeEvent& run = news.emplace_back(TreeEvent{true, space, position, 0, {}, {}, {}});
      if (position > 0) {
        const Node& node = nodes_[climb({at.node, position}).node];
        const int64_t page = math_.page(position - node.begin);
        runs_.copy_pages(node.run, 0, page - 1, page, &run.parent);
        correct_parent(run);
      }
      run.tokens.assign(sequence.tokens.data + (position - base),
                        sequence.tokens.data + (position - base + num_tokens));
      for (const Ids& column : columns) {
        const int32_t* ids = column.data + math_.page(position - base);
        run.columns.emplace_back(ids, ids + math_.page(num_tokens));
      }
    };
    for (const Checkpoint& checkpoint : taken) {
      if (checkpoint.length > present) break;
      add_event(checkpoint.length, 0);
      news.back().states.push_back(checkpoint);
    }
    if (added > 0) add_event(present, added);
    for (const Checkpoint& checkpoint : taken) {
      if (checkpoint.length > present) news.back().states.push_back(checkpoint);
    }
    events_.reserve(events_.size() + news.size());
  }

  ++now_;
  for (const Hole& hole : holes) {
    const int32_t node = *std::find_if(path_.begin(), path_.end(),
                                       [&](int32_t n) { return math_.first_slot(hole.page) < nodes_[n].end(); });
    const int64_t page = hole.page - math_.page(nodes_[node].begin);
    runs_.for_pages(nodes_[node].run, hole.column, page, page + 1, [&](int32_t* id, int64_t) {
      *id = columns[static_cast<size_t>(hole.column)][hole.page - math_.page(base)];
    });
    add_held(node, hole.column, 1);
  }
  if (added > 0) {
    int32_t node = at.node;
    if (!grows) {
      const int32_t parent = from < 0 ? find_or_make_root(sequence.space) : end_at(at);
      node = new_node(parent, present);
    }
    const int32_t* new_entries = entries + (present - base);
    runs_.append(nodes_[node].run, new_entries, new_ids, added);
    if (!extra_keys_.empty()) extra_keys_.add(new_entries, added);
    tokens_.total += added;
    if (nodes_[node].locks > 0) tokens_.locked += added;
    for (int c = 0; c < num_columns(); ++c) {
      if (!is_window(c)) continue;
      const int32_t* ids = new_ids[static_cast<size_t>(c)];
      add_held(node, c, std::count_if(ids, ids + math_.page(added), [](int32_t id) { return id >= 0; }));
    }
    if (!grows) {
      link(node);
      order_.add(node);
    }
    at = {node, stored};
  }
  for (const Checkpoint& checkpoint : taken) {
    const int32_t node = climb({at.node, checkpoint.length}).node;
    auto& all = checkpoints_[static_cast<size_t>(node)];
    all.insert(std::find_if(all.begin(), all.end(), [&](const Checkpoint& c) { return c.length > checkpoint.length; }),
               checkpoint);
    ++states_.total;
    if (nodes_[node].locks > 0) ++states_.locked;
  }
  if (at.node >= 0) {
    const Place last = usable(at);
    result.length = last.depth;
    const int32_t node = end_at(last);
    if (lease != nullptr) {
      if (node != lease->node) {
        hold(node);
        let_go(lease->node);
        lease->node = node;
      }
    }
    // What is stored is hot, and so is all above it: no child is hotter than its parent.
    if (added > 0) {
      touch(at.node);
    } else if (lease == nullptr) {
      touch(node);
    }
  }
  for (TreeEvent& each : news) events_.push_back(std::move(each));
  return result;
}

}  // namespace pagoda
