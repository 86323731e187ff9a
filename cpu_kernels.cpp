// Operators for decoding on a CPU, where a step costs what it reads: `linear` over packed weights, `norm`, and `layers`, a
// stack of decoder layers over caches of which only the filled slots are read. cpu_kernels.py builds this file and makes
// the layouts it reads.
//
// All arithmetic is one kernel, `tile`: rows of x times 32 columns of w, over 32-bit *words* that hold two bfloat16 or
// one float. Every sum runs in the same order whatever the number of rows, so that a row's result does not depend on
// its company: a row alone, as plain decoding has it, and the same row among K + 1 in a verification are equal bits. (So
// -ffp-contract=fast: a product and a sum are one instruction in every version of `tile`, or else in none.)

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/util/accumulate.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <tuple>
#include <vector>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

namespace {

using at::Tensor;
using c10::BFloat16;
typedef float Floats __attribute__((vector_size(64)));  // 16 lanes: one register of AVX512
typedef uint32_t Words __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));

constexpr int kColumns = 32;       // of a packed block: two vectors
constexpr int kRows = 12;          // of a tile: 24 sums, of 32 registers
constexpr int kMaxHeadDim = 256;   // for which a block of query rows has room
constexpr int kChunk = 64;         // keys whose softmax is taken together
constexpr int kFewBlocks = 8;      // of query rows a key head: up to here threads may share a block's chunks
constexpr float kMasked = -2e30f;  // a masked score
constexpr float kLowest = -1e30f;  // the largest score of no keys at all: above kMasked, so that masked ones weigh 0

template <class T>
constexpr int kPerWord = sizeof(uint32_t) / sizeof(T);

template <class T>
const uint32_t* words(const T* values) {
  return reinterpret_cast<const uint32_t*>(values);
}

float as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// sum + w * x, where a word is one float, or two bfloat16 whose products are both added.
template <class T>
inline Floats multiply_add(Floats sum, Words w, uint32_t x) {
  if constexpr (kPerWord<T> == 1) return sum + (Floats)w * as_float(x);
#ifdef __AVX512BF16__
  return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)w, (__m512bh)_mm512_set1_epi32(x));
#else
  sum += (Floats)(w << 16) * as_float(x << 16);
  return sum + (Floats)(w & 0xffff0000u) * as_float(x & 0xffff0000u);
#endif
}

typedef uint16_t Halves __attribute__((vector_size(32)));

inline Floats widen(Floats x) { return x; }
inline Floats widen(Halves x) { return (Floats)(__builtin_convertvector(x, Words) << 16); }

inline void narrow(Floats x, Floats& y) { y = x; }
inline void narrow(Floats x, Halves& y) {
#ifdef __AVX512BF16__
  y = (Halves)_mm512_cvtneps_pbh((__m512)x);
#else
  for (int i = 0; i < 16; i++) y[i] = BFloat16(x[i]).x;
#endif
}

template <class T>
using Packed = std::conditional_t<kPerWord<T> == 1, Floats, Halves>;

// 16 numbers, or the first `count` of them with 0 behind.
template <class T>
inline Floats load(const T* x, int64_t count = 16) {
  Packed<T> packed = {};
  count < 16 ? std::memcpy(&packed, x, count * sizeof(T)) : std::memcpy(&packed, x, sizeof packed);
  return widen(packed);
}

template <class T>
inline void store(Floats x, T* y, int64_t count = 16) {
  Packed<T> packed;
  narrow(x, packed);
  count < 16 ? std::memcpy(y, &packed, count * sizeof(T)) : std::memcpy(y, &packed, sizeof packed);
}

// x as it is after rounding to T.
template <class T>
inline Floats rounded(Floats x) {
  Packed<T> packed;
  narrow(x, packed);
  return widen(packed);
}

inline float sum_of(Floats x) {
  float total = 0;
  for (int i = 0; i < 16; i++) total += x[i];
  return total;
}

