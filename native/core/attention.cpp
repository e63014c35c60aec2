#include "core/attention.hpp"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "core/errors.hpp"
#include "core/parallel.hpp"

namespace pagoda {

extern const AttentionKernels kAttentionBaseline;
#ifdef PAGODA_X86
extern const AttentionKernels kAttentionAvx2, kAttentionAvx512, kAttentionAvx512Bf16;
#endif

namespace {

constexpr int64_t kTileRows = 192;          // (query, head) pairs of a tile
constexpr int64_t kBlock = 64;              // parts begin at multiples of it, from the tile's first key
constexpr int64_t kParts = 128;             // aim of parts in a call
constexpr int64_t kSmallPart = 256;         // the fewest keys of a part, for tiles of few queries in a small call
constexpr int64_t kMediumPart = 1'024;      // and in a large one: the first keys of a part are waited for
constexpr int64_t kLargePart = 2'048;       // and for tiles of many, which rarely need to be cut
constexpr int64_t kFewRows = 8;             // (query, head) pairs of a KV head in a tile of few queries
constexpr int64_t kBlockBytes = 256 << 10;  // the most bytes of a block of keys and values of such a tile

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// One part of a tile. `work` is the tile's index, `part` the part's.
struct Part {
  AttentionTile tile;
  int64_t work, part;
};

struct Work {
  AttentionTile tile;
  int64_t num_parts;
  int64_t states;  // where its states begin, in floats; unused if there is one part
};

// Memory that the calls of a thread use one after the other.
class Memory {
 public:
  float* get(int64_t floats) {
    if (floats > size_) {
      void* found = nullptr;
      if (posix_memalign(&found, 64, static_cast<size_t>(floats) * sizeof(float)) != 0) throw std::bad_alloc();
      data_.reset(static_cast<float*>(found));
      size_ = floats;
    }
    return data_.get();
  }

 private:
  struct Free {
    void operator()(float* data) const { std::free(data); }
  };
  std::unique_ptr<float, Free> data_;
  int64_t size_ = 0;
};

struct Plan {
  std::vector<Work> works;
  std::vector<Part> parts;
  int64_t state_floats = 0;
  int64_t thread_floats = 0;
};

void add_tiles(const Attention& call, std::vector<Work>& works) {
  const int64_t most = std::max<int64_t>(1, kTileRows / call.group_heads());
  const int64_t head_bytes = kBlock * (call.k_dim + call.v_dim) * (call.is_bfloat16 ? 2 : 4);
  const int64_t kv_heads = std::max<int64_t>(1, kBlockBytes / head_bytes);
  for (int64_t row = 0; row < call.num_rows; ++row) {
    const int64_t first = call.starts[row], end = call.starts[row + 1];
    if (first < 0 || end > call.num_tokens || first >= end) continue;
    const int64_t length = std::min(std::max<int64_t>(call.lengths[row], 0), call.table_width * call.page_tokens);
    const int64_t position = call.lengths[row] - (end - first);  // of the row's first query
    // From the last queries on: they read most, and short tiles at the end keep all threads busy.
    for (int64_t i = ceil_div(end - first, most); i-- > 0;) {
      const int64_t from = first + i * most, n = std::min(most, end - from), at = position + (from - first);
      const int64_t last = std::min(length, at + n);
      const int64_t begin = call.window > 0 ? std::max<int64_t>(0, at - call.window + 1) : 0;
      const int64_t step = n * call.group_heads() <= kFewRows ? kv_heads : 1;
      for (int64_t head = 0; head < call.kv_heads; head += step) {
        const int64_t num = std::min(step, call.kv_heads - head);
        works.push_back({{row, head, num, from, n, at, begin, std::max(begin, last)}, 1, 0});
      }
    }
  }
}

Plan plan(const Attention& call, const AttentionKernels& kernels) {
  Plan made;
  add_tiles(call, made.works);
  int64_t total = 0;
  for (const Work& work : made.works) total += work.tile.end - work.tile.begin;
  const int64_t fair = ceil_div(ceil_div(total, kParts), kBlock) * kBlock;
  for (size_t i = 0; i < made.works.size(); ++i) {
    Work& work = made.works[i];
    const AttentionTile& tile = work.tile;
    const bool is_small = tile.num_queries * call.group_heads() <= kFewRows;
    const int64_t fewest = is_small ? std::min(std::max(total / 8, kSmallPart), kMediumPart) : kLargePart;
    const int64_t span = tile.end - tile.begin, most = std::max(fair, fewest);
    const int64_t step = ceil_div(ceil_div(span, std::max<int64_t>(1, ceil_div(span, most))), kBlock) * kBlock;
    work.num_parts = span == 0 ? 1 : ceil_div(span, step);
    for (int64_t part = 0; part < work.num_parts; ++part) {
      AttentionTile keys = tile;
      keys.begin = tile.begin + part * step;
      keys.end = std::min(tile.end, keys.begin + step);
      made.parts.push_back({keys, static_cast<int64_t>(i), part});
    }
    if (work.num_parts > 1) {
      work.states = made.state_floats;
      made.state_floats += work.num_parts * kernels.state_floats(call, tile.num_queries, tile.num_kv_heads);
    }
    made.thread_floats =
        std::max(made.thread_floats, kernels.state_floats(call, tile.num_queries, tile.num_kv_heads) +
                                         kernels.scratch_floats(call, tile.num_queries, tile.num_kv_heads));
  }
  return made;
}

struct Run {
  const Attention& call;
  const AttentionKernels& kernels;
  const Plan& plan;
  float *states, *scratch;
  int64_t scratch_floats;
  std::unique_ptr<std::atomic<int64_t>[]> left;  // parts of a tile that are not computed
  std::atomic<int64_t> next_part{0}, next_seat{0};

