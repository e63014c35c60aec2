#include "core/free_list.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <limits>

#include "bind/arrays.hpp"
#include "bind/module.hpp"

// The interpreter's lock serialises calls: arguments are read and results allocated first, and no Python runs
// after that until the call has finished.

namespace pagoda::bind {

namespace {

constexpr int64_t kMaxId = std::numeric_limits<int32_t>::max();
constexpr int64_t kMaxCount = std::numeric_limits<int64_t>::max();
constexpr int64_t kMaxFence = std::numeric_limits<int64_t>::max();
constexpr int64_t kMinFence = std::numeric_limits<int64_t>::min() + 1;

Fence to_fence(nb::handle fence) {
  if (fence.is_none()) return std::nullopt;
  return to_int(fence, "fence", kMinFence, kMaxFence);
}

void construct(FreeList* self, nb::handle num_ids, nb::handle first_id, nb::handle what) {
  to_config([&] {
    const int64_t first = to_int(first_id, "first_id", 0, kMaxId);
    const int64_t n = to_int(num_ids, "num_ids", 0, kMaxId - first);
    new (self) FreeList(n, first, to_text(what, "what"));
  });
}

nb::object alloc(FreeList& self, nb::handle n) {
  const int64_t count = to_int(n, "n", 0, kMaxCount);
  self.require(count);
  auto out = new_int32(count);
  self.alloc(count, out.data);
  return out.array;
}

nb::object grow(FreeList& self, nb::handle old_lens, nb::handle new_lens, nb::handle last_slots,
                nb::handle page_tokens) {
  IdArray from(old_lens, "old_lens"), to(new_lens, "new_lens"), last(last_slots, "last_slots");
  const PageMath pages(to_int(page_tokens, "page_tokens", 1, kMaxId));
  const Ids old_ids = from.borrow(), new_ids = to.borrow(), last_ids = last.borrow();
  const FreeList::Need need = self.plan_growth(old_ids, new_ids, last_ids, pages);
  auto out = new_int32(need.tokens);
  self.fill_growth(need, old_ids, new_ids, last_ids, pages, out.data);
  return out.array;
}

int64_t id_of(nb::handle id) {
  return to_int(id, "id", std::numeric_limits<int64_t>::min(), std::numeric_limits<int64_t>::max());
}

std::string repr(const FreeList& self) {
  return "FreeList(" + text(self.num_ids()) + " " + self.what() + " from " + text(self.first_id()) + ": " +
         text(self.num_free()) + " free, " + text(self.num_held()) + " held, " + text(self.num_quarantined()) +
         " quarantined)";
}

}  // namespace

void bind_free_list(nb::module_& m) {
  nb::class_<FreeList>(m, "FreeList", nb::is_weak_referenceable(),
                       R"(Hands out the ids of one id space, lowest first, and takes them back.

An id is free, held, or quarantined: freed under a fence that has not passed yet. The ids are
``first_id ... first_id + num_ids - 1``; id 0 is padding unless ``first_id`` is 0. `what` names
the ids in error messages.

A call that raises changes nothing. Arguments are host arrays: numpy int32 or int64, torch tensors
on the CPU, or lists. No call but `reset` and `check` depends on ``num_ids``. Memory is about three
bits per id, plus eight bytes per id once a fence is used. A list may be used from several threads.

Errors: ConfigError for sizes that are negative or exceed 2**31.)")
      .def("__init__", &construct, nb::arg("num_ids").none(), nb::arg("first_id").none() = 1,
           nb::arg("what").none() = "ids",
           nb::sig("def __init__(self, num_ids: int, first_id: int = 1, what: str = 'ids') -> None"))
      .def_prop_ro("num_ids", &FreeList::num_ids, "Number of ids, in whatever state.")
      .def_prop_ro("first_id", &FreeList::first_id, "The lowest id.")
      .def_prop_ro("num_free", &FreeList::num_free, "Number of ids that can be allocated now.")
      .def_prop_ro("num_held", &FreeList::num_held, "Number of ids that are held.")
      .def_prop_ro("num_quarantined", &FreeList::num_quarantined, "Number of freed ids that wait for a fence.")
      .def(
          "can_alloc",
          [](const FreeList& self, nb::handle n) { return to_int(n, "n", 0, kMaxCount) <= self.num_free(); },
          nb::arg("n").none(), nb::sig("def can_alloc(self, n: int) -> bool"), "Return whether alloc(n) would succeed.")
      .def("alloc", &alloc, nb::arg("n").none(), nb::sig("def alloc(self, n: int) -> npt.NDArray[np.int32]"),
           R"(Allocate the n lowest free ids and return them in ascending order: [n] int32, host.

The caller holds them. Errors: CapacityError if fewer are free; ArgumentError.)")
      .def(
          "take", [](FreeList& self, nb::handle ids) { self.take(IdArray(ids, "ids").borrow()); },
          nb::arg("ids").none(), nb::sig("def take(self, ids: IdsLike) -> None"),
          R"(Take exactly these ids, which must be free. The caller holds them.

Errors: AlreadyHeldError if one is held, quarantined or duplicated; OutOfRangeError; ArgumentError.)")
      .def(
          "require_held", [](FreeList& self, nb::handle ids) { self.require_held(IdArray(ids, "ids").borrow()); },
          nb::arg("ids").none(), nb::sig("def require_held(self, ids: IdsLike) -> None"),
          "Raise what `free` would raise for these ids, without freeing them.")
      .def(
          "free",
          [](FreeList& self, nb::handle ids, nb::handle fence) {
            const Fence until = to_fence(fence);
            self.free(IdArray(ids, "ids").borrow(), until);
          },
          nb::arg("ids").none(), nb::arg("fence").none() = nb::none(),
          nb::sig("def free(self, ids: IdsLike, fence: int | None = None) -> None"),
          R"(Free held ids: at once, or, with a fence, when `pass_fence` reaches it.

With a fence that has already passed they are free at once. Errors: DoubleFreeError for an id that is
duplicated or quarantined; NotHeldError for one that is free; OutOfRangeError; ArgumentError.)")
      .def(
          "free_slots",
          [](FreeList& self, nb::handle slots, nb::handle page_tokens, nb::handle fence) {
            const PageMath pages(to_int(page_tokens, "page_tokens", 1, kMaxId));
            const Fence until = to_fence(fence);
            self.free_slots(IdArray(slots, "slots").borrow(), pages, until);
          },
          nb::arg("slots").none(), nb::arg("page_tokens").none(), nb::arg("fence").none() = nb::none(),
          nb::sig("def free_slots(self, slots: IdsLike, page_tokens: int, fence: int | None = None) -> None"),
          R"(Free the pages that these slots are in; the ids of this list are page ids.

One slot is enough to free its page, and a page may be named more than once, in this call or in earlier
calls under the same fence. With page_tokens 1 this is `free`: a duplicated slot raises. Errors: as `free`.)")
      .def(
          "pass_fence",
          [](FreeList& self, nb::handle fence) {
            return self.pass_fence(to_int(fence, "fence", kMinFence, kMaxFence));
          },
          nb::arg("fence").none(), nb::sig("def pass_fence(self, fence: int) -> int"),
          R"(Free the ids that wait for this fence or an earlier one, and return their number.

Errors: ArgumentError.)")
      .def(
          "recall",
          [](FreeList& self, nb::handle fence) { return self.recall(to_int(fence, "fence", kMinFence, kMaxFence)); },
          nb::arg("fence").none(), nb::sig("def recall(self, fence: int) -> int"),
          R"(Turn the ids that wait for exactly this fence back into held ones, and return their number.

Errors: ArgumentError.)")
      .def("grow", &grow, nb::arg("old_lens").none(), nb::arg("new_lens").none(), nb::arg("last_slots").none(),
           nb::arg("page_tokens").none(),
           nb::sig("def grow(self, old_lens: IdsLike, new_lens: IdsLike, last_slots: IdsLike, page_tokens: int) -> "
                   "npt.NDArray[np.int32]"),
           R"(Allocate slots for requests that each grow from an old to a new length, in one call.

Request i first fills the rest of the page of last_slots[i] (read only if old_lens[i] ends inside a
page), then takes whole pages. Returns [sum(new_lens - old_lens)] int32, host, request after request;
slot = page * page_tokens + offset. The caller holds the new pages. Errors: CapacityError;
ArgumentError for arrays of different sizes, a length that shrinks, or a last slot that does not fit
its length; NotHeldError, OutOfRangeError for the page of a last slot.)")
      .def(
          "is_free", [](const FreeList& self, nb::handle id) { return self.is_free(id_of(id)); }, nb::arg("id").none(),
          nb::sig("def is_free(self, id: int) -> bool"), "Return whether an id is free. Errors: OutOfRangeError.")
      .def(
          "is_held", [](const FreeList& self, nb::handle id) { return self.is_held(id_of(id)); }, nb::arg("id").none(),
          nb::sig("def is_held(self, id: int) -> bool"),
          "Return whether an id is held: neither free nor quarantined. Errors: OutOfRangeError.")
      .def("reset", &FreeList::reset, "Make every id free and forget all fences.")
      .def("check", &FreeList::check,
           "Verify invariants 1 to 4. Errors: InvariantError for the first one that is broken.")
      .def("__repr__", &repr);
}

}  // namespace pagoda::bind
