#include "bind/module.hpp"

#include "bind/arrays.hpp"

NB_MODULE(_native, m) {
  using namespace pagoda::bind;
  using pagoda::Ids;
  m.doc() = "Pagoda's native core. Public names are re-exported by the rooms of the house.";
  init_arrays();
  init_errors();
  bind_free_list(m);
  bind_prefix_tree(m);
  bind_manager(m);
  bind_rank(m);
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
      "Sum of an array argument: what crossing into the core costs and accepts, for tests and figures.");
}