  void work() {
    float* own = scratch + next_seat.fetch_add(1) * scratch_floats;
    const int64_t n = static_cast<int64_t>(plan.parts.size());
    for (int64_t i; (i = next_part.fetch_add(1)) < n;) {
      const Part& part = plan.parts[static_cast<size_t>(i)];
      const Work& of = plan.works[static_cast<size_t>(part.work)];
      const int64_t floats = kernels.state_floats(call, part.tile.num_queries, part.tile.num_kv_heads);
      const bool is_whole = of.num_parts == 1;
      float* all = is_whole ? own : states + of.states;
      kernels.compute(call, part.tile, own + floats, all + part.part * floats);
      if (is_whole || left[static_cast<size_t>(part.work)].fetch_sub(1) == 1) {
        kernels.finish(call, of.tile, own + floats, all, of.num_parts);
      }
    }
  }
};

// Tokens that belong to no row.
void clear_padding(const Attention& call) {
  const int64_t size = call.is_bfloat16 ? 2 : 4;
  int64_t end = 0;
  const auto clear = [&](int64_t from, int64_t to) {
    for (int64_t t = std::max<int64_t>(0, from); t < std::min(to, call.num_tokens); ++t) {
      for (int64_t h = 0; h < call.heads; ++h) {
        std::memset(static_cast<char*>(call.out) + (t * call.out_token_stride + h * call.out_head_stride) * size, 0,
                    static_cast<size_t>(call.v_dim * size));
      }
    }
  };
  for (int64_t row = 0; row < call.num_rows; ++row) {
    if (call.starts[row] < 0 || call.starts[row + 1] > call.num_tokens || call.starts[row] >= call.starts[row + 1]) {
      continue;
    }
    clear(end, call.starts[row]);
    end = call.starts[row + 1];
  }
  clear(end, call.num_tokens);
}

const AttentionKernels& level_named(const char* name) {
  const AttentionKernels* const* levels = attention_levels();
  if (name == nullptr) return **levels;
  for (; *levels != nullptr; ++levels) {
    if (std::strcmp((*levels)->name, name) == 0) return **levels;
  }
  std::string names;
  for (levels = attention_levels(); *levels != nullptr; ++levels) {
    names += (names.empty() ? "" : ", ") + std::string((*levels)->name);
  }
  throw BadArgument("level: this machine has no " + std::string(name) + ": it has " + names);
}

}  // namespace

const AttentionKernels* const* attention_levels() {
  static const auto found = [] {
    std::vector<const AttentionKernels*> all;
#ifdef PAGODA_X86
    __builtin_cpu_init();
    const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (has_avx512 && __builtin_cpu_supports("avx512bf16")) all.push_back(&kAttentionAvx512Bf16);
    if (has_avx512) all.push_back(&kAttentionAvx512);
    if (has_avx2) all.push_back(&kAttentionAvx2);
#endif
    all.push_back(&kAttentionBaseline);
    all.push_back(nullptr);
    return all;
  }();
  return found.data();
}

void attend(const Attention& call, int64_t num_threads, const char* level) {
  const AttentionKernels& kernels = level_named(level);
  const Plan made = plan(call, kernels);
  const int64_t threads = std::max<int64_t>(1, std::min(num_threads, static_cast<int64_t>(made.parts.size())));
  thread_local Memory memory;
  float* states = memory.get(made.state_floats + threads * made.thread_floats);
  Run run{call, kernels, made, states, states + made.state_floats, made.thread_floats, nullptr};
  run.left = std::make_unique<std::atomic<int64_t>[]>(made.works.size());
  for (size_t i = 0; i < made.works.size(); ++i) run.left[i] = made.works[i].num_parts;
  clear_padding(call);
  if (made.parts.empty()) return;
  run_on_threads(threads, [](void* context) { static_cast<Run*>(context)->work(); }, &run);
}

}  // namespace pagoda