// y[r] = sum over k < n of x[r][k] * w[k], for R rows of words `x_stride` apart and 32 columns `w_stride` apart.
template <class T, int R>
void tile(const uint32_t* x, int64_t x_stride, const uint32_t* w, int64_t w_stride, int64_t n, Floats (*y)[2]) {
  Floats sums[R][2] = {};
  for (int64_t k = 0; k < n; k++) {
    Words left, right;
    std::memcpy(&left, w + k * w_stride, sizeof left);
    std::memcpy(&right, w + k * w_stride + 16, sizeof right);
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
      const uint32_t value = x[r * x_stride + k];
      sums[r][0] = multiply_add<T>(sums[r][0], left, value);
      sums[r][1] = multiply_add<T>(sums[r][1], right, value);
    }
  }
  std::memcpy(y, sums, sizeof sums);
}

// The same for a number of rows, 1 to kRows, known only at run time.
template <class T, int R = kRows>
void tile(int rows, const uint32_t* x, int64_t x_stride, const uint32_t* w, int64_t w_stride, int64_t n,
          Floats (*y)[2]) {
  if constexpr (R > 1) {
    if (rows < R) return tile<T, R - 1>(rows, x, x_stride, w, w_stride, n, y);
  }
  tile<T, R>(x, x_stride, w, w_stride, n, y);
}

// ---- linear ----------------------------------------------------------------------------------------------------------

// The products of `rows` rows of x, `in` numbers each, with `blocks` blocks of packed weights: for each row and block,
// write(row, block, sums of its left columns, of its right ones).
template <class T, class Write>
void multiply(const T* x, const T* w, int64_t rows, int64_t in, int64_t blocks, const Write& write) {
  const int64_t n = in / kPerWord<T>;
  at::parallel_for(0, blocks, 1, [&](int64_t begin, int64_t end) {
    Floats sums[kRows][2];
    for (int64_t block = begin; block < end; block++) {
      for (int64_t row = 0; row < rows; row += kRows) {  // meanwhile the block's weights stay in the core's cache
        const int count = std::min<int64_t>(kRows, rows - row);
        tile<T>(count, words(x + row * in), n, words(w + block * kColumns * in), kColumns, n, sums);
        for (int r = 0; r < count; r++) write(row + r, block, sums[r][0], sums[r][1]);
      }
    }
  });
}

int64_t blocks_of(int64_t columns) { return (columns + kColumns - 1) / kColumns; }

// y = x w^T (+ bias) (+ residual), rounded where PyTorch rounds. x (rows, in), y and residual (rows, out).
template <class T>
void linear_rows(const T* x, const T* w, const T* bias, const T* residual, T* y, int64_t rows, int64_t in,
                 int64_t out) {
  multiply<T>(x, w, rows, in, blocks_of(out), [&](int64_t row, int64_t block, Floats left, Floats right) {
    for (int64_t column = block * kColumns, half = 0; half < 2 && column < out; half++, column += 16) {
      const int64_t width = std::min<int64_t>(16, out - column);
      Floats sum = half ? right : left;
      if (bias) sum += load(bias + column, width);
      if (residual) sum = rounded<T>(sum) + load(residual + row * out + column, width);
      store(sum, y + row * out + column, width);
    }
  });
}

// x (..., in) -> (..., out). packed (out / 32, in / p, 32, p): blocks of 32 outputs, in words of p inputs.
Tensor linear(const Tensor& x, const Tensor& packed, const std::optional<Tensor>& bias, int64_t out) {
  const int64_t in = x.size(-1);
  TORCH_CHECK(x.is_contiguous() && packed.size(1) * packed.size(3) == in && packed.size(0) == blocks_of(out), "x ",
              x.sizes(), " of strides ", x.strides(), ", weights ", packed.sizes(), ", outputs ", out);
  auto shape = x.sizes().vec();
  shape.back() = out;
  Tensor y = at::empty(shape, x.options());
  auto run = [&]<class T>(T) {
    const T* added = bias ? bias->const_data_ptr<T>() : nullptr;
    linear_rows<T>(x.const_data_ptr<T>(), packed.const_data_ptr<T>(), added, nullptr, y.mutable_data_ptr<T>(),
                   x.numel() / in, in, out);
  };
  x.scalar_type() == at::kFloat ? run(float()) : run(BFloat16());
  return y;
}

