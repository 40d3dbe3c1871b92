// XLA custom calls for CPUs: matmuls with 16-bit or 32-bit weights, rotary embedding and KV cache write of new tokens,
// paged attention, and the statistics of logits that sampling needs.
//
// ../bindings.py says what each computes, and what a panel is; kernels.h what there is for each instruction set.

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string_view>
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

ffi::Error invalid(const char* message) { return ffi::Error::InvalidArgument(message); }

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

// One matrix of a call, and its results.
struct Matrix {
  const char* panels;
  const float* scale;  // of weights of int8: [outputs]
  float* y;
  int64_t outputs, first_panel;

  // Panel `own`, of `size` bytes and `width` outputs.
  LinearPanel panel(int64_t own, int64_t size, int64_t width) const {
    const int64_t first = own * width;
    const float* factors = scale == nullptr ? nullptr : scale + first;
    return {panels + own * size, factors, std::min(width, outputs - first), y + first, outputs, nullptr, nullptr};
  }
};

// The scales of the matrices of one layer, [matrices, outputs], in scales [layers, matrices..., outputs]; null if they
// are not that.
const float* scales_of(const ffi::ErrorOr<ffi::AnyBuffer>& scales, ffi::Span<const int64_t> shape, int64_t layer,
                       int64_t outputs) {
  if (!scales.has_value() || scales->element_type() != ffi::DataType::F32) return nullptr;
  const auto own = scales->dimensions();
  if (own.size() + 1 != shape.size() || own.back() != outputs || !std::equal(own.begin(), own.end() - 1, shape.begin()))
    return nullptr;
  int64_t of_layer = 1;
  for (size_t i = 1; i < own.size(); ++i) of_layer *= own[i];
  return static_cast<const float*>(scales->untyped_data()) + layer * of_layer;
}

// The matrix that has a panel, of the matrices of a call one behind the other.
const Matrix& matrix_of(const std::vector<Matrix>& matrices, int64_t panel) {
  size_t m = matrices.size() - 1;
  while (matrices[m].first_panel > panel) --m;
  return matrices[m];
}

void multiply_panels(const Kernels& kernels, Weights type, const LinearArgs& args, const LinearPanel* panels,
                     int64_t count) {
  static thread_local std::vector<CacheLine> lines;
  const bool has_scratch = type != F32 && kernels.linear_floats != nullptr;
  const int64_t floats = has_scratch ? kernels.linear_floats(args, count) : 0;
  kernels.linear[type](args, panels, count, reserve_in_lines<float>(floats, &lines));
}

// Rows as they come, `inputs` each, and what is applied to them before they are multiplied: the norm or the gate, or
// neither (null).
struct Source {
  const float* x;
  int64_t inputs;
  const float* norm;
  float eps;
  const float* gate;  // [rows, inputs]
};

// Applies the norm, whose factor for the row is given, or the gate to inputs begin … begin + count - 1 of a row; an
// input that does not exist, the second of the last pair if their number is odd, is 0. Returns where they are: `to`, or
// where they come from if there is nothing to apply.
inline const float* applied(const Kernels& kernels, const Source& source, int64_t row, float factor, int64_t begin,
                            int64_t count, float* to) {
  const int64_t known = std::min(count, source.inputs - begin), at = row * source.inputs + begin;
  if (source.norm != nullptr)
    kernels.scaled(source.x + at, source.norm + begin, factor, known, to);
  else if (source.gate != nullptr)
    kernels.gated(source.x + at, source.gate + at, known, to);
  else if (known == count)
    return source.x + at;
  else
    std::copy_n(source.x + at, known, to);
  if (known < count) to[known] = 0;
  return to;
}

