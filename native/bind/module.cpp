#include "bind/module.hpp"

#include "bind/arrays.hpp"
#include "core/window.hpp"

NB_MODULE(_native, m) {
  using namespace pagoda::bind;
  using pagoda::Ids;
  m.doc() = "Pagoda's native core. pagoda.ids, pagoda.tree, pagoda.manager and pagoda.pools re-export what is public.";
  // A thread, handler or traceback may keep objects alive until the interpreter exits, which is not a leak of ours.
  // Tests of the bindings turn the warnings on.
  nb::set_leak_warnings(false);
  init_arrays();
  init_errors();
  bind_attention(m);
  bind_free_list(m);
  bind_prefix_tree(m);
  bind_manager(m);
  bind_rank(m);
  m.def("set_leak_warnings", &nb::set_leak_warnings, nb::arg("on"),
        "Set whether objects that are still alive when the interpreter exits are reported on stderr; off by default.");
  m.def(
      "sum_ids",
      [](nb::handle ids) {
        IdArray array(ids, "ids");
        const Ids all = array.borrow();
        int64_t sum = 0;
        for (int64_t i = 0; i < all.size; ++i) sum += all[i];
        return sum;
      },
      nb::arg("ids").none(), nb::sig("def sum_ids(ids: IdsLike, /) -> int"),
      "Return the sum of an array argument. For tests and benchmarks of how arguments reach the core.");
  m.def(
      "first_live_token",
      [](nb::handle committed, nb::handle window, nb::handle resume_step) {
        constexpr int64_t kMost = int64_t{1} << 62;
        const pagoda::PageMath pages(to_int(resume_step, "resume_step", 1, kMost));
        return pages.first_slot(pagoda::first_live_page(to_int(committed, "committed", 0, kMost),
                                                        to_int(window, "window", 1, kMost), pages));
      },
      nb::arg("committed").none(), nb::arg("window").none(), nb::arg("resume_step").none(),
      nb::sig("def first_live_token(committed: int, window: int, resume_step: int) -> int"),
      "Return the first token of a window group that a row with `committed` tokens still reads.");
}
