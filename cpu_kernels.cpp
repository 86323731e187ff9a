// Operators for decoding on a CPU, where a step costs what it reads: `linear` over packed weights, `norm`, and `layers`, a
// stack of decoder layers over caches of which only the filled slots are read. cpu_kernels.py builds this file and makes
// the layouts it reads.
//
// All arithmetic is one kernel, `tile`: rows of x times 32 columns of w, over 32-bit *words* that hold two bfloat16 or
// one float. Weights in eight bits become such words in registers, which costs nothing: the memory is what takes its time.
// Every sum runs in the same order whatever the number of rows, so that a row's result does not depend on
// its company: a row alone, as plain decoding has it, and the same row among K + 1 in a verification are equal bits. (So
// -ffp-contract=fast: a product and a sum are one instruction in every version of `tile`, or else in none.)

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/util/accumulate.h>
#include <torch/library.h>

#include <omp.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>
#if defined(__AVX512BF16__) || defined(__AVX512VBMI__)
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

// 32 columns of words of T, `stride` words apart.
template <class T>
struct Plain {
  static constexpr int kStep = 1;  // words of x that one of w is multiplied by
  const uint32_t* words;
  int64_t stride;

  void load(int64_t k, Words& left, Words& right) const {
    std::memcpy(&left, words + k * stride, sizeof left);
    std::memcpy(&right, words + k * stride + 16, sizeof right);
  }
  static Floats add(Floats sum, Words w, const uint32_t* x) { return multiply_add<T>(sum, w, *x); }
};

// What a code means: a sign, and one of 128 magnitudes, all of them exactly bfloat16. `lowest`: the upper byte of what
// minus zero stands for, which is -128 among int8s.
struct Meaning {
  alignas(64) std::array<uint8_t, 128> low{}, high{};
  uint8_t lowest;

  constexpr Meaning(bool is_float8) : lowest(is_float8 ? 0x80 : 0xc3) {
    for (int i = 0; i < 128; i++) {
      float value = i;
      if (is_float8) {  // e4m3: 4 bits of exponent, 3 of mantissa; 127 is NaN
        value = (i < 8 ? i : 8 + i % 8) / 512.0f;
        for (int e = 1; e < i / 8; e++) value *= 2;
      }
      const uint32_t bits = is_float8 && i == 127 ? 0x7fc00000u : std::bit_cast<uint32_t>(value);
      low[i] = bits >> 16 & 255, high[i] = bits >> 24;
    }
  }
};
constexpr Meaning kInt8Meaning(false), kFloat8Meaning(true);

// Without AVX512-VBMI the tables are read number by number: right, but slower than weights of 16 bits.
#ifdef __AVX512VBMI__
constexpr bool kReadsCodes = true;
#else
constexpr bool kReadsCodes = false;
#endif

