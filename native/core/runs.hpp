// Storage for the tokens and page ids of a tree's nodes, and for content keys while there are listeners.
//
// A run is a chain of chunks. A chunk has 64 tokens (one page, if pages are longer) and, for each column, the ids of
// their pages. Runs grow and are trimmed at their end and never move: a request that commits page by page copies
// nothing, and a trimmed tail is free at once. The price is half a chunk per run on average. The links of chunks are
// separate from their contents, so that a walk can prefetch.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "core/grow_array.hpp"
#include "core/page_math.hpp"

namespace pagoda {

// Tokens [offset, offset + length) of a chain.
struct Run {
  int32_t head = -1;
  int32_t tail = -1;
  int32_t offset = 0;
  int32_t length = 0;
};

class RunStore {
 public:
  // `capacity` tokens are committed up front.
  RunStore(int64_t page_tokens, int num_columns, int64_t capacity);

  int64_t num_chunks() const { return next_.size(); }

  // How many chunks n more tokens of a run take.
  int64_t chunks_to_append(const Run& run, int64_t n) const {
    const int64_t used = run.length == 0 ? 0 : (run.offset + run.length) % chunk_tokens_;
    return (n - (used == 0 ? 0 : chunk_tokens_ - used) + chunk_tokens_ - 1) / chunk_tokens_;
  }

  // Starts keeping a 64-bit key per page, not written yet, or stops.
  void keep_keys();
  void drop_keys();

  // Reserves address space for so many tokens.
  void expect(int64_t tokens);

  // Allocates for n more chunks, so that what follows cannot fail.
  void reserve(int64_t n);

  // Appends n tokens, whole pages, and the ids of these pages in each column to a run.
  void append(Run& run, const int32_t* tokens, const std::vector<const int32_t*>& columns, int64_t n);

  // Cuts a run after `at` tokens and returns the rest. Takes at most one chunk.
  Run split(Run& run, int64_t at);

  // Joins what `split` cut; false if the halves are not stored as a split leaves them.
  bool can_join(const Run& upper, const Run& lower) const {
    return (upper.offset + upper.length) % chunk_tokens_ == lower.offset;
  }
  Run join(const Run& upper, const Run& lower);

  // Trims a run to its first `length` tokens.
  void trim(Run& run, int64_t length);

  // How many of n tokens equal the first tokens of the run; n is at most the run's length. If `ids` is not null, it
  // gets the ids in column 0 of the pages that are equal, read in the same pass.
  template <bool with_ids>
  int64_t common(const Run& run, const int32_t* tokens, int64_t n, int32_t* ids) const;

  // Copies tokens [begin, end) of a run, and the page ids of its pages [begin, end).
  void copy_tokens(const Run& run, int64_t begin, int64_t end, int32_t* out) const;
  void copy_pages(const Run& run, int column, int64_t begin, int64_t end, int32_t* out) const;

  // Calls each(ids, n) for the contiguous stretches of pages [begin, end) of a run, in order.
  template <typename Each>
  void for_pages(const Run& run, int column, int64_t begin, int64_t end, Each each) const {
    for_pieces(run, math_.first_slot(begin), math_.first_slot(end), [&](int32_t chunk, int64_t offset, int64_t n) {
      each(ids_of(column, chunk) + math_.page(offset), math_.page(n));
    });
  }
  template <typename Each>
  void for_pages(const Run& run, int column, int64_t begin, int64_t end, Each each) {
    const RunStore& self = *this;
    self.for_pages(run, column, begin, end, [&](const int32_t* ids, int64_t n) { each(const_cast<int32_t*>(ids), n); });
  }

  // The same, last stretch first, until each returns false.
  template <typename Each>
  void for_pages_backward(const Run& run, int column, int64_t begin, int64_t end, Each each) const {
    const int64_t stop = math_.first_slot(begin);
    int64_t at = math_.first_slot(end);
    if (at <= stop) return;
    for (int32_t chunk = chunk_at(run, at - 1);; chunk = prev_[chunk]) {
      const int64_t last = (run.offset + at - 1) % chunk_tokens_ + 1, n = std::min(last, at - stop);
      if (!each(ids_of(column, chunk) + math_.page(last - n), math_.page(n))) return;
      at -= n;
      if (at == stop) return;
    }
  }

  // Calls each(chunk, place, n) for the stretches of pages [begin, end) of a run; `place` is the index of the first
  // page among all stored pages, the same in every column.
  template <typename Each>
  void for_places(const Run& run, int64_t begin, int64_t end, Each each) const {
    for_pieces(run, math_.first_slot(begin), math_.first_slot(end), [&](int32_t chunk, int64_t offset, int64_t n) {
      each(chunk, chunk * chunk_pages_ + math_.page(offset), math_.page(n));
    });
  }
  int32_t id_at(int column, int64_t place) const { return ids_of(column, chunk_of(place))[place % chunk_pages_]; }
  int32_t& id_at(int column, int64_t place) {
    return const_cast<int32_t*>(ids_of(column, chunk_of(place)))[place % chunk_pages_];
  }
  // The keys of pages from a place to the end of its chunk.
  uint64_t* keys_at(int64_t place) { return keys_.data() + place; }
  const uint64_t* keys_at(int64_t place) const { return keys_.data() + place; }
  const int32_t* tokens_at(int64_t place) const { return tokens_.data() + math_.first_slot(place); }
  int64_t place_of(const Run& run, int64_t page) const {
    const int64_t at = math_.first_slot(page);
    return chunk_at(run, at) * chunk_pages_ + math_.page((run.offset + at) % chunk_tokens_);
  }
  int64_t last_place(const Run& run) const {
    return run.tail * chunk_pages_ + math_.page((run.offset + run.length - 1) % chunk_tokens_);
  }
  // The place of the page before one of the same run.
  int64_t place_before(int64_t place) const {
    return place % chunk_pages_ > 0 ? place - 1
                                    : int64_t{prev_[place / chunk_pages_]} * chunk_pages_ + chunk_pages_ - 1;
  }
  int32_t chunk_of(int64_t place) const { return static_cast<int32_t>(place / chunk_pages_); }
  int64_t pages_per_chunk() const { return chunk_pages_; }