// Replaces the rows of args->x by what the matmuls read: an even number of inputs, with the norm or the gate applied.
// Requires: there is a norm or a gate, or the number of inputs is odd.
void prepare_rows(const Kernels& kernels, int64_t threads, const Source& source, LinearArgs* args) {
  static thread_local std::vector<float> rows;
  const size_t size = args->rows * args->inputs;
  if (rows.size() < size) rows.resize(size);
  float* all = rows.data();  // this thread's buffer, which the workers write too
  Workers::shared().run(threads, count_blocks(args->rows, PREPARED_ROWS), [&](int64_t piece) {
    const int64_t last = std::min(args->rows, (piece + 1) * PREPARED_ROWS);
    for (int64_t row = piece * PREPARED_ROWS; row < last; ++row) {
      const float* from = source.x + row * source.inputs;
      const float factor = source.norm == nullptr ? 0 : kernels.norm_factor(from, source.inputs, source.eps);
      applied(kernels, source, row, factor, 0, args->inputs, all + row * args->inputs);
    }
  });
  args->x = all;
  args->x_stride = args->inputs;
}

// Words of a packed row.
int64_t packed_words(const Kernels& kernels, int64_t inputs) {
  return count_blocks(inputs, kernels.packed_inputs) * kernels.packed_inputs / 2;
}

// Memory for `size` words of packed rows, and BEHIND_PACKED more.
Pair* reserve_words(int64_t size, std::vector<CacheLine>* lines) {
  return reserve_in_lines<Pair>(size + BEHIND_PACKED, lines);
}

// The same for matmuls of pairs: sets args->packed. The rows of a block are interleaved. Threads divide its inputs,
// because threads that divided its rows would take every cache line from each other; what a thread packs it has just
// computed, so that rows with the norm or the gate applied are in no memory but the first cache.
void pack_rows(const Kernels& kernels, int64_t threads, const Source& source, LinearArgs* args) {
  static thread_local std::vector<CacheLine> packed;
  static thread_local std::vector<float> factors;
  const int64_t width = packed_words(kernels, args->inputs);
  const int64_t steps = count_blocks(args->inputs, PACK_STEP);
  const int64_t wanted = count_blocks(args->inputs * std::min(args->rows, kernels.rows), PACKED);
  const int64_t step = count_blocks(steps, std::min(wanted, steps)) * PACK_STEP;
  const int64_t ranges = count_blocks(args->inputs, step);
  const auto factor_of = [&](int64_t row) {
    return kernels.norm_factor(source.x + row * source.inputs, source.inputs, source.eps);
  };
  const bool shares_factors = source.norm != nullptr && ranges > FEW_RANGES;
  if (shares_factors) {
    if (factors.size() < static_cast<size_t>(args->rows)) factors.resize(args->rows);
    float* all = factors.data();
    Workers::shared().run(threads, count_blocks(args->rows, PREPARED_ROWS), [&](int64_t piece) {
      const int64_t last = std::min(args->rows, (piece + 1) * PREPARED_ROWS);
      for (int64_t row = piece * PREPARED_ROWS; row < last; ++row) all[row] = factor_of(row);
    });
  }
  Pair* words = reserve_words(args->rows * width, &packed);  // these are this thread's buffers
  const float* known = factors.data();
  Workers::shared().run(threads, count_blocks(args->rows, kernels.rows) * ranges, [&](int64_t piece) {
    static thread_local std::vector<float> part;
    if (part.size() < static_cast<size_t>(step)) part.resize(step);
    const Block block = block_at(args->rows, piece / ranges, kernels.rows);
    const int64_t begin = piece % ranges * step, count = std::min(step, args->inputs - begin);
    Pair* to = words + block.first * width + begin * block.rows / 2;
    for (int64_t i = 0; i < block.rows; ++i) {
      const int64_t row = block.first + i;
      const float factor = source.norm == nullptr ? 0 : shares_factors ? known[row] : factor_of(row);
      const float* found = applied(kernels, source, row, factor, begin, count, part.data());
      kernels.pack_row(found, count, block.rows, i, to);
    }
  });
  args->packed = words;
}

