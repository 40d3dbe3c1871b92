// XLA custom calls for CPUs: matmuls with 16-bit or 32-bit weights, rotary embedding and KV cache write of new tokens,
// paged attention, and sampling from logits.
//
// ../bindings.py says what each computes, and what a panel is; kernels.h what there is for each instruction set.

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kernels.h"
#ifdef LEVANTER_INFER_AMX
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#include "parallel.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = ::xla::ffi;

namespace levanter_infer {

#ifdef LEVANTER_INFER_AMX
// Whether the processor has tiles of bfloat16, and the system lets this process use them, which it has to ask for.
bool may_use_tiles() {
  constexpr unsigned BF16 = 1u << 22, TILES = 1u << 24;            // CPUID leaf 7, EDX
  constexpr unsigned VBMI = 1u << 1;                               // the same, ECX: look-ups of bytes
  constexpr long REQUEST_STATE = 0x1023, TILE_DATA = 18;           // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  unsigned eax, ebx, ecx = 0, edx = 0;
  return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) != 0 && (edx & BF16) != 0 && (edx & TILES) != 0 &&
         (ecx & VBMI) != 0 && syscall(SYS_arch_prctl, REQUEST_STATE, TILE_DATA) == 0;
}

const bool HAS_TILES = may_use_tiles();
#endif

// The widest instruction set that both this build and the processor know.
const char* best_isa() {
#ifdef LEVANTER_INFER_X86
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq")) {
    if (!__builtin_cpu_supports("avx512bf16")) return "avx512";
#ifdef LEVANTER_INFER_AMX
    if (HAS_TILES) return "amx_bf16";
#endif
    return "avx512_bf16";
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return "avx2";
#endif
  return "generic";
}

const Kernels& kernels_for(std::string_view isa) {
#ifdef LEVANTER_INFER_AMX
  if (isa == "amx_bf16" && HAS_TILES) return amx_bf16::KERNELS;
#endif
#ifdef LEVANTER_INFER_X86
  if (isa == "avx512_bf16") return avx512_bf16::KERNELS;
  if (isa == "avx512") return avx512::KERNELS;
  if (isa == "avx2") return avx2::KERNELS;
#endif
  return generic::KERNELS;
}

bool is_bf16(ffi::AnyBuffer buffer) {
  return buffer.element_type() == ffi::DataType::BF16 || buffer.element_type() == ffi::DataType::U16;
}

bool same_shape(ffi::Span<const int64_t> a, ffi::Span<const int64_t> b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end());
}

ffi::Error invalid(std::string message) { return ffi::Error::InvalidArgument(std::move(message)); }

// A norm's weights of one layer as floats; empty if there is no such layer, or they are not `size`.
std::vector<float> norm_of(const ffi::ErrorOr<ffi::AnyBuffer>& weight, int64_t layer, int64_t size) {
  std::vector<float> norm;
  if (!weight.has_value()) return norm;
  const auto shape = weight->dimensions();
  if (shape.size() != 2 || shape[1] != size || layer < 0 || layer >= shape[0]) return norm;
  norm.resize(size);
  if (is_bf16(*weight)) {
    const uint16_t* from = static_cast<const uint16_t*>(weight->untyped_data()) + layer * size;
    for (int64_t i = 0; i < size; ++i) {
      const uint32_t word = static_cast<uint32_t>(from[i]) << 16;
      std::memcpy(&norm[i], &word, sizeof word);
    }
  } else {
    std::copy_n(static_cast<const float*>(weight->untyped_data()) + layer * size, size, norm.data());
  }
  return norm;
}

// Memory for `size` elements, from a cache line on: rows of a tile that cross lines take twice as long to load.
template <class T>
T* reserve_in_lines(int64_t size, std::vector<CacheLine>* lines) {
  const size_t count = count_blocks(size * sizeof(T), sizeof(CacheLine));
  if (lines->size() < count) lines->resize(count);
  return reinterpret_cast<T*>(lines->data());
}

// The type of weights, if matmuls read it.
std::optional<Weights> weights_of(ffi::AnyBuffer buffer) {
  if (is_bf16(buffer)) return BF16;
  if (buffer.element_type() == ffi::DataType::F32) return F32;
  if (buffer.element_type() == ffi::DataType::S8) return INT8;
  return std::nullopt;
}