// 32 columns of codes. 64 of them are words of two inputs: of every 16, the first 8 are 4 left columns', the others 4
// right ones'.
template <class T>
struct Codes {
  static constexpr int kStep = 2 / kPerWord<T>;
  const uint8_t* codes;
  const Meaning& meaning;

#ifdef __AVX512VBMI__
  void load(int64_t k, Words& left, Words& right) const {
    const auto table = [](const auto& bytes, int half) { return _mm512_load_si512(&bytes[64 * half]); };
    const __m512i code = _mm512_loadu_si512(codes + 64 * k), sign = _mm512_set1_epi8(char(0x80));
    const __m512i low = _mm512_permutex2var_epi8(table(meaning.low, 0), code, table(meaning.low, 1));
    __m512i high = _mm512_permutex2var_epi8(table(meaning.high, 0), code, table(meaning.high, 1));
    high = _mm512_ternarylogic_epi32(high, code, sign, 0xf8);  // high | (code & sign)
    high = _mm512_mask_mov_epi8(high, _mm512_cmpeq_epi8_mask(code, sign), _mm512_set1_epi8(char(meaning.lowest)));
    left = (Words)_mm512_unpacklo_epi8(low, high);
    right = (Words)_mm512_unpackhi_epi8(low, high);
  }
#else
  uint32_t number(uint8_t code) const {
    if (code == 0x80) return meaning.lowest << 8;
    return meaning.low[code & 127] | (meaning.high[code & 127] | (code & 128)) << 8;
  }
  void load(int64_t k, Words& left, Words& right) const {
    for (int i = 0; i < 16; i++) {
      const uint8_t* pair = codes + 64 * k + i / 4 * 16 + i % 4 * 2;
      left[i] = number(pair[0]) | number(pair[1]) << 16;
      right[i] = number(pair[8]) | number(pair[9]) << 16;
    }
  }
#endif
  static Floats add(Floats sum, Words w, const uint32_t* x) {
    if constexpr (kStep == 1) return multiply_add<BFloat16>(sum, w, *x);
    sum += (Floats)(w << 16) * as_float(x[0]);
    return sum + (Floats)(w & 0xffff0000u) * as_float(x[1]);
  }
};

// y[r] = sum over k < n of x[r][k] * w[k], for R rows of words `x_stride` apart and 32 columns of w.
template <int R, class W>
void tile(const uint32_t* x, int64_t x_stride, const W& w, int64_t n, Floats (*y)[2]) {
  Floats sums[R][2] = {};
  for (int64_t k = 0; k < n; k++) {
    Words left, right;
    w.load(k, left, right);
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
      const uint32_t* value = x + r * x_stride + k * W::kStep;
      sums[r][0] = W::add(sums[r][0], left, value);
      sums[r][1] = W::add(sums[r][1], right, value);
    }
  }
  std::memcpy(y, sums, sizeof sums);
}

// The same for a number of rows, 1 to kRows, known only at run time.
template <class W, int R = kRows>
void tile(int rows, const uint32_t* x, int64_t x_stride, const W& w, int64_t n, Floats (*y)[2]) {
  if constexpr (R > 1) {
    if (rows < R) return tile<W, R - 1>(rows, x, x_stride, w, n, y);
  }
  tile<R, W>(x, x_stride, w, n, y);
}

// ---- threads ---------------------------------------------------------------------------------------------------------

// Threads that work in step. OpenMP starts them and makes a system call at each of its barriers; this one makes none
// unless it waits long, and a step has hundreds.
struct Team {
  const int64_t count;
  alignas(64) std::atomic<int64_t> arrived = 0;
  alignas(64) std::atomic<int64_t> generation = 0;

  void wait() {
    const int patience = count > omp_get_num_procs() ? 0 : 20000;  // looks, before whoever shares the core may have it
    const int64_t now = generation.load(std::memory_order_relaxed);
    if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == count) {
      arrived.store(0, std::memory_order_relaxed);
      generation.store(now + 1, std::memory_order_release);
    }
    for (int looks = 0; generation.load(std::memory_order_acquire) == now;)
      looks < patience ? (looks++, __builtin_ia32_pause()) : std::this_thread::yield();
  }
};

// One of them.
struct Member {
  Team& team;
  const int64_t index;

  // The part [begin, end) of n pieces that is this one's.
  std::pair<int64_t, int64_t> share(int64_t n) const {
    return {n * index / team.count, n * (index + 1) / team.count};
  }
  void wait() const {
    if (team.count > 1) team.wait();
  }
};

// work(Member) by torch's threads, or by this one alone where there is little to do. It must not throw.
template <class Work>
void in_team(bool much, const Work& work) {
  const bool several = much && !at::in_parallel_region() && at::get_num_threads() > 1;
  std::unique_ptr<Team> team;
#pragma omp parallel if (several)
  {
#pragma omp single
    team.reset(new Team{omp_get_num_threads()});  // may be fewer than asked for
    work(Member{*team, omp_get_thread_num()});
  }
}

