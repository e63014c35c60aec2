// The kernels of attention, for one instruction set. A file that includes this defines, before it includes it:
//   PAGODA_LANES    floats in a vector
//   PAGODA_ROWS     rows of a register block: (query, head) pairs
//   PAGODA_VECTORS  vectors of a register block
// and has a macro PAGODA_BF16_DOT if the instruction set multiplies pairs of bfloat16.
//
// Everything here has internal linkage and nothing of the standard library is instantiated, because the linker keeps
// one copy of a function that several files emit, and it may be one that this machine cannot run.
//
// Vectors are those of GCC and Clang, so that one text serves every instruction set. Rows of bfloat16 are widened in
// units of two vectors: the even elements, then the odd ones. Queries, keys, values and weighted values are all in
// this order, which is undone when outputs are written.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#include "core/attention.hpp"

#ifdef PAGODA_BF16_DOT
#include <immintrin.h>
#endif

namespace pagoda {
namespace {

constexpr int64_t kLanes = PAGODA_LANES;
constexpr int64_t kRows = PAGODA_ROWS;
constexpr int64_t kVectors = PAGODA_VECTORS;
constexpr int64_t kKeys = 64;    // keys of a block
constexpr int64_t kDotKeys = 4;  // keys whose products with a query are summed together
constexpr int64_t kSoon = 24;
constexpr int64_t kDotTile = 8;  // tiles of up to so many rows do not pay for packing keys
constexpr int64_t kAlign = 16;   // floats
constexpr int64_t kPanel = kLanes * kVectors;
constexpr float kLow = -1e30f;  // the maximum of no logits; finite, so that differences are numbers
constexpr float kLog2E = 1.44269504088896340736f;

static_assert(kKeys % kPanel == 0 && kLanes % kDotKeys == 0 && kRows <= kAlign && kLanes <= kAlign);

typedef float Vec __attribute__((vector_size(kLanes * 4)));
typedef int32_t Int __attribute__((vector_size(kLanes * 4)));
typedef uint32_t Word __attribute__((vector_size(kLanes * 4)));

struct Bf16 {
  uint16_t bits;
};

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

template <typename To, typename From>
inline To bits_of(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

template <typename V = Vec>
inline V load(const void* at) {
  V v;
  std::memcpy(&v, at, sizeof v);
  return v;
}

inline void store(void* at, Vec v) { std::memcpy(at, &v, sizeof v); }
inline Vec all(float x) { return Vec{} + x; }
inline Vec max_of(Vec a, Vec b) { return a > b ? a : b; }

// ── how elements are read ───────────────────────────────────────────────────────────────────────────

template <typename T>
struct Unit;

template <>
struct Unit<float> {
  static constexpr int64_t kSize = kLanes;  // elements
  static constexpr int kNum = 1;            // vectors
  static inline void read(const float* at, Vec* out) { out[0] = load(at); }
  static inline void write(float* at, const Vec* in) { store(at, in[0]); }
};

template <>
struct Unit<Bf16> {
  static constexpr int64_t kSize = 2 * kLanes;
  static constexpr int kNum = 2;
  static inline void read(const Bf16* at, Vec* out) {
    const Word words = load<Word>(at);
    out[0] = bits_of<Vec>(words << 16);
    out[1] = bits_of<Vec>(words & 0xffff0000u);
  }
  static inline Word rounded(Vec x) {
    const Word bits = bits_of<Word>(x);
    const Word nearest = bits + 0x7fffu + ((bits >> 16) & 1u);
    return x != x ? (Word{} + 0x7fc00000u) : nearest;
  }
  static inline void write(Bf16* at, const Vec* in) {
    const Word words = (rounded(in[0]) >> 16) | (rounded(in[1]) & 0xffff0000u);
    std::memcpy(at, &words, sizeof words);
  }
};

// ── shuffles ────────────────────────────────────────────────────────────────────────────────────────

// Lane i of the answer is lane kFrom(i) of a, b one after the other.
template <typename From, size_t... I>
inline Vec shuffled(Vec a, Vec b, std::index_sequence<I...>) {
#ifdef __clang__
  return __builtin_shufflevector(a, b, From::of(I)...);
#else
  return __builtin_shuffle(a, b, Int{From::of(I)...});
#endif
}

template <typename From>
inline Vec shuffle(Vec a, Vec b) {
  return shuffled<From>(a, b, std::make_index_sequence<kLanes>());
}

template <int G, int Half>
struct Groups {  // the first or second halves of groups of 2 G lanes: of a, then of b
  static constexpr int of(int i) {
    return i / (2 * G) * (2 * G) + Half * G + i % G + (i % (2 * G) < G ? 0 : static_cast<int>(kLanes));
  }
};

template <int Half>
struct Zip {  // the lanes of both in turn: of their first or second half
  static constexpr int of(int i) {
    return i / 2 + Half * static_cast<int>(kLanes / 2) + (i % 2 == 0 ? 0 : static_cast<int>(kLanes));
  }
};

// N vectors to one: in each group of N lanes, lane i has the sum of vector i over these lanes.
template <int N>
inline Vec sums_of(const Vec* a) {
  if constexpr (N == 1) {
    return a[0];
  } else {
    const Vec x = sums_of<N / 2>(a), y = sums_of<N / 2>(a + N / 2);
    return shuffle<Groups<N / 2, 0>>(x, y) + shuffle<Groups<N / 2, 1>>(x, y);
  }
}

// The same, where each vector already has its N lanes of groups of `Done` vectors.
template <int N, int Done>
inline Vec sums_of_groups(const Vec* a) {
  if constexpr (N == 1) {
    return a[0];
  } else {
    const Vec x = sums_of_groups<N / 2, Done>(a), y = sums_of_groups<N / 2, Done>(a + N / 2);
    return shuffle<Groups<Done * N / 2, 0>>(x, y) + shuffle<Groups<Done * N / 2, 1>>(x, y);
  }
}

template <int G>
inline Vec rotated_max(Vec v) {
  if constexpr (G == 0) {
    return v;
  } else {
    return rotated_max<G / 2>(max_of(shuffle<Groups<G, 0>>(v, v), shuffle<Groups<G, 1>>(v, v)));
  }
}

inline float max_lane(Vec v) { return rotated_max<kLanes / 2>(v)[0]; }

inline float sum_lanes(const float* at) {
  float sum = 0;
  for (int64_t i = 0; i < kLanes; ++i) sum += at[i];
  return sum;
}

inline void transpose(Vec* v) {  // kLanes vectors
  Vec other[kLanes];
#pragma GCC unroll 4
  for (int64_t step = 1; step < kLanes; step *= 2) {
#pragma GCC unroll 8
    for (int64_t i = 0; i < kLanes / 2; ++i) {
      other[2 * i] = shuffle<Zip<0>>(v[i], v[i + kLanes / 2]);
      other[2 * i + 1] = shuffle<Zip<1>>(v[i], v[i + kLanes / 2]);
    }
#pragma GCC unroll 16
    for (int64_t i = 0; i < kLanes; ++i) v[i] = other[i];
  }
}

// ── functions ───────────────────────────────────────────────────────────────────────────────────────

// 2^x to 2e-7 for x <= 0; 0 below 2^-126. NaN stays.
inline Vec exp2_of(Vec x) {
  constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const Vec in = x < -126.0f ? all(-126.0f) : x;
  const Vec shifted = in + kMagic;
  const Vec f = in - (shifted - kMagic);
  Vec p = all(0.00132764718f);
  p = p * f + 0.00967554133f;
  p = p * f + 0.0555071327f;
  p = p * f + 0.240221197f;
  p = p * f + 0.693146967f;
  p = p * f + 1.00000007f;
  const Word power = (bits_of<Word>(shifted) - (bits_of<uint32_t>(kMagic) - 127u)) << 23;
  return x < -126.0f ? Vec{} : p * bits_of<Vec>(power);
}

inline Vec tanh_of(Vec x) {
  const Vec size = bits_of<Vec>(bits_of<Word>(x) & 0x7fffffffu);
  const Vec square = x * x;
  Vec q = all(-0.00609634631f);
  q = q * square + 0.0209968323f;
  q = q * square - 0.0538507988f;
  q = q * square + 0.133327684f;
  q = q * square - 0.333333289f;
  const Vec small = x + x * square * q;
  const Vec e = exp2_of(size * (-2 * kLog2E));
  const Vec large = (1.0f - e) / (1.0f + e);
  const Vec is_signed = bits_of<Vec>(bits_of<Word>(large) | (bits_of<Word>(x) & 0x80000000u));
  return size < 0.625f ? small : is_signed;
}

// ── memory ──────────────────────────────────────────────────────────────────────────────────────────

template <typename T>
struct Sizes {
  int64_t k, v;  // dimensions, padded to whole units
  bool is_direct_k, is_direct_v;

  explicit Sizes(const Attention& call)
      : k(round_up(call.k_dim, Unit<T>::kSize)),
        v(round_up(call.v_dim, Unit<T>::kSize)),
        is_direct_k(k == call.k_dim),
        is_direct_v(v == call.v_dim) {}
};

// [rows] maxima, [rows, lanes] sums, [rows, v] weighted values
struct State {
  float *top, *sum, *value;

  State(float* at, int64_t rows)
      : top(at), sum(at + round_up(rows, kAlign)), value(sum + round_up(rows * kLanes, kAlign)) {}
  static int64_t floats(int64_t rows, int64_t v) {
    return round_up(rows, kAlign) + round_up(rows * kLanes, kAlign) + round_up(rows * v, kAlign);
  }
};

template <typename T>
struct Scratch {
  float* query;   // [rows, k]
  T* raw_query;   // [rows, k] as they are given, padded
  float* logits;  // [kRows, kKeys]
  float* keys;    // [kKeys / kPanel, k, kPanel]: panels of keys, transposed
  float* values;  // [kKeys, v]
  T* stage_k;     // [kKeys, k]
  T* stage_v;     // [kKeys, v]
  T* zeros;       // a token without keys and values, of all KV heads of the tile
  float* row;     // [v]
  int64_t floats;

  Scratch(float* at, const Attention& call, const Sizes<T>& sizes, int64_t num_queries, int64_t kv_heads) {
    floats = 0;
    const auto take = [&](int64_t n) {
      float* const taken = at == nullptr ? nullptr : at + floats;
      floats += round_up(n, kAlign);
      return taken;
    };
    const int64_t rows = num_queries * call.group_heads();
    const bool is_packed = rows > kDotTile;
    query = take(kv_heads * rows * sizes.k);
    raw_query = reinterpret_cast<T*>(take(kv_heads * rows * sizes.k));
    logits = take(kRows * kKeys);
    keys = take(is_packed ? kKeys * sizes.k : 0);
    values = take(is_packed ? kKeys * sizes.v : 0);
    stage_k = reinterpret_cast<T*>(take(sizes.is_direct_k ? 0 : kKeys * sizes.k));
    stage_v = reinterpret_cast<T*>(take(sizes.is_direct_v ? 0 : kKeys * sizes.v));
    zeros = reinterpret_cast<T*>(take(kv_heads * most(sizes.k, sizes.v)));
    row = take(sizes.v);
  }
};

// A block of keys: where each token lies, from the tile's first KV head on. Tokens that are not there are zeros, and
// are marked.
template <typename T>
struct Block {
  const T* k[kKeys];
  const T* v[kKeys];
  int32_t is_absent[kKeys];
  int64_t begin, n;
  bool has_absent;
};

template <typename T>
void find_rows(const Attention& call, const AttentionTile& tile, const T* zeros, int64_t begin, Block<T>& block) {
  const int32_t* table = call.page_table + tile.row * call.table_width;
  const int64_t k_stride = call.kv_heads * call.k_dim;
  const bool is_latent = call.values == nullptr;
  const int64_t v_stride = is_latent ? k_stride : call.kv_heads * call.v_dim;
  const T* k_head = static_cast<const T*>(call.keys) + tile.kv_head * call.k_dim;
  const T* v_head = is_latent ? k_head : static_cast<const T*>(call.values) + tile.kv_head * call.v_dim;
  block.begin = begin;
  block.n = most(0, least(kKeys, tile.end - begin));
  block.has_absent = false;
  for (int64_t i = 0; i < block.n;) {
    const int64_t position = begin + i, column = position / call.page_tokens;
    const int64_t offset = position - column * call.page_tokens, id = table[column];
    const int64_t end = least(block.n, i + call.page_tokens - offset);
    if (id > 0 && id < call.num_pages) {
      const int64_t slot = id * call.page_tokens + offset - i;
      for (; i < end; ++i) {
        block.k[i] = k_head + (slot + i) * k_stride;
        block.v[i] = v_head + (slot + i) * v_stride;
        block.is_absent[i] = 0;
      }
    } else {
      block.has_absent = true;
      for (; i < end; ++i) {
        block.k[i] = block.v[i] = zeros;
        block.is_absent[i] = -1;
      }
    }
  }
  for (int64_t i = block.n; i < kKeys; ++i) {  // the tile's end masks them
    block.k[i] = block.v[i] = zeros;
    block.is_absent[i] = -1;
  }
}

// Where one KV head's keys or values are: in the pool, or in `stage` if their rows are not whole units.
template <typename T>
void select_head(const T* const* tokens, int64_t n, int64_t head, int64_t dim, int64_t padded, T* stage,
                 const T** rows) {
  for (int64_t i = 0; i < kKeys; ++i) rows[i] = tokens[i] + head * dim;
  if (dim == padded) return;
  for (int64_t i = 0; i < round_up(n, kPanel); ++i) {
    std::memcpy(stage + i * padded, rows[i], static_cast<size_t>(dim) * sizeof(T));
    rows[i] = stage + i * padded;
  }
}

// Ask for the bytes at `from` of row i of the next block, and once more for those of a row soon to be read, into the
// second-level cache. Reads into the first level are too few at a time to keep memory busy (13 of 20 GB/s on a Zen 4
// core); those into the second are lost when there are too many, so the second time catches them.
template <int64_t Bytes, typename T>
inline void prefetch(const T* const* ahead, const T* const* rows, int64_t i, int64_t from) {
#pragma GCC unroll 8
  for (int64_t b = 0; b < Bytes; b += 64) {
    __builtin_prefetch(reinterpret_cast<const char*>(ahead[i] + from) + b, 0, 2);
    __builtin_prefetch(reinterpret_cast<const char*>(rows[i + kSoon] + from) + b, 0, 2);
  }
}

template <typename T>
void pack_keys(const T* const* rows, int64_t n, int64_t k, float* keys) {
  const int64_t end = round_up(n, kPanel);
  Vec v[Unit<T>::kNum][kLanes];
  for (int64_t i = 0; i < end; i += kLanes) {
    float* panel = keys + i / kPanel * (kPanel * k) + i % kPanel;
    for (int64_t d = 0; d < k; d += Unit<T>::kSize) {
      for (int64_t j = 0; j < kLanes; ++j) {
        Vec both[Unit<T>::kNum];
        Unit<T>::read(rows[i + j] + d, both);
        for (int u = 0; u < Unit<T>::kNum; ++u) v[u][j] = both[u];
      }
      for (int u = 0; u < Unit<T>::kNum; ++u) {
        transpose(v[u]);
        for (int64_t j = 0; j < kLanes; ++j) store(panel + (d + u * kLanes + j) * kPanel, v[u][j]);
      }
    }
  }
}

template <typename T>
void pack_values(const T* const* rows, int64_t n, int64_t v, float* values) {
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t d = 0; d < v; d += Unit<T>::kSize) {
      Vec both[Unit<T>::kNum];
      Unit<T>::read(rows[i] + d, both);
      for (int u = 0; u < Unit<T>::kNum; ++u) store(values + i * v + d + u * kLanes, both[u]);
    }
  }
}

// ── products ────────────────────────────────────────────────────────────────────────────────────────

// logits[m, i] = query[m] · key i, for M rows and panels of packed keys
template <int M>
void multiply_packed(const float* query, int64_t k, const float* keys, int64_t n, float* logits) {
  for (int64_t i = 0; i < n; i += kPanel) {
    Vec sums[M][kVectors] = {};
    const float* at = keys + i * k;
    for (int64_t d = 0; d < k; ++d, at += kPanel) {
      Vec key[kVectors];
#pragma GCC unroll 16
      for (int64_t j = 0; j < kVectors; ++j) key[j] = load(at + j * kLanes);
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m) {
        const Vec q = all(query[m * k + d]);
#pragma GCC unroll 16
        for (int64_t j = 0; j < kVectors; ++j) sums[m][j] += q * key[j];
      }
    }
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 16
      for (int64_t j = 0; j < kVectors; ++j) store(logits + m * kKeys + i + j * kLanes, sums[m][j]);
    }
  }
}

