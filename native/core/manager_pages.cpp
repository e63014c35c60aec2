// Pages given by number instead of by tokens: to a row ahead of what it reserves, or to nobody's row.
#include <algorithm>

#include "core/manager.hpp"

namespace pagoda {

void Manager::extend(int64_t number, int64_t g, int64_t n, int32_t* out) {
  row_at(number, 0);
  const size_t which = static_cast<size_t>(g);
  Group& group = groups_[which];
  const int64_t from = end(number, which);
  if (n > group.max_pages - from) {
    throw BadArgument("n: row " + text(number) + " has " + text(from) + " of at most " + text(group.max_pages) +
                      " pages of group " + group.spec.name + ": cannot give it " + text(n) + " more");
  }
  if (n == 0) return;
  grow_writes(n);
  provide(group, n);
  touched_[static_cast<size_t>(number)] = step_;
  add_pages(group, which, number, from + n);
  std::copy_n(group.ids(number) + from, n, out);
}

void Manager::trim(int64_t number, int64_t g, int64_t n) {
  const Row& row = row_at(number, 0);
  const size_t which = static_cast<size_t>(g);
  Group& group = groups_[which];
  const int64_t to = end(number, which),
                spare = to - std::max<int64_t>(group.math.pages_for(row.reserved), first(number, which));
  if (n > spare) {
    throw BadArgument("n: row " + text(number) + " has " + text(std::max<int64_t>(0, spare)) + " pages of group " +
                      group.spec.name + " behind its reserved tokens: cannot take back " + text(n));
  }
  if (is_touched(number)) {
    throw BadArgument("row " + text(number) + " was admitted, forked or given pages since the last plan: plan first");
  }
  require_no_step("trim");
  int32_t* ids = group.ids(number) + (to - n);
  group.pages.free({ids, n}, std::nullopt);
  std::fill_n(ids, n, 0);
  std::fill_n(group.owned(number) + (to - n), n, uint8_t{0});
  group.num_own -= n;
  end(number, which) = static_cast<int32_t>(to - n);
}

void Manager::alloc_pages(int64_t g, int64_t n, int32_t* out) {
  Group& group = groups_[static_cast<size_t>(g)];
  if (!group.given_out) group.given_out = LazyArray<uint8_t>(group.spec.num_pages + 1);
  provide(group, n);
  group.pages.alloc(n, out);
  for (int64_t i = 0; i < n; ++i) group.given_out[out[i]] = 1;
  group.num_given_out += n;
}

void Manager::free_pages(int64_t g, Ids page_ids) {
  Group& group = groups_[static_cast<size_t>(g)];
  for (int64_t i = 0; i < page_ids.size; ++i) {
    const int32_t id = page_ids[i];
    const bool is_page = id >= 1 && id <= group.spec.num_pages;
    if (is_page && group.pages.is_held(id) && (!group.given_out || group.given_out[id] == 0)) {
      throw BadId{
          IdFault::kNotHeld, id, i,
          "page_ids[" + text(i) + "] = " + text(id) + " was not given out by alloc_pages: a row or the cache has it"};
    }
  }
  group.pages.free(page_ids, fence(false) <= passed_ ? Fence{} : Fence{fence(false)});
  for (int64_t i = 0; i < page_ids.size; ++i) group.given_out[page_ids[i]] = 0;
  group.num_given_out -= page_ids.size;
}

void Manager::provide(Group& group, int64_t n) {
  Needs needs(groups_.size());
  needs[static_cast<size_t>(group.number)].pages = n;
  require_room(needs, 0);
  make_room(needs);
}

void Manager::require_no_step(const char* call) const {
  if (passed_ >= step_ - 1) return;
  throw BadArgument(std::string(call) + ": steps " + text(passed_ + 1) + " to " + text(step_ - 1) +
                    " may still be running: call pass_fence(" + text(step_ - 1) + ") when they have finished");
}

}  // namespace pagoda