// ---- linear ----------------------------------------------------------------------------------------------------------

// Packed weights, in blocks of 32 columns: numbers of the type of x; or 32 scales, and then codes.
enum Kind : int64_t { kPlain, kInt8, kFloat8 };

struct Matrix {
  Kind kind;
  const uint8_t* data;
};

int64_t block_bytes(int64_t kind, int64_t in, int64_t of_one) {
  return kColumns * (kind == kPlain ? in * of_one : in + int64_t(sizeof(float)));
}

// The products of `rows` rows of x, `in` numbers each, with `blocks` blocks of weights, of which weights(block) is one:
// for each row and block, write(row, block, sums of its left columns, of its right ones).
template <class T, class Weights, class Write>
void multiply(const Member& me, const T* x, int64_t rows, int64_t in, int64_t blocks, const Weights& weights,
              const Write& write) {
  const int64_t stride = in / kPerWord<T>;
  const auto [begin, end] = me.share(blocks);
  Floats sums[kRows][2];
  for (int64_t block = begin; block < end; block++) {
    const auto w = weights(block);
    for (int64_t row = 0; row < rows; row += kRows) {  // meanwhile the block's weights stay in the core's cache
      const int count = std::min<int64_t>(kRows, rows - row);
      tile(count, words(x + row * in), stride, w, stride / w.kStep, sums);
      for (int r = 0; r < count; r++) write(row + r, block, sums[r][0], sums[r][1]);
    }
  }
  me.wait();
}

template <class T, class Write>
void multiply(const Member& me, const T* x, const Matrix& w, int64_t rows, int64_t in, int64_t blocks,
              const Write& write) {
  if (w.kind == kPlain) {
    const auto plain = [&](int64_t block) {
      return Plain<T>{words((const T*)w.data + block * kColumns * in), kColumns};
    };
    return multiply(me, x, rows, in, blocks, plain, write);
  }
  const Meaning& meaning = w.kind == kInt8 ? kInt8Meaning : kFloat8Meaning;
  const auto scales = [&](int64_t block) { return (const float*)(w.data + block * block_bytes(w.kind, in, 1)); };
  const auto codes = [&](int64_t block) { return Codes<T>{(const uint8_t*)(scales(block) + kColumns), meaning}; };
  multiply(me, x, rows, in, blocks, codes, [&](int64_t row, int64_t block, Floats left, Floats right) {
    write(row, block, left * load(scales(block)), right * load(scales(block) + 16));
  });
}

int64_t blocks_of(int64_t columns) { return (columns + kColumns - 1) / kColumns; }

// y = x w^T (+ bias) (+ residual), rounded where PyTorch rounds. x (rows, in), y and residual (rows, out).
template <class T>
void linear_rows(const Member& me, const T* x, const Matrix& w, const T* bias, const T* residual, T* y, int64_t rows,
                 int64_t in, int64_t out) {
  multiply(me, x, w, rows, in, blocks_of(out), [&](int64_t row, int64_t block, Floats left, Floats right) {
    for (int64_t column = block * kColumns, half = 0; half < 2 && column < out; half++, column += 16) {
      const int64_t width = std::min<int64_t>(16, out - column);
      Floats sum = half ? right : left;
      if (bias) sum += load(bias + column, width);
      if (residual) sum = rounded<T>(sum) + load(residual + row * out + column, width);
      store(sum, y + row * out + column, width);
    }
  });
}

