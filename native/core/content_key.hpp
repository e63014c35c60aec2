// Keys of contents: 64 bits that name all tokens of a namespace up to a position, with their extra keys. The same
// contents have the same key in every process, whatever pages hold them. Not cryptographic: whoever chooses tokens can
// make two contents collide.
//
// A key is made from words, one after the other:
//
//     absorb(key, word) = x ^ (x >> 32), where x = (key ^ word) * 0x9E3779B97F4A7C15 mod 2^64
//
// Bytes begin at 0xD1342543DE82EF95 and absorb each byte, then their number. A sequence begins at the key of its
// namespace's bytes. A token is absorbed as it is; a token under an extra key as 2^32 + token, then the position where
// the extra key begins, then the key of its bytes.
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
