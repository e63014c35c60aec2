#include "bind/tree.hpp"

namespace pagoda::bind {

namespace {

nb::object to_python(const TreeEvent& event) {
  nb::object values = nb::module_::import_("pagoda.tree.values");
  nb::object parent = event.position == 0 ? nb::none() : nb::object(nb::int_(event.parent));
  return values.attr(event.is_stored ? "Stored" : "Removed")(nb::bytes(event.space.data(), event.space.size()),
                                                             event.position, parent, to_array(event.tokens),
                                                             to_tuple(event.columns), to_tuple(event.states));
}

// What a listener raises concerns neither the call nor the other listeners. True for Ctrl-C.
bool report(nb::handle listener) {
  if (!PyErr_ExceptionMatches(PyExc_KeyboardInterrupt)) {
    PyErr_WriteUnraisable(listener.ptr());
    return false;
  }
  PyErr_Clear();
  return true;
}

}  // namespace

void deliver(Tree& tree) {
  if (!tree.core.has_events()) return;
  for (TreeEvent& event : tree.core.take_events()) tree.news.push_back(std::move(event));
  if (tree.is_delivering) return;  // a listener called: whoever delivers goes on with these
  struct Delivery {
    Tree& tree;
    ~Delivery() { tree.is_delivering = false; }
  } delivery{tree};
  tree.is_delivering = true;
  bool is_interrupted = false;
  while (!tree.news.empty()) {
    const TreeEvent event = std::move(tree.news.front());
    tree.news.pop_front();
    const std::vector<nb::object> listeners = tree.listeners;
    nb::object told;
    try {
      told = to_python(event);
    } catch (nb::python_error& failure) {
      failure.restore();
      is_interrupted |= report(nb::none());
      continue;
    }
    for (const nb::object& listener : listeners) {
      if (!nb::steal(PyObject_CallOneArg(listener.ptr(), told.ptr())).is_valid()) is_interrupted |= report(listener);
    }
  }
  if (is_interrupted) PyErr_SetInterrupt();  // raised again now that the call is done and everybody was told
}

}  // namespace pagoda::bind