// The same for few rows, with keys where they lie. Keys of the next block, `ahead`, are asked for unless it is null.
template <typename T, int M>
void multiply_rows(const float* query, int64_t k, const T* const* keys, int64_t n, const T* const* ahead,
                   float* logits) {
  constexpr int kGroups = kLanes / kDotKeys;
  for (int64_t i = 0; i < n; i += kLanes) {
    Vec partial[M][kGroups];
#pragma GCC unroll 16
    for (int g = 0; g < kGroups; ++g) {
      const T* const* rows = keys + i + g * kDotKeys;
      Vec sums[M][kDotKeys] = {};
      for (int64_t d = 0; d < k; d += Unit<T>::kSize) {
        Vec key[kDotKeys][Unit<T>::kNum];
#pragma GCC unroll 16
        for (int64_t j = 0; j < kDotKeys; ++j) Unit<T>::read(rows[j] + d, key[j]);
        if (ahead != nullptr) {
#pragma GCC unroll 16
          for (int64_t j = 0; j < kDotKeys; ++j) prefetch<sizeof(Vec)>(ahead, keys, i + g * kDotKeys + j, d);
        }
#pragma GCC unroll 16
        for (int u = 0; u < Unit<T>::kNum; ++u) {
#pragma GCC unroll 16
          for (int m = 0; m < M; ++m) {
            const Vec q = load(query + m * k + d + u * kLanes);
#pragma GCC unroll 16
            for (int64_t j = 0; j < kDotKeys; ++j) sums[m][j] += q * key[j][u];
          }
        }
      }
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m) partial[m][g] = sums_of<kDotKeys>(sums[m]);
    }
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) store(logits + m * kKeys + i, sums_of_groups<kGroups, kDotKeys>(partial[m]));
  }
}