  // Calls each(tokens, n) for the contiguous stretches of tokens [begin, end) of a run, in order.
  template <typename Each>
  void for_tokens(const Run& run, int64_t begin, int64_t end, Each each) const {
    for_pieces(run, begin, end, [&](int32_t chunk, int64_t offset, int64_t n) {
      each(tokens_.data() + chunk * chunk_tokens_ + offset, n);
    });
  }

  const int32_t* first_page(const Run& run) const { return tokens_.data() + run.head * chunk_tokens_ + run.offset; }

  void prefetch_links(const Run& run) const {
    __builtin_prefetch(&next_[run.head]);
    __builtin_prefetch(&prev_[run.tail]);
  }

  // Prefetches what an append touches first.
  void prefetch_end(const Run& run) const {
    const int64_t at = run.tail * chunk_tokens_ + (run.offset + run.length) % chunk_tokens_;
    __builtin_prefetch(tokens_.data() + at, 1);
    for (int c = 0; c < num_columns_; c += 4) __builtin_prefetch(ids_of(c, run.tail), 1);
    __builtin_prefetch(&next_[run.tail], 1);
  }

  // Marks the run's chunks; false if one is already marked or the chain is broken.
  bool mark(const Run& run, std::vector<bool>& seen) const;
  // Whether the number of free chunks is as counted and none of them is marked.
  bool free_chunks_are_right(std::vector<bool>& seen) const;

  void clear();

 private:
  const int32_t* ids_of(int column, int64_t chunk) const {
    return ids_.data() + (chunk * num_columns_ + column) * chunk_pages_;
  }
  int32_t take();
  void give(int32_t chunk);
  // Copies tokens, ids and keys of a chunk from an offset on to the same offset of another chunk.
  void copy_rest(int32_t from, int32_t to, int64_t offset);
  // The chunk of token `at` of a run, from whichever end is nearer.
  int32_t chunk_at(const Run& run, int64_t at) const;

  template <typename Each>
  void for_pieces(const Run& run, int64_t begin, int64_t end, Each each) const {
    if (begin >= end) return;
    int32_t chunk = chunk_at(run, begin);
    int64_t offset = (run.offset + begin) % chunk_tokens_;
    for (;;) {
      const int64_t n = std::min(chunk_tokens_ - offset, end - begin);
      each(chunk, offset, n);
      begin += n;
      if (begin == end) return;
      chunk = next_[chunk];
      offset = 0;
    }
  }

  PageMath math_;
  int num_columns_;
  int64_t chunk_pages_;
  int64_t chunk_tokens_;
  GrowArray<int32_t> tokens_;       // [chunks * chunk_tokens]
  GrowArray<int32_t> ids_;          // [chunks, columns, chunk_pages]: contiguous per chunk
  GrowArray<uint64_t> keys_;        // [chunks * chunk_pages], while has_keys_
  GrowArray<int32_t> next_, prev_;  // [chunks]
  bool has_keys_ = false;
  int32_t free_ = -1;  // first free chunk; next_ links the others, last in first out
  int64_t num_free_ = 0;
};

template <bool with_ids>
int64_t RunStore::common(const Run& run, const int32_t* tokens, int64_t n, int32_t* ids) const {
  constexpr int kAhead = 4;  // chunks to prefetch: more misses than a core can have outstanding
  const auto fetch = [&](int64_t chunk) {
    const int32_t* t = tokens_.data() + chunk * chunk_tokens_;
    for (int64_t i = 0; i < chunk_tokens_; i += 16) __builtin_prefetch(t + i);
    if (with_ids) {
      const int32_t* mine = ids_of(0, chunk);
      for (int64_t i = 0; i < chunk_pages_; i += 16) __builtin_prefetch(mine + i);
    }
  };
  int64_t offset = run.offset, done = 0, fetched = chunk_tokens_ - offset;
  int32_t chunk = run.head, ahead = chunk;
  fetch(chunk);
  for (int i = 1; i < kAhead && fetched < n; ++i, fetched += chunk_tokens_) {
    ahead = next_[ahead];
    fetch(ahead);
  }
  for (;;) {
    if (fetched < n) {
      ahead = next_[ahead];
      fetch(ahead);
      fetched += chunk_tokens_;
    }
    const int64_t piece = std::min(chunk_tokens_ - offset, n - done);
    const int32_t* mine = tokens_.data() + chunk * chunk_tokens_ + offset;
    const int32_t* theirs = tokens + done;
    int64_t same = piece;
    if (std::memcmp(mine, theirs, static_cast<size_t>(piece) * sizeof(int32_t)) != 0) {
      for (same = 0; mine[same] == theirs[same];) ++same;
    }
    if (with_ids) {
      const int64_t pages = math_.page(same);
      std::memcpy(ids, ids_of(0, chunk) + math_.page(offset), static_cast<size_t>(pages) * sizeof(int32_t));
      ids += pages;
    }
    done += same;
    if (same < piece || done == n) return done;
    chunk = next_[chunk];
    offset = 0;
  }
}

}  // namespace pagoda
