// Who holds which id of one id space. In: how many, out: which.
//
// An id is free, held, or quarantined: freed, but steps that may still read it have not passed
// their fence. Every call either does all it says or throws and changes nothing.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/errors.hpp"
#include "core/fence_queue.hpp"
#include "core/id_set.hpp"
#include "core/lazy_array.hpp"
#include "core/page_math.hpp"

namespace pagoda {

// A borrowed run of integers.
struct Ids {
  const int32_t* data;
  int64_t size;
  int32_t operator[](int64_t i) const { return data[i]; }
};

// A step number; none means: nothing reads the ids any more.
using Fence = std::optional<int64_t>;

class FreeList {
 public:
  // Ids first_id ... first_id + num_ids - 1, all free. `what` names them in errors.
  FreeList(int64_t num_ids, int64_t first_id, std::string what);

  int64_t num_ids() const { return num_ids_; }
  int64_t first_id() const { return first_id_; }
  int64_t num_free() const { return num_free_; }
  int64_t num_quarantined() const { return num_quarantined_; }
  int64_t num_held() const { return num_ids_ - num_free_ - num_quarantined_; }
  const std::string& what() const { return what_; }

  bool is_free(int64_t id) const;
  bool is_held(int64_t id) const;

  // Throws OutOfIds when fewer than n are free.
  void require(int64_t n) const;

  // The n lowest free ids, ascending.
  void alloc(int64_t n, int32_t* out);

  // Takes these ids, which must be free.
  void take(Ids ids);

  // Throws as free would, and changes nothing.
  void require_held(Ids ids);

  // Gives ids back, at once or when `fence` passes. An id that is not held, or stands twice, throws.
  void free(Ids ids, Fence fence);

  // Room for n ids that will wait for this fence: freeing them does not fail.
  void expect(int64_t n, int64_t fence);

  // Gives back the pages that slots lie in. A page named again, in this call or before under the
  // same fence, counts once.
  void free_slots(Ids slots, const PageMath& pages, Fence fence);

  // Frees what waits for this fence or an earlier one; returns how many ids that were.
  int64_t pass_fence(int64_t fence);

  // Makes held again what waits for exactly this fence; returns how many ids that were.
  int64_t recall(int64_t fence);

  struct Need {
    int64_t tokens;
    int64_t pages;
  };
  // What requests that each grow from old_lens[i] to new_lens[i] tokens take. Throws when they
  // cannot: too few free pages, a length that shrinks, or a last_slots[i] (read only where
  // old_lens[i] ends inside a page) that is not where the last token lies in a held page.
  Need plan_growth(Ids old_lens, Ids new_lens, Ids last_slots, const PageMath& pages);

  // The slots of a plan that was just made, request after request: first the rest of the page of
  // last_slots[i], then whole pages. slots_out takes need.tokens entries.
  void fill_growth(const Need& need, Ids old_lens, Ids new_lens, Ids last_slots, const PageMath& pages,
                   int32_t* slots_out);

  // Everything free, no fence waiting, none passed.
  void reset();

  // Throws BrokenInvariant with the first one broken. O(num_ids / 64 + quarantined).
  void check() const;

 private:
  // The number of an id in the space, or BadId.
  int64_t index(int64_t id, int64_t position) const;
  // Number i of the space is held.
  bool holds(int64_t i) const { return !free_.contains(i) && !quarantined_.contains(i); }
  [[noreturn]] void throw_not_held(Ids ids, int64_t position) const;
  [[noreturn]] void throw_slot(Ids slots, int64_t position, const char* name, const PageMath& pages) const;
  void require_slots_fit(const PageMath& pages) const;
  // Moves held id number i to the free ones or into quarantine, and back.
  void put(int64_t i, bool at_once);
  void unput(int64_t i, bool at_once);
  // Counts ids that were put, and queues them behind their fence.
  void settle(const int32_t* ids, int64_t n, Fence fence, bool at_once);

  int64_t num_ids_;
  int64_t first_id_;
  std::string what_;
  int64_t num_free_;
  int64_t num_quarantined_ = 0;
  int64_t passed_;
  IdSet free_;
  BitSet quarantined_;
  BitSet seen_;                   // scratch of one call, empty between calls
  std::vector<int32_t> scratch_;  // likewise
  FenceQueue<int32_t> waiting_;
  LazyArray<int64_t> fence_of_;  // of a quarantined id; made when a fence is used
};

}  // namespace pagoda