// value[m, :] = value[m, :] * decay[m] + sum over i of weights[m, i] * values of key i, for M rows and N vectors
template <typename T, int M, int N>
inline void accumulate_some(const T* const* rows, int64_t d, int64_t n, const T* const* ahead, const float* weights,
                            const float* decay, float* value, int64_t v) {
  Vec sums[M][N];
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 16
    for (int j = 0; j < N; ++j) sums[m][j] = load(value + m * v + d + j * kLanes) * decay[m];
  }
  for (int64_t i = 0; i < n; ++i) {
    Vec x[N];
#pragma GCC unroll 16
    for (int j = 0; j < N; j += Unit<T>::kNum) Unit<T>::read(rows[i] + d + j * kLanes, x + j);
    if (ahead != nullptr) prefetch<N * kLanes * sizeof(T)>(ahead, rows, i, d);
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      const Vec weight = all(weights[m * kKeys + i]);
#pragma GCC unroll 16
      for (int j = 0; j < N; ++j) sums[m][j] += weight * x[j];
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 16
    for (int j = 0; j < N; ++j) store(value + m * v + d + j * kLanes, sums[m][j]);
  }
}

template <typename T, int M>
void accumulate(const T* const* rows, int64_t n, const T* const* ahead, const float* weights, const float* decay,
                float* value, int64_t v) {
  constexpr int kNum = Unit<T>::kNum;
  int64_t d = 0;
  for (; d + kPanel <= v; d += kPanel) accumulate_some<T, M, kVectors>(rows, d, n, ahead, weights, decay, value, v);
  for (; d < v; d += kNum * kLanes) accumulate_some<T, M, kNum>(rows, d, n, ahead, weights, decay, value, v);
}