// ---- attention -------------------------------------------------------------------------------------------------------

// e^x for x <= 0, within 1e-7 of it, exactly 0 where it is below 1e-37: 2^n * e^r, |r| <= ln(2) / 2 (Cephes' expf).
inline Floats exponential(Floats x) {
  const Floats shifted = x * 1.44269504f + 12582912.0f;  // adding 1.5 * 2^23 rounds to an integer, in the low bits
  const Floats n = shifted - 12582912.0f;
  const Floats r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  const Words power = ((Words)shifted - 0x4b400000u + 127u) << 23;
  return x < -85.0f ? Floats{} : (p * r * r + r + 1.0f) * (Floats)power;
}

// The softmax over some keys, not yet divided by its sum, for up to kRows rows: in memory that somebody else holds.
struct Part {
  float *largest, *sum, *values;  // of each row: the largest score, the sum of exponentials, the weighted values (Hd)

  static int64_t size(int64_t head_dim) { return kRows * (head_dim + 2); }

  explicit Part(float* memory) : largest(memory), sum(memory + kRows), values(memory + 2 * kRows) {}

  void clear(int rows, int64_t head_dim) {
    std::fill_n(largest, rows, kLowest);
    std::fill_n(sum, rows, 0.0f);
    std::fill_n(values, rows * head_dim, 0.0f);
  }

  // The keys of both (the online softmax of flash attention, Dao et al. 2022, arXiv:2205.14135).
  void add(const Part& other, int rows, int64_t head_dim) {
    for (int r = 0; r < rows; r++) {
      const float top = std::max(largest[r], other.largest[r]);
      const Floats weights = exponential(Floats{largest[r] - top, other.largest[r] - top});
      sum[r] = sum[r] * weights[0] + other.sum[r] * weights[1];
      largest[r] = top;
      for (int64_t i = r * head_dim; i < (r + 1) * head_dim; i++)
        values[i] = values[i] * weights[0] + other.values[i] * weights[1];
    }
  }
};

// Up to kRows query rows that read the same key head: their vectors, the slots each may see, where its result goes.
template <class T>
struct Block {
  int rows;
  int32_t first[kRows], end[kRows];
  T* y[kRows];
  alignas(64) T q[kRows * kMaxHeadDim];
  const T *k, *v;  // (S / 32, Hd / per word, 32, per word) and (S / per word, Hd, per word)

  // Writes the attention over the keys of one chunk to `part`.
  void over(int64_t chunk, int64_t head_dim, Part part) const {
    const int64_t n = head_dim / kPerWord<T>, begin = chunk * kChunk;
    Floats sums[kRows][2];
    alignas(64) float scores[kRows][kChunk];
    alignas(64) T weights[kRows][kChunk];
    for (int64_t c = 0; c < kChunk; c += kColumns) {
      tile<T>(rows, words(q), n, words(k + (begin + c) * head_dim), kColumns, n, sums);
      for (int r = 0; r < rows; r++) std::memcpy(scores[r] + c, sums[r], sizeof sums[r]);
    }
    for (int r = 0; r < rows; r++) softmax(scores[r], r, begin, 1 / std::sqrt(float(head_dim)), weights[r], part);
    for (int64_t d = 0; d < head_dim; d += kColumns) {
      const uint32_t* values = words(v + begin * head_dim) + d;
      tile<T>(rows, words(weights[0]), kChunk / kPerWord<T>, values, head_dim, kChunk / kPerWord<T>, sums);
      for (int r = 0; r < rows; r++) std::memcpy(part.values + r * head_dim + d, sums[r], sizeof sums[r]);
    }
  }

