// What the kernels of one instruction set compute, and what they are given. Each set is compiled by itself, from the
// same sources: generic.cc, avx2.cc and avx512.cc include kernels.inc. They include headers before they name their
// instruction set: the linker may take any file's copy of what these define.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define LEVANTER_INFER_X86 1
#if __GNUC__ >= 11 && defined(__linux__)
#define LEVANTER_INFER_AMX 1
#endif
#endif

namespace levanter_infer {

struct BFloat16 {
  uint16_t bits = 0;
};

using Pair = uint32_t;  // two bfloat16, the first in the lower half

struct alignas(64) CacheLine {
  char bytes[64];
};

// Types of weights. All but F32 are multiplied as pairs of bfloat16 where the instruction set has these.
enum Weights { F32, BF16, INT8, NUM_WEIGHTS };

struct LinearArgs {
  const float* x;      // [rows, x_stride]
  int64_t rows, inputs, x_stride;  // inputs: of a panel, an even number
  const Pair* packed;  // replaces x where pairs are multiplied: blocks of rows, as `pack_row` writes them
};

// A panel of weights, and where its sums go.
struct LinearPanel {
  const void* weights;
  const float* scale;     // [outs], factors of the sums; null: none
  int64_t outs;           // outputs that exist
  float* y;               // [rows, y_stride]
  int64_t y_stride;
  const float* residual;  // as y, added to the sums; null: none
  const float* gate;      // [rows, panel]: silu(gate) times the sums, which have no residual then; null: none
  bool is_scratch;        // whether a block of rows behind the last may be written too
  Pair* packed;           // rows of results, as `pack_row` writes them, of y_stride words each, instead of y; null: y
  int64_t first_out;      // of the panel in these rows; outputs that do not exist are zeros in them
};

struct AttentionArgs {
  const float* q;    // [tokens, query_heads, head_dim]
  const void* pool;  // [layers, num_pages, page_size, sides * kv_heads, head_dim]
  const int32_t *page_indices, *seq_lens, *cu_q_lens;
  float* out;  // [tokens, query_heads, value_dim]
  int64_t layer, query_heads, kv_heads, head_dim, num_pages, page_size, max_pages, window;
  int64_t sides, value_dim;      // sides 1: values are the first value_dim numbers of keys, and not stored beside them
  int64_t chunk;                 // positions of an attention chunk; 0: none
  int64_t num_rows;              // rows in use
  float scale, soft_cap;         // scores are logarithms to base 2; soft_cap 0: none
  const float *slopes, *sinks;   // [query_heads]; sinks of -inf: none
  bool sloped;                   // whether any slope is not 0
};

struct PlaceArgs {
  const float* q;      // [tokens, query_heads, head_dim]
  float* out;          // as q
  const float *k, *v;  // [tokens, kv_heads, head_dim]
  const float *cos, *sin;        // [tokens, head_dim / 2]
  const float *q_norm, *k_norm;  // [head_dim]; null: none
  float q_eps, k_eps;
  void* pool;            // [layers, layer_tokens, 2 * kv_heads, head_dim]
  const int32_t* dests;  // [tokens]: page * page_size + page offset
  int64_t layer, query_heads, kv_heads, head_dim, layer_tokens;
};

// Which logits of a row may be drawn, and what they weigh: those from `threshold` up, e^((logit - peak) * inverse), if
// the exponent is at least `floor`.
struct DrawRule {
  float peak, inverse, floor, threshold;
};

// What a row's draw is random by.
struct DrawSeed {
  uint32_t high, low, sample_index, position;
};

constexpr int64_t MANY_ROWS = 48;     // from here on narrow weights, keys and values are widened once for all rows
constexpr int64_t PREFETCHED = 2048;  // how far ahead, in bytes, weights are prefetched
constexpr int64_t PREFETCHED_PAIRS = 8192;  // the same where pairs are multiplied
constexpr int64_t PREPARED_ROWS = 4;
constexpr int64_t PACKED = 4096, PACK_STEP = 32;  // inputs of all rows that one piece of work packs; granularity
constexpr int64_t BEHIND_PACKED = 256;  // words behind packed rows that may be read
constexpr int64_t FEW_RANGES = 4;  // up to here each piece of work computes the norm's factor of its rows
constexpr int64_t PLACED_TOKENS = 8;  // new tokens per piece of work
constexpr int64_t PIECES = 8, MAX_PANELS = 8;  // pieces of work per thread that suffice; most panels per piece
constexpr int64_t LARGE_PIECES = 3;  // pieces per thread where the panels of a piece share parts of many rows in a cache
constexpr int64_t MASK_WORDS = 128;  // the words of a mask are a multiple of it, and so of LANES
constexpr int FAN = 16;              // children of a node of the tree of sums that a token is drawn by
constexpr int64_t MAX_LEVELS = 8;    // of this tree
constexpr int64_t READ_STEP = 512, READ_PIECE = 1 << 20;  // bytes that `read_all` reads at once; per piece of work
constexpr int KEYS = 32;             // keys per turn of the online softmax
constexpr int64_t FEW_QUERIES = 8;  // queries per query block that are worth a piece of work
constexpr int64_t HEAD_PIECES = 4;  // pieces of attention per thread, at least, into which kv heads are divided
constexpr int64_t ROWS_OF_ALL_HEADS = 96;  // larger query blocks are computed for one kv head at a time

struct Block {
  int64_t first, rows;
};

// A mask of the first `count` of 32.
inline uint32_t first_bits(int64_t count) { return count == 32 ? 0xFFFFFFFFu : (1u << count) - 1; }

inline int64_t count_blocks(int64_t num_rows, int64_t most) { return (num_rows + most - 1) / most; }

// Block `index` of rows that are computed together: as few blocks of at most `most` rows as possible, of about one
// size.
inline Block block_at(int64_t num_rows, int64_t index, int64_t most) {
  const int64_t blocks = count_blocks(num_rows, most), size = num_rows / blocks, larger = num_rows % blocks;
  return {index * size + std::min(index, larger), size + (index < larger)};
}

// The block in which `row` is computed.
inline Block block_of_row(int64_t num_rows, int64_t row, int64_t most) {
  const int64_t blocks = count_blocks(num_rows, most), size = num_rows / blocks, larger = num_rows % blocks;
  const int64_t in_larger = larger * (size + 1);
  return block_at(num_rows, row < in_larger ? row / (size + 1) : larger + (row - in_larger) / size, most);
}

// Changes of a row's logits (`LogitChanges` of kernels/backend.py). Ids outside of the vocabulary are none.
struct LogitChange {
  const int32_t* bias_ids;
  const float* bias_values;
  int64_t biases;
  float repetition, frequency, presence;
  const int32_t* tokens;  // the sequence's, of which `known` are read and the first `prompt` are the prompt's
  int64_t prompt, known;
  const int32_t* banned;
  int64_t bans;
  const uint32_t* mask;  // null: none
  int64_t words;
};

// Of the scratch of what samples from a row of `size` logits, which copies the row, its weights, and less than either.
inline int64_t sampling_floats(int64_t size) { return 3 * (size + 64); }

struct Kernels {
  int64_t panel, rows;  // outputs per panel; rows that are computed together, at most
  float (*norm_factor)(const float* x, int64_t size, float eps);
  void (*scaled)(const float* x, const float* weight, float factor, int64_t size, float* to);
  void (*normalize)(const float* x, const float* weight, int64_t size, float eps, float* to);
  void (*gated)(const float* x, const float* gate, int64_t size, float* to);
  int64_t packed_inputs;  // a packed row is a multiple of so many inputs
  void (*pack_row)(const float* x, int64_t inputs, int64_t rows, int64_t row, Pair* to);  // null: rows are not packed
  int64_t (*linear_floats)(const LinearArgs&, int64_t panels);  // of the scratch of `linear` but for F32; null: none
  void (*linear[NUM_WEIGHTS])(const LinearArgs&, const LinearPanel* panels, int64_t count, float* scratch);
  bool packs_results;  // whether `linear` but for F32 writes `LinearPanel.packed`
  int64_t (*queries)(const AttentionArgs&);  // of a query block, at most
  int64_t (*floats_f32)(const AttentionArgs&, int64_t queries, int64_t kv_heads);  // of the scratch of attend_f32
  int64_t (*floats_bf16)(const AttentionArgs&, int64_t queries, int64_t kv_heads);
  void (*attend_f32)(const AttentionArgs&, int64_t row, int64_t first, int64_t count, int64_t head_begin,
                     int64_t head_end, float* scratch);
  void (*attend_bf16)(const AttentionArgs&, int64_t row, int64_t first, int64_t count, int64_t head_begin,
                      int64_t head_end, float* scratch);
  void (*place_f32)(const PlaceArgs&, int64_t token, float* scratch);
  void (*place_bf16)(const PlaceArgs&, int64_t token, float* scratch);
  void (*row_stats)(const float* logits, int64_t size, float* peak, float* total, int32_t* best);
  // `counts` has an entry for each token, and zeros before and after.
  void (*change_row)(const float* logits, int64_t size, const LogitChange& change, int32_t* counts, float* to);
  void (*masked_best)(const float* logits, const uint32_t* mask, int64_t words, int64_t size, float* peak,
                      int32_t* best);
  // The scratch of these three is `sampling_floats(size)` floats.
  void (*row_likeliest)(const float* logits, int64_t size, int64_t count, float* scratch, float* values,
                        int32_t* tokens);
  float (*row_threshold)(const float* logits, int64_t size, const DrawRule& rule, int64_t top_k, float top_p,
                         float* scratch);
  void (*draw_row)(const float* logits, const DrawRule& rule, const DrawSeed& seed, const int64_t* sizes,
                   int64_t levels, float* scratch, int32_t* token, float* logprob);
  void (*add_weighted)(const float* x, float weight, int64_t size, bool first, float* y);
  uint32_t (*read_all)(const char* from, int64_t size);
  int64_t (*multiply_adds)(int64_t times, float factor, float* seen);
};

namespace generic {
extern const Kernels KERNELS;
}
#ifdef LEVANTER_INFER_X86
namespace avx2 {
extern const Kernels KERNELS;
}
namespace avx512 {
extern const Kernels KERNELS;
}
namespace avx512_bf16 {
extern const Kernels KERNELS;
}
#ifdef LEVANTER_INFER_AMX
namespace amx_bf16 {
extern const Kernels KERNELS;
}
#endif
#endif

}  // namespace levanter_infer