#ifdef PAGODA_BF16_DOT

inline Vec add_pairs(Vec sum, Word a, Word b) {
  return bits_of<Vec>(_mm512_dpbf16_ps(bits_of<__m512>(sum), bits_of<__m512bh>(a), bits_of<__m512bh>(b)));
}

// multiply_rows for pairs of bfloat16, with queries as they are given
template <int M>
void multiply_pairs(const Bf16* query, int64_t k, const Bf16* const* keys, int64_t n, const Bf16* const* ahead,
                    float* logits) {
  constexpr int kGroups = kLanes / kDotKeys;
  for (int64_t i = 0; i < n; i += kLanes) {
    Vec partial[M][kGroups];
#pragma GCC unroll 16
    for (int g = 0; g < kGroups; ++g) {
      const Bf16* const* rows = keys + i + g * kDotKeys;
      Vec sums[M][kDotKeys] = {};
      for (int64_t d = 0; d < k; d += 2 * kLanes) {
        Word key[kDotKeys];
#pragma GCC unroll 16
        for (int64_t j = 0; j < kDotKeys; ++j) key[j] = load<Word>(rows[j] + d);
        if (ahead != nullptr) {
#pragma GCC unroll 16
          for (int64_t j = 0; j < kDotKeys; ++j) prefetch<sizeof(Vec)>(ahead, keys, i + g * kDotKeys + j, d);
        }
#pragma GCC unroll 16
        for (int m = 0; m < M; ++m) {
          const Word q = load<Word>(query + m * k + d);
#pragma GCC unroll 16
          for (int64_t j = 0; j < kDotKeys; ++j) sums[m][j] = add_pairs(sums[m][j], q, key[j]);
        }
      }
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m) partial[m][g] = sums_of<kDotKeys>(sums[m]);
    }
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) store(logits + m * kKeys + i, sums_of_groups<kGroups, kDotKeys>(partial[m]));
  }
}

