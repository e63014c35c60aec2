#include "core/errors.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "bind/module.hpp"

namespace pagoda::bind {

namespace {

template <typename... Args>
void raise(const char* type, Args&&... args) {
  try {
    nb::object errors = nb::module_::import_("pagoda.errors");
    nb::object error = errors.attr(type)(std::forward<Args>(args)...);
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
  } catch (nb::python_error& failure) {
    failure.restore();
  }
}

const char* type_of(IdFault fault) {
  switch (fault) {
    case IdFault::kOutOfRange:
      return "OutOfRangeError";
    case IdFault::kNotHeld:
      return "NotHeldError";
    case IdFault::kDoubleFree:
      return "DoubleFreeError";
    case IdFault::kAlreadyHeld:
      return "AlreadyHeldError";
  }
  return "UsageError";
}

void translate(const std::exception_ptr& thrown, void*) {
  try {
    std::rethrow_exception(thrown);
  } catch (const OutOfIds& e) {
    raise("CapacityError", e.what, e.wanted, e.free, e.total);
  } catch (const BadId& e) {
    raise(type_of(e.fault), e.message, e.id, e.position);
  } catch (const BadConfig& e) {
    raise("ConfigError", e.what());
  } catch (const Stale& e) {
    raise("StaleError", e.what());
  } catch (const BadArgument& e) {
    raise("ArgumentError", e.what());
  } catch (const BrokenInvariant& e) {
    raise("InvariantError", e.number, e.message);
  }
}

}  // namespace

void init_errors() { nb::register_exception_translator(translate); }

}  // namespace pagoda::bind
