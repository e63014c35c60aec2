// Tokens under an extra key, as numbers of their own.
//
// What tokens do not tell (an image over a range of positions) is part of their identity: each
// distinct (key, begin of its range, token) that a tree stores gets a negative number, which stands in the run
// in the token's place. So the tree compares plain integers, and a sequence without extra keys pays nothing. Numbers
// are counted by the tokens stored under them and go when the last one goes.
#pragma once

#include <cstdint>
#include <limits>
#include <map>
#include <string>
#include <tuple>
#include <vector>

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

  bool empty() const { return numbers_.empty(); }

  // Tokens of positions base, base + 1, ... with the numbers of those under a key; unknown ones are
  // kUnknown, or made.
  std::vector<int32_t> find(const int32_t* tokens, int64_t n, int64_t base, const std::vector<KeyRange>& ranges) const;
  std::vector<int32_t> make(const int32_t* tokens, int64_t n, int64_t base, const std::vector<KeyRange>& ranges);
  // Forgets made numbers that no token is stored under.
  void tidy();

  // n tokens were stored, or removed.
  void add(const int32_t* tokens, int64_t n);
  void remove(const int32_t* tokens, int64_t n);

  struct Identity {
    std::string key;
    int64_t begin;
    int32_t token;
    bool operator<(const Identity& other) const {
      return std::tie(token, key, begin) < std::tie(other.token, other.key, other.begin);
    }
  };
  // What stands behind an entry of a run.
  int32_t token(int32_t entry) const { return entry >= 0 ? entry : of(entry).token; }
  const Identity& of(int32_t entry) const { return uses_[static_cast<size_t>(-1 - entry)].at->first; }

  // How many tokens are stored under an entry, for check().
  int64_t count(int32_t entry) const { return uses_[static_cast<size_t>(-1 - entry)].count; }
  int64_t size() const { return static_cast<int64_t>(numbers_.size()); }

  void clear();

 private:
  using Numbers = std::map<Identity, int32_t>;
  struct Use {
    Numbers::const_iterator at;
    int64_t count;
  };

  template <typename Number>
  std::vector<int32_t> translate(const int32_t* tokens, int64_t n, int64_t base, const std::vector<KeyRange>& ranges,
                                 Number number) const;
  void forget(int32_t entry);

  Numbers numbers_;
  std::vector<Use> uses_;      // by -1 - entry
  std::vector<int32_t> free_;  // entries that can be given again
  std::vector<int32_t> made_;  // since the last tidy
};

}  // namespace pagoda