int64_t bytes_of(Weights weights) { return weights == F32 ? 4 : weights == BF16 ? 2 : 1; }

#include "stacked.inc"
#include "grouped.inc"

// Arguments: q f32[tokens, query_heads, head_dim]; the pool, which the second result aliases; k, v
// f32[tokens, kv_heads, head_dim]; cos, sin f32[tokens, head_dim / 2]; dests i32[tokens]; layer i32[]; then optionally
// the weights [layers, head_dim] of the norms of q and of k, and their layer i32[]. Results: q, and the pool.
ffi::Error place_tokens(ffi::ThreadPool threads, ffi::Buffer<ffi::F32> q, ffi::AnyBuffer pool, ffi::Buffer<ffi::F32> k,
                        ffi::Buffer<ffi::F32> v, ffi::Buffer<ffi::F32> cos, ffi::Buffer<ffi::F32> sin,
                        ffi::Buffer<ffi::S32> dests, ffi::Buffer<ffi::S32> layer, ffi::RemainingArgs norms,
                        ffi::ResultBuffer<ffi::F32> rotated, ffi::Result<ffi::AnyBuffer> stored, float q_eps,
                        float k_eps, std::string_view isa) {
  const auto shape = pool.dimensions(), queries = q.dimensions(), keys = k.dimensions(), angles = cos.dimensions();
  if (shape.size() != 5 || queries.size() != 3 || keys.size() != 3 || angles.size() != 2 ||
      dests.dimensions().size() != 1)
    return invalid("place_tokens: shapes do not fit");
  const int64_t tokens = queries[0], size = queries[2];
  if (keys[0] != tokens || keys[2] != size || 2 * keys[1] != shape[3] || shape[4] != size || angles[0] != tokens ||
      2 * angles[1] != size || dests.dimensions()[0] != tokens || !same_shape(keys, v.dimensions()) ||
      !same_shape(angles, sin.dimensions()))
    return invalid("place_tokens: shapes do not fit");
  const bool bf16 = is_bf16(pool);
  if (!bf16 && pool.element_type() != ffi::DataType::F32)
    return invalid("place_tokens: the pool is neither bf16 nor f32");
  if (pool.untyped_data() != stored->untyped_data())
    return invalid("place_tokens: the second result does not alias the pool");
  const int64_t index = *layer.typed_data();
  if (index < 0 || index >= shape[0]) return invalid("place_tokens: there is no such layer");
  std::vector<float> norm[2];
  if (norms.size() > 0) {
    const auto norm_layer = norms.get<ffi::Buffer<ffi::S32>>(2);
    if (norms.size() != 3 || !norm_layer.has_value()) return invalid("place_tokens: the norms do not fit");
    for (size_t i = 0; i < 2; ++i) {
      norm[i] = norm_of(norms.get<ffi::AnyBuffer>(i), *norm_layer->typed_data(), size);
      if (norm[i].empty()) return invalid("place_tokens: the norms do not fit, or have no such layer");
    }
  }
  const PlaceArgs args{
      q.typed_data(), rotated->typed_data(), k.typed_data(), v.typed_data(), cos.typed_data(), sin.typed_data(),
      norm[0].empty() ? nullptr : norm[0].data(), norm[1].empty() ? nullptr : norm[1].data(), q_eps, k_eps,
      stored->untyped_data(), dests.typed_data(), index, queries[1], keys[1], size, shape[1] * shape[2],
  };
  const Kernels& kernels = kernels_for(isa);
  Workers::shared().run(threads.num_threads(), (tokens + PLACED_TOKENS - 1) / PLACED_TOKENS, [&](int64_t piece) {
    static thread_local std::vector<float> scratch;
    if (static_cast<int64_t>(scratch.size()) < size) scratch.resize(size);
    const int64_t last = std::min(tokens, (piece + 1) * PLACED_TOKENS);
    for (int64_t token = piece * PLACED_TOKENS; token < last; ++token)
      (bf16 ? kernels.place_bf16 : kernels.place_f32)(args, token, scratch.data());
  });
  return ffi::Error::Success();
}

