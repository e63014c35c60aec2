// Walks down the tree, and where a walk may end.
#include <algorithm>
#include <cstring>

#include "core/prefix_tree.hpp"

namespace pagoda {

namespace {

uint64_t fold(uint64_t a, uint64_t b) {
  const unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

}  // namespace

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
    return nodes_[node].parent == parent && !nodes_[node].is_lost &&
           std::memcmp(runs_.first_page(nodes_[node].run), page, bytes) == 0;
  });
}

PrefixTree::Place PrefixTree::climb(Place place) const {
  while (!nodes_[place.node].is_root() && place.depth <= nodes_[place.node].begin) {
    place.node = nodes_[place.node].parent;
  }
  return place;
}

PrefixTree::Place PrefixTree::seen_through(Place place, int column) const {
  const int64_t window = windows_[static_cast<size_t>(column)];
  if (window == 1) return place;
  // Upwards page by page: after a hole, the hole's begin is the next candidate, so no page is visited twice.
  int64_t page = math_.page(place.depth), candidate = page;
  const auto first_needed = [&] { return math_.page(std::max<int64_t>(0, math_.first_slot(candidate) - window + 1)); };
  for (int32_t node = place.node; !nodes_[node].is_root() && page > first_needed(); node = nodes_[node].parent) {
    const Node& at = nodes_[node];
    const int64_t first = math_.page(at.begin), num_held = held(column, node);
    if (num_held == 0) {
      page = candidate = first;
    } else if (num_held == math_.page(at.run.length)) {
      page = first;
    } else {
      runs_.for_pages_backward(at.run, column, 0, page - first, [&](const int32_t* ids, int64_t n) {
        for (int64_t i = n; i-- > 0;) {
          --page;
          if (ids[i] < 0) candidate = page;
          if (page <= first_needed()) return false;
        }
        return true;
      });
    }
  }
  return climb({place.node, math_.first_slot(candidate)});
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
      if (is_window(c)) place = seen_through(place, c);
    }
    if (place.depth == before) return place;
  }
}

void PrefixTree::match(const Sequence& sequence, Match& match, int32_t* ids) const {
  if (!extra_keys_.empty()) require_tokens(sequence.tokens, 0);  // stored entries may be negative
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
  const auto step = [&](int32_t node, int64_t depth) {
    const Node& at = nodes_[node];
    match.path.push({at.number, at.family, node, static_cast<int32_t>(depth), at.hash});
  };
  const Place root{match.root, 0};
  const Place found = ids != nullptr ? walk<true>(root, entries, 0, sequence.tokens.size, ids, step)
                                     : walk<false>(root, entries, 0, sequence.tokens.size, nullptr, step);
  require_tokens(sequence.tokens, found.depth);  // those before it equal stored tokens
  match.found = match.length = found.depth;
  if (is_plain()) return;
  const Node& last = nodes_[found.node];
  match.goes_on = found.depth < last.end() || last.first_child >= 0;
  const Place place = usable(found);
  match.length = place.depth;
  while (match.path.size() > 0 && nodes_[match.path.back().node].begin >= place.depth) match.path.pop();
  if (match.path.size() == 0) return;
  match.path.back().end = static_cast<int32_t>(place.depth);
  if (has_states_) match.state_id = last_checkpoint_up(place.node, place.depth).state_id;
}

int64_t PrefixTree::match_length(const Sequence& sequence) const {
  if (sequence.ranges != nullptr) {
    Match full;
    match(sequence, full, nullptr);
    return full.length;
  }
  if (!extra_keys_.empty()) require_tokens(sequence.tokens, 0);
  Place place{find_root(sequence.space), 0};
  if (place.node >= 0) {
    place = walk<false>(place, sequence.tokens.data, 0, sequence.tokens.size, nullptr, [](int32_t, int64_t) {});
  }
  require_tokens(sequence.tokens, place.depth);
  return place.node < 0 ? 0 : usable(place).depth;
}

void PrefixTree::copy_pages(const Match& match, int column, int64_t first, int32_t* out) const {
  for (int64_t i = match.path.size(); i-- > 0;) {
    const Step& step = match.path[i];
    const int64_t begin = i == 0 ? 0 : math_.page(match.path[i - 1].end), end = math_.page(step.end);
    const int64_t from = std::max(first, begin);
    if (from < end) runs_.copy_pages(nodes_[step.node].run, column, from - begin, end - begin, out + from);
    if (begin <= first) return;
  }
}

}  // namespace pagoda