// Arguments: x f32[rows, inputs]; used i32[], rows in use; layer i32[]; then, as the attributes say, the weight of a
// norm [layers, inputs], a gate f32[rows, inputs], a residual f32[rows, outputs] for a single result; then weights
// [layers, panels, size of a panel], and if they are int8 as many scales f32[layers, outputs]. Results: f32[rows,
// outputs] each; of a gated pair of weights one, silu(the first one's result) times the second one's.
ffi::Error linear(ffi::ThreadPool threads, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::S32> used,
                  ffi::Buffer<ffi::S32> layer, ffi::RemainingArgs rest, ffi::RemainingRets results,
                  std::string_view isa, bool has_norm, bool has_gate, bool has_residual, bool is_gated_pair,
                  float eps) {
  const size_t extras = has_norm + has_gate + has_residual, weights = is_gated_pair ? 2 : results.size();
  const size_t scales = rest.size() == extras + 2 * weights ? weights : 0;
  if (x.dimensions().size() != 2 || rest.size() != extras + weights + scales || (has_residual && weights != 1) ||
      (is_gated_pair && results.size() != 1))
    return invalid("linear: shapes do not fit");
  if (x.dimensions()[1] == 0) return invalid("linear: rows have no inputs");
  const int64_t rows = std::clamp<int64_t>(*used.typed_data(), 0, x.dimensions()[0]);
  const int64_t inputs = x.dimensions()[1], index = *layer.typed_data();
  const Kernels& kernels = kernels_for(isa);

  size_t next = 0;
  std::vector<float> norm;
  if (has_norm) {
    norm = norm_of(rest.get<ffi::AnyBuffer>(next++), index, inputs);
    if (norm.empty()) return invalid("linear: the norm does not fit, or has no such layer");
  }
  const float* gate = nullptr;
  if (has_gate) {
    const auto buffer = rest.get<ffi::Buffer<ffi::F32>>(next++);
    if (!buffer.has_value() || !same_shape(buffer->dimensions(), x.dimensions()))
      return invalid("linear: the gate does not fit");
    gate = buffer->typed_data();
  }
  const float* residual = nullptr;
  if (has_residual) {
    const auto buffer = rest.get<ffi::Buffer<ffi::F32>>(next++);
    auto result = results.get<ffi::Buffer<ffi::F32>>(0);
    if (!buffer.has_value() || !result.has_value() || !same_shape(buffer->dimensions(), (*result)->dimensions()))
      return invalid("linear: the residual does not fit");
    residual = buffer->typed_data();
  }

  const int64_t panel_size = (inputs + 1) / 2 * 2 * kernels.panel;
  std::vector<Matrix> matrices;
  int64_t panels = 0;
  Weights type = F32;
  for (size_t i = 0; i < weights; ++i) {
    const auto weight = rest.get<ffi::AnyBuffer>(next + i);
    auto result = results.get<ffi::Buffer<ffi::F32>>(is_gated_pair ? 0 : i);
    if (!weight.has_value() || !result.has_value()) return invalid("linear: an argument is missing");
    const auto shape = weight->dimensions(), out = (*result)->dimensions();
    if (shape.size() != 3 || shape[2] != panel_size || out.size() != 2 || out[0] != x.dimensions()[0] ||
        (out[1] + kernels.panel - 1) / kernels.panel != shape[1])
      return invalid("linear: weights are not [layers, panels, size of a panel]");
    if (index < 0 || index >= shape[0]) return invalid("linear: there is no such layer");
    const auto own = weights_of(*weight);
    if (!own.has_value()) return invalid("linear: weights are neither bf16 nor f32 nor int8");
    if (i == 0) type = *own;
    if (*own != type) return invalid("linear: weights of one call have one type");
    if ((type == INT8) != (scales > 0)) return invalid("linear: weights of int8, and no others, have scales");
    const float* scale = nullptr;
    if (type == INT8) {
      scale = scales_of(rest.get<ffi::AnyBuffer>(next + weights + i), shape, index, out[1]);
      if (scale == nullptr) return invalid("linear: the scales do not fit");
    }
    const int64_t offset = index * shape[1] * panel_size * bytes_of(type);
    float* y = (*result)->typed_data();
    matrices.push_back({static_cast<const char*>(weight->untyped_data()) + offset, scale, y, out[1], panels});
    std::fill(y + rows * out[1], y + out[0] * out[1], 0.0f);
    if (!is_gated_pair || i == 0) panels += shape[1];
  }

  if (rows == 0) return ffi::Error::Success();

  LinearArgs args{x.typed_data(), rows, (inputs + 1) / 2 * 2, inputs, nullptr};
  const bool pack = type != F32 && kernels.pack_row != nullptr;
  const Source source{x.typed_data(), inputs, has_norm ? norm.data() : nullptr, eps, gate};
  if (pack)
    pack_rows(kernels, threads.num_threads(), source, &args);
  else if (has_norm || has_gate || inputs % 2 != 0)
    prepare_rows(kernels, threads.num_threads(), source, &args);
  // A piece of work is several panels where there are many, so that the threads seldom contend for the counter.
  const int64_t together = std::clamp<int64_t>(panels / (threads.num_threads() * PIECES), 1, MAX_PANELS);
  const int64_t panel_bytes = panel_size * bytes_of(type);
  Workers::shared().run(threads.num_threads(), (panels + together - 1) / together, [&](int64_t piece) {
    static thread_local std::vector<CacheLine> lines;
    std::array<LinearPanel, 2 * MAX_PANELS> own;
    int64_t count = 0;
    float* gates = is_gated_pair ? reserve_in_lines<float>(rows * kernels.panel, &lines) : nullptr;
    for (int64_t panel = piece * together; panel < std::min(panels, (piece + 1) * together); ++panel) {
      if (is_gated_pair) {
        LinearPanel& of_gate = own[count++] = matrices[0].panel(panel, panel_bytes, kernels.panel);
        of_gate.y = gates;
        of_gate.y_stride = kernels.panel;
        own[count] = matrices[1].panel(panel, panel_bytes, kernels.panel);
        own[count++].gate = gates;
        continue;
      }
      const Matrix& matrix = matrix_of(matrices, panel);
      own[count] = matrix.panel(panel - matrix.first_panel, panel_bytes, kernels.panel);
      if (residual != nullptr) own[count].residual = residual + panel * kernels.panel;
      ++count;
    }
    multiply_panels(kernels, type, args, own.data(), count);
  });
  return ffi::Error::Success();
}

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

  const int64_t tokens = q.dimensions()[0];
  const int64_t rows = std::clamp<int64_t>(*num_seqs.typed_data(), 0, page_indices.dimensions()[0]);
  args.num_rows = rows;
  struct Piece {
    int32_t row;
    int64_t first, count, head_begin, head_end;
  };
  const Kernels& kernels = kernels_for(isa);
  for (int64_t row = 0; row < rows; ++row) {
    if ((row == 0 && args.cu_q_lens[0] != 0) || args.cu_q_lens[row] > args.cu_q_lens[row + 1])
      return invalid("attention: cu_q_lens does not ascend from 0");
    if (args.seq_lens[row] > args.max_pages * args.page_size) return invalid("attention: a row is out of range");
  }
  const auto pieces_of = [&](int64_t queries) {
    std::vector<Piece> pieces;
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t end = std::min<int64_t>(args.cu_q_lens[row + 1], tokens);
      for (int64_t first = args.cu_q_lens[row]; first < end; first += queries)
        pieces.push_back({static_cast<int32_t>(row), first, std::min(queries, end - first), 0, args.kv_heads});
    }
    return pieces;
  };
  int64_t queries = kernels.queries(args.query_heads / args.kv_heads);
  std::vector<Piece> pieces = pieces_of(queries);
  // Large query blocks pack keys and values less often, but should be enough for all threads.
  if (static_cast<int64_t>(pieces.size()) * args.kv_heads < 2 * threads.num_threads()) {
    queries = std::min(queries, FEW_QUERIES);
    pieces = pieces_of(queries);
  }
  // With few query blocks, a piece of work is one kv head of one. With many it is all heads, so that a token's keys and
  // values of all heads are read together.
  if (static_cast<int64_t>(pieces.size()) < 4 * threads.num_threads()) {
    std::vector<Piece> split;
    for (const Piece& piece : pieces)
      for (int64_t head = 0; head < args.kv_heads; ++head)
        split.push_back({piece.row, piece.first, piece.count, head, head + 1});
    pieces.swap(split);
  }
  const int64_t used = rows == 0 ? 0 : std::min<int64_t>(args.cu_q_lens[rows], tokens);
  const int64_t token_size = args.query_heads * args.value_dim;
  std::fill(args.out + used * token_size, args.out + tokens * token_size, 0.0f);
  const int64_t floats = (bf16 ? kernels.floats_bf16 : kernels.floats_f32)(args, queries);
  Workers::shared().run(threads.num_threads(), pieces.size(), [&](int64_t i) {
    static thread_local std::vector<CacheLine> lines;
    float* scratch = reserve_in_lines<float>(floats, &lines);
    const Piece& piece = pieces[i];
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

// What is wrong with the arguments of `masked_logits` and `masked_best`; null: nothing.
const char* wrong_masks(const ffi::Buffer<ffi::F32>& logits, const ffi::Buffer<ffi::U32>& masks,
                        const ffi::Buffer<ffi::S32>& masked) {
  if (logits.dimensions().size() != 2) return "masked logits: logits are not [rows, vocab]";
  const int64_t rows = logits.dimensions()[0], vocab = logits.dimensions()[1];
  if (masks.dimensions().size() != 2 || masks.dimensions()[0] != rows || masks.dimensions()[1] * 32 < vocab)
    return "masked logits: masks are not [rows, words] with a bit for each token";
  if (masks.dimensions()[1] % MASK_WORDS != 0) return "masked logits: masks have no multiple of 128 words";
  if (masked.dimensions().size() != 1 || masked.dimensions()[0] != rows) return "masked logits: masked is not [rows]";
  return nullptr;
}

// Arguments: logits f32[rows, vocab]; used i32[], rows in use; masks u32[rows, words]; masked i32[rows], not 0 in rows
// that have a mask. Result: the logits, with -inf where a row in use has a mask without the token's bit.
ffi::Error masked_logits(ffi::ThreadPool threads, ffi::Buffer<ffi::F32> logits, ffi::Buffer<ffi::S32> used,
                         ffi::Buffer<ffi::U32> masks, ffi::Buffer<ffi::S32> masked, ffi::ResultBuffer<ffi::F32> results,
                         std::string_view isa) {
  if (const char* wrong = wrong_masks(logits, masks, masked)) return invalid(wrong);
  const int64_t rows = logits.dimensions()[0], vocab = logits.dimensions()[1], words = masks.dimensions()[1];
  if (results->element_count() != logits.element_count())
    return invalid("masked_logits: results are not [rows, vocab]");
  const int64_t counted = std::clamp<int64_t>(*used.typed_data(), 0, rows);
  const Kernels& kernels = kernels_for(isa);
  Workers::shared().run(threads.num_threads(), rows, [&](int64_t row) {
    const float* from = logits.typed_data() + row * vocab;
    float* to = results->typed_data() + row * vocab;
    if (row < counted && masked.typed_data()[row] != 0)
      kernels.mask_row(from, masks.typed_data() + row * words, words, vocab, to);
    else
      std::copy(from, from + vocab, to);
  });
  return ffi::Error::Success();
}

// Arguments as in `masked_logits`. Results, [rows]: the largest logit that a row's mask allows, and its first index; of
// the whole row without a mask; 0 and 0 for rows that are not in use.
ffi::Error masked_best(ffi::ThreadPool threads, ffi::Buffer<ffi::F32> logits, ffi::Buffer<ffi::S32> used,
                       ffi::Buffer<ffi::U32> masks, ffi::Buffer<ffi::S32> masked, ffi::ResultBuffer<ffi::F32> peaks,
                       ffi::ResultBuffer<ffi::S32> best, std::string_view isa) {
  if (const char* wrong = wrong_masks(logits, masks, masked)) return invalid(wrong);
  const int64_t rows = logits.dimensions()[0], vocab = logits.dimensions()[1], words = masks.dimensions()[1];
  for (const auto shape : {peaks->dimensions(), best->dimensions()})
    if (shape.size() != 1 || shape[0] != rows) return invalid("masked_best: results are not [rows]");
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

XLA_FFI_DEFINE_HANDLER_SYMBOL(levanter_infer_masked_logits, levanter_infer::masked_logits,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::U32>>()
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

#pragma GCC visibility pop