// Queries of a query block: as many as possible, up to `most`, because each packs keys and values, while all threads have
// two pieces of work or more, and about as many each. `used`: the queries of all rows.
int64_t queries_of_block(int64_t kv_heads, int64_t used, int64_t threads, int64_t most) {
  threads = std::max<int64_t>(threads, 1);
  for (int64_t pieces = 2 * threads;; pieces += threads) {
    const int64_t blocks = pieces / kv_heads;
    if (blocks == 0) continue;
    const int64_t queries = count_blocks(used, blocks);
    if (queries <= most) return std::min(most, std::max(queries, FEW_QUERIES));
  }
}

// `ragged_paged_attention`; q and the result in f32. A pool with one head per token is one of latents.
ffi::Error attention(ffi::ThreadPool threads, ffi::Buffer<ffi::F32> q, ffi::AnyBuffer pool,
                     ffi::Buffer<ffi::S32> layer, ffi::Buffer<ffi::S32> page_indices, ffi::Buffer<ffi::S32> seq_lens,
                     ffi::Buffer<ffi::S32> cu_q_lens, ffi::Buffer<ffi::S32> num_seqs, ffi::Buffer<ffi::S32> window,
                     ffi::Buffer<ffi::F32> slopes, ffi::Buffer<ffi::F32> sinks, ffi::ResultBuffer<ffi::F32> out,
                     float scale, float soft_cap, int64_t attention_chunk, std::string_view isa) {
  const auto shape = pool.dimensions();
  if (q.dimensions().size() != 3 || shape.size() != 5 || page_indices.dimensions().size() != 2)
    return invalid("attention: shapes do not fit");
  const bool bf16 = is_bf16(pool);
  if (!bf16 && pool.element_type() != ffi::DataType::F32) return invalid("attention: the pool is neither bf16 nor f32");
  AttentionArgs args;
  args.q = q.typed_data();
  args.pool = pool.untyped_data();
  args.page_indices = page_indices.typed_data();
  args.seq_lens = seq_lens.typed_data();
  args.cu_q_lens = cu_q_lens.typed_data();
  args.out = out->typed_data();
  args.layer = *layer.typed_data();
  args.query_heads = q.dimensions()[1];
  args.head_dim = q.dimensions()[2];
  args.num_pages = shape[1];
  args.page_size = shape[2];
  args.sides = shape[3] == 1 ? 1 : 2;
  args.kv_heads = shape[3] / args.sides;
  if (args.kv_heads == 0 || args.query_heads == 0 || args.query_heads % args.kv_heads != 0)
    return invalid("attention: query heads are no multiple of kv heads");
  args.value_dim = out->dimensions()[2];
  if (args.value_dim > args.head_dim || (args.sides == 2 && args.value_dim != args.head_dim))
    return invalid("attention: the result has other numbers of a head than values have");
  args.max_pages = page_indices.dimensions()[1];
  args.window = *window.typed_data();
  args.scale = scale;
  args.soft_cap = soft_cap;
  args.chunk = attention_chunk;
  args.slopes = slopes.typed_data();
  args.sloped = std::any_of(args.slopes, args.slopes + args.query_heads, [](float slope) { return slope != 0; });
  args.sinks = sinks.typed_data();
  if (args.layer < 0 || args.layer >= shape[0]) return invalid("attention: there is no such layer");
  if (args.window < 0) return invalid("attention: the window is negative");

  const int64_t tokens = q.dimensions()[0];
  const int64_t rows = std::clamp<int64_t>(*num_seqs.typed_data(), 0, page_indices.dimensions()[0]);
  args.num_rows = rows;
  struct Piece {
    int64_t row, first, count, head_begin, head_end;
  };
  const Kernels& kernels = kernels_for(isa);
  for (int64_t row = 0; row < rows; ++row) {
    if ((row == 0 && args.cu_q_lens[0] != 0) || args.cu_q_lens[row] > args.cu_q_lens[row + 1])
      return invalid("attention: cu_q_lens does not ascend from 0");
    if (args.seq_lens[row] > args.max_pages * args.page_size) return invalid("attention: a row is out of range");
    if (args.seq_lens[row] < args.cu_q_lens[row + 1] - args.cu_q_lens[row])
      return invalid("attention: a row has more queries than tokens");
  }
  const int64_t used = rows == 0 ? 0 : std::min<int64_t>(args.cu_q_lens[rows], tokens);
  const int64_t queries = queries_of_block(args.kv_heads, used, threads.num_threads(), kernels.queries(args));
  const auto queries_of_row = [&](int64_t row) {
    return std::max<int64_t>(0, std::min<int64_t>(args.cu_q_lens[row + 1], tokens) - args.cu_q_lens[row]);
  };
  // A piece of work is all kv heads of a query block, because a token's keys and values of all heads stand together, or
  // as many as are at most a quarter of a thread's work, or one of a block with so many rows that the cache holds those
  // of one head.
  const auto work_of_head = [&](int64_t row) {  // of one query: the keys that it sees, about
    return std::max<int64_t>(1, std::min<int64_t>(args.seq_lens[row], args.window));
  };
  int64_t work = 0;
  for (int64_t row = 0; row < rows; ++row) work += queries_of_row(row) * work_of_head(row) * args.kv_heads;
  const int64_t most_work = work / (HEAD_PIECES * std::max<int64_t>(threads.num_threads(), 1));
  std::vector<Piece> pieces;
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t i = 0, count = queries_of_row(row); i < count_blocks(count, queries); ++i) {
      const Block block = block_at(count, i, queries);
      const bool many_rows = block.rows * (args.query_heads / args.kv_heads) > ROWS_OF_ALL_HEADS;
      const int64_t fitting = many_rows ? 1 : most_work / (block.rows * work_of_head(row));
      const int64_t heads = std::clamp<int64_t>(fitting, 1, args.kv_heads);
      for (int64_t part = 0; part < count_blocks(args.kv_heads, heads); ++part) {
        const Block of = block_at(args.kv_heads, part, heads);
        pieces.push_back({row, args.cu_q_lens[row] + block.first, block.rows, of.first, of.first + of.rows});
      }
    }
  const int64_t token_size = args.query_heads * args.value_dim;
  std::fill(args.out + used * token_size, args.out + tokens * token_size, 0.0f);
  Workers::shared().run(threads.num_threads(), pieces.size(), [&](int64_t i) {
    static thread_local std::vector<CacheLine> lines;
    const Piece& piece = pieces[i];
    const int64_t floats =
        (bf16 ? kernels.floats_bf16 : kernels.floats_f32)(args, piece.count, piece.head_end - piece.head_begin);
    float* scratch = reserve_in_lines<float>(floats, &lines);
    (bf16 ? kernels.attend_bf16 : kernels.attend_f32)(args, piece.row, piece.first, piece.count, piece.head_begin,
                                                      piece.head_end, scratch);
  });
  return ffi::Error::Success();
}