  void softmax(float* scores, int r, int64_t begin, float scale, T* weights, Part part) const {
    Floats x[kChunk / 16], top = Floats{} + kLowest, total = {};
    Ints slot = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    slot += int32_t(begin);
    for (int i = 0; i < kChunk / 16; i++, slot += 16) {
      std::memcpy(&x[i], scores + 16 * i, sizeof x[i]);
      x[i] = (slot >= first[r]) & (slot < end[r]) ? x[i] * scale : Floats{} + kMasked;
      top = x[i] > top ? x[i] : top;
    }
    float largest = kLowest;
    for (int i = 0; i < 16; i++) largest = std::max(largest, top[i]);
    for (int i = 0; i < kChunk / 16; i++) {
      x[i] = exponential(x[i] - largest);
      total += x[i];
      store(x[i], weights + 16 * i);
    }
    part.largest[r] = largest;
    part.sum[r] = sum_of(total);
  }

  void finish(const Part& all, int64_t head_dim) const {
    for (int r = 0; r < rows; r++) {
      const float* values = all.values + r * head_dim;
      const float scale = all.sum[r] > 0 ? 1 / all.sum[r] : 0;
      for (int64_t d = 0; d < head_dim; d += 16) store(load(values + d) * scale, y[r] + d);
    }
  }
};

template <class T>
struct Attention {
  int64_t batch, tokens, heads, kv_heads, head_dim, slots, window;
  const int64_t* positions;  // (B, T)
  T *k_cache, *v_cache;

  int64_t group() const { return heads / kv_heads; }
  int64_t blocks_per_head() const { return (group() * tokens + kRows - 1) / kRows; }

  // Puts the new keys and values into their slots.
  void write(const T* qkv) const {
    constexpr int p = kPerWord<T>;
    for (int64_t i = 0; i < batch * tokens * kv_heads; i++) {
      const int64_t head = i % kv_heads, row = i / kv_heads, b = row / tokens, slot = positions[row];
      TORCH_CHECK(0 <= slot && slot < slots, "position ", slot, " in a cache of ", slots, " slots");
      const T* key = qkv + (row * (heads + 2 * kv_heads) + heads + head) * head_dim;
      const T* value = key + kv_heads * head_dim;
      T* keys = k_cache + ((b * kv_heads + head) * slots + slot / kColumns * kColumns) * head_dim;
      T* values = v_cache + ((b * kv_heads + head) * slots + slot / p * p) * head_dim;
      for (int64_t d = 0; d < head_dim; d++) {
        keys[(d / p * kColumns + slot % kColumns) * p + d % p] = key[d];
        values[d * p + slot % p] = value[d];
      }
    }
  }

  // Block i: rows of one sequence and key head. Row r of a head is query head r % group of token r / group.
  void fill(Block<T>& block, int64_t i, const T* qkv, T* y) const {
    const int64_t begin = i % blocks_per_head() * kRows, head = i / blocks_per_head() % kv_heads;
    const int64_t b = i / blocks_per_head() / kv_heads, cache = (b * kv_heads + head) * slots * head_dim;
    const int rows = std::min<int64_t>(kRows, group() * tokens - begin);
    block.rows = rows, block.k = k_cache + cache, block.v = v_cache + cache;
    for (int r = 0; r < rows; r++) {
      const int64_t row = b * tokens + (begin + r) / group(), query = head * group() + (begin + r) % group();
      const bool padding = positions[row] == slots - 1;  // goes to the last slot and sees nothing
      block.end[r] = padding ? 0 : positions[row] + 1;
      block.first[r] = padding ? INT32_MAX : 0;
      if (window > 0 && !padding) block.first[r] = std::max<int64_t>(0, block.end[r] - window);
      block.y[r] = y + (row * heads + query) * head_dim;
      const T* q = qkv + (row * (heads + 2 * kv_heads) + query) * head_dim;
      std::memcpy(block.q + r * head_dim, q, head_dim * sizeof(T));
    }
  }

