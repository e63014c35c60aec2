#include <algorithm>

#include "bind/tree.hpp"

namespace pagoda::bind {

namespace {

nb::object to_python(const TreeEvent& event) {
  nb::object values = nb::module_::import_("pagoda.tree._values");
  if (event.kind == EventKind::kReset) return values.attr("Reset")();
  auto keys = new_uint64(static_cast<int64_t>(event.keys.size()));
  std::copy(event.keys.begin(), event.keys.end(), keys.data);
  nb::object parent = event.position == 0 ? nb::none() : nb::object(nb::int_(event.parent));
  return values.attr(event.kind == EventKind::kStored ? "Stored" : "Removed")(
      nb::bytes(event.space.data(), event.space.size()), event.position, parent, keys.array, to_array(event.tokens),
      to_tuple(event.ranges), to_tuple(event.columns), to_tuple(event.states), event.ids_only);
}

// Reports what a listener raised, which must disturb neither the call nor other listeners. True for Ctrl-C.
bool report(nb::handle listener) {
  if (!PyErr_ExceptionMatches(PyExc_KeyboardInterrupt)) {
    PyErr_WriteUnraisable(listener.ptr());
    return false;
  }
  PyErr_Clear();
  return true;
}

void take_events(PrefixTree& core, Listeners& to) {
  for (TreeEvent& event : core.take_events()) to.news.push_back({std::move(event), to.next_number++, 0});
}

void deliver_news(Listeners& to) {
  if (to.is_delivering) return;  // called by a listener: the delivery in progress continues with these
  struct Delivery {
    Listeners& to;
    ~Delivery() { to.is_delivering = false; }
  } delivery{to};
  to.is_delivering = true;
  bool is_interrupted = false;
  while (!to.news.empty()) {
    const News news = std::move(to.news.front());
    to.news.pop_front();
    const std::vector<Listener> listeners = to.listeners;
    nb::object told;
    try {
      told = to_python(news.event);
    } catch (nb::python_error& failure) {
      failure.restore();
      is_interrupted |= report(nb::none());
      continue;
    }
    for (const Listener& listener : listeners) {
      if (news.only == 0 ? news.number < listener.since : news.only != listener.since) continue;
      const nb::object done = nb::steal(PyObject_CallOneArg(listener.call.ptr(), told.ptr()));
      if (!done.is_valid()) is_interrupted |= report(listener.call);
    }
  }
  if (is_interrupted) PyErr_SetInterrupt();  // raised again now that all listeners were called
}

}  // namespace

void deliver_events(PrefixTree& core, Listeners& to) {
  take_events(core, to);
  deliver_news(to);
}

void listen(PrefixTree& core, Listeners& to, nb::handle listener) {
  if (!PyCallable_Check(listener.ptr())) throw BadArgument("listener: give a callable that takes an event");
  core.listen(true);
  std::vector<TreeEvent> all;
  try {
    all = core.retell();
    to.listeners.push_back({nb::borrow(listener), 0});
  } catch (...) {
    core.listen(!to.listeners.empty());
    throw;
  }
  take_events(core, to);  // those from before it listened
  const int64_t since = to.listeners.back().since = to.next_number++;
  for (TreeEvent& event : all) to.news.push_back({std::move(event), since, since});
  deliver_news(to);
}

void unlisten(PrefixTree& core, Listeners& to, nb::handle listener) {
  // Comparing runs Python, which may change the list: go through a copy.
  const std::vector<Listener> listeners = to.listeners;
  for (const Listener& each : listeners) {
    if (!each.call.is(listener) && !each.call.equal(listener)) continue;
    const auto it = std::find_if(to.listeners.begin(), to.listeners.end(),
                                 [&](const Listener& other) { return other.since == each.since; });
    if (it == to.listeners.end()) break;
    const Listener gone = *it;
    to.listeners.erase(it);
    core.listen(!to.listeners.empty());
    return;
  }
  throw BadArgument("listener: it is not listening");
}

}  // namespace pagoda::bind