// accumulate for pairs of keys; weights are rounded to bfloat16
template <int M, int N>
inline void accumulate_some_pairs(const Bf16* const* rows, int64_t d, int64_t n, const Bf16* const* ahead,
                                  const uint32_t* weights, const float* decay, float* value, int64_t v) {
  Vec sums[M][N];
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 16
    for (int j = 0; j < N; ++j) sums[m][j] = load(value + m * v + d + j * kLanes) * decay[m];
  }
  for (int64_t i = 0; i < n; i += 2) {
    Word pairs[N];
#pragma GCC unroll 16
    for (int j = 0; j < N; j += 2) {
      const Word a = load<Word>(rows[i] + d + j * kLanes), b = load<Word>(rows[i + 1] + d + j * kLanes);
      pairs[j] = (a & 0xffffu) | (b << 16);
      pairs[j + 1] = (a >> 16) | (b & 0xffff0000u);
    }
    if (ahead != nullptr) {
      prefetch<N * kLanes * sizeof(Bf16)>(ahead, rows, i, d);
      prefetch<N * kLanes * sizeof(Bf16)>(ahead, rows, i + 1, d);
    }
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      const Word weight = Word{} + weights[(m * kKeys + i) / 2];
#pragma GCC unroll 16
      for (int j = 0; j < N; ++j) sums[m][j] = add_pairs(sums[m][j], weight, pairs[j]);
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 16
    for (int j = 0; j < N; ++j) store(value + m * v + d + j * kLanes, sums[m][j]);
  }
}

