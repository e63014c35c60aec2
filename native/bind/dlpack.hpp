// The part of DLPack's C ABI (major version 1) that reads a host tensor without owning it.
#pragma once

#include <cstdint>

namespace pagoda::bind::dlpack {

struct Tensor {
  void* data;
  int32_t device_type;  // 1: host, 3: pinned host
  int32_t device_id;
  int32_t ndim;
  uint8_t type_code;  // 0: signed integer
  uint8_t type_bits;
  uint16_t type_lanes;
  int64_t* shape;
  int64_t* strides;  // in elements; null means row-major
  uint64_t byte_offset;
};

struct ExchangeApi {
  uint32_t major;
  uint32_t minor;
  ExchangeApi* older;
  void* allocate;
  void* managed_from_object;
  void* managed_to_object;
  int (*tensor_from_object)(void* object, Tensor* out);  // may be null
};

constexpr int32_t kHost = 1;
constexpr int32_t kPinnedHost = 3;
constexpr uint8_t kSigned = 0;

}  // namespace pagoda::bind::dlpack
