#include "core/extra_keys.hpp"

#include <algorithm>

namespace pagoda {

namespace {

// Replaces the tokens that a range covers. number(token) is called once for a repeated token, as images have.
template <typename Number>
void cover(std::vector<int32_t>& entries, int64_t base, const KeyRange& range, Number number) {
  const int64_t end = std::min(range.end - base, static_cast<int64_t>(entries.size()));
  int32_t token = -1, entry = 0;
  for (int64_t i = std::max<int64_t>(range.begin - base, 0); i < end; ++i) {
    int32_t& at = entries[static_cast<size_t>(i)];
    if (at != token) entry = number(token = at);
    at = entry;
  }
}

}  // namespace

std::vector<int32_t> ExtraKeys::find(const int32_t* tokens, int64_t n, int64_t base,
                                     const std::vector<KeyRange>& ranges) const {
  std::vector<int32_t> entries(tokens, tokens + n);
  for (const KeyRange& range : ranges) {
    const auto known = ranges_.find({range.key, range.begin});
    cover(entries, base, range, [&](int32_t token) {
      if (known == ranges_.end()) return kUnknown;
      const auto it = entries_.find(identity(known->second.number, token));
      return it == entries_.end() ? kUnknown : it->second;
    });
  }
  return entries;
}

std::vector<int32_t> ExtraKeys::make(const int32_t* tokens, int64_t n, int64_t base,
                                     const std::vector<KeyRange>& ranges) {
  std::vector<int32_t> entries(tokens, tokens + n);
  for (const KeyRange& range : ranges) {
    if (range.end <= base || range.begin >= base + n) continue;
    const auto [at, is_new] = ranges_.try_emplace({range.key, range.begin}, Range{next_range_, 0, 0});
    if (is_new) {
      ++next_range_;
      at->second.key = key_of_bytes(range.key);
    }
    try {
      cover(entries, base, range, [&, at = at](int32_t token) {
        const auto it = entries_.find(identity(at->second.number, token));
        return it != entries_.end() ? it->second : make_entry(at, token);
      });
    } catch (...) {
      forget_if_empty(at);
      throw;
    }
  }
  return entries;
}

int32_t ExtraKeys::make_entry(Ranges::iterator range, int32_t token) {
  const auto make_room = [](auto& list) {
    if (list.size() == list.capacity()) list.reserve(2 * list.size() + 16);
  };
  make_room(made_);
  if (free_.empty()) {
    make_room(uses_);
    free_.reserve(uses_.capacity());  // so that freeing a number cannot fail
    uses_.push_back({range, token, 0});
    free_.push_back(-static_cast<int32_t>(uses_.size()));
  }
  const int32_t entry = free_.back();
  entries_.emplace(identity(range->second.number, token), entry);
  use_of(entry) = {range, token, 0};
  ++range->second.num_entries;
  free_.pop_back();
  made_.push_back(entry);
  return entry;
}

void ExtraKeys::forget(int32_t entry) {
  const Use& use = use_of(entry);
  entries_.erase(identity(use.range->second.number, use.token));
  free_.push_back(entry);
  --use.range->second.num_entries;
  forget_if_empty(use.range);
}

void ExtraKeys::forget_if_empty(Ranges::iterator range) {
  if (range->second.num_entries == 0) ranges_.erase(range);
}

std::vector<KeyRange> ExtraKeys::ranges(const int32_t* entries, int64_t n, int64_t position) const {
  std::vector<KeyRange> found;
  const Range* last = nullptr;
  for (int64_t i = 0; i < n; ++i) {
    const Range* range = nullptr;
    if (entries[i] < 0) {
      const Ranges::iterator at = use_of(entries[i]).range;
      range = &at->second;
      if (range != last) found.push_back({at->first.second, position + i, at->first.first});
      found.back().end = position + i + 1;
    }
    last = range;
  }
  return found;
}

void ExtraKeys::tidy() {
  for (int32_t entry : made_) {
    if (count(entry) == 0) forget(entry);
  }
  made_.clear();
}

void ExtraKeys::add(const int32_t* tokens, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    if (tokens[i] < 0) ++use_of(tokens[i]).count;
  }
}

void ExtraKeys::remove(const int32_t* tokens, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    if (tokens[i] < 0 && --use_of(tokens[i]).count == 0) forget(tokens[i]);
  }
}

void ExtraKeys::clear() {
  entries_.clear();
  ranges_.clear();
  uses_.clear();
  free_.clear();
  made_.clear();
}

}  // namespace pagoda