template <int M>
void accumulate_pairs(const Bf16* const* rows, int64_t n, const Bf16* const* ahead, const float* weights,
                      const float* decay, float* value, int64_t v) {
  uint32_t pairs[M * kKeys / 2];
  for (int64_t i = 0; i < round_up(n, kLanes); i += kLanes) {
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      const __m256bh narrow = _mm512_cvtneps_pbh(bits_of<__m512>(load(weights + m * kKeys + i)));
      std::memcpy(pairs + (m * kKeys + i) / 2, &narrow, sizeof narrow);
    }
  }
  int64_t d = 0;
  for (; d + kPanel <= v; d += kPanel) {
    accumulate_some_pairs<M, kVectors>(rows, d, n, ahead, pairs, decay, value, v);
  }
  for (; d < v; d += 2 * kLanes) accumulate_some_pairs<M, 2>(rows, d, n, ahead, pairs, decay, value, v);
}

#else

template <int M>
void multiply_pairs(const Bf16* query, int64_t k, const Bf16* const* keys, int64_t n, const Bf16* const* ahead,
                    float* logits);
template <int M>
void accumulate_pairs(const Bf16* const* rows, int64_t n, const Bf16* const* ahead, const float* weights,
                      const float* decay, float* value, int64_t v);

#endif

// ── tiles ───────────────────────────────────────────────────────────────────────────────────────────

template <typename T>
struct Pass {
#ifdef PAGODA_BF16_DOT
  static constexpr bool kHasPairs = sizeof(T) == sizeof(Bf16);
#else
  static constexpr bool kHasPairs = false;
#endif
  const Attention& call;
  const AttentionTile& tile;
  Sizes<T> sizes;
  int64_t group;  // query heads per KV head
  int64_t rows;   // (query, head) pairs per KV head, the heads of a query together
  bool is_packed;
  Scratch<T> scratch;
  State state;                   // KV head after KV head
  const T* keys[kKeys + kSoon];  // and the first that are read after them
  const T* values[kKeys + kSoon];
  const float* packed[kKeys];
  const T* ahead_k[kKeys];
  const T* ahead_v[kKeys];

  Pass(const Attention& call, const AttentionTile& tile, float* memory, float* state_memory)
      : call(call),
        tile(tile),
        sizes(call),
        group(call.group_heads()),
        rows(tile.num_queries * group),
        is_packed(rows > kDotTile),
        scratch(memory, call, sizes, tile.num_queries, tile.num_kv_heads),
        state(state_memory, rows * tile.num_kv_heads) {}

  void load_queries() {
    for (int64_t r = 0; r < rows * tile.num_kv_heads; ++r) {
      const int64_t head = (tile.kv_head + r / rows) * group + r % group;
      T* raw = scratch.raw_query + r * sizes.k;
      std::memset(raw, 0, static_cast<size_t>(sizes.k) * sizeof(T));
      std::memcpy(raw,
                  static_cast<const T*>(call.queries) + (tile.first + r % rows / group) * call.query_token_stride +
                      head * call.query_head_stride,
                  static_cast<size_t>(call.k_dim) * sizeof(T));
      for (int64_t d = 0; d < sizes.k; d += Unit<T>::kSize) {
        Vec both[Unit<T>::kNum];
        Unit<T>::read(raw + d, both);
        for (int u = 0; u < Unit<T>::kNum; ++u) store(scratch.query + r * sizes.k + d + u * kLanes, both[u]);
      }
    }
  }

  // Turn a query's products with n keys into logits, in units of log 2. Return how far its maximum falls behind.
  float weigh(int64_t query, float& top, const Block<T>& block, int64_t n, float* logits) {
    const int64_t at = tile.position + query;
    // Keys of the block that the query reads: [from, to]
    const int64_t to = least(at, tile.end - 1) - block.begin;
    const int64_t from = call.window > 0 ? at - call.window + 1 - block.begin : 0;
    const bool is_masked = block.has_absent || from > 0 || to < n - 1;
    const float scale = call.softcap > 0 ? call.scale / call.softcap : call.scale * kLog2E;
    Vec best = all(kLow);
    for (int64_t i = 0; i < n; i += kLanes) {
      Vec x = load(logits + i) * scale;
      if (call.softcap > 0) x = tanh_of(x) * (call.softcap * kLog2E);
      if (is_masked) {
        Int index;
        for (int j = 0; j < kLanes; ++j) index[j] = static_cast<int32_t>(i) + j;
        const Int first = Int{} + static_cast<int32_t>(most(from, 0));
        const Int last = Int{} + static_cast<int32_t>(to);
        const Int is_out = (index < first) | (index > last) | load<Int>(block.is_absent + i);
        x = is_out != 0 ? all(-__builtin_inff()) : x;
      }
      store(logits + i, x);
      best = max_of(x, best);
    }
    const float before = top, now = max_lane(best);
    top = now > before ? now : before;
    return before - top;
  }