  // Few rows, as in a round: the threads share the chunks of each block. Many, as in a prompt: they share the blocks.
  // Either way the chunks are added up in the same order.
  // qkv (B, T, H + 2 Hkv, Hd), y (B, T, H, Hd).
  void run(const T* qkv, T* y) const {
    write(qkv);
    const int64_t count = batch * kv_heads * blocks_per_head();
    const auto blocks = std::make_unique_for_overwrite<Block<T>[]>(count);
    std::vector<int64_t> starts{0}, chunks;  // of each block: where its parts start, its first chunk
    for (int64_t i = 0; i < count; i++) {
      fill(blocks[i], i, qkv, y);
      const Block<T>& rows = blocks[i];
      chunks.push_back(*std::min_element(rows.first, rows.first + rows.rows) / kChunk);
      const int64_t end = (*std::max_element(rows.end, rows.end + rows.rows) + kChunk - 1) / kChunk;
      starts.push_back(starts.back() + std::max<int64_t>(0, end - chunks.back()));
    }
    const bool share_chunks = count < 4 * at::get_num_threads() && blocks_per_head() <= kFewBlocks;
    const auto memory = std::make_unique_for_overwrite<float[]>(share_chunks ? starts.back() * Part::size(head_dim) : 0);
    auto part = [&](int64_t c) { return Part(memory.get() + c * Part::size(head_dim)); };
    if (share_chunks)
      at::parallel_for(0, starts.back(), 1, [&](int64_t begin, int64_t end) {
        int64_t i = std::upper_bound(starts.begin(), starts.end(), begin) - starts.begin() - 1;
        for (int64_t c = begin; c < end; c++) {
          while (c >= starts[i + 1]) i++;
          blocks[i].over(chunks[i] + c - starts[i], head_dim, part(c));
        }
      });
    at::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
      const auto own = std::make_unique_for_overwrite<float[]>(2 * Part::size(head_dim));
      Part all(own.get()), next(own.get() + Part::size(head_dim));
      for (int64_t i = begin; i < end; i++) {
        all.clear(blocks[i].rows, head_dim);
        for (int64_t c = starts[i]; c < starts[i + 1]; c++) {
          if (!share_chunks) blocks[i].over(chunks[i] + c - starts[i], head_dim, next);
          all.add(share_chunks ? part(c) : next, blocks[i].rows, head_dim);
        }
        blocks[i].finish(all, head_dim);
      }
    });
  }
};

// ---- norm and layers -------------------------------------------------------------------------------------------------

template <class T>
void rms_norm(const T* x, const T* weight, int64_t size, float eps, T* y) {
  Floats squares = {};
  for (int64_t i = 0; i < size; i += 16) squares += load(x + i, size - i) * load(x + i, size - i);
  const float scale = 1 / std::sqrt(sum_of(squares) / size + eps);
  for (int64_t i = 0; i < size; i += 16)
    store(rounded<T>(load(x + i, size - i) * scale) * load(weight + i, size - i), y + i, size - i);
}

// Turns the halves of one head by the angles of its position. cos and sin (Hd / 2).
template <class T>
void rotate(T* x, const float* cos, const float* sin, int64_t head_dim) {
  for (int64_t d = 0; d < head_dim / 2; d += 16) {
    T* y = x + head_dim / 2;
    const Floats left = load(x + d), right = load(y + d), c = load(cos + d), s = load(sin + d);
    store(left * c - right * s, x + d);
    store(right * c + left * s, y + d);
  }
}

// y (rows, inner) = silu(gate) * up, where a block's left columns are gates and its right ones what they open.
template <class T>
void gated_rows(const T* x, const T* w, T* y, int64_t rows, int64_t in, int64_t inner) {
  multiply<T>(x, w, rows, in, (inner + 15) / 16, [&](int64_t row, int64_t block, Floats gate, Floats up) {
    const Floats g = rounded<T>(gate), falling = exponential(g < 0 ? g : -g);
    const Floats silu = g * (g < 0 ? falling : Floats{} + 1.0f) / (falling + 1.0f);
    const int64_t column = block * 16, width = std::min<int64_t>(16, inner - column);
    store(rounded<T>(silu) * rounded<T>(up), y + row * inner + column, width);
  });
}