// Arguments: logits f32[rows, vocab]; used i32[], rows in use. Results, [rows]: the largest logit, the sum of
// e^(logit - largest), and the first index of the largest; 0, 1 and 0 for rows that are not in use.
ffi::Error logit_stats(ffi::ThreadPool threads, ffi::Buffer<ffi::F32> logits, ffi::Buffer<ffi::S32> used,
                       ffi::ResultBuffer<ffi::F32> peaks, ffi::ResultBuffer<ffi::F32> totals,
                       ffi::ResultBuffer<ffi::S32> best, std::string_view isa) {
  if (logits.dimensions().size() != 2) return invalid("logit_stats: logits are not [rows, vocab]");
  const int64_t rows = logits.dimensions()[0], vocab = logits.dimensions()[1];
  for (const auto shape : {peaks->dimensions(), totals->dimensions(), best->dimensions()})
    if (shape.size() != 1 || shape[0] != rows) return invalid("logit_stats: results are not [rows]");
  const int64_t counted = std::clamp<int64_t>(*used.typed_data(), 0, rows);
  const Kernels& kernels = kernels_for(isa);
  float *peak = peaks->typed_data(), *total = totals->typed_data();
  int32_t* index = best->typed_data();
  Workers::shared().run(threads.num_threads(), counted, [&](int64_t row) {
    kernels.row_stats(logits.typed_data() + row * vocab, vocab, peak + row, total + row, index + row);
  });
  std::fill(peak + counted, peak + rows, 0.0f);
  std::fill(total + counted, total + rows, 1.0f);
  std::fill(index + counted, index + rows, 0);
  return ffi::Error::Success();
}

// Whether all of these buffers are [rows].
template <class... Buffers>
bool are_of_rows(int64_t rows, const Buffers&... buffers) {
  return ((buffers.dimensions().size() == 1 && buffers.dimensions()[0] == rows) && ...);
}