  void exponentiate(int64_t n, float top, float decay, float* sums, float* logits) {
    Vec sum = load(sums) * decay;
    for (int64_t i = 0; i < n; i += kLanes) {
      const Vec weight = exp2_of(load(logits + i) - top);
      store(logits + i, weight);
      sum += weight;
    }
    store(sums, sum);
  }

  // Rows [r, r + M) of a KV head over a block
  template <int M>
  void step(int64_t head, int64_t r, const Block<T>& block) {
    const int64_t first = tile.position + r / group, last = tile.position + (r + M - 1) / group;
    const int64_t n = least(block.n, last - block.begin + 1);  // keys that the last row reads
    if (n <= 0 || (call.window > 0 && block.begin + block.n <= first - call.window + 1)) return;
    const int64_t padded = round_up(n, is_packed ? kPanel : kLanes), at = head * rows + r;
    float* logits = scratch.logits;
    multiply<M>(at, padded, r == 0, logits);
    alignas(64) float decay[kAlign] = {};
    for (int m = 0; m < M; ++m) {
      decay[m] = weigh((r + m) / group, state.top[at + m], block, padded, logits + m * kKeys);
    }
    for (int64_t m = 0; m < M; m += kLanes) store(decay + m, exp2_of(load(decay + m)));
    for (int m = 0; m < M; ++m) {
      exponentiate(padded, state.top[at + m], decay[m], state.sum + (at + m) * kLanes, logits + m * kKeys);
    }
    add_values<M>(state.value + at * sizes.v, n, r == 0, logits, decay);
  }

  template <int M>
  void multiply(int64_t at, int64_t n, bool is_first, float* logits) {
    const T* const* ahead = is_first ? ahead_k : nullptr;
    if (is_packed) {
      multiply_packed<M>(scratch.query + at * sizes.k, sizes.k, scratch.keys, n, logits);
    } else if constexpr (kHasPairs) {
      multiply_pairs<M>(scratch.raw_query + at * sizes.k, sizes.k, keys, n, ahead, logits);
    } else {
      multiply_rows<T, M>(scratch.query + at * sizes.k, sizes.k, keys, n, ahead, logits);
    }
  }

  template <int M>
  void add_values(float* value, int64_t n, bool is_first, const float* weights, const float* decay) {
    const T* const* ahead = is_first && call.values != nullptr ? ahead_v : nullptr;
    if (is_packed) {
      accumulate<float, M>(packed, n, nullptr, weights, decay, value, sizes.v);
    } else if constexpr (kHasPairs) {
      accumulate_pairs<M>(values, n, ahead, weights, decay, value, sizes.v);
    } else {
      accumulate<T, M>(values, n, ahead, weights, decay, value, sizes.v);
    }
  }

  template <int... I>
  void step_of(int64_t m, int64_t head, int64_t r, const Block<T>& block, std::integer_sequence<int, I...>) {
    (void)((m == I + 1 ? (step<I + 1>(head, r, block), true) : false) || ...);
  }

  // What to ask for while a KV head's keys are computed: its share of the next block, in the order of memory.
  void look_ahead(const Block<T>& block, const Block<T>& next, int64_t head) {
    const int64_t heads = tile.num_kv_heads;
    const bool is_last = head + 1 == heads;
    for (int64_t i = 0; i < kSoon; ++i) {
      keys[kKeys + i] = is_last ? next.k[i] : block.k[i] + (head + 1) * call.k_dim;
      values[kKeys + i] = is_last ? next.v[i] : block.v[i] + (head + 1) * call.v_dim;
    }
    int64_t token = head * kKeys / heads, part = head * kKeys % heads;
    for (int64_t i = 0; i < kKeys; ++i) {
      ahead_k[i] = next.k[token] + part * call.k_dim;
      ahead_v[i] = next.v[token] + part * call.v_dim;
      if (++part == heads) {
        part = 0;
        ++token;
      }
    }
  }

  void clear() {
    const int64_t all_rows = rows * tile.num_kv_heads, wide = most(sizes.k, sizes.v);
    for (int64_t r = 0; r < all_rows; ++r) state.top[r] = kLow;
    std::memset(state.sum, 0, static_cast<size_t>(all_rows * kLanes) * sizeof(float));
    std::memset(state.value, 0, static_cast<size_t>(all_rows * sizes.v) * sizeof(float));
    std::memset(scratch.zeros, 0, static_cast<size_t>(tile.num_kv_heads * wide) * sizeof(T));
    if (!sizes.is_direct_k) std::memset(scratch.stage_k, 0, static_cast<size_t>(kKeys * sizes.k) * sizeof(T));
    if (!sizes.is_direct_v) std::memset(scratch.stage_v, 0, static_cast<size_t>(kKeys * sizes.v) * sizeof(T));
    for (int64_t i = 0; is_packed && i < kKeys; ++i) packed[i] = scratch.values + i * sizes.v;
  }

