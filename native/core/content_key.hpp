// Content keys: 64 bits that identify a namespace and all tokens up to a position, with their extra keys. Equal
// contents have equal keys in every process, whichever pages hold them. Not cryptographic: anyone who can choose tokens
// can make two contents collide.
//
// A key absorbs words one after the other:
//
//     absorb(key, word) = x ^ (x >> 32), where x = (key ^ word) * 0x9E3779B97F4A7C15 mod 2^64
//
// The key of a byte string starts at 0xD1342543DE82EF95 and absorbs each byte, then their number. The key of a sequence
// starts at the key of its namespace. A plain token is absorbed as it is; for a token under an extra key, 2^32 + token
// is absorbed, then the position where the extra key begins, then the key of its bytes.
#pragma once

#include <cstdint>
#include <string_view>

namespace pagoda {

inline uint64_t absorb(uint64_t key, uint64_t word) {
  const uint64_t x = (key ^ word) * 0x9E3779B97F4A7C15u;
  return x ^ (x >> 32);
}

inline uint64_t key_of_bytes(std::string_view bytes) {
  uint64_t key = 0xD1342543DE82EF95u;
  for (const char c : bytes) key = absorb(key, static_cast<unsigned char>(c));
  return absorb(key, bytes.size());
}

}  // namespace pagoda
