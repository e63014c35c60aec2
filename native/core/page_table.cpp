#include "core/page_table.hpp"

#include <algorithm>
#include <limits>

namespace pagoda {

PageTable::PageTable(int64_t num_rows, int64_t max_pages_per_row, int64_t page_tokens)
    : num_rows_(num_rows),
      max_pages_(max_pages_per_row),
      math_(page_tokens),
      lens_(static_cast<size_t>(num_rows + 1), 0),
      entries_((num_rows + 1) * max_pages_per_row),
      seen_(num_rows + 1) {}

int64_t PageTable::require_row(int64_t row, int64_t position) const {
  if (row >= 1 && row <= num_rows_) return row;
  std::string message =
      "rows[" + text(position) + "] = " + text(row) + " is out of range: rows are 1 to " + text(num_rows_);
  if (row == 0) message += ", and 0 is the padding that nobody holds";
  throw BadId{IdFault::kOutOfRange, row, position, message};
}

void PageTable::require_room(int64_t row, int64_t num_pages) const {
  if (num_pages <= max_pages_) return;
  throw OutOfIds{"pages of row " + text(row), num_pages, max_pages_ - math_.pages_for(lens_[row]), max_pages_};
}

FreeList::Need PageTable::plan_growth(FreeList& pages, Ids rows, Ids new_lens) {
  if (rows.size != new_lens.size) {
    throw BadArgument("rows has " + text(rows.size) + " entries and new_lens " + text(new_lens.size));
  }
  if (pages.first_id() < 1) throw BadArgument("page 0 is padding: give a free-list whose ids begin at 1");
  old_lens_.resize(static_cast<size_t>(rows.size));
  last_slots_.resize(static_cast<size_t>(rows.size));
  int64_t r = 0;
  const auto unmark = [&] {
    while (r-- > 0) seen_.erase(rows[r]);
  };
  try {
    for (; r < rows.size; ++r) {
      const int64_t row = require_row(rows[r], r);
      if (seen_.contains(row)) throw BadArgument("row " + text(row) + " stands twice in rows");
      require_room(row, math_.pages_for(new_lens[r]));
      seen_.insert(row);
      const int64_t len = lens_[row];
      old_lens_[r] = static_cast<int32_t>(len);
      last_slots_[r] = 0;
      if (const int64_t used = math_.offset(len); used != 0) {
        const int64_t page = entries_[row * max_pages_ + math_.page(len)];
        last_slots_[r] = static_cast<int32_t>(math_.first_slot(page) + used - 1);
      }
    }
  } catch (...) {
    unmark();
    throw;
  }
  unmark();
  return pages.plan_growth({old_lens_.data(), rows.size}, new_lens, {last_slots_.data(), rows.size}, math_);
}

void PageTable::fill_growth(const FreeList::Need& need, FreeList& pages, Ids rows, Ids new_lens, int32_t* slots_out,
                            int64_t* index_out, int32_t* page_ids_out) {
  pages.fill_growth(need, {old_lens_.data(), rows.size}, new_lens, {last_slots_.data(), rows.size}, math_, slots_out);
  for (int64_t r = 0; r < rows.size; ++r) {
    const int64_t begin = old_lens_[r], end = new_lens[r];
    const int64_t at = int64_t{rows[r]} * max_pages_;
    // A new page begins wherever a new token stands at a page boundary.
    for (int64_t page = math_.pages_for(begin); page < math_.pages_for(end); ++page) {
      const int32_t id = static_cast<int32_t>(math_.page(slots_out[math_.first_slot(page) - begin]));
      entries_[at + page] = id;
      *index_out++ = at + page;
      *page_ids_out++ = id;
    }
    lens_[rows[r]] = static_cast<int32_t>(end);
    slots_out += end - begin;
  }
}

void PageTable::append(int64_t row, Ids page_ids, int64_t num_tokens, int64_t* index_out) {
  require_row(row, 0);
  const int64_t len = lens_[row];
  if (math_.offset(len) != 0) {
    throw BadArgument("row " + text(row) + " ends inside a page, at " + text(len) +
                      " tokens: pages are added at a boundary");
  }
  if (num_tokens < 0 || math_.pages_for(num_tokens) != page_ids.size) {
    throw BadArgument(text(num_tokens) + " tokens do not lie in " + text(page_ids.size) + " pages of " +
                      text(math_.size()));
  }
  const int64_t first = math_.page(len);
  require_room(row, first + page_ids.size);
  if (len + num_tokens > std::numeric_limits<int32_t>::max()) throw BadArgument("a row holds fewer than 2^31 tokens");
  for (int64_t p = 0; p < page_ids.size; ++p) {
    // The slots of a page are int32 too.
    if (page_ids[p] < 1 || page_ids[p] >= std::numeric_limits<int32_t>::max() / math_.size()) {
      throw BadId{IdFault::kOutOfRange, page_ids[p], p,
                  "page_ids[" + text(p) + "] = " + text(page_ids[p]) +
                      " is not a page: ids begin at 1, and slots stay below 2^31"};
    }
  }
  const int64_t at = row * max_pages_ + first;
  for (int64_t p = 0; p < page_ids.size; ++p) {
    entries_[at + p] = page_ids[p];
    index_out[p] = at + p;
  }
  lens_[row] = static_cast<int32_t>(len + num_tokens);
}

void PageTable::release(int64_t row) {
  int32_t* entries = entries_.data() + require_row(row, 0) * max_pages_;
  std::fill(entries, entries + math_.pages_for(lens_[row]), 0);
  lens_[row] = 0;
}

void PageTable::check() const {
  for (int64_t row = 0; row <= num_rows_; ++row) {
    const int64_t used = math_.pages_for(lens_[row]);
    if (lens_[row] < 0 || used > max_pages_ || (row == 0 && used != 0)) {
      throw BrokenInvariant{5, "row " + text(row) + " counts " + text(lens_[row]) + " tokens"};
    }
    for (int64_t p = 0; p < max_pages_; ++p) {
      if ((p < used) != (entries_[row * max_pages_ + p] > 0)) {
        throw BrokenInvariant{5, "row " + text(row) + " of " + text(lens_[row]) + " tokens has page " +
                                     text(entries_[row * max_pages_ + p]) + " at " + text(p)};
      }
    }
  }
  if (seen_.count() != 0) throw BrokenInvariant{5, "marks of a finished call are still set"};
}

}  // namespace pagoda