  void compute() {
    Block<T> blocks[2];
    clear();
    find_rows(call, tile, scratch.zeros, tile.begin, blocks[0]);
    load_queries();
    const int64_t steps = (rows + kRows - 1) / kRows;
    for (int64_t i = 0; blocks[i].n > 0; i ^= 1) {
      const Block<T>& block = blocks[i];
      Block<T>& next = blocks[i ^ 1];
      find_rows(call, tile, scratch.zeros, block.begin + kKeys, next);
      for (int64_t head = 0; head < tile.num_kv_heads; ++head) {
        select_head(block.k, block.n, head, call.k_dim, sizes.k, scratch.stage_k, keys);
        select_head(block.v, block.n, head, call.v_dim, sizes.v, scratch.stage_v, values);
        look_ahead(block, next, head);
        if (is_packed) {
          pack_keys(keys, block.n, sizes.k, scratch.keys);
          pack_values(values, block.n, sizes.v, scratch.values);
        }
        for (int64_t j = 0; j < steps; ++j) {
          const int64_t r = rows * j / steps, m = rows * (j + 1) / steps - r;
          step_of(m, head, r, block, std::make_integer_sequence<int, kRows>());
        }
      }
    }
  }
};

template <typename T>
void finish_tile(const Attention& call, const AttentionTile& tile, float* memory, const float* states,
                 int64_t num_parts) {
  const Sizes<T> sizes(call);
  const int64_t group = call.group_heads(), rows = tile.num_queries * group, all_rows = rows * tile.num_kv_heads;
  const int64_t floats = State::floats(all_rows, sizes.v);
  Scratch<T> scratch(memory, call, sizes, tile.num_queries, tile.num_kv_heads);
  const auto part = [&](int64_t p) { return State(const_cast<float*>(states) + p * floats, all_rows); };
  const auto power = [](float x) { return exp2_of(all(x))[0]; };
  for (int64_t r = 0; r < all_rows; ++r) {
    const int64_t head = (tile.kv_head + r / rows) * group + r % group;
    const float sink = call.sinks == nullptr ? kLow : call.sinks[head] * kLog2E;
    float top = sink > kLow ? sink : kLow;
    for (int64_t p = 0; p < num_parts; ++p) top = part(p).top[r] > top ? part(p).top[r] : top;
    float total = call.sinks == nullptr ? 0 : power(sink - top);
    float* row = scratch.row;
    for (int64_t d = 0; d < sizes.v; d += kLanes) store(row + d, Vec{});
    for (int64_t p = 0; p < num_parts; ++p) {
      const State state = part(p);
      const float weight = power(state.top[r] - top);
      total += weight * sum_lanes(state.sum + r * kLanes);
      for (int64_t d = 0; d < sizes.v; d += kLanes) {
        store(row + d, load(row + d) + load(state.value + r * sizes.v + d) * weight);
      }
    }
    const float factor = total == 0 ? 0 : call.value_scale / total;
    T* to = static_cast<T*>(call.out) + (tile.first + r % rows / group) * call.out_token_stride +
            head * call.out_head_stride;
    T* narrow = reinterpret_cast<T*>(row);  // each unit is read before it is written
    for (int64_t d = 0; d < sizes.v; d += Unit<T>::kSize) {
      Vec both[Unit<T>::kNum];
      for (int u = 0; u < Unit<T>::kNum; ++u) both[u] = load(row + d + u * kLanes) * factor;
      Unit<T>::write(narrow + d, both);
    }
    std::memcpy(to, narrow, static_cast<size_t>(call.v_dim) * sizeof(T));
  }
}

// ── the table of this level ─────────────────────────────────────────────────────────────────────────

int64_t state_floats(const Attention& call, int64_t num_queries, int64_t kv_heads) {
  return State::floats(num_queries * call.group_heads() * kv_heads,
                       call.is_bfloat16 ? Sizes<Bf16>(call).v : Sizes<float>(call).v);
}

int64_t scratch_floats(const Attention& call, int64_t num_queries, int64_t kv_heads) {
  return call.is_bfloat16 ? Scratch<Bf16>(nullptr, call, Sizes<Bf16>(call), num_queries, kv_heads).floats
                          : Scratch<float>(nullptr, call, Sizes<float>(call), num_queries, kv_heads).floats;
}

void compute(const Attention& call, const AttentionTile& tile, float* scratch, float* state) {
  call.is_bfloat16 ? Pass<Bf16>(call, tile, scratch, state).compute()
                   : Pass<float>(call, tile, scratch, state).compute();
}

void finish(const Attention& call, const AttentionTile& tile, float* scratch, const float* states, int64_t num_parts) {
  call.is_bfloat16 ? finish_tile<Bf16>(call, tile, scratch, states, num_parts)
                   : finish_tile<float>(call, tile, scratch, states, num_parts);
}

}  // namespace
}  // namespace pagoda