// What is wrong with masks u32[rows, words] and masked i32[rows]; null: nothing.
const char* wrong_masks(int64_t rows, int64_t vocab, const ffi::Buffer<ffi::U32>& masks,
                        const ffi::Buffer<ffi::S32>& masked) {
  if (masks.dimensions().size() != 2 || masks.dimensions()[0] != rows || masks.dimensions()[1] * 32 < vocab)
    return "masks are not [rows, words] with a bit for each token";
  if (masks.dimensions()[1] % MASK_WORDS != 0) return "masks have no multiple of 128 words";
  return are_of_rows(rows, masked) ? nullptr : "masked is not [rows]";
}

bool is_matrix(int64_t rows, ffi::Span<const int64_t> shape) { return shape.size() == 2 && shape[0] == rows; }

int32_t* zero_counts(int64_t vocab) {
  static thread_local std::vector<int32_t> counts;
  if (counts.size() < static_cast<size_t>(vocab)) counts.resize(vocab);
  return counts.data();
}

// Arguments: logits f32[rows, vocab]; used i32[], rows in use; and the fields of `LogitChanges` of kernels/backend.py.
// Result: the logits of changed rows in use; the others are not written.
ffi::Error changed_logits(ffi::ThreadPool threads, ffi::Buffer<ffi::F32> logits, ffi::Buffer<ffi::S32> used,
                          ffi::Buffer<ffi::S32> bias_ids, ffi::Buffer<ffi::F32> bias_values,
                          ffi::Buffer<ffi::F32> repetition, ffi::Buffer<ffi::F32> frequency,
                          ffi::Buffer<ffi::F32> presence, ffi::Buffer<ffi::S32> tokens, ffi::Buffer<ffi::S32> slot_ids,
                          ffi::Buffer<ffi::S32> prompt_lens, ffi::Buffer<ffi::S32> seq_lens,
                          ffi::Buffer<ffi::S32> banned_ids, ffi::Buffer<ffi::U32> masks, ffi::Buffer<ffi::S32> masked,
                          ffi::Buffer<ffi::S32> changed, ffi::ResultBuffer<ffi::F32> results, std::string_view isa) {
  if (logits.dimensions().size() != 2 || !same_shape(logits.dimensions(), results->dimensions()))
    return invalid("changed_logits: logits or results are not [rows, vocab]");
  const int64_t rows = logits.dimensions()[0], vocab = logits.dimensions()[1];
  if (!are_of_rows(rows, repetition, frequency, presence, slot_ids, prompt_lens, seq_lens, changed))
    return invalid("changed_logits: penalties, slots, lengths or changed are not [rows]");
  if (!is_matrix(rows, bias_ids.dimensions()) || !same_shape(bias_ids.dimensions(), bias_values.dimensions()) ||
      !is_matrix(rows, banned_ids.dimensions()) || tokens.dimensions().size() != 2)
    return invalid("changed_logits: bias and banned ids are not [rows, n], or tokens not [slots, positions]");
  const int64_t words = is_matrix(rows, masks.dimensions()) ? masks.dimensions()[1] : -1;
  if (const char* wrong = words == 0 ? nullptr : wrong_masks(rows, vocab, masks, masked))
    return invalid(std::string("changed_logits: ") + wrong);
  const int64_t slots = tokens.dimensions()[0], positions = tokens.dimensions()[1];
  const int64_t biases = bias_ids.dimensions()[1], bans = banned_ids.dimensions()[1];
  const Kernels& kernels = kernels_for(isa);
  Workers::shared().run(threads.num_threads(), std::clamp<int64_t>(*used.typed_data(), 0, rows), [&](int64_t row) {
    if (changed.typed_data()[row] == 0) return;
    const int64_t slot = slot_ids.typed_data()[row];
    const bool is_known = slot >= 0 && slot < slots;
    const LogitChange change{
        bias_ids.typed_data() + row * biases,
        bias_values.typed_data() + row * biases,
        biases,
        repetition.typed_data()[row],
        frequency.typed_data()[row],
        presence.typed_data()[row],
        tokens.typed_data() + (is_known ? slot * positions : 0),
        prompt_lens.typed_data()[row],
        is_known ? std::min<int64_t>(seq_lens.typed_data()[row], positions) : 0,
        banned_ids.typed_data() + row * bans,
        bans,
        words > 0 && masked.typed_data()[row] != 0 ? masks.typed_data() + row * words : nullptr,
        words,
    };
    kernels.change_row(logits.typed_data() + row * vocab, vocab, change, zero_counts(vocab),
                       results->typed_data() + row * vocab);
  });
  return ffi::Error::Success();
}