// Where one layer's weights are; nullptr where it has none. sizes: numbers of each, in this order.
template <class T>
struct Layer {
  const T *norm, *qkv, *qkv_bias, *q_norm, *k_norm, *out, *out_bias, *mlp_norm, *gate_up, *down;  // norm: or the caller
  static constexpr size_t kParts = 10;

  Layer(const T* weights, at::IntArrayRef sizes) {
    const T** parts[] = {&norm, &qkv, &qkv_bias, &q_norm, &k_norm, &out, &out_bias, &mlp_norm, &gate_up, &down};
    for (size_t i = 0; i < kParts; weights += sizes[i++]) *parts[i] = sizes[i] ? weights : nullptr;
  }
};

template <class T>
void norm_rows(const T* x, const T* weight, float eps, T* y, int64_t rows, int64_t size) {
  at::parallel_for(0, rows, 8, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin * size; i < end * size; i += size) rms_norm(x + i, weight, size, eps, y + i);
  });
}

// model.RMSNorm of x (..., D): Inductor's own would sum one row in another order than several.
Tensor norm(const Tensor& x, const Tensor& weight, double eps) {
  const int64_t size = x.size(-1);
  TORCH_CHECK(x.is_contiguous() && weight.numel() == size, "x ", x.sizes(), " of strides ", x.strides());
  Tensor y = at::empty_like(x);
  auto run = [&]<class T>(T) {
    norm_rows<T>(x.const_data_ptr<T>(), weight.const_data_ptr<T>(), eps, y.mutable_data_ptr<T>(), x.numel() / size,
                 size);
  };
  x.scalar_type() == at::kFloat ? run(float()) : run(BFloat16());
  return y;
}

// A layer for `rows` rows of `size` numbers: x becomes x + attention(normed), and then that + mlp(mlp_norm(that)).
// normed (rows, in); inner: the mlp's width.
template <class T>
void run_layer(const Layer<T>& layer, T* x, const T* normed, const Attention<T>& where, const float* cos_sin, float eps,
               int64_t rows, int64_t size, int64_t in, int64_t inner) {
  const int64_t heads = where.heads + where.kv_heads, width = where.head_dim, all = heads + where.kv_heads;
  const float *cos = cos_sin, *sin = cos + rows * width / 2;
  auto scratch = [&](int64_t width) { return std::make_unique_for_overwrite<T[]>(rows * width); };
  const auto qkv = scratch(all * width), attended = scratch(where.heads * width), middle = scratch(size),
             gated = scratch(inner);
  linear_rows<T>(normed, layer.qkv, layer.qkv_bias, nullptr, qkv.get(), rows, in, all * width);
  at::parallel_for(0, rows, 2, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin * heads; i < end * heads; i++) {
      const int64_t row = i / heads, head = i % heads, angle = row * width / 2;
      const T* norm = head < where.heads ? layer.q_norm : layer.k_norm;
      T* vector = qkv.get() + (row * all + head) * width;
      if (norm) rms_norm(vector, norm, width, eps, vector);
      rotate(vector, cos + angle, sin + angle, width);
    }
  });
  where.run(qkv.get(), attended.get());
  linear_rows<T>(attended.get(), layer.out, layer.out_bias, x, x, rows, where.heads * width, size);
  norm_rows<T>(x, layer.mlp_norm, eps, middle.get(), rows, size);
  gated_rows<T>(middle.get(), layer.gate_up, gated.get(), rows, size, inner);
  linear_rows<T>(gated.get(), layer.down, nullptr, x, x, rows, inner, size);
}

