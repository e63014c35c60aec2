// Attention of a step's queries over the pages of a pool, on the CPU. In: addresses and shapes; out: outputs.
//
// A call is cut into tiles: some adjacent queries of one row, with all query heads of one KV head, so that keys and
// values are read once for all of them. Tiles of few queries, whose time is that of reading, have several KV heads, so
// that memory is read in order. The keys of long tiles are cut into parts, whose results are merged by their
// log-sum-exp. Tiles and parts depend on the call alone, and the order of every sum on the tile alone, so results do
// not depend on the number of threads. Kernels exist once (attention_kernels.hpp) and are compiled for several
// instruction sets, of which the best that the machine has is used.
#pragma once

#include <cstdint>

namespace pagoda {

// Strides and dimensions are in elements; all elements are float32, or all are bfloat16.
struct Attention {
  const void* queries;  // [num_tokens, heads, k_dim], the last dimension dense
  int64_t query_token_stride, query_head_stride;
  void* out;  // [num_tokens, heads, v_dim], the last dimension dense
  int64_t out_token_stride, out_head_stride;
  const void* keys;    // [num_pages, page_tokens, kv_heads, k_dim]
  const void* values;  // [num_pages, page_tokens, kv_heads, v_dim]; null: the first v_dim of each key
  int64_t num_tokens, num_pages, page_tokens;
  int64_t heads, kv_heads, k_dim, v_dim;
  const int32_t* starts;      // [num_rows + 1] the first query of each row
  const int32_t* lengths;     // [num_rows] tokens of each row, its queries included
  const int32_t* page_table;  // [num_rows, table_width]
  int64_t num_rows, table_width;
  int64_t window;      // keys that a query reads, its own included; 0: all
  float scale;         // of logits
  float value_scale;   // of outputs
  float softcap;       // 0: none
  const float* sinks;  // [heads] logits that count in the denominator only; null: none
  bool is_bfloat16;

  int64_t group_heads() const { return heads / kv_heads; }
};

// Queries [first, first + num_queries) of a row with the query heads of some KV heads, over keys [begin, end).
struct AttentionTile {
  int64_t row, kv_head, num_kv_heads;
  int64_t first, num_queries;  // tokens of the step
  int64_t position;            // of the first query
  int64_t begin, end;
};

// What one instruction set brings. A state is the result of one part: maxima, sums and weighted values, as floats.
struct AttentionKernels {
  const char* name;
  // Floats of a state, and of the memory that a thread works in. Both are multiples of 16.
  int64_t (*state_floats)(const Attention&, int64_t num_queries, int64_t num_kv_heads);
  int64_t (*scratch_floats)(const Attention&, int64_t num_queries, int64_t num_kv_heads);
  // Compute a part: `state` is written. Memory is aligned to 64 bytes.
  void (*compute)(const Attention&, const AttentionTile&, float* scratch, float* state);
  // Merge the states of a tile's parts, which lie one after the other, and write its outputs.
  void (*finish)(const Attention&, const AttentionTile&, float* scratch, const float* states, int64_t num_parts);
};

// Write the outputs of all tokens. Numbers of the batch that are out of range are not followed: page ids outside the
// pool are not read, tokens that belong to no row get 0. `num_threads`: the most threads to use, this one included.
// `level`: null, or the name of a level of this machine. Errors: BadArgument, std::bad_alloc; nothing is written then.
void attend(const Attention& call, int64_t num_threads, const char* level);

// The levels that this machine can run, from the best one on; ends with null.
const AttentionKernels* const* attention_levels();

}  // namespace pagoda