// Arguments: logits f32[rows, vocab]; used i32[], rows in use; masks u32[rows, words]; masked i32[rows], not 0 in rows
// that have a mask. Results, [rows]: the largest logit that a row's mask allows, and its first index; of the whole row
// without a mask; 0 and 0 for rows that are not in use.
ffi::Error masked_best(ffi::ThreadPool threads, ffi::Buffer<ffi::F32> logits, ffi::Buffer<ffi::S32> used,
                       ffi::Buffer<ffi::U32> masks, ffi::Buffer<ffi::S32> masked, ffi::ResultBuffer<ffi::F32> peaks,
                       ffi::ResultBuffer<ffi::S32> best, std::string_view isa) {
  if (logits.dimensions().size() != 2) return invalid("masked_best: logits are not [rows, vocab]");
  const int64_t rows = logits.dimensions()[0], vocab = logits.dimensions()[1];
  if (const char* wrong = wrong_masks(rows, vocab, masks, masked)) return invalid(std::string("masked_best: ") + wrong);
  if (!are_of_rows(rows, *peaks, *best)) return invalid("masked_best: results are not [rows]");
  const int64_t words = masks.dimensions()[1];
  const int64_t counted = std::clamp<int64_t>(*used.typed_data(), 0, rows);
  const Kernels& kernels = kernels_for(isa);
  const std::vector<uint32_t> all(words, ~0u);
  float* peak = peaks->typed_data();
  int32_t* index = best->typed_data();
  Workers::shared().run(threads.num_threads(), counted, [&](int64_t row) {
    const uint32_t* mask = masked.typed_data()[row] != 0 ? masks.typed_data() + row * words : all.data();
    kernels.masked_best(logits.typed_data() + row * vocab, mask, words, vocab, peak + row, index + row);
  });
  std::fill(peak + counted, peak + rows, 0.0f);
  std::fill(index + counted, index + rows, 0);
  return ffi::Error::Success();
}

float* sampling_scratch(int64_t vocab) {
  static thread_local std::vector<float> scratch;
  const size_t size = sampling_floats(vocab);
  if (scratch.size() < size) scratch.resize(size);
  return scratch.data();
}

// Arguments: logits f32[rows, vocab]; counts s32[rows]. Results: the largest logits of each row and their tokens, [rows,
// most] each, the largest first; 0 in columns beyond a row's count.
ffi::Error likeliest(ffi::ThreadPool threads, ffi::Buffer<ffi::F32> logits, ffi::Buffer<ffi::S32> counts,
                     ffi::ResultBuffer<ffi::F32> values, ffi::ResultBuffer<ffi::S32> tokens, std::string_view isa) {
  if (logits.dimensions().size() != 2) return invalid("likeliest: logits are not [rows, vocab]");
  const int64_t rows = logits.dimensions()[0], vocab = logits.dimensions()[1];
  const auto shape = values->dimensions();
  if (!are_of_rows(rows, counts) || shape.size() != 2 || shape[0] != rows || !same_shape(shape, tokens->dimensions()))
    return invalid("likeliest: counts are not [rows], or results not [rows, most]");
  const int64_t most = shape[1];
  const Kernels& kernels = kernels_for(isa);
  Workers::shared().run(threads.num_threads(), rows, [&](int64_t row) {
    float* value = values->typed_data() + row * most;
    int32_t* token = tokens->typed_data() + row * most;
    std::fill(value, value + most, 0.0f);
    std::fill(token, token + most, 0);
    const int64_t count = std::min<int64_t>({counts.typed_data()[row], most, vocab});
    if (count > 0)
      kernels.row_likeliest(logits.typed_data() + row * vocab, vocab, count, sampling_scratch(vocab), value, token);
  });
  return ffi::Error::Success();
}

