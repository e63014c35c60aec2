// Which ids of one id space are free, held or quarantined. In: how many; out: which.
//
// A quarantined id was freed, but a step that may still read it has not passed its fence. A call that throws changes
// nothing.
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

// A borrowed array of integers.
struct Ids {
  const int32_t* data;
  int64_t size;
  int32_t operator[](int64_t i) const { return data[i]; }
};

// A step number; nullopt if no step reads the ids any more.
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

  // Throws OutOfIds if fewer than n are free.
  void require(int64_t n) const;

  // The n lowest free ids, ascending.
  void alloc(int64_t n, int32_t* out);

  // Takes these ids, which must be free.
  void take(Ids ids);

  // Throws what `free` would throw, without freeing.
  void require_held(Ids ids);

  // Frees ids, at once or when `fence` passes. Throws for an id that is duplicated or not held.
  void free(Ids ids, Fence fence);

  // Allocates for n ids that will wait for this fence, so that freeing them cannot fail.
  void expect(int64_t n, int64_t fence);

  // Frees the pages that these slots are in. A page may be named more than once, in this call or in earlier ones under
  // the same fence.
  void free_slots(Ids slots, const PageMath& pages, Fence fence);

  // Frees the ids that wait for this fence or an earlier one; returns their number.
  int64_t pass_fence(int64_t fence);

  // Turns the ids that wait for exactly this fence back into held ones; returns their number.
  int64_t recall(int64_t fence);

  struct Need {
    int64_t tokens;
    int64_t pages;
  };
  // What requests need that each grow from old_lens[i] to new_lens[i] tokens. Throws if they cannot: too few free
  // pages, a length that shrinks, or a last_slots[i] (read only if old_lens[i] ends inside a page) that is not the slot
  // of the last token in a held page.
  Need plan_growth(Ids old_lens, Ids new_lens, Ids last_slots, const PageMath& pages);

  // Writes the slots of a plan made just before, request after request: first the rest of the page of last_slots[i],
  // then whole pages. slots_out: [need.tokens].
  void fill_growth(const Need& need, Ids old_lens, Ids new_lens, Ids last_slots, const PageMath& pages,
                   int32_t* slots_out);

  // Makes all ids free and forgets all fences.
  void reset();

  // Throws BrokenInvariant for the first invariant that is broken.
  void check() const;

 private:
  // The index of an id in the id space, or BadId.
  int64_t index(int64_t id, int64_t position) const;
  // Whether the id of index i is held.
  bool holds(int64_t i) const { return !free_.contains(i) && !quarantined_.contains(i); }
  [[noreturn]] void throw_not_held(Ids ids, int64_t position) const;
  [[noreturn]] void throw_slot(Ids slots, int64_t position, const char* name, const PageMath& pages) const;
  void require_slots_fit(const PageMath& pages) const;
  // Makes the held id of index i free or quarantined, and held again.
  void put(int64_t i, bool at_once);
  void unput(int64_t i, bool at_once);
  // Counts ids that were put, and queues them for their fence.
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
  std::vector<int32_t> scratch_;  // of one call
  FenceQueue<int32_t> waiting_;
  LazyArray<int64_t> fence_of_;  // of each quarantined id; allocated when a fence is first used
};

}  // namespace pagoda
