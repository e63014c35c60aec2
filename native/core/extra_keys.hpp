// Tokens under an extra key, encoded as negative integers.
//
// Content that tokens do not identify (an image over a range of positions) is part of their identity: each distinct
// (key, begin of its range, token) that a tree stores gets a negative number, which runs store instead of the token. So
// the tree compares plain integers, and sequences without extra keys cost nothing more. A number counts the tokens
// stored under it and is freed with the last one; each key is stored once.
#pragma once

#include <cstdint>
#include <limits>
#include <map>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/content_key.hpp"

namespace pagoda {

struct KeyRange {
  int64_t begin;
  int64_t end;
  std::string key;
};

class ExtraKeys {
 public:
  // A number that no stored token has.
  static constexpr int32_t kUnknown = std::numeric_limits<int32_t>::min();

  bool empty() const { return entries_.empty(); }

  // Tokens of positions base, base + 1, ..., with the numbers of those under a key. New combinations become kUnknown
  // (find), or get a number (make).
  std::vector<int32_t> find(const int32_t* tokens, int64_t n, int64_t base, const std::vector<KeyRange>& ranges) const;
  std::vector<int32_t> make(const int32_t* tokens, int64_t n, int64_t base, const std::vector<KeyRange>& ranges);
  // Frees the numbers made since the last call that no stored token uses.
  void tidy();

  // Counts n entries that were stored, or removed.
  void add(const int32_t* tokens, int64_t n);
  void remove(const int32_t* tokens, int64_t n);

  // The token of an entry of a run.
  int32_t token(int32_t entry) const { return entry >= 0 ? entry : use_of(entry).token; }
  // The content key after this entry, given the key before it.
  uint64_t absorb_entry(uint64_t key, int32_t entry) const {
    if (entry >= 0) return absorb(key, static_cast<uint64_t>(entry));
    const Use& use = use_of(entry);
    const uint64_t token = (uint64_t{1} << 32) + static_cast<uint64_t>(use.token);
    return absorb(absorb(absorb(key, token), static_cast<uint64_t>(use.range->first.second)), use.range->second.key);
  }
  // The ranges over n entries from `position` on: each with its original begin, and with its end among these entries.
  std::vector<KeyRange> ranges(const int32_t* entries, int64_t n, int64_t position) const;
  // Orders two entries with the same token by key, then by the begin of its range.
  bool is_less(int32_t a, int32_t b) const { return use_of(a).range->first < use_of(b).range->first; }

  // How many tokens are stored under an entry, for check().
  int64_t count(int32_t entry) const { return use_of(entry).count; }
  int64_t size() const { return static_cast<int64_t>(entries_.size()); }

  void clear();

 private:
  struct Range {
    int32_t number;
    int64_t num_entries;
    uint64_t key;  // of the bytes of the extra key
  };
  using Ranges = std::map<std::pair<std::string, int64_t>, Range>;  // (key, begin)
  struct Use {
    Ranges::iterator range;
    int32_t token;
    int64_t count;
  };

  static uint64_t identity(int32_t range, int32_t token) {
    return (uint64_t{static_cast<uint32_t>(range)} << 32) | static_cast<uint32_t>(token);
  }
  const Use& use_of(int32_t entry) const { return uses_[static_cast<size_t>(-1 - entry)]; }
  Use& use_of(int32_t entry) { return uses_[static_cast<size_t>(-1 - entry)]; }
  int32_t make_entry(Ranges::iterator range, int32_t token);
  void forget(int32_t entry);
  void forget_if_empty(Ranges::iterator range);

  Ranges ranges_;
  int32_t next_range_ = 0;
  std::unordered_map<uint64_t, int32_t> entries_;  // by identity
  std::vector<Use> uses_;                          // by -1 - entry
  std::vector<int32_t> free_;                      // entries that can be reused
  std::vector<int32_t> made_;                      // since the last tidy
};

}  // namespace pagoda
