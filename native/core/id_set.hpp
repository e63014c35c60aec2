// A set of integers in [0, size) that finds its smallest member in O(log64 size).
//
// Words of 64 bits, and above them a pyramid: bit w of a level says that word w of the level
// below is not zero. Ten million members are four levels deep, and the upper three stay in cache.
#pragma once

#include <cstdint>
#include <vector>

namespace pagoda {

class IdSet {
 public:
  explicit IdSet(int64_t size) : size_(size) {
    int64_t bits = size, total = 0, begins[kMaxLevels];
    do {
      bits = (bits + 63) / 64;
      num_words_[num_levels_] = static_cast<int32_t>(bits);
      begins[num_levels_++] = total;
      total += bits;
    } while (bits > 1);
    words_.resize(static_cast<size_t>(total), 0);
    for (int l = 0; l < num_levels_; ++l) levels_[l] = words_.data() + begins[l];
  }
  IdSet(const IdSet&) = delete;
  IdSet& operator=(const IdSet&) = delete;

  bool contains(int64_t i) const { return (levels_[0][i >> 6] >> (i & 63)) & 1; }

  void insert(int64_t i) { insert_word(i >> 6, uint64_t{1} << (i & 63)); }

  // The members of word w (w * 64 ... w * 64 + 63) as bits; insert_word adds at least one.
  uint64_t word(int64_t w) const { return levels_[0][w]; }
  void insert_word(int64_t w, uint64_t members) {
    uint64_t& word = levels_[0][w];
    const bool was_empty = word == 0;
    word |= members;
    if (was_empty) set_above(w);
  }

  void erase(int64_t i) {
    uint64_t& word = levels_[0][i >> 6];
    word &= ~(uint64_t{1} << (i & 63));
    if (word == 0) clear_above(i >> 6);
  }

  // Makes the set {0, ..., size - 1}. O(size / 64).
  void fill() {
    int64_t bits = size_;
    for (int l = 0; l < num_levels_; ++l) {
      for (int64_t w = 0; w < num_words_[l]; ++w) {
        const int64_t rest = bits - w * 64;
        levels_[l][w] = rest >= 64 ? ~uint64_t{0} : rest <= 0 ? 0 : (uint64_t{1} << rest) - 1;
      }
      bits = (bits + 63) / 64;
    }
  }

  // Removes the n smallest members and writes each plus `offset` to out. The set has at least n members.
  template <typename Out>
  void pop_smallest(int64_t n, int64_t offset, Out* out) {
    uint64_t* leaf = levels_[0];
    while (n > 0) {
      const int64_t w = first_word();
      uint64_t word = leaf[w];
      const int64_t base = w * 64 + offset;
      if (word == ~uint64_t{0} && n >= 64) {
        for (int b = 0; b < 64; ++b) out[b] = static_cast<Out>(base + b);
        out += 64;
        n -= 64;
        word = 0;
      }
      for (; word != 0 && n > 0; --n, word &= word - 1) {
        *out++ = static_cast<Out>(base + __builtin_ctzll(word));
      }
      leaf[w] = word;
      if (word == 0) clear_above(w);
    }
  }

  int64_t count() const {
    int64_t n = 0;
    for (int64_t w = 0; w < num_words_[0]; ++w) n += __builtin_popcountll(levels_[0][w]);
    return n;
  }

  // Whether every summary bit agrees with the level below, and no bit beyond the size is set.
  bool is_consistent() const {
    int64_t bits = size_;
    for (int l = 0; l < num_levels_; ++l) {
      if (bits % 64 != 0 && (levels_[l][num_words_[l] - 1] >> (bits % 64)) != 0) return false;
      bits = (bits + 63) / 64;
      if (l == 0) continue;
      for (int64_t w = 0; w < num_words_[l - 1]; ++w) {
        const bool bit = (levels_[l][w >> 6] >> (w & 63)) & 1;
        if (bit != (levels_[l - 1][w] != 0)) return false;
      }
    }
    return true;
  }

 private:
  static constexpr int kMaxLevels = 6;  // 64^6 > 2^31

  // Index of the first leaf word that is not zero. The set is not empty.
  int64_t first_word() const {
    int64_t w = 0;
    for (int l = num_levels_ - 1; l > 0; --l) w = w * 64 + __builtin_ctzll(levels_[l][w]);
    return w;
  }

  // Word w of the leaves is no longer zero.
  void set_above(int64_t w) {
    for (int l = 1; l < num_levels_; ++l, w >>= 6) {
      uint64_t& word = levels_[l][w >> 6];
      const bool was_empty = word == 0;
      word |= uint64_t{1} << (w & 63);
      if (!was_empty) return;
    }
  }

  // Word w of the leaves has become zero.
  void clear_above(int64_t w) {
    for (int l = 1; l < num_levels_; ++l, w >>= 6) {
      uint64_t& word = levels_[l][w >> 6];
      word &= ~(uint64_t{1} << (w & 63));
      if (word != 0) return;
    }
  }

  int64_t size_;
  int num_levels_ = 0;
  std::vector<uint64_t> words_;   // all levels, leaves first
  uint64_t* levels_[kMaxLevels];  // [0]: one bit per member; [l]: one bit per word of l - 1
  int32_t num_words_[kMaxLevels];
};

// Plain bits, for membership alone.
class BitSet {
 public:
  explicit BitSet(int64_t size) : words_(static_cast<size_t>((size + 63) / 64), 0) {}
  bool contains(int64_t i) const { return (words_[i >> 6] >> (i & 63)) & 1; }
  void insert(int64_t i) { words_[i >> 6] |= uint64_t{1} << (i & 63); }
  uint64_t word(int64_t w) const { return words_[w]; }
  void insert_word(int64_t w, uint64_t members) { words_[w] |= members; }
  void erase(int64_t i) { words_[i >> 6] &= ~(uint64_t{1} << (i & 63)); }
  void clear() { words_.assign(words_.size(), 0); }
  int64_t count() const {
    int64_t n = 0;
    for (uint64_t word : words_) n += __builtin_popcountll(word);
    return n;
  }

 private:
  std::vector<uint64_t> words_;
};

}  // namespace pagoda
