#include "bind/arrays.hpp"

#define NPY_NO_DEPRECATED_API NPY_1_7_API_VERSION
#include <numpy/arrayobject.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <limits>
#include <string>

#include "bind/dlpack.hpp"

namespace pagoda::bind {

namespace {

// torch.Tensor and its exchange API, once one has been seen.
PyTypeObject* g_tensor_type = nullptr;
const dlpack::ExchangeApi* g_tensor_api = nullptr;

std::string kind_of(nb::handle value) { return Py_TYPE(value.ptr())->tp_name; }

[[noreturn]] void refuse(const char* name, const std::string& why) {
  throw BadArgument(std::string(name) + ": " + why);
}

bool is_named(PyTypeObject* type, const char* module, const char* name) {
  nb::handle handle(reinterpret_cast<PyObject*>(type));
  nb::object found_module = nb::getattr(handle, "__module__", nb::none());
  nb::object found_name = nb::getattr(handle, "__name__", nb::none());
  return nb::isinstance<nb::str>(found_module) && nb::isinstance<nb::str>(found_name) &&
         PyUnicode_CompareWithASCIIString(found_module.ptr(), module) == 0 &&
         PyUnicode_CompareWithASCIIString(found_name.ptr(), name) == 0;
}

// The exchange API of torch.Tensor itself. A subclass may report data that it does not have, as torch's FakeTensor
// does, and takes the slow path.
const dlpack::ExchangeApi* exchange_api(PyTypeObject* type) {
  if (type == g_tensor_type) return g_tensor_api;
  if (g_tensor_type != nullptr || !is_named(type, "torch", "Tensor")) return nullptr;
  nb::object capsule =
      nb::getattr(nb::handle(reinterpret_cast<PyObject*>(type)), "__dlpack_c_exchange_api__", nb::none());
  if (!PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api")) return nullptr;
  auto* api = static_cast<dlpack::ExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  while (api != nullptr && api->major != 1) api = api->older;
  if (api == nullptr || api->tensor_from_object == nullptr) return nullptr;
  Py_INCREF(type);  // for the cache
  g_tensor_type = type;
  g_tensor_api = api;
  return api;
}

// Whether a value is a Python bool or a bool tensor, which `__index__` would turn into 0 or 1. numpy's bool has none.
bool is_bool(nb::handle value) {
  if (PyLong_CheckExact(value.ptr())) return false;
  if (PyBool_Check(value.ptr())) return true;
  if (PyArray_IsScalar(value.ptr(), Integer)) return false;
  nb::object dtype = nb::steal(PyObject_GetAttrString(value.ptr(), "dtype"));
  if (!dtype.is_valid()) {
    forgive();
    return false;
  }
  nb::object name = nb::steal(PyObject_Str(dtype.ptr()));
  if (!name.is_valid()) {
    forgive();
    return false;
  }
  return PyUnicode_CompareWithASCIIString(name.ptr(), "torch.bool") == 0;
}

template <typename T>
NewArray<T> new_array(int64_t size, int type) {
  npy_intp shape = size;
  nb::object array = nb::steal(PyArray_SimpleNew(1, &shape, type));
  if (!array.is_valid()) throw nb::python_error();
  T* data = static_cast<T*>(PyArray_DATA(reinterpret_cast<PyArrayObject*>(array.ptr())));
  return {std::move(array), data};
}

}  // namespace

void forgive() {
  if (!PyErr_ExceptionMatches(PyExc_Exception) || PyErr_ExceptionMatches(PyExc_MemoryError)) throw nb::python_error();
  PyErr_Clear();
}

void init_arrays() {
  if (PyArray_ImportNumPyAPI() < 0) throw nb::python_error();
}

NewArray<int32_t> new_int32(int64_t size) { return new_array<int32_t>(size, NPY_INT32); }
NewArray<uint64_t> new_uint64(int64_t size) { return new_array<uint64_t>(size, NPY_UINT64); }

nb::object view_int32(nb::handle owner, int32_t* data, int64_t size) {
  npy_intp shape = size;
  nb::object array = nb::steal(PyArray_SimpleNewFromData(1, &shape, NPY_INT32, data));
  if (!array.is_valid()) throw nb::python_error();
  PyArray_SetBaseObject(reinterpret_cast<PyArrayObject*>(array.ptr()), owner.inc_ref().ptr());
  return array;
}

int64_t to_int(nb::handle value, const char* name, int64_t low, int64_t high) {
  if (is_bool(value))
    refuse(name, "give an integer, not " + (PyBool_Check(value.ptr()) ? "bool" : "a bool " + kind_of(value)));
  nb::object index = nb::steal(PyNumber_Index(value.ptr()));
  if (!index.is_valid()) {
    forgive();
    refuse(name, "give an integer, not " + kind_of(value));
  }
  int overflow = 0;
  const int64_t n = PyLong_AsLongLongAndOverflow(index.ptr(), &overflow);
  if (overflow != 0 || n < low || n > high) {
    const std::string given = overflow != 0 ? "one that exceeds 64 bits" : text(n);
    refuse(name, "give an integer from " + text(low) + " to " + text(high) + ", not " + given);
  }
  return n;
}

bool is_number(nb::handle value) {
  return PyLong_Check(value.ptr()) || PyFloat_Check(value.ptr()) || PyArray_IsScalar(value.ptr(), Number) ||
         PyArray_IsScalar(value.ptr(), Bool);
}

std::string to_text(nb::handle value, const char* name) {
  Py_ssize_t size = 0;
  const char* characters = PyUnicode_Check(value.ptr()) ? PyUnicode_AsUTF8AndSize(value.ptr(), &size) : nullptr;
  if (characters == nullptr) {
    if (PyErr_Occurred() != nullptr) forgive();
    refuse(name, "give a str of valid characters");
  }
  return {characters, static_cast<size_t>(size)};
}

IdArray::IdArray(nb::handle array, const char* name) : array_(array), name_(name) {
  // Cheapest test first.
  if (PyArray_CheckExact(array.ptr())) {
    source_ = Source::kNumpy;
  } else if (PyList_CheckExact(array.ptr())) {
    from_sequence(array);
  } else if (exchange_api(Py_TYPE(array.ptr())) != nullptr) {
    source_ = Source::kTensor;
  } else if (PyObject_CheckBuffer(array.ptr())) {
    from_buffer(array);
    own();
  } else if (nb::hasattr(array, "__dlpack__")) {
    from_dlpack(array);
  } else {
    from_sequence(array);
  }
}

Ids IdArray::borrow() {
  if (source_ == Source::kNumpy) from_numpy(array_);
  if (source_ == Source::kTensor) from_tensor(array_);
  return {data_, size_};
}

int32_t* IdArray::room_for(int64_t size) {
  if (size <= static_cast<int64_t>(std::size(few_))) return few_;
  many_.resize(static_cast<size_t>(size));
  return many_.data();
}

void IdArray::own() {
  if (data_ == few_ || data_ == many_.data()) return;
  int32_t* entries = room_for(size_);
  std::copy_n(data_, size_, entries);
  data_ = entries;
}

void IdArray::narrow(const int64_t* data) {
  int32_t* narrowed = room_for(size_);
  for (int64_t i = 0; i < size_; ++i) {
    narrowed[i] = static_cast<int32_t>(data[i]);
    if (narrowed[i] != data[i]) {
      refuse(name_, "entry " + text(i) + " is " + text(data[i]) + ", which does not fit in int32");
    }
  }
  data_ = narrowed;
}

void IdArray::from_numpy(nb::handle array) {
  auto* given = reinterpret_cast<PyArrayObject*>(array.ptr());
  if (PyArray_NDIM(given) != 1) refuse(name_, "give one dimension, not " + text(PyArray_NDIM(given)));
  size_ = PyArray_DIM(given, 0);
  const int64_t item = PyArray_ITEMSIZE(given);
  if (!PyArray_ISSIGNED(given) || (item != 4 && item != 8) || !PyArray_ISNOTSWAPPED(given)) {
    if (size_ == 0 && PyArray_TYPE(given) == NPY_DOUBLE) return;  // numpy.array([])
    const nb::object dtype = nb::borrow(reinterpret_cast<PyObject*>(PyArray_DESCR(given)));
    refuse(name_, std::string("give int32 or int64, not ") + nb::str(dtype).c_str());
  }
  if (size_ > 1 && PyArray_STRIDE(given, 0) != item) {
    refuse(name_, "not contiguous: give numpy.ascontiguousarray(...)");
  }
  if (!PyArray_ISALIGNED(given)) refuse(name_, "not aligned to its dtype: give a copy");
  if (item == 4) {
    data_ = static_cast<const int32_t*>(PyArray_DATA(given));
  } else {
    narrow(static_cast<const int64_t*>(PyArray_DATA(given)));
  }
}

void IdArray::from_tensor(nb::handle array) {
  dlpack::Tensor tensor;
  if (g_tensor_api->tensor_from_object(array.ptr(), &tensor) != 0) {
    forgive();
    refuse(name_, "this tensor cannot be read: give a dense tensor that requires no gradient");
  }
  if (tensor.device_type != dlpack::kHost && tensor.device_type != dlpack::kPinnedHost) {
    refuse(name_, "the tensor is on a device, but ids are read on the host: give .cpu(), which waits for the device");
  }
  if (tensor.ndim != 1) refuse(name_, "give one dimension, not " + text(tensor.ndim));
  if (tensor.type_code != dlpack::kSigned || tensor.type_lanes != 1 ||
      (tensor.type_bits != 32 && tensor.type_bits != 64)) {
    refuse(name_, "give int32 or int64");
  }
  size_ = tensor.shape[0];
  if (size_ == 0) return;
  if (size_ > 1 && tensor.strides != nullptr && tensor.strides[0] != 1) {
    refuse(name_, "not contiguous: give .contiguous()");
  }
  if (tensor.data == nullptr) refuse(name_, "this tensor has no storage");
  const char* data = static_cast<const char*>(tensor.data) + tensor.byte_offset;
  if (tensor.type_bits == 32) {
    data_ = reinterpret_cast<const int32_t*>(data);
  } else {
    narrow(reinterpret_cast<const int64_t*>(data));
  }
}

// A tensor of another library, or a subclass of torch's.
void IdArray::from_dlpack(nb::handle array) {
  nb::object from_dlpack = nb::module_::import_("numpy").attr("from_dlpack");
  nb::object view = nb::steal(PyObject_CallOneArg(from_dlpack.ptr(), array.ptr()));
  if (!view.is_valid()) {
    forgive();
    refuse(name_, "this " + kind_of(array) + " cannot be read on the host: give .cpu(), which waits for the device");
  }
  from_buffer(view);
  own();
}

void IdArray::from_buffer(nb::handle array) {
  Py_buffer& buffer = buffer_.view;
  if (PyObject_GetBuffer(array.ptr(), &buffer, PyBUF_FORMAT | PyBUF_ND | PyBUF_STRIDES) != 0) {
    forgive();
    refuse(name_, "this " + kind_of(array) + " cannot be read as an array");
  }
  if (buffer.ndim != 1) refuse(name_, "give one dimension, not " + text(buffer.ndim));
  size_ = buffer.shape[0];
  const char* format = buffer.format == nullptr ? "B" : buffer.format;
  if (*format == '=' || *format == '<' || *format == '@') ++format;  // the native byte order
  const bool is_signed = format[0] != '\0' && std::strchr("ilq", format[0]) != nullptr && format[1] == '\0';
  if (!is_signed || (buffer.itemsize != 4 && buffer.itemsize != 8)) {
    if (size_ == 0 && format[0] == 'd') return;  // numpy.array([])
    refuse(name_, "give int32 or int64, not numpy format '" + std::string(format) + "'");
  }
  if (size_ > 1 && buffer.strides[0] != buffer.itemsize) {
    refuse(name_, "not contiguous: give numpy.ascontiguousarray(...)");
  }
  if (reinterpret_cast<uintptr_t>(buffer.buf) % static_cast<uintptr_t>(buffer.itemsize) != 0) {
    refuse(name_, "not aligned to its dtype: give a copy");
  }
  if (buffer.itemsize == 4) {
    data_ = static_cast<const int32_t*>(buffer.buf);
  } else {
    narrow(static_cast<const int64_t*>(buffer.buf));
  }
}

void IdArray::from_sequence(nb::handle array) {
  if (PyUnicode_Check(array.ptr()) || PyDict_Check(array.ptr())) {
    refuse(name_, "give an array of ids, not " + kind_of(array));
  }
  nb::object items = nb::steal(PySequence_Fast(array.ptr(), ""));
  if (!items.is_valid()) {
    forgive();
    refuse(name_, "give an array of ids (numpy, torch on the CPU, or a list), not " + kind_of(array));
  }
  const int64_t size = PySequence_Fast_GET_SIZE(items.ptr());
  int32_t* entries = room_for(size);
  constexpr int64_t low = std::numeric_limits<int32_t>::min(), high = std::numeric_limits<int32_t>::max();
  // An item's __index__ may run Python that shortens the list: ask for the size each time.
  for (size_ = 0; size_ < std::min<int64_t>(size, PySequence_Fast_GET_SIZE(items.ptr())); ++size_) {
    nb::object item = nb::borrow(PySequence_Fast_GET_ITEM(items.ptr(), size_));
    entries[size_] = static_cast<int32_t>(to_int(item, name_, low, high));
  }
  data_ = entries;
}

}  // namespace pagoda::bind
