#include <algorithm>

#include "bind/tree.hpp"

namespace pagoda::bind {

namespace {

nb::object to_python(const TreeEvent& event) {
  nb::object values = nb::module_::import_("pagoda.tree._values");
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

void deliver(PrefixTree& core, Listeners& to) {
  if (!core.has_events()) return;
  for (TreeEvent& event : core.take_events()) to.news.push_back(std::move(event));
  if (to.is_delivering) return;  // a listener called: whoever delivers goes on with these
  struct Delivery {
    Listeners& to;
    ~Delivery() { to.is_delivering = false; }
  } delivery{to};
  to.is_delivering = true;
  bool is_interrupted = false;
  while (!to.news.empty()) {
    const TreeEvent event = std::move(to.news.front());
    to.news.pop_front();
    const std::vector<nb::object> listeners = to.listeners;
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

void listen(PrefixTree& core, Listeners& to, nb::handle listener) {
  if (!PyCallable_Check(listener.ptr())) throw BadArgument("listener: give a callable that takes an event");
  to.listeners.push_back(nb::borrow(listener));
  core.listen(true);
}

void unlisten(PrefixTree& core, Listeners& to, nb::handle listener) {
  // Comparing runs Python: it sees a copy.
  const std::vector<nb::object> listeners = to.listeners;
  for (const nb::object& each : listeners) {
    if (!each.is(listener) && !each.equal(listener)) continue;
    const auto it =
        std::find_if(to.listeners.begin(), to.listeners.end(), [&](const nb::object& other) { return other.is(each); });
    if (it == to.listeners.end()) break;
    const nb::object gone = *it;
    to.listeners.erase(it);
    core.listen(!to.listeners.empty());
    return;
  }
  throw BadArgument("listener: this one does not listen");
}

}  // namespace pagoda::bind