// Arguments: logits f32[rows, vocab]; of each row the largest logit and the inverse temperature, f32[rows], top_k
// s32[rows], 0: off, and top_p f32[rows], 1: off. Result: the smallest logit that passes, f32[rows].
ffi::Error thresholds(ffi::ThreadPool threads, ffi::Buffer<ffi::F32> logits, ffi::Buffer<ffi::F32> peak,
                      ffi::Buffer<ffi::F32> inverse, ffi::Buffer<ffi::S32> top_k, ffi::Buffer<ffi::F32> top_p,
                      ffi::ResultBuffer<ffi::F32> results, float floor, std::string_view isa) {
  if (logits.dimensions().size() != 2) return invalid("thresholds: logits are not [rows, vocab]");
  const int64_t rows = logits.dimensions()[0], vocab = logits.dimensions()[1];
  if (!are_of_rows(rows, peak, inverse, top_k, top_p, *results))
    return invalid("thresholds: rules are not [rows]");
  const Kernels& kernels = kernels_for(isa);
  Workers::shared().run(threads.num_threads(), rows, [&](int64_t row) {
    const DrawRule rule{peak.typed_data()[row], inverse.typed_data()[row], floor, -INFINITY};
    results->typed_data()[row] =
        kernels.row_threshold(logits.typed_data() + row * vocab, vocab, rule, top_k.typed_data()[row],
                              top_p.typed_data()[row], sampling_scratch(vocab));
  });
  return ffi::Error::Success();
}

// Arguments: logits f32[rows, vocab]; of each row the largest logit, the inverse temperature, the least exponent and the
// least logit of a token that may be drawn, f32[rows]; s32[rows], not 0 in rows that are drawn; seed u32[rows, 2];
// sample index and position, s32[rows]. Results, [rows]: the tokens and their log probabilities; 0 in other rows.
ffi::Error draw(ffi::ThreadPool threads, ffi::Buffer<ffi::F32> logits, ffi::Buffer<ffi::F32> peak,
                ffi::Buffer<ffi::F32> inverse, ffi::Buffer<ffi::F32> floor, ffi::Buffer<ffi::F32> threshold,
                ffi::Buffer<ffi::S32> draws, ffi::Buffer<ffi::U32> seed, ffi::Buffer<ffi::S32> sample_index,
                ffi::Buffer<ffi::S32> position, ffi::ResultBuffer<ffi::S32> tokens,
                ffi::ResultBuffer<ffi::F32> logprobs, ffi::Span<const int64_t> sizes, std::string_view isa) {
  if (logits.dimensions().size() != 2) return invalid("draw: logits are not [rows, vocab]");
  const int64_t rows = logits.dimensions()[0], vocab = logits.dimensions()[1];
  if (!are_of_rows(rows, peak, inverse, floor, threshold, draws, sample_index, position, *tokens, *logprobs))
    return invalid("draw: rules, seeds or results are not [rows]");
  const auto of_seed = seed.dimensions();
  if (of_seed.size() != 2 || of_seed[0] != rows || of_seed[1] != 2) return invalid("draw: seeds are not [rows, 2]");
  const int64_t levels = sizes.size();
  if (levels == 0 || sizes[0] != vocab) return invalid("draw: the first level is not that of the tokens");
  for (int64_t i = 1; i < levels; ++i)
    if (sizes[i] != count_blocks(sizes[i - 1], FAN)) return invalid("draw: a level is no 16th of the one before");
  if (levels > MAX_LEVELS || sizes[levels - 1] > FAN) return invalid("draw: the last level has more than 16 entries");
  const Kernels& kernels = kernels_for(isa);
  Workers::shared().run(threads.num_threads(), rows, [&](int64_t row) {
    int32_t* token = tokens->typed_data() + row;
    float* logprob = logprobs->typed_data() + row;
    *token = 0;
    *logprob = 0;
    if (draws.typed_data()[row] == 0) return;
    const DrawRule rule{peak.typed_data()[row], inverse.typed_data()[row], floor.typed_data()[row],
                        threshold.typed_data()[row]};
    const DrawSeed own{seed.typed_data()[2 * row], seed.typed_data()[2 * row + 1],
                       static_cast<uint32_t>(sample_index.typed_data()[row]),
                       static_cast<uint32_t>(position.typed_data()[row])};
    kernels.draw_row(logits.typed_data() + row * vocab, rule, own, sizes.begin(), levels,
                     sampling_scratch(vocab), token, logprob);
  });
  return ffi::Error::Success();
}

}  // namespace levanter_infer

