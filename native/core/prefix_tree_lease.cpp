// What a lease protects, from the match it was made from until it is released.
#include <algorithm>

#include "core/prefix_tree.hpp"

namespace pagoda {

PrefixTree::Place PrefixTree::survivor(const Match& match) const {
  // The root that the match started at. The caller has checked that it still exists.
  Place place{match.root, 0};
  int64_t next = match.path.size();
  while (next > 0) {
    const Step& step = match.path[next - 1];
    const Node& node = nodes_[step.node];
    if (node.number == step.number) {
      place = climb({step.node, std::min(step.end, node.end())});
      if (place.depth < step.end) next = match.path.size() + 1;  // trimmed: nothing below is left
      break;
    }
    --next;
  }
  // Of a node that is gone, an upper half of the same family may be left where it began.
  for (; next < match.path.size(); ++next) {
    const Step& step = match.path[next];
    const auto child_of_family = [&](int32_t parent) {
      int32_t child = nodes_[parent].first_child;
      while (child >= 0 && nodes_[child].family != step.family) child = nodes_[child].next_sibling;
      return child;
    };
    int32_t half = place.node;  // if it was joined with the node before it
    if (place.depth == nodes_[half].end() || nodes_[half].family != step.family) {
      half = children_.find(step.hash, [&](int32_t node) {
        return nodes_[node].parent == place.node && nodes_[node].family == step.family;
      });
      // Its parent may have been joined and split again and is then another node; a root stays the same.
      if (half < 0 && !nodes_[place.node].is_root()) half = child_of_family(place.node);
    }
    while (half >= 0) {
      place = {half, std::min(step.end, nodes_[half].end())};
      if (place.depth == step.end) break;
      half = child_of_family(half);
    }
    if (place.depth < step.end) break;
  }
  if (match.made <= replaced_) {
    for (int32_t node = place.node; !nodes_[node].is_root(); node = nodes_[node].parent) {
      if (nodes_[node].family >= match.made) return {match.root, 0};  // its ids have changed since the match
    }
  }
  return place;
}

void PrefixTree::reserve_leases(int64_t n) {
  const size_t wanted = static_cast<size_t>(n);
  if (wanted <= free_leases_.size()) return;
  const size_t all = leases_.size() + wanted - free_leases_.size();
  if (all > leases_.capacity()) leases_.reserve(std::max(all, 2 * leases_.size() + 64));
  free_leases_.reserve(leases_.capacity());  // so that a release cannot fail
  while (leases_.size() < all) {
    leases_.push_back({0, 0, false});
    free_leases_.push_back(static_cast<int32_t>(leases_.size() - 1));
  }
}

LeaseId PrefixTree::new_lease(int32_t node) {
  ++now_;
  hold(node);
  const int32_t slot = free_leases_.back();
  free_leases_.pop_back();
  leases_[static_cast<size_t>(slot)] = {next_lease_, node, false};
  ++num_leases_;
  return {slot, next_lease_++};
}

LeaseId PrefixTree::lease_again(LeaseId lease) {
  const int32_t node = require(lease).node;
  reserve_leases(1);
  return new_lease(node);
}

LeaseId PrefixTree::lock(const Match& match) {
  reserve(2, 1);
  reserve_leases(1);
  const int32_t root = find_or_make_root(match.space);
  Place place{root, 0};
  if (match.root == root && nodes_[root].number == match.root_number) place = usable(survivor(match));
  return new_lease(end_at(place));
}

LeaseId PrefixTree::lock_fresh(const Match& match) {
  reserve(2, 1);
  reserve_leases(1);
  if (match.path.size() == 0) return new_lease(find_or_make_root(match.space));
  return new_lease(end_at({match.path[match.path.size() - 1].node, match.length}));
}

int64_t PrefixTree::count_unlocked(const Match& match) const {
  // The ancestors of a locked node are locked.
  int64_t locked = 0;
  for (int64_t i = match.path.size(); i-- > 0 && locked == 0;) {
    const Node& at = nodes_[match.path[i].node];
    if (at.locks > 0) locked = std::min<int64_t>(at.end(), match.length);
  }
  return match.length - locked;
}

int64_t PrefixTree::count_released(const std::vector<LeaseId>& leases) const {
  std::unordered_map<int32_t, int32_t> locks;  // that would remain
  int64_t tokens = 0;
  for (const LeaseId& lease : leases) {
    for (int32_t node = require(lease).node; !nodes_[node].is_root(); node = nodes_[node].parent) {
      if (--locks.try_emplace(node, nodes_[node].locks).first->second > 0) break;
      tokens += nodes_[node].run.length;
    }
  }
  return math_.page(tokens);
}

bool PrefixTree::is_held(LeaseId lease) const {
  return lease.slot < static_cast<int64_t>(leases_.size()) &&
         leases_[static_cast<size_t>(lease.slot)].number == lease.number;
}

int64_t PrefixTree::length(LeaseId lease) const { return nodes_[require(lease).node].end(); }

int32_t PrefixTree::state_id(LeaseId lease) const {
  const int32_t node = require(lease).node;
  if (!has_states_ || nodes_[node].is_root()) return -1;
  const auto& all = checkpoints_[static_cast<size_t>(node)];
  return !all.empty() && all.back().length == nodes_[node].end() ? all.back().state_id : -1;
}

void PrefixTree::demote(LeaseId lease) {
  require(lease);
  leases_[static_cast<size_t>(lease.slot)].is_demoted = true;
}

void PrefixTree::release(LeaseId id) {
  const Lease lease = require(id);
  const bool is_root = nodes_[lease.node].is_root();  // an empty root is removed
  ++now_;
  leases_[static_cast<size_t>(id.slot)].number = 0;
  free_leases_.push_back(id.slot);
  --num_leases_;
  if (is_lost(lease.node)) {
    let_go_dropped(lease.node);
  } else if (lease.is_demoted) {
    let_go_coldest(lease.node);
  } else {
    let_go(lease.node);
  }
  if (is_root) return;
  rejoin(lease.node);
  if (is_followed() && !has_full_) prune(lease.node);
}

void PrefixTree::copy_pages(LeaseId lease, int column, int64_t first, int32_t* out) const {
  for (int32_t node = require(lease).node; !nodes_[node].is_root(); node = nodes_[node].parent) {
    const Node& at = nodes_[node];
    const int64_t begin = math_.page(at.begin), end = math_.page(at.end()), from = std::max(first, begin);
    if (from < end) runs_.copy_pages(at.run, column, from - begin, end - begin, out + from);
    if (begin <= first) return;
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
  for (int32_t child = -1; !nodes_[node].is_root(); child = node, node = nodes_[node].parent) {
    Node& at = nodes_[node];
    if (at.locks != 1 || at.num_children != (child < 0 ? 0 : 1)) break;
    at.locks = 0;
    if (child < 0) {
      order_.add_coldest(node);
    } else {
      order_.add_upper(node, child);
    }
    count_locked(node, -1);
    at.used = cold_;
  }
  let_go(node);
}

void PrefixTree::let_go_dropped(int32_t node) {
  --cold_;
  while (--nodes_[node].locks == 0) {
    if (nodes_[node].is_root()) return free_root_if_empty(node);
    // It cannot be found any more: make it as cold as its children allow.
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
    const bool is_last = nodes_[node].is_lost && !nodes_[nodes_[node].root].is_dropped;
    node = nodes_[node].parent;
    if (is_last) return let_go(node);  // nodes above it can still be found
  }
}

bool PrefixTree::is_below_lost(int32_t node) const {
  if (num_lost_ == 0) return false;
  while (!nodes_[node].is_root() && !nodes_[node].is_lost) node = nodes_[node].parent;
  return nodes_[node].is_lost;
}

bool PrefixTree::is_lost(LeaseId lease) const { return is_lost(require(lease).node); }

bool PrefixTree::is_discarded(LeaseId lease) const { return is_below_lost(require(lease).node); }

bool PrefixTree::is_lost(int set, int32_t id) const {
  return is_lost(owners_[runs_.chunk_of(places_[static_cast<size_t>(set)][id] & 0xFFFFFFFF)].node);
}

void PrefixTree::touch(int32_t node) {
  for (; !nodes_[node].is_root() && nodes_[node].locks == 0; node = nodes_[node].parent) {
    order_.remove(node);
    order_.add(node);
    nodes_[node].used = now_;
  }
}

}  // namespace pagoda