// x (..., in) -> (..., out). packed: blocks of 32 outputs, of kPlain (out / 32, in / p, 32, p), words of p inputs; of
// codes (out / 32, bytes).
Tensor linear(const Tensor& x, const Tensor& packed, const std::optional<Tensor>& bias, int64_t out, int64_t kind) {
  const int64_t in = x.size(-1);
  const int64_t bytes = blocks_of(out) * block_bytes(kind, in, x.element_size());
  TORCH_CHECK(x.is_contiguous() && int64_t(packed.nbytes()) == bytes && (kind == kPlain || in % 2 == 0), "x ",
              x.sizes(), " of strides ", x.strides(), ", weights ", packed.sizes(), " of kind ", kind, ", outputs ", out);
  const Matrix w{Kind(kind), (const uint8_t*)packed.const_data_ptr()};
  auto shape = x.sizes().vec();
  shape.back() = out;
  Tensor y = at::empty(shape, x.options());
  auto run = [&]<class T>(T) {
    const T* added = bias ? bias->const_data_ptr<T>() : nullptr;
    const T* from = x.const_data_ptr<T>();
    T* to = y.mutable_data_ptr<T>();
    in_team(true, [&](const Member& me) {
      linear_rows<T>(me, from, w, added, nullptr, to, x.numel() / in, in, out);
    });
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
      tile(rows, words(q), n, Plain<T>{words(k + (begin + c) * head_dim), kColumns}, n, sums);
      for (int r = 0; r < rows; r++) std::memcpy(scores[r] + c, sums[r], sizeof sums[r]);
    }
    for (int r = 0; r < rows; r++) softmax(scores[r], r, begin, 1 / std::sqrt(float(head_dim)), weights[r], part);
    for (int64_t d = 0; d < head_dim; d += kColumns) {
      const Plain<T> values{words(v + begin * head_dim) + d, head_dim};
      tile(rows, words(weights[0]), kChunk / kPerWord<T>, values, kChunk / kPerWord<T>, sums);
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

// The sizes of a call, and which chunks of keys its blocks of query rows see. Row r of a key head's blocks is query head
// r % group of token r / group.
struct Reach {
  int64_t batch, tokens, heads, kv_heads, head_dim, slots, window;
  const int64_t* positions;                   // (B, T)
  std::vector<int64_t> starts = {0}, firsts;  // of each block: where its chunks start among all, its first one
  bool share_chunks;                          // few rows, as in a round: the threads share the chunks of each block

  Reach(int64_t batch, int64_t tokens, at::IntArrayRef shape, int64_t slots, int64_t window, const int64_t* positions)
      : batch(batch), tokens(tokens), heads(shape[0]), kv_heads(shape[1]), head_dim(shape[2]), slots(slots),
        window(window), positions(positions) {
    for (int64_t i = 0; i < blocks(); i++) {
      int64_t first = slots, end = 0;
      for (int r = 0; r < rows(i); r++) {
        const auto [from, to] = seen(i, r);
        first = std::min(first, from), end = std::max(end, to);
      }
      firsts.push_back(first / kChunk);
      starts.push_back(starts.back() + std::max<int64_t>(0, (end + kChunk - 1) / kChunk - firsts.back()));
    }
    share_chunks = blocks() < 4 * at::get_num_threads() && blocks_per_head() <= kFewBlocks;
  }

  int64_t group() const { return heads / kv_heads; }
  int64_t all_heads() const { return heads + 2 * kv_heads; }
  int64_t blocks_per_head() const { return (group() * tokens + kRows - 1) / kRows; }
  int64_t blocks() const { return batch * kv_heads * blocks_per_head(); }
  int64_t first_row(int64_t i) const { return i % blocks_per_head() * kRows; }
  int64_t head(int64_t i) const { return i / blocks_per_head() % kv_heads; }
  int64_t sequence(int64_t i) const { return i / blocks_per_head() / kv_heads; }
  int rows(int64_t i) const { return std::min<int64_t>(kRows, group() * tokens - first_row(i)); }
  // Of row r of block i: (b, t) as one number.
  int64_t token(int64_t i, int r) const { return sequence(i) * tokens + (first_row(i) + r) / group(); }

  // The slots [first, end) that row r of block i sees. Padding stands in the last slot and sees nothing.
  std::pair<int64_t, int64_t> seen(int64_t i, int r) const {
    const int64_t position = positions[token(i, r)], end = position + 1;
    if (position == slots - 1) return {slots, 0};
    return {window > 0 ? std::max<int64_t>(0, end - window) : 0, end};
  }

  int64_t part_numbers() const { return share_chunks ? starts.back() * kRows * (head_dim + 2) : 0; }
};

template <class T>
struct Attention {
  const Reach& reach;
  T *k_cache, *v_cache;

  // Puts a new key or value of row (b, t) into its slot; not padding's, which nobody sees.
  void write(const T* vector, int64_t row, int64_t head, bool is_key) const {
    constexpr int p = kPerWord<T>;
    const int64_t slot = reach.positions[row], head_dim = reach.head_dim;
    const int64_t start = (row / reach.tokens * reach.kv_heads + head) * reach.slots;
    T* keys = k_cache + (start + slot / kColumns * kColumns) * head_dim;
    T* values = v_cache + (start + slot / p * p) * head_dim;
    for (int64_t d = 0; d < head_dim; d++)
      (is_key ? keys[(d / p * kColumns + slot % kColumns) * p + d % p] : values[d * p + slot % p]) = vector[d];
  }

  void fill(Block<T>& block, int64_t i, const T* qkv, T* y) const {
    const int64_t head_dim = reach.head_dim;
    const int64_t cache = (reach.sequence(i) * reach.kv_heads + reach.head(i)) * reach.slots * head_dim;
    block.rows = reach.rows(i), block.k = k_cache + cache, block.v = v_cache + cache;
    for (int r = 0; r < block.rows; r++) {
      const int64_t query = reach.head(i) * reach.group() + (reach.first_row(i) + r) % reach.group();
      std::tie(block.first[r], block.end[r]) = reach.seen(i, r);
      block.y[r] = y + (reach.token(i, r) * reach.heads + query) * head_dim;
      const T* q = qkv + (reach.token(i, r) * reach.all_heads() + query) * head_dim;
      std::memcpy(block.q + r * head_dim, q, head_dim * sizeof(T));
    }
  }

  // qkv (B, T, H + 2 Hkv, Hd), y (B, T, H, Hd), parts: reach.part_numbers(). Whether the threads share chunks or blocks,
  // the chunks are added up in the same order.
  void run(const Member& me, const T* qkv, T* y, float* parts) const {
    const int64_t head_dim = reach.head_dim;
    const auto& starts = reach.starts;
    auto part = [&](int64_t c) { return Part(parts + c * Part::size(head_dim)); };
    Block<T> block;
    if (reach.share_chunks) {
      const auto [begin, end] = me.share(starts.back());
      int64_t i = std::upper_bound(starts.begin(), starts.end(), begin) - starts.begin() - 1;
      for (int64_t c = begin; c < end; c++) {
        while (c >= starts[i + 1]) i++;
        if (c == begin || c == starts[i]) fill(block, i, qkv, y);
        block.over(reach.firsts[i] + c - starts[i], head_dim, part(c));
      }
      me.wait();
    }
    float own[2 * kRows * (kMaxHeadDim + 2)];
    Part all(own), next(own + Part::size(head_dim));
    const auto [begin, end] = me.share(reach.blocks());
    for (int64_t i = begin; i < end; i++) {
      fill(block, i, qkv, y);
      all.clear(block.rows, head_dim);
      for (int64_t c = starts[i]; c < starts[i + 1]; c++) {
        if (!reach.share_chunks) block.over(reach.firsts[i] + c - starts[i], head_dim, next);
        all.add(reach.share_chunks ? part(c) : next, block.rows, head_dim);
      }
      block.finish(all, head_dim);
    }
    me.wait();
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
void gated_rows(const Member& me, const T* x, const Matrix& w, T* y, int64_t rows, int64_t in, int64_t inner) {
  multiply(me, x, w, rows, in, (inner + 15) / 16, [&](int64_t row, int64_t block, Floats gate, Floats up) {
    const Floats g = rounded<T>(gate), falling = exponential(g < 0 ? g : -g);
    const Floats silu = g * (g < 0 ? falling : Floats{} + 1.0f) / (falling + 1.0f);
    const int64_t column = block * 16, width = std::min<int64_t>(16, inner - column);
    store(rounded<T>(silu) * rounded<T>(up), y + row * inner + column, width);
  });
}

// Where one layer's weights are; nullptr where it has none (norm: where the caller has normed). sizes: bytes of each,
// in this order; kinds: what the matrices' are.
template <class T>
struct Layer {
  const T *norm, *qkv_bias, *q_norm, *k_norm, *out_bias, *mlp_norm;
  Matrix qkv, out, gate_up, down;
  static constexpr size_t kParts = 10;

  Layer(const uint8_t* weights, at::IntArrayRef sizes, at::IntArrayRef kinds) {
    const uint8_t* at[kParts];
    for (size_t i = 0; i < kParts; weights += sizes[i++]) at[i] = sizes[i] ? weights : nullptr;
    const T** vectors[kParts] = {&norm, nullptr, &qkv_bias, &q_norm, &k_norm, nullptr, &out_bias, &mlp_norm};
    Matrix* matrices[kParts] = {nullptr, &qkv, nullptr, nullptr, nullptr, &out, nullptr, nullptr, &gate_up, &down};
    for (size_t i = 0; i < kParts; i++) {
      if (matrices[i]) *matrices[i] = Matrix{Kind(kinds[i]), at[i]};
      if (vectors[i]) *vectors[i] = (const T*)at[i];
    }
  }
};

template <class T>
void norm_rows(const Member& me, const T* x, const T* weight, float eps, T* y, int64_t rows, int64_t size) {
  const auto [begin, end] = me.share(rows);
  for (int64_t i = begin; i < end; i++) rms_norm(x + i * size, weight, size, eps, y + i * size);
  me.wait();
}

// model.RMSNorm of x (..., D): Inductor's own would sum one row in another order than several.
Tensor norm(const Tensor& x, const Tensor& weight, double eps) {
  const int64_t size = x.size(-1);
  TORCH_CHECK(x.is_contiguous() && weight.numel() == size, "x ", x.sizes(), " of strides ", x.strides());
  Tensor y = at::empty_like(x);
  auto run = [&]<class T>(T) {
    const T *from = x.const_data_ptr<T>(), *by = weight.const_data_ptr<T>();
    T* to = y.mutable_data_ptr<T>();
    const int64_t rows = x.numel() / size;
    in_team(rows >= 8, [&](const Member& me) { norm_rows<T>(me, from, by, eps, to, rows, size); });
  };
  x.scalar_type() == at::kFloat ? run(float()) : run(BFloat16());
  return y;
}

// What a layer leaves on its way, for `rows` rows; all layers use the same.
template <class T>
struct Scratch {
  std::unique_ptr<T[]> normed, qkv, attended, gated;
  std::unique_ptr<float[]> parts;

  Scratch(int64_t rows, int64_t size, const Reach& reach, int64_t inner, int64_t part_numbers)
      : normed(new T[rows * size]), qkv(new T[rows * reach.all_heads() * reach.head_dim]),
        attended(new T[rows * reach.heads * reach.head_dim]), gated(new T[rows * inner]),
        parts(new float[part_numbers]) {}
};

// A layer for `rows` rows of `size` numbers: x becomes x + attention(normed), and then that + mlp(mlp_norm(that)).
// normed (rows, in), which may be the scratch's; inner: the mlp's width.
template <class T>
void run_layer(const Member& me, const Layer<T>& layer, T* x, const T* normed, const Attention<T>& attention,
               const float* cos_sin, float eps, int64_t rows, int64_t size, int64_t in, int64_t inner,
               const Scratch<T>& scratch) {
  const Reach& reach = attention.reach;
  const int64_t width = reach.head_dim, all = reach.all_heads();
  linear_rows<T>(me, normed, layer.qkv, layer.qkv_bias, nullptr, scratch.qkv.get(), rows, in, all * width);
  const auto [begin, end] = me.share(rows * all);
  for (int64_t i = begin; i < end; i++) {
    const int64_t row = i / all, head = i % all, key = head - reach.heads, value = key - reach.kv_heads;
    const float* cos = cos_sin + row * width / 2;
    const T* norm = key < 0 ? layer.q_norm : layer.k_norm;
    T* vector = scratch.qkv.get() + i * width;
    if (value < 0 && norm) rms_norm(vector, norm, width, eps, vector);
    if (value < 0) rotate(vector, cos, cos + rows * width / 2, width);
    const bool padding = reach.positions[row] == reach.slots - 1;
    if (key >= 0 && !padding) attention.write(vector, row, value < 0 ? key : value, value < 0);
  }
  me.wait();
  attention.run(me, scratch.qkv.get(), scratch.attended.get(), scratch.parts.get());
  linear_rows<T>(me, scratch.attended.get(), layer.out, layer.out_bias, x, x, rows, reach.heads * width, size);
  norm_rows<T>(me, x, layer.mlp_norm, eps, scratch.normed.get(), rows, size);
  gated_rows<T>(me, scratch.normed.get(), layer.gate_up, scratch.gated.get(), rows, size, inner);
  linear_rows<T>(me, scratch.gated.get(), layer.down, nullptr, x, x, rows, inner, size);
}

// A stack of layers. x (B, T, D); normed (B, T, in) what the first one's attention reads, if that is not norm(x);
// positions (B, T); cos_sin (2, B, T, 1, Hd / 2); weights: bytes, those of one layer after the other, of which `sizes`
// and `kinds` tell the parts; caches (n_layer, 2, B, Hkv, S, Hd), keys and values in their own orders; windows: each
// layer's, 0 for none; shape: heads, key heads, head dim, inner. Returns x behind the last layer and, (B, T, n * D), as
// it enters those named in `taps` (n_layer: as it leaves the last one). One tensor each for weights and caches: what Python hands over costs a microsecond apiece.
std::tuple<Tensor, Tensor> layers(const Tensor& x, const std::optional<Tensor>& normed, const Tensor& positions,
                                  const Tensor& cos_sin, const Tensor& weights, at::IntArrayRef sizes,
                                  at::IntArrayRef kinds, Tensor caches, at::IntArrayRef windows, at::IntArrayRef shape,
                                  double eps, at::IntArrayRef taps) {
  const int64_t batch = x.size(0), tokens = x.size(1), rows = batch * tokens, size = x.size(2), n = taps.size();
  const int64_t heads = shape[0], kv_heads = shape[1], head_dim = shape[2], inner = shape[3], count = windows.size();
  const int64_t in = normed ? normed->size(2) : size, of_one = c10::sum_integers(sizes), slots = caches.size(4);
  const int64_t cache = batch * kv_heads * slots * head_dim;  // numbers
  TORCH_CHECK(head_dim % kColumns == 0 && head_dim <= kMaxHeadDim && slots % kChunk == 0, "heads of ", head_dim,
              ", slots ", slots);
  TORCH_CHECK(caches.numel() == 2 * count * cache && caches.size(2) == batch && positions.numel() == rows &&
                  cos_sin.numel() == rows * head_dim, "caches ", caches.sizes(), ", positions ", positions.sizes(),
              ", cos and sin ", cos_sin.sizes());
  const auto fits = [&](int part, int64_t blocks, int64_t in) {
    const bool even = kinds[part] == kPlain || in % 2 == 0;
    return even && sizes[part] == blocks * block_bytes(kinds[part], in, x.element_size());
  };
  TORCH_CHECK(sizes.size() == Layer<float>::kParts && kinds.size() == sizes.size() &&
                  (sizes[0] > 0) != normed.has_value() && int64_t(weights.nbytes()) == count * of_one &&
                  fits(1, blocks_of((heads + 2 * kv_heads) * head_dim), in) &&
                  fits(5, blocks_of(size), heads * head_dim) && fits(8, (inner + 15) / 16, size) &&
                  fits(9, blocks_of(size), inner) && caches.scalar_type() == x.scalar_type(),
              "weights ", weights.sizes(), " for ", count, " layers of ", sizes, ", kinds ", kinds, ", x ", x.sizes(),
              ", shape ", shape);
  for (const Tensor& input : {x, normed.value_or(x), positions, cos_sin, weights, caches})
    TORCH_CHECK(input.is_contiguous(), "sizes ", input.sizes(), ", strides ", input.strides());
  const int64_t* where = positions.const_data_ptr<int64_t>();
  for (int64_t row = 0; row < rows; row++)
    TORCH_CHECK(0 <= where[row] && where[row] < slots, "position ", where[row], " in a cache of ", slots, " slots");
  std::map<int64_t, Reach> reaches;  // by window: most models have one or two
  int64_t part_numbers = 0;
  for (const int64_t window : windows)
    part_numbers = std::max(part_numbers, reaches.try_emplace(window, batch, tokens, shape, slots, window, where)
                                              .first->second.part_numbers());
  Tensor y = at::empty_like(x), aux = at::empty({batch, tokens, n * size}, x.options());
  auto run = [&]<class T>(T) {
    const T* given = normed ? normed->const_data_ptr<T>() : nullptr;
    T *stream = y.mutable_data_ptr<T>(), *keys = caches.mutable_data_ptr<T>(), *states = aux.mutable_data_ptr<T>();
    const float* angles = cos_sin.const_data_ptr<float>();
    std::memcpy(stream, x.const_data_ptr<T>(), rows * size * sizeof(T));
    const Scratch<T> scratch(rows, size, reaches.begin()->second, inner, part_numbers);
    in_team(true, [&](const Member& me) {
      for (int64_t i = 0; i <= count; i++) {
        for (int64_t tap = 0; tap < n; tap++)
          for (int64_t row = 0; me.index == 0 && taps[tap] == i && row < rows; row++)
            std::memcpy(states + (row * n + tap) * size, stream + row * size, size * sizeof(T));
        if (i == count) break;
        const Layer<T> layer((const uint8_t*)weights.const_data_ptr() + i * of_one, sizes, kinds);
        T* cached = keys + 2 * i * cache;
        if (layer.norm) norm_rows<T>(me, stream, layer.norm, eps, scratch.normed.get(), rows, size);
        run_layer<T>(me, layer, stream, layer.norm ? scratch.normed.get() : given,
                     {reaches.at(windows[i]), cached, cached + cache}, angles, eps, rows, size, in, inner,
                     scratch);
      }
    });
  };
  x.scalar_type() == at::kFloat ? run(float()) : run(BFloat16());
  return {y, aux};
}

}  // namespace

TORCH_LIBRARY(eagle_fast, library) {
  library.def("linear(Tensor x, Tensor packed, Tensor? bias, int out, int kind) -> Tensor");
  library.def("reads_codes() -> bool", [] { return kReadsCodes; });
  library.def("norm(Tensor x, Tensor weight, float eps) -> Tensor");
  library.def("layers(Tensor x, Tensor? normed, Tensor positions, Tensor cos_sin, Tensor weights, int[] sizes, "
              "int[] kinds, Tensor(a!) caches, int[] windows, int[] shape, float eps, int[] taps) -> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(eagle_fast, CPU, library) {
  library.impl("linear", &linear);
  library.impl("norm", &norm);
  library.impl("layers", &layers);
}