// A stack of layers. x (B, T, D); normed (B, T, in) what the first one's attention reads, if that is not norm(x);
// positions (B, T); cos_sin (2, B, T, 1, Hd / 2); weights: those of one layer after the other, of which `sizes` tells
// the parts; caches (n_layer, 2, ...): keys and values; windows: each layer's, 0 for none; shape: heads, key heads, head
// dim, inner. Returns x behind the last layer and, (B, T, n * D), as it enters those named in `taps` (n_layer: as it
// leaves the last one). One tensor each for weights and caches: what Python hands over costs a microsecond apiece.
std::tuple<Tensor, Tensor> layers(const Tensor& x, const std::optional<Tensor>& normed, const Tensor& positions,
                                  const Tensor& cos_sin, const Tensor& weights, at::IntArrayRef sizes, Tensor caches,
                                  at::IntArrayRef windows, at::IntArrayRef shape, double eps, at::IntArrayRef taps) {
  const int64_t batch = x.size(0), tokens = x.size(1), rows = batch * tokens, size = x.size(2), n = taps.size();
  const int64_t heads = shape[0], kv_heads = shape[1], head_dim = shape[2], inner = shape[3], count = windows.size();
  const int64_t in = normed ? normed->size(2) : size, cache = batch * kv_heads * head_dim, of_one = c10::sum_integers(sizes);
  const int64_t slots = caches.numel() / (2 * count * cache);
  TORCH_CHECK(head_dim % kColumns == 0 && head_dim <= kMaxHeadDim && slots % kChunk == 0, "heads of ", head_dim,
              ", slots ", slots);
  TORCH_CHECK(sizes.size() == Layer<float>::kParts && weights.numel() == count * of_one &&
                  sizes[1] == blocks_of((heads + 2 * kv_heads) * head_dim) * kColumns * in &&
                  sizes[5] == blocks_of(size) * kColumns * heads * head_dim &&
                  sizes[8] == (inner + 15) / 16 * kColumns * size && sizes[9] == blocks_of(size) * kColumns * inner,
              "weights ", weights.sizes(), " for ", count, " layers of ", sizes, ", x ", x.sizes(), ", shape ", shape);
  for (const Tensor& input : {x, normed.value_or(x), positions, cos_sin, weights, caches})
    TORCH_CHECK(input.is_contiguous(), "sizes ", input.sizes(), ", strides ", input.strides());
  Tensor y = at::empty_like(x), aux = at::empty({batch, tokens, n * size}, x.options());
  auto run = [&]<class T>(T) {
    T *stream = y.mutable_data_ptr<T>(), *keys = caches.mutable_data_ptr<T>();
    std::memcpy(stream, x.const_data_ptr<T>(), rows * size * sizeof(T));
    const auto own = std::make_unique_for_overwrite<T[]>(rows * size);
    for (int64_t i = 0; i <= count; i++, keys += 2 * cache * slots) {
      for (int64_t tap = 0; tap < n; tap++)
        for (int64_t row = 0; taps[tap] == i && row < rows; row++)
          std::memcpy(aux.mutable_data_ptr<T>() + (row * n + tap) * size, stream + row * size, size * sizeof(T));
      if (i == count) break;
      const Layer<T> layer(weights.const_data_ptr<T>() + i * of_one, sizes);
      if (layer.norm) norm_rows<T>(stream, layer.norm, eps, own.get(), rows, size);
      const Attention<T> where{batch, tokens, heads, kv_heads, head_dim, slots, windows[i],
                               positions.const_data_ptr<int64_t>(), keys, keys + cache * slots};
      run_layer<T>(layer, stream, layer.norm ? own.get() : normed->const_data_ptr<T>(), where,
                   cos_sin.const_data_ptr<float>(), eps, rows, size, in, inner);
    }
  };
  x.scalar_type() == at::kFloat ? run(float()) : run(BFloat16());
  return {y, aux};
}

}  // namespace

TORCH_LIBRARY(eagle_fast, library) {
  library.def("linear(Tensor x, Tensor packed, Tensor? bias, int out) -> Tensor");
  library.def("norm(Tensor x, Tensor weight, float eps) -> Tensor");
  library.def("layers(Tensor x, Tensor? normed, Tensor positions, Tensor cos_sin, Tensor weights, int[] sizes, "
              "Tensor(a!) caches, int[] windows, int[] shape, float eps, int[] taps) -> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(eagle_fast, CPU, library) {
  library.impl("linear", &linear);
  library.impl("norm", &norm);
  library.impl("layers", &layers);
}
