#include "bind/arrays.hpp"

#include <nanobind/stl/string.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <limits>
#include <string>

#include "bind/dlpack.hpp"

namespace pagoda::bind {

namespace {

PyObject* g_empty = nullptr;  // numpy.empty
PyObject* g_int32 = nullptr;  // numpy.dtype("int32")
PyObject* g_int64 = nullptr;

// The last type that offered an exchange API: in practice torch.Tensor, looked up once.
PyTypeObject* g_tensor_type = nullptr;
const dlpack::ExchangeApi* g_tensor_api = nullptr;

std::string kind_of(nb::handle value) { return Py_TYPE(value.ptr())->tp_name; }

[[noreturn]] void refuse(const char* name, const std::string& why) {
  throw BadArgument(std::string(name) + ": " + why);
}

[[noreturn]] void refuse_size(const char* name, int64_t position, int64_t value) {
  refuse(name, "entry " + text(position) + " is " + text(value) + ", which does not fit in int32");
}

const dlpack::ExchangeApi* exchange_api(PyTypeObject* type) {
  if (type == g_tensor_type) return g_tensor_api;
  nb::handle handle(reinterpret_cast<PyObject*>(type));
  if (!nb::hasattr(handle, "__dlpack_c_exchange_api__")) return nullptr;
  nb::object capsule = handle.attr("__dlpack_c_exchange_api__");
  auto* api = static_cast<dlpack::ExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  if (api == nullptr) PyErr_Clear();
  while (api != nullptr && api->major != 1) api = api->older;
  if (api == nullptr || api->tensor_from_object == nullptr) return nullptr;
  Py_INCREF(type);  // types of tensors live as long as the process; this one must, for the cache
  Py_XDECREF(reinterpret_cast<PyObject*>(g_tensor_type));
  g_tensor_type = type;
  g_tensor_api = api;
  return api;
}

template <typename T>
NewArray<T> new_array(int64_t size, PyObject* dtype) {
  nb::object length = nb::steal(PyLong_FromLongLong(size));
  PyObject* args[] = {nullptr, length.ptr(), dtype};
  nb::object array = nb::steal(PyObject_Vectorcall(g_empty, args + 1, 2 | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr));
  if (!array.is_valid()) throw nb::python_error();
  Py_buffer buffer;
  if (PyObject_GetBuffer(array.ptr(), &buffer, PyBUF_SIMPLE | PyBUF_WRITABLE) != 0) throw nb::python_error();
  T* data = static_cast<T*>(buffer.buf);
  PyBuffer_Release(&buffer);  // the array owns the data; nobody resizes it before it is handed out
  return {std::move(array), data};
}

}  // namespace

void init_arrays() {
  nb::object numpy = nb::module_::import_("numpy");
  g_empty = numpy.attr("empty").inc_ref().ptr();
  g_int32 = numpy.attr("dtype")("int32").release().ptr();
  g_int64 = numpy.attr("dtype")("int64").release().ptr();
}

NewArray<int32_t> new_int32(int64_t size) { return new_array<int32_t>(size, g_int32); }
NewArray<int64_t> new_int64(int64_t size) { return new_array<int64_t>(size, g_int64); }

int64_t to_int(nb::handle value, const char* name, int64_t low, int64_t high) {
  nb::object index = nb::steal(PyNumber_Index(value.ptr()));
  if (!index.is_valid()) {
    PyErr_Clear();
    refuse(name, "give an integer, not " + kind_of(value));
  }
  int overflow = 0;
  const int64_t n = PyLong_AsLongLongAndOverflow(index.ptr(), &overflow);
  if (overflow != 0 || n < low || n > high) {
    const std::string given = nb::cast<std::string>(nb::str(index));
    refuse(name, "give an integer from " + text(low) + " to " + text(high) + ", not " + given);
  }
  return n;
}

IdArray::IdArray(nb::handle array, const char* name) {
  // Cheapest question first: a numpy array answers the first, a tensor the third.
  if (PyObject_CheckBuffer(array.ptr())) {
    from_buffer(array, name);
  } else if (PyList_CheckExact(array.ptr()) || !(from_tensor(array, name) || from_dlpack(array, name))) {
    from_sequence(array, name);
  }
}

int32_t* IdArray::room_for(int64_t size) {
  if (size <= static_cast<int64_t>(std::size(few_))) return few_;
  many_.resize(static_cast<size_t>(size));
  return many_.data();
}

void IdArray::narrow(const int64_t* data, const char* name) {
  int32_t* narrowed = room_for(size_);
  for (int64_t i = 0; i < size_; ++i) {
    narrowed[i] = static_cast<int32_t>(data[i]);
    if (narrowed[i] != data[i]) refuse_size(name, i, data[i]);
  }
  data_ = narrowed;
}

bool IdArray::from_tensor(nb::handle array, const char* name) {
  const dlpack::ExchangeApi* api = exchange_api(Py_TYPE(array.ptr()));
  if (api == nullptr) return false;
  dlpack::Tensor tensor;
  if (api->tensor_from_object(array.ptr(), &tensor) != 0) {
    PyErr_Clear();
    refuse(name, "this tensor cannot be read: give one that is dense and needs no gradient");
  }
  if (tensor.device_type != dlpack::kHost && tensor.device_type != dlpack::kPinnedHost) {
    refuse(name, "the tensor is on a device; ids are read on the host: give .cpu(), which waits for the device");
  }
  if (tensor.ndim != 1) refuse(name, "give one dimension, not " + text(tensor.ndim));
  size_ = tensor.shape[0];
  if (size_ > 1 && tensor.strides != nullptr && tensor.strides[0] != 1)
    refuse(name, "not contiguous: give .contiguous()");
  if (tensor.type_code != dlpack::kSigned || tensor.type_lanes != 1 ||
      (tensor.type_bits != 32 && tensor.type_bits != 64)) {
    refuse(name, "give int32 or int64");
  }
  const char* data = static_cast<const char*>(tensor.data) + (size_ > 0 ? tensor.byte_offset : 0);
  if (tensor.type_bits == 32) {
    data_ = reinterpret_cast<const int32_t*>(data);
  } else {
    narrow(reinterpret_cast<const int64_t*>(data), name);
  }
  return true;
}

// A tensor of a library without the exchange API.
bool IdArray::from_dlpack(nb::handle array, const char* name) {
  if (!nb::hasattr(array, "__dlpack__")) return false;
  nb::object from_dlpack = nb::module_::import_("numpy").attr("from_dlpack");
  keep_ = nb::steal(PyObject_CallOneArg(from_dlpack.ptr(), array.ptr()));
  if (!keep_.is_valid()) {
    PyErr_Clear();
    refuse(name, "this " + kind_of(array) + " cannot be read on the host: give .cpu(), which waits for the device");
  }
  from_buffer(keep_, name);
  return true;
}

void IdArray::from_buffer(nb::handle array, const char* name) {
  Py_buffer& buffer = buffer_.view;
  if (PyObject_GetBuffer(array.ptr(), &buffer, PyBUF_FORMAT | PyBUF_ND | PyBUF_STRIDES) != 0) {
    PyErr_Clear();
    refuse(name, "this " + kind_of(array) + " cannot be read as an array");
  }
  if (buffer.ndim != 1) refuse(name, "give one dimension, not " + text(buffer.ndim));
  size_ = buffer.shape[0];
  const char* format = buffer.format == nullptr ? "B" : buffer.format;
  if (*format == '=' || *format == '<' || *format == '@') ++format;  // byte orders that are ours
  const bool is_signed = std::strchr("ilq", format[0]) != nullptr && format[0] != '\0' && format[1] == '\0';
  if (!is_signed || (buffer.itemsize != 4 && buffer.itemsize != 8)) {
    if (size_ == 0 && format[0] == 'd') return;  // numpy.array([])
    refuse(name, "give int32 or int64, not numpy format '" + std::string(format) + "'");
  }
  if (size_ > 1 && buffer.strides[0] != buffer.itemsize)
    refuse(name, "not contiguous: give numpy.ascontiguousarray(...)");
  if (buffer.itemsize == 4) {
    data_ = static_cast<const int32_t*>(buffer.buf);
  } else {
    narrow(static_cast<const int64_t*>(buffer.buf), name);
  }
}

void IdArray::from_sequence(nb::handle array, const char* name) {
  if (PyUnicode_Check(array.ptr()) || PyDict_Check(array.ptr())) {
    refuse(name, "give an array of ids, not " + kind_of(array));
  }
  nb::object items = nb::steal(PySequence_Fast(array.ptr(), ""));
  if (!items.is_valid()) {
    PyErr_Clear();
    refuse(name, "give an array of ids (numpy, torch on the CPU, or a list), not " + kind_of(array));
  }
  int32_t* entries = room_for(PySequence_Fast_GET_SIZE(items.ptr()));
  const int64_t size = PySequence_Fast_GET_SIZE(items.ptr());
  constexpr int64_t low = std::numeric_limits<int32_t>::min(), high = std::numeric_limits<int32_t>::max();
  // An item's __index__ may run Python that shortens the list: the size is asked for each time.
  for (size_ = 0; size_ < std::min<int64_t>(size, PySequence_Fast_GET_SIZE(items.ptr())); ++size_) {
    nb::object item = nb::borrow(PySequence_Fast_GET_ITEM(items.ptr(), size_));
    entries[size_] = static_cast<int32_t>(to_int(item, name, low, high));
  }
  data_ = entries;
}

}  // namespace pagoda::bind
