#include "core/free_list.hpp"

#include <algorithm>
#include <limits>

namespace pagoda {

namespace {

constexpr int64_t kNoFencePassed = std::numeric_limits<int64_t>::min();

}  // namespace

FreeList::FreeList(int64_t num_ids, int64_t first_id, std::string what)
    : num_ids_(num_ids),
      first_id_(first_id),
      what_(std::move(what)),
      num_free_(num_ids),
      passed_(kNoFencePassed),
      free_(num_ids),
      quarantined_(num_ids),
      seen_(num_ids) {
  free_.fill();
}

int64_t FreeList::index(int64_t id, int64_t position) const {
  if (id >= first_id_ && id - first_id_ < num_ids_) return id - first_id_;
  std::string message = "ids[" + text(position) + "] = " + text(id) + " is out of range: ";
  if (num_ids_ == 0) {
    message += "this list has no " + what_;
  } else {
    message += what_ + " are " + text(first_id_) + " to " + text(first_id_ + num_ids_ - 1);
    if (id == 0) message += ", and 0 is padding";
  }
  throw BadId{IdFault::kOutOfRange, id, position, message};
}

bool FreeList::is_free(int64_t id) const { return free_.contains(index(id, 0)); }

bool FreeList::is_held(int64_t id) const { return holds(index(id, 0)); }

void FreeList::require(int64_t n) const {
  if (n > num_free_) throw OutOfIds{what_, n, num_free_, num_ids_};
}

void FreeList::throw_not_held(Ids ids, int64_t position) const {
  const int64_t id = ids[position];
  const int64_t i = index(id, position);
  const std::string at = "ids[" + text(position) + "] = " + text(id);
  if (std::find(ids.data, ids.data + position, id) != ids.data + position) {
    throw BadId{IdFault::kDoubleFree, id, position, at + " is duplicated: give each id once"};
  }
  if (quarantined_.contains(i)) {
    throw BadId{IdFault::kDoubleFree, id, position, at + " was already freed and waits for its fence"};
  }
  throw BadId{IdFault::kNotHeld, id, position, at + " is not held: it was already freed, or never allocated"};
}

void FreeList::throw_slot(Ids slots, int64_t position, const char* name, const PageMath& pages) const {
  const int64_t slot = slots[position], i = pages.page(slot) - first_id_;
  const std::string at = std::string(name) + "[" + text(position) + "] = " + text(slot);
  if (i < 0 || i >= num_ids_) {
    const int64_t first = pages.first_slot(first_id_), end = pages.first_slot(first_id_ + num_ids_);
    throw BadId{IdFault::kOutOfRange, slot, position,
                at + " is out of range: slots are " + text(first) + " to " + text(end - 1)};
  }
  throw BadId{
      quarantined_.contains(i) ? IdFault::kDoubleFree : IdFault::kNotHeld, slot, position,
      at + " is in page " + text(pages.page(slot)) + ", which is not held: it was already freed, or never allocated"};
}

void FreeList::alloc(int64_t n, int32_t* out) {
  require(n);
  free_.pop_smallest(n, first_id_, out);
  num_free_ -= n;
}

void FreeList::take(Ids ids) {
  int64_t done = 0;
  try {
    for (; done < ids.size; ++done) {
      const int64_t i = index(ids[done], done);
      if (!free_.contains(i)) {
        throw BadId{IdFault::kAlreadyHeld, ids[done], done,
                    "ids[" + text(done) + "] = " + text(ids[done]) + " is not free: give ids that are, each once"};
      }
      free_.erase(i);
    }
  } catch (...) {
    while (done-- > 0) free_.insert(ids[done] - first_id_);
    throw;
  }
  num_free_ -= ids.size;
}

void FreeList::require_held(Ids ids) {
  int64_t done = 0;
  const auto unmark = [&] {
    while (done-- > 0) seen_.erase(ids[done] - first_id_);
  };
  try {
    for (; done < ids.size; ++done) {
      const int64_t i = index(ids[done], done);
      if (seen_.contains(i) || !holds(i)) throw_not_held(ids, done);
      seen_.insert(i);
    }
  } catch (...) {
    unmark();
    throw;
  }
  unmark();
}

void FreeList::put(int64_t i, bool at_once) {
  if (at_once) {
    free_.insert(i);
  } else {
    quarantined_.insert(i);
  }
}

void FreeList::unput(int64_t i, bool at_once) {
  if (at_once) {
    free_.erase(i);
  } else {
    quarantined_.erase(i);
  }
}

void FreeList::expect(int64_t n, int64_t fence) {
  if (n == 0 || fence <= passed_) return;
  if (!fence_of_) fence_of_ = LazyArray<int64_t>(num_ids_);
  waiting_.reserve(n, fence);
}

void FreeList::settle(const int32_t* ids, int64_t n, Fence fence, bool at_once) {
  if (at_once) {
    num_free_ += n;
  } else if (n > 0) {
    expect(n, *fence);
    waiting_.push(*fence, ids, n);
    for (int64_t k = 0; k < n; ++k) fence_of_[ids[k] - first_id_] = *fence;
    num_quarantined_ += n;
  }
}

void FreeList::free(Ids ids, Fence fence) {
  const bool at_once = !fence || *fence <= passed_;
  int64_t done = 0;
  try {
    // Neighbours usually share a word of the bitmaps: read and write each word once for all of them.
    while (done < ids.size) {
      const int64_t w = (ids[done] - first_id_) >> 6;
      uint64_t members = 0;
      int64_t next = done;
      for (; next < ids.size; ++next) {
        const int64_t i = ids[next] - first_id_;
        if (i < 0 || i >= num_ids_) throw_not_held(ids, next);
        const uint64_t member = uint64_t{1} << (i & 63);
        if ((i >> 6) != w || (members & member) != 0) break;
        members |= member;
      }
      if (((free_.word(w) | quarantined_.word(w)) & members) != 0) {
        int64_t bad = done;
        while (holds(ids[bad] - first_id_)) ++bad;
        throw_not_held(ids, bad);
      }
      if (at_once) {
        free_.insert_word(w, members);
      } else {
        quarantined_.insert_word(w, members);
      }
      done = next;
    }
    settle(ids.data, ids.size, fence, at_once);
  } catch (...) {
    while (done-- > 0) unput(ids[done] - first_id_, at_once);
    throw;
  }
}

void FreeList::require_slots_fit(const PageMath& pages) const {
  if (first_id_ + num_ids_ > std::numeric_limits<int32_t>::max() / pages.size()) {
    throw BadArgument("page_tokens = " + text(pages.size()) + " makes the slots of " + text(num_ids_) + " " + what_ +
                      " exceed 2^31: give a smaller page_tokens or fewer ids");
  }
}

void FreeList::free_slots(Ids slots, const PageMath& pages, Fence fence) {
  require_slots_fit(pages);
  if (pages.size() == 1) return free(slots, fence);
  const bool at_once = !fence || *fence <= passed_;
  scratch_.clear();
  // Clears the marks of this call, whether it fails or succeeds.
  const auto unmark = [this] {
    for (int32_t page : scratch_) seen_.erase(page - first_id_);
  };
  try {
    int64_t last = std::numeric_limits<int64_t>::min();
    for (int64_t s = 0; s < slots.size; ++s) {
      const int64_t page = pages.page(slots[s]), i = page - first_id_;
      if (page == last) continue;
      if (i < 0 || i >= num_ids_) throw_slot(slots, s, "slots", pages);
      last = page;
      if (seen_.contains(i) || (fence && quarantined_.contains(i) && fence_of_[i] == *fence)) continue;
      if (!holds(i)) throw_slot(slots, s, "slots", pages);
      scratch_.push_back(static_cast<int32_t>(page));
      seen_.insert(i);
      put(i, at_once);
    }
    settle(scratch_.data(), static_cast<int64_t>(scratch_.size()), fence, at_once);
  } catch (...) {
    unmark();
    for (int32_t page : scratch_) unput(page - first_id_, at_once);
    throw;
  }
  unmark();
}

int64_t FreeList::pass_fence(int64_t fence) {
  const int64_t n = waiting_.pass(fence, [this](int32_t id) {
    quarantined_.erase(id - first_id_);
    free_.insert(id - first_id_);
  });
  num_quarantined_ -= n;
  num_free_ += n;
  passed_ = std::max(passed_, fence);
  return n;
}

int64_t FreeList::recall(int64_t fence) {
  const int64_t n = waiting_.recall(fence, [this](int32_t id) { quarantined_.erase(id - first_id_); });
  num_quarantined_ -= n;
  return n;
}

FreeList::Need FreeList::plan_growth(Ids old_lens, Ids new_lens, Ids last_slots, const PageMath& pages) {
  require_slots_fit(pages);
  if (old_lens.size != new_lens.size || old_lens.size != last_slots.size) {
    throw BadArgument("old_lens has " + text(old_lens.size) + " entries, new_lens " + text(new_lens.size) +
                      " and last_slots " + text(last_slots.size) + ": give one entry per request in each");
  }
  Need need{0, 0};
  int64_t r = 0;
  const auto grows_inside = [&](int64_t at) { return new_lens[at] > old_lens[at] && pages.offset(old_lens[at]) != 0; };
  const auto unmark = [&] {
    while (r-- > 0) {
      if (grows_inside(r)) seen_.erase(pages.page(last_slots[r]) - first_id_);
    }
  };
  try {
    for (; r < old_lens.size; ++r) {
      if (old_lens[r] < 0 || new_lens[r] < old_lens[r]) {
        throw BadArgument("new_lens[" + text(r) + "] = " + text(new_lens[r]) + ", old_lens[" + text(r) +
                          "] = " + text(old_lens[r]) + ": lengths must not be negative or shrink");
      }
      need.tokens += new_lens[r] - old_lens[r];
      need.pages += pages.pages_for(new_lens[r]) - pages.pages_for(old_lens[r]);
      if (!grows_inside(r)) continue;
      // A partly used page that is not held, or that two requests name, would hand out a slot twice.
      const int64_t i = pages.page(last_slots[r]) - first_id_;
      if (i < 0 || i >= num_ids_ || !holds(i)) throw_slot(last_slots, r, "last_slots", pages);
      if (pages.offset(last_slots[r]) != pages.offset(old_lens[r]) - 1) {
        throw BadArgument("last_slots[" + text(r) + "] = " + text(last_slots[r]) + " is not where token " +
                          text(old_lens[r] - 1) + " would be in a page of " + text(pages.size()) + " tokens");
      }
      if (seen_.contains(i)) {
        throw BadArgument("last_slots[" + text(r) + "] = " + text(last_slots[r]) +
                          " is in a partly used page that another request grows into as well");
      }
      seen_.insert(i);
    }
  } catch (...) {
    unmark();
    throw;
  }
  unmark();
  require(need.pages);
  return need;
}

void FreeList::fill_growth(const Need& need, Ids old_lens, Ids new_lens, Ids last_slots, const PageMath& pages,
                           int32_t* slots_out) {
  scratch_.resize(static_cast<size_t>(need.pages));
  alloc(need.pages, scratch_.data());
  const int32_t* next = scratch_.data();
  for (int64_t r = 0; r < old_lens.size; ++r) {
    int64_t left = new_lens[r] - old_lens[r];
    const int64_t used = pages.offset(old_lens[r]);
    int64_t slot = last_slots[r] + int64_t{1};
    int64_t room = used == 0 ? 0 : pages.size() - used;
    for (;;) {
      const int64_t run = std::min(left, room);
      for (int64_t t = 0; t < run; ++t) slots_out[t] = static_cast<int32_t>(slot + t);
      slots_out += run;
      left -= run;
      if (left == 0) break;
      slot = pages.first_slot(*next++);
      room = pages.size();
    }
  }
}

void FreeList::reset() {
  free_.fill();
  quarantined_.clear();
  waiting_.clear();
  num_free_ = num_ids_;
  num_quarantined_ = 0;
  passed_ = kNoFencePassed;
}

void FreeList::check() const {
  if (!free_.is_consistent()) throw BrokenInvariant{3, "a summary bit of the free " + what_ + " is wrong"};
  if (free_.count() != num_free_) {
    throw BrokenInvariant{
        1, text(num_free_) + " " + what_ + " are counted as free, but a walk finds " + text(free_.count())};
  }
  BitSet waits(num_ids_);
  int64_t num_waiting = 0;
  waiting_.for_each([&](int64_t fence, int32_t id) {
    if (fence <= passed_) throw BrokenInvariant{4, "ids wait for fence " + text(fence) + ", which has passed"};
    const int64_t i = id - first_id_;
    if (waits.contains(i) || !quarantined_.contains(i)) {
      throw BrokenInvariant{2, "id " + text(id) + " waits for two fences, or waits without being quarantined"};
    }
    if (free_.contains(i)) throw BrokenInvariant{2, "id " + text(id) + " is both free and quarantined"};
    if (fence_of_[i] != fence)
      throw BrokenInvariant{2, "id " + text(id) + " waits for another fence than the one noted"};
    waits.insert(i);
    ++num_waiting;
  });
  if (num_waiting != num_quarantined_ || quarantined_.count() != num_quarantined_) {
    throw BrokenInvariant{
        1, text(num_quarantined_) + " " + what_ + " are counted as quarantined, but a walk finds " + text(num_waiting)};
  }
  if (seen_.count() != 0) throw BrokenInvariant{2, "marks of a finished call are still set"};
}

}  // namespace pagoda
