#include "core/extra_keys.hpp"

#include <algorithm>

namespace pagoda {

template <typename Number>
std::vector<int32_t> ExtraKeys::translate(const int32_t* tokens, int64_t n, int64_t base,
                                          const std::vector<KeyRange>& ranges, Number number) const {
  std::vector<int32_t> entries(tokens, tokens + n);
  for (const KeyRange& range : ranges) {
    const int64_t end = std::min(range.end - base, n);
    Identity identity{range.key, range.begin, -1};
    int32_t entry = kUnknown;
    // An image is one token over and over: it is looked up once.
    for (int64_t i = std::max<int64_t>(range.begin - base, 0); i < end; ++i) {
      if (tokens[i] != identity.token) {
        identity.token = tokens[i];
        entry = number(identity);
      }
      entries[static_cast<size_t>(i)] = entry;
    }
  }
  return entries;
}

std::vector<int32_t> ExtraKeys::find(const int32_t* tokens, int64_t n, int64_t base,
                                     const std::vector<KeyRange>& ranges) const {
  return translate(tokens, n, base, ranges, [this](const Identity& identity) {
    const auto it = numbers_.find(identity);
    return it == numbers_.end() ? kUnknown : it->second;
  });
}

std::vector<int32_t> ExtraKeys::make(const int32_t* tokens, int64_t n, int64_t base,
                                     const std::vector<KeyRange>& ranges) {
  return translate(tokens, n, base, ranges, [this](const Identity& identity) {
    const auto known = numbers_.find(identity);
    if (known != numbers_.end()) return known->second;
    made_.reserve(made_.size() + 1);
    if (free_.empty()) {
      uses_.push_back({numbers_.end(), 0});
      free_.reserve(uses_.size());  // giving a number back cannot fail
      free_.push_back(-static_cast<int32_t>(uses_.size()));
    }
    const int32_t entry = free_.back();
    uses_[static_cast<size_t>(-1 - entry)] = {numbers_.emplace(identity, entry).first, 0};
    free_.pop_back();
    made_.push_back(entry);
    return entry;
  });
}

void ExtraKeys::forget(int32_t entry) {
  numbers_.erase(uses_[static_cast<size_t>(-1 - entry)].at);
  free_.push_back(entry);
}

void ExtraKeys::tidy() {
  for (int32_t entry : made_) {
    if (count(entry) == 0) forget(entry);
  }
  made_.clear();
}

void ExtraKeys::add(const int32_t* tokens, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    if (tokens[i] < 0) ++uses_[static_cast<size_t>(-1 - tokens[i])].count;
  }
}

void ExtraKeys::remove(const int32_t* tokens, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    if (tokens[i] < 0 && --uses_[static_cast<size_t>(-1 - tokens[i])].count == 0) forget(tokens[i]);
  }
}

void ExtraKeys::clear() {
  numbers_.clear();
  uses_.clear();
  free_.clear();
  made_.clear();
}

}  // namespace pagoda