#pragma GCC visibility push(default)

extern "C" const char* levanter_infer_isa() {
  return levanter_infer::best_isa();
}

extern "C" int levanter_infer_panel(const char* isa) {
  return static_cast<int>(levanter_infer::kernels_for(isa).panel);
}

// Version of XLA's FFI that the handlers were compiled for. A runtime runs handlers of its own version and of older
// ones.
extern "C" int levanter_infer_ffi_api() {
  return XLA_FFI_API_MAJOR * 1000 + XLA_FFI_API_MINOR;
}

// Digest of the sources that this library was built from.
extern "C" const char* levanter_infer_sources() { return LEVANTER_INFER_SOURCES; }

// Reads `size` bytes, a multiple of READ_STEP, `times` times; returns a number that depends on all of them. Called
// directly, without XLA, as is `levanter_infer_multiply_adds`.
extern "C" uint32_t levanter_infer_read(const char* isa, const void* data, int64_t size, int64_t times,
                                        int64_t threads) {
  using namespace levanter_infer;
  const Kernels& kernels = kernels_for(isa);
  const int64_t piece = std::clamp(size / (threads * PIECES) / READ_STEP * READ_STEP, READ_STEP, READ_PIECE);
  std::atomic<uint32_t> seen{0};
  for (int64_t i = 0; i < times; ++i)
    Workers::shared().run(threads, count_blocks(size, piece), [&](int64_t at) {
      const char* from = static_cast<const char*>(data) + at * piece;
      seen.fetch_or(kernels.read_all(from, std::min(piece, size - at * piece)), std::memory_order_relaxed);
    });
  return seen;
}

// Multiplies and adds in registers; returns the number of floating-point operations of all threads.
extern "C" int64_t levanter_infer_multiply_adds(const char* isa, int64_t times, int64_t threads, float* seen) {
  using namespace levanter_infer;
  const Kernels& kernels = kernels_for(isa);
  std::atomic<int64_t> operations{0};
  Workers::shared().run(threads, threads * PIECES, [&](int64_t piece) {
    float all;
    operations.fetch_add(kernels.multiply_adds(times, 0.5f, &all), std::memory_order_relaxed);
    if (piece == 0) *seen = all;
  });
  return operations;
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(levanter_infer_linear, levanter_infer::linear,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<std::string_view>("isa")
                                  .Attr<bool>("has_norm")
                                  .Attr<bool>("has_gate")
                                  .Attr<bool>("has_residual")
                                  .Attr<bool>("is_gated_pair")
                                  .Attr<int64_t>("gated")
                                  .Attr<float>("eps"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(levanter_infer_grouped_linear, levanter_infer::grouped_linear,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<std::string_view>("isa")
                                  .Attr<bool>("has_norm")
                                  .Attr<bool>("has_gate")
                                  .Attr<float>("eps"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(levanter_infer_combine, levanter_infer::combine,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<std::string_view>("isa"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(levanter_infer_place_tokens, levanter_infer::place_tokens,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .RemainingArgs()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<float>("q_eps")
                                  .Attr<float>("k_eps")
                                  .Attr<std::string_view>("isa"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(levanter_infer_attention, levanter_infer::attention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<float>("scale")
                                  .Attr<float>("soft_cap")
                                  .Attr<int64_t>("attention_chunk")
                                  .Attr<std::string_view>("isa"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(levanter_infer_logit_stats, levanter_infer::logit_stats,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::S32>>()
                                  .Attr<std::string_view>("isa"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(levanter_infer_changed_logits, levanter_infer::changed_logits,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::U32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<std::string_view>("isa"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(levanter_infer_masked_best, levanter_infer::masked_best,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::U32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::S32>>()
                                  .Attr<std::string_view>("isa"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(levanter_infer_likeliest, levanter_infer::likeliest,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::S32>>()
                                  .Attr<std::string_view>("isa"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(levanter_infer_thresholds, levanter_infer::thresholds,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<float>("floor")
                                  .Attr<std::string_view>("isa"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(levanter_infer_draw, levanter_infer::draw,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::U32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<ffi::Span<const int64_t>>("sizes")
                                  .Attr<std::string_view>("isa"));

#pragma GCC visibility pop
