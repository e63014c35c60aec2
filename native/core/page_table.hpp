// Which pages the tokens of each row lie in. In: row, position; out: page id.
//
// The host's copy is the truth; the pools keep one on the device and are told what to write.
// A row only ever grows at its end until it is released: a step that is running on the device
// never sees an entry change under it.
#pragma once

#include <cstdint>
#include <vector>

#include "core/errors.hpp"
#include "core/free_list.hpp"
#include "core/lazy_array.hpp"

namespace pagoda {

class PageTable {
 public:
  // Rows 1 ... num_rows; row 0 is padding and stays empty.
  PageTable(int64_t num_rows, int64_t max_pages_per_row, int64_t page_tokens);

  int64_t num_rows() const { return num_rows_; }
  int64_t max_pages_per_row() const { return max_pages_; }
  int64_t page_tokens() const { return math_.size(); }

  int64_t num_tokens(int64_t row) const { return lens_[require_row(row, 0)]; }
  int64_t num_pages(int64_t row) const { return math_.pages_for(num_tokens(row)); }
  const int32_t* pages(int64_t row) const { return entries_.data() + row * max_pages_; }

  // What growing these rows to new_lens takes. Throws when they cannot grow so.
  FreeList::Need plan_growth(FreeList& pages, Ids rows, Ids new_lens);

  // Grows the rows by a plan that was just made. slots_out takes a slot a new token; index_out
  // (row * max_pages_per_row + column) and page_ids_out the entries written.
  void fill_growth(const FreeList::Need& need, FreeList& pages, Ids rows, Ids new_lens, int32_t* slots_out,
                   int64_t* index_out, int32_t* page_ids_out);

  // Adds num_tokens that lie in page_ids already, at a page boundary. index_out as above.
  void append(int64_t row, Ids page_ids, int64_t num_tokens, int64_t* index_out);

  // Empties a row. Its page ids are in pages(row)[0, num_pages) until the call.
  void release(int64_t row);

  // Throws BrokenInvariant with the first one broken. O(rows * pages).
  void check() const;

 private:
  int64_t require_row(int64_t row, int64_t position) const;
  void require_room(int64_t row, int64_t num_pages) const;

  int64_t num_rows_;
  int64_t max_pages_;
  PageMath math_;
  std::vector<int32_t> lens_;                   // [num_rows + 1], in tokens
  LazyArray<int32_t> entries_;                  // [num_rows + 1, max_pages], 0 behind a row's end
  BitSet seen_;                                 // scratch of one call, empty between calls
  std::vector<int32_t> old_lens_, last_slots_;  // likewise
};

}  // namespace pagoda
