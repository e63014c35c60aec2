// Views of the tree: events, nodes for display, and the check of its invariants.
#include <algorithm>

#include "core/prefix_tree.hpp"

namespace pagoda {

const std::string& PrefixTree::space_of(int32_t node) const { return names_.find(nodes_[node].root)->second; }

std::vector<int32_t> PrefixTree::decode(const int32_t* entries, int64_t n) const {
  std::vector<int32_t> tokens(entries, entries + n);
  if (!extra_keys_.empty()) {
    for (int32_t& token : tokens) token = extra_keys_.token(token);
  }
  return tokens;
}

void PrefixTree::listen(bool on) {
  if (on == is_listened_) return;
  is_listened_ = on;
  if (!on) {
    events_.clear();
    return runs_.drop_keys();
  }
  try {
    runs_.keep_keys();
  } catch (...) {
    is_listened_ = false;
    throw;
  }
  for (const auto& [root, name] : names_) {
    for_subtree(root, [&](int32_t node) {
      const Node& at = nodes_[node];
      if (at.is_root()) return;
      uint64_t before = key_at(at.parent, at.begin);
      runs_.for_places(at.run, 0, math_.page(at.run.length), [&](int32_t, int64_t place, int64_t n) {
        make_keys(before, runs_.tokens_at(place), n, runs_.keys_at(place));
        before = runs_.keys_at(place)[n - 1];
      });
    });
  }
}

std::vector<TreeEvent> PrefixTree::retell() const {
  std::vector<TreeEvent> news;
  for (const auto& [name, root] : roots_) {
    for_subtree(root, [&](int32_t node) {
      const Node& at = nodes_[node];
      if (!at.is_root() && !is_lost(node)) news.push_back(event(EventKind::kStored, node, at.begin, at.end()));
    });
  }
  return news;
}

uint64_t PrefixTree::key_at(int32_t node, int64_t position) const {
  if (position == 0) return key_of_bytes(space_of(node));
  const Node& at = nodes_[climb({node, position}).node];
  const int64_t page = math_.page(position - at.begin) - 1;
  return *runs_.keys_at(position == at.end() ? runs_.last_place(at.run) : runs_.place_of(at.run, page));
}

void PrefixTree::make_keys(uint64_t before, const int32_t* entries, int64_t num_pages, uint64_t* out) const {
  for (int64_t p = 0; p < num_pages; ++p) {
    for (int64_t i = 0; i < math_.size(); ++i) before = extra_keys_.absorb_entry(before, *entries++);
    out[p] = before;
  }
}

void PrefixTree::describe(TreeEvent& event, const int32_t* entries, int64_t n) const {
  event.tokens = decode(entries, n);
  if (!extra_keys_.empty()) event.ranges = extra_keys_.ranges(entries, n, event.position);
}

TreeEvent PrefixTree::event(EventKind kind, int32_t node, int64_t begin, int64_t end) const {
  const Node& at = nodes_[node];
  TreeEvent event{kind, false, space_of(node), begin, key_at(node, begin)};
  runs_.for_places(at.run, math_.page(begin - at.begin), math_.page(end - at.begin),
                   [&](int32_t, int64_t place, int64_t n) {
                     event.keys.insert(event.keys.end(), runs_.keys_at(place), runs_.keys_at(place) + n);
                   });
  std::vector<int32_t> entries(static_cast<size_t>(end - begin));
  runs_.copy_tokens(at.run, begin - at.begin, end - at.begin, entries.data());
  describe(event, entries.data(), end - begin);
  for_checkpoints({node, static_cast<int32_t>(end - at.begin), static_cast<int32_t>(begin - at.begin)},
                  [&](const Checkpoint& checkpoint) { event.states.push_back(checkpoint); });
  for (int c = 0; c < num_columns(); ++c) {
    auto& ids = event.columns.emplace_back(static_cast<size_t>(math_.page(end - begin)));
    runs_.copy_pages(at.run, c, math_.page(begin - at.begin), math_.page(end - at.begin), ids.data());
  }
  return event;
}

TreeEvent PrefixTree::page_event(EventKind kind, const Hole& at, int32_t id) const {
  TreeEvent event{kind, true, space_of(at.node), math_.first_slot(at.page)};
  const bool is_first = event.position == nodes_[at.node].begin;
  event.parent = is_first ? key_at(at.node, event.position) : *runs_.keys_at(runs_.place_before(at.place));
  event.keys.push_back(*runs_.keys_at(at.place));
  describe(event, runs_.tokens_at(at.place), math_.size());
  for (int c = 0; c < num_columns(); ++c) event.columns.emplace_back(1, c == at.column ? id : -1);
  return event;
}

std::vector<NodeInfo> PrefixTree::nodes(int64_t max_nodes, int64_t max_tokens, const std::string_view* space) const {
  // The leases that protect a node are those that end there and those that protect its children. Visits every node
  // above a lease once, the deepest first.
  std::unordered_map<int32_t, int64_t> leases;
  std::vector<int32_t> above;
  for (const Lease& lease : leases_) {
    if (lease.number == 0) continue;
    for (int32_t node = lease.node; node >= 0 && leases.try_emplace(node, 0).second; node = nodes_[node].parent) {
      above.push_back(node);
    }
    ++leases[lease.node];
  }
  std::sort(above.begin(), above.end(), [&](int32_t a, int32_t b) { return nodes_[a].end() > nodes_[b].end(); });
  for (int32_t node : above) {
    if (!nodes_[node].is_root()) leases[nodes_[node].parent] += leases[node];
  }
  // Nodes still to show, the next one last, and their levels.
  std::vector<std::pair<int32_t, int64_t>> todo;
  std::vector<std::pair<int64_t, int32_t>> dropped;
  for (const auto& [root, name] : names_) {
    if (names_.size() == roots_.size()) break;  // no namespace was dropped
    if (nodes_[root].is_dropped && (space == nullptr || name == *space))
      dropped.emplace_back(nodes_[root].number, root);
  }
  std::sort(dropped.rbegin(), dropped.rend());
  for (const auto& each : dropped) todo.emplace_back(each.second, 0);
  if (space != nullptr) {
    if (const int32_t root = find_root(*space); root >= 0) todo.emplace_back(root, 0);
  } else {
    for (auto it = roots_.rbegin(); it != roots_.rend(); ++it) todo.emplace_back(it->second, 0);
  }

  // Children in the order of their first pages.
  const auto is_less = [this](int32_t a, int32_t b) {
    const int32_t* left = runs_.first_page(nodes_[a].run);
    const int32_t* right = runs_.first_page(nodes_[b].run);
    for (int64_t i = 0; i < math_.size(); ++i) {
      if (left[i] == right[i]) continue;
      const int32_t x = extra_keys_.token(left[i]), y = extra_keys_.token(right[i]);
      if (x != y) return x < y;
      // The same token: first without a key, then by key.
      if (left[i] >= 0 || right[i] >= 0) return left[i] >= 0;
      return extra_keys_.is_less(left[i], right[i]);
    }
    return false;
  };
  std::vector<NodeInfo> views;
  std::vector<int32_t> children;
  while (!todo.empty() && static_cast<int64_t>(views.size()) < max_nodes) {
    const auto [index, level] = todo.back();
    todo.pop_back();
    const Node& node = nodes_[index];
    NodeInfo view{};
    view.number = node.number;
    view.parent = node.is_root() ? 0 : nodes_[node.parent].number;
    view.space = &space_of(index);
    view.is_dropped = nodes_[node.root].is_dropped;
    view.level = level;
    view.begin = node.begin;
    view.end = node.end();
    const int64_t pages = math_.pages_for(std::min<int64_t>(max_tokens, node.run.length));
    const int64_t shown = std::min<int64_t>(max_tokens, node.run.length);
    std::vector<int32_t> entries(static_cast<size_t>(shown));
    runs_.copy_tokens(node.run, 0, shown, entries.data());
    view.tokens = decode(entries.data(), shown);
    for (int c = 0; c < num_columns(); ++c) {
      auto& ids = view.columns.emplace_back(static_cast<size_t>(pages));
      runs_.copy_pages(node.run, c, 0, pages, ids.data());
    }
    view.num_children = node.num_children;
    const auto held = leases.find(index);
    view.leases = held == leases.end() ? 0 : held->second;
    view.used = node.is_root() ? 0 : node.used;
    if (has_states_) view.checkpoints = checkpoints_[static_cast<size_t>(index)];
    view.is_lost = is_lost(index);
    views.push_back(std::move(view));

    children.clear();
    for (int32_t child = node.first_child; child >= 0; child = nodes_[child].next_sibling) children.push_back(child);
    const int64_t room = std::min<int64_t>(static_cast<int64_t>(children.size()), max_nodes);
    std::partial_sort(children.begin(), children.begin() + room, children.end(), is_less);
    for (int64_t i = room; i-- > 0;) todo.emplace_back(children[static_cast<size_t>(i)], level + 1);
  }
  return views;
}

void PrefixTree::broken(int number, int32_t node, const std::string& what) const {
  throw BrokenInvariant{number, "node " + text(nodes_[node].number) + ": " + what};
}

// Checks the links, the run and the rules of one node, and marks its chunks.
void PrefixTree::check_node(int32_t index, std::vector<bool>& chunks) const {
  const Node& node = nodes_[index];
  if (node.number <= 0) broken(10, index, "it was freed, but is linked");
  int64_t num_children = 0;
  for (int32_t child = node.first_child, before = -1; child >= 0; child = nodes_[child].next_sibling) {
    const Node& at = nodes_[child];
    if (at.parent != index || at.prev_sibling != before || at.root != node.root) {
      broken(10, child, "its links do not lead back");
    }
    if (at.begin != node.end()) broken(10, child, "it does not begin where its parent ends");
    before = child;
    ++num_children;
  }
  if (num_children != node.num_children) broken(10, index, "its children are miscounted");
  if (node.is_root()) {
    if (node.run.length != 0 || node.begin != 0) broken(10, index, "a root has tokens");
    return;
  }
  if (node.run.length <= 0 || math_.offset(node.run.length) != 0) broken(10, index, "it holds no whole pages");
  if (!runs_.mark(node.run, chunks)) broken(14, index, "its chunks belong to another node, or their chain is broken");
  const int32_t* page = runs_.first_page(node.run);
  if (node.hash != hash(node.parent, page) || (!node.is_lost && child_of(node.parent, page, node.hash) != index)) {
    broken(10, index, "the table does not lead to it");
  }
  for (int c = 0; c < num_columns(); ++c) {
    const int64_t pages = math_.page(node.run.length), held_pages = count_held(node.run, c, 0, pages);
    if (!is_window(c) && held_pages != pages) broken(15, index, "a column without a window has a hole");
    if (held(c, index) != held_pages) broken(11, index, "its pages are miscounted");
  }
  int64_t next = math_.page(node.begin);
  const auto check_places = [&](int32_t chunk, int64_t place, int64_t n) {
    for (int64_t end = place + n; place < end; ++place, ++next) {
      if (owners_[chunk].node != index || owners_[chunk].first_page + place % runs_.pages_per_chunk() != next) {
        broken(14, index, "one of its chunks is noted to be elsewhere");
      }
      for (int c = 0; c < num_columns(); ++c) {
        const int set = set_of_[static_cast<size_t>(c)];
        const int32_t id = runs_.id_at(c, place);
        if (set >= 0 && id >= 0 && places_[static_cast<size_t>(set)][id] != place) {
          broken(14, index, "one of its pages is noted to be elsewhere");
        }
      }
    }
  };
  if (!set_of_.empty()) runs_.for_places(node.run, 0, math_.page(node.run.length), check_places);
  if (is_listened_) {
    uint64_t key = key_at(node.parent, node.begin);
    std::vector<uint64_t> keys(static_cast<size_t>(runs_.pages_per_chunk()));
    runs_.for_places(node.run, 0, math_.page(node.run.length), [&](int32_t, int64_t place, int64_t n) {
      make_keys(key, runs_.tokens_at(place), n, keys.data());
      if (!std::equal(keys.begin(), keys.begin() + n, runs_.keys_at(place)))
        broken(14, index, "a content key is wrong");
      key = keys[static_cast<size_t>(n - 1)];
    });
  }
  if (has_states_) {
    int64_t before = node.begin;
    for (const Checkpoint& checkpoint : checkpoints_[static_cast<size_t>(index)]) {
      if (checkpoint.length <= before || checkpoint.length > node.end()) broken(15, index, "a checkpoint is misplaced");
      before = checkpoint.length;
      if (!follows_states_) continue;
      const auto [at, length] = spots_[checkpoint.state_id];
      if (at != index || length != checkpoint.length) broken(15, index, "a checkpoint is noted to be elsewhere");
    }
    if (!is_followed() && node.first_child < 0 && before != node.end()) {
      broken(15, index, "a leaf ends without a checkpoint");
    }
  }
}

// Checks that the order lists every unprotected node once, coldest first, before its parent.
void PrefixTree::check_order() const {
  std::vector<bool> seen(static_cast<size_t>(nodes_.size()), false);
  int64_t listed = 0, unlocked = 0, used = std::numeric_limits<int64_t>::min();
  for (int32_t node = order_.coldest(); node >= 0; node = order_.after(node)) {
    const Node& at = nodes_[node];
    if (at.number <= 0 || at.is_root() || at.locks > 0 || seen[static_cast<size_t>(node)]) {
      broken(12, node, "it is listed for eviction, but is not an unprotected node, or is listed twice");
    }
    if (at.used < used) broken(12, node, "it is listed behind a node that was used later");
    used = at.used;
    for (int32_t child = at.first_child; child >= 0; child = nodes_[child].next_sibling) {
      if (!seen[static_cast<size_t>(child)]) broken(12, node, "it is listed before its child");
    }
    seen[static_cast<size_t>(node)] = true;
    ++listed;
  }
  for (int64_t i = 0; i < nodes_.size(); ++i) {
    unlocked += nodes_[i].number > 0 && !nodes_[i].is_root() && nodes_[i].locks == 0;
  }
  if (listed != unlocked) throw BrokenInvariant{12, "not every unprotected node is listed for eviction"};
}

void PrefixTree::check() const {
  std::vector<bool> chunks(static_cast<size_t>(runs_.num_chunks()), false);
  std::vector<int32_t> locks(static_cast<size_t>(nodes_.size()), 0);
  Tally tokens, states;
  std::vector<Tally> pages(windows_.size());
  std::map<int32_t, int64_t> keys;
  int64_t num_lost = 0, num_nodes = 0, num_leaves = 0, num_leases = 0, reached = 0;
  for (const Lease& lease : leases_) {
    if (lease.number == 0) continue;
    ++num_leases;
    ++locks[static_cast<size_t>(lease.node)];
    if (nodes_[lease.node].number <= 0) broken(12, lease.node, "a lease ends at it, but it was freed");
  }
  for (const auto& [name, root] : roots_) {
    const auto it = names_.find(root);
    if (it == names_.end() || it->second != name || nodes_[root].is_dropped) broken(10, root, "it has two names");
  }
  std::vector<int32_t> order;  // parents before children
  for (const auto& [root, name] : names_) {
    if (!nodes_[root].is_root() || nodes_[root].root != root) broken(10, root, "a root has a parent");
    if (!nodes_[root].is_dropped && find_root(name) != root) broken(10, root, "its namespace does not lead to it");
    order.push_back(root);
  }
  for (size_t i = 0; i < order.size(); ++i) {
    const Node& node = nodes_[order[i]];
    if (++reached > nodes_.size()) throw BrokenInvariant{10, "the tree has a cycle"};
    check_node(order[i], chunks);
    for (int32_t child = node.first_child; child >= 0; child = nodes_[child].next_sibling) order.push_back(child);
    if (node.is_root()) {
      if (node.first_child < 0 && node.locks == 0) broken(10, order[i], "an empty namespace is kept");
      continue;
    }
    ++num_nodes;
    num_lost += node.is_lost;
    num_leaves += node.first_child < 0;
    const auto add = [&](Tally& tally, int64_t n) {
      tally.total += n;
      if (node.locks > 0) tally.locked += n;
    };
    add(tokens, node.run.length);
    for (int c = 0; c < num_columns(); ++c) add(pages[static_cast<size_t>(c)], held(c, order[i]));
    if (has_states_) add(states, static_cast<int64_t>(checkpoints_[static_cast<size_t>(order[i])].size()));
    if (!extra_keys_.empty()) {
      runs_.for_tokens(node.run, 0, node.run.length, [&](const int32_t* entries, int64_t n) {
        for (int64_t t = 0; t < n; ++t) {
          if (entries[t] < 0) ++keys[entries[t]];
        }
      });
    }
  }
  for (size_t i = order.size(); i-- > 0;) {
    const Node& node = nodes_[order[i]];
    if (locks[static_cast<size_t>(order[i])] != node.locks) {
      broken(12, order[i],
             text(node.locks) + " locks are counted, but there are " + text(locks[static_cast<size_t>(order[i])]));
    }
    if (node.locks > 0 && !node.is_root()) ++locks[static_cast<size_t>(node.parent)];
  }
  const auto require = [](int64_t counted, int64_t found, const char* what) {
    if (counted != found) {
      throw BrokenInvariant{11, text(counted) + " " + what + " are counted, but a walk finds " + text(found)};
    }
  };
  require(num_nodes_, num_nodes, "nodes");
  require(num_leaves_, num_leaves, "leaves");
  require(num_lost_, num_lost, "lost nodes");
  require(num_leases_, num_leases, "leases");
  require(static_cast<int64_t>(free_leases_.size()), static_cast<int64_t>(leases_.size()) - num_leases, "free leases");
  require(tokens_.total, tokens.total, "tokens");
  require(tokens_.locked, tokens.locked, "protected tokens");
  require(states_.total, states.total, "states");
  require(states_.locked, states.locked, "protected states");
  for (int c = 0; c < num_columns(); ++c) {
    require(this->pages(c).total, pages[static_cast<size_t>(c)].total, "pages of a column");
    require(this->pages(c).locked, pages[static_cast<size_t>(c)].locked, "protected pages of a column");
  }
  require(children_.size(), num_nodes, "entries of the table");
  int64_t freed = 0;
  for (int32_t node = free_node_; node >= 0 && freed <= nodes_.size(); node = nodes_[node].parent) ++freed;
  require(freed + reached, nodes_.size(), "entries of nodes, used and free,");
  if (!runs_.free_chunks_are_right(chunks))
    throw BrokenInvariant{14, "a chunk is neither in a run nor free, or is both"};
  require(extra_keys_.size(), static_cast<int64_t>(keys.size()), "tokens under extra keys");
  for (const auto& [entry, n] : keys) require(extra_keys_.count(entry), n, "uses of an extra key");
  check_order();
}

}  // namespace pagoda
