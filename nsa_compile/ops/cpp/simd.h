// Vectors of the machine's width, an exponential, and the matrix product made of these.
#pragma once

#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

namespace {

template <typename T>
using Vec = at::vec::Vectorized<T>;

template <typename T>
constexpr int64_t kLanes = Vec<T>::size();

// Rows of C that one micro kernel keeps in registers, two vectors each: 16 accumulators where there are 32 vector
// registers, 8 where there are 16.
#if defined(CPU_CAPABILITY_AVX512) || defined(__aarch64__)
constexpr int64_t kTileRows = 8;
#else
constexpr int64_t kTileRows = 4;
#endif

constexpr int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

constexpr int64_t divide_up(int64_t value, int64_t divisor) {
  return (value + divisor - 1) / divisor;
}

// Columns of a matrix in a buffer: whole vectors.
template <typename T>
constexpr int64_t padded_columns(int64_t columns) {
  return round_up(columns, kLanes<T>);
}

template <typename T>
constexpr T kInfinity = std::numeric_limits<T>::infinity();

// exp(x) for x <= 0 to about one unit in the last place; exactly 0 below -87, where the true value is at most 1.7e-38.
inline Vec<float> exp_nonpositive(const Vec<float>& x) {
  // exp(x) = 2^n exp(r) with n an integer and |r| <= ln(2) / 2; ln(2) in two parts keeps r exact.
  const Vec<float> smallest(-87.0f);
  // clamp_min keeps NaN, so that broken inputs stay visible.
  const Vec<float> clamped = at::vec::clamp_min(x, smallest);
  const Vec<float> n = (clamped * Vec<float>(1.44269504088896341f)).round();
  Vec<float> r = at::vec::fmadd(n, Vec<float>(-0.693145751953125f), clamped);
  r = at::vec::fmadd(n, Vec<float>(-1.42860682030941723212e-6f), r);
  Vec<float> p(1.3981999507e-3f);
  p = at::vec::fmadd(p, r, Vec<float>(8.3334519073e-3f));
  p = at::vec::fmadd(p, r, Vec<float>(4.1665795894e-2f));
  p = at::vec::fmadd(p, r, Vec<float>(1.6666665459e-1f));
  p = at::vec::fmadd(p, r, Vec<float>(5.0000001201e-1f));
  p = at::vec::fmadd(p, r * r, r + Vec<float>(1.0f));
#if defined(CPU_CAPABILITY_AVX512)
  return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, smallest, _CMP_NLT_UQ), p, n);
#else
  const Vec<int32_t> biased = at::vec::convert_to_int_of_same_size<float>(n) + Vec<int32_t>(127);
  const Vec<float> power = at::vec::cast<float, int32_t>(biased << Vec<int32_t>(23));
  return Vec<float>::blendv(p * power, Vec<float>(0.0f), x < smallest);
#endif
}

inline Vec<double> exp_nonpositive(const Vec<double>& x) {
  return x.exp();
}

template <typename T>
inline T largest_lane(const Vec<T>& x) {
  return at::vec::vec_reduce_all<T>([](const Vec<T>& a, const Vec<T>& b) { return at::vec::maximum(a, b); }, x);
}

template <typename T>
inline T sum_of_lanes(const Vec<T>& x) {
  return at::vec::vec_reduce_all<T>([](const Vec<T>& a, const Vec<T>& b) { return a + b; }, x);
}

// The sums of the lanes of four vectors at once: that many rearrange together for little more than one.
constexpr int kSums = 4;

template <typename T>
inline __attribute__((always_inline)) void sums_of_lanes(const Vec<T>* x, T* sums) {
#if defined(CPU_CAPABILITY_AVX512)
  if constexpr (std::is_same_v<T, float>) {
    const auto pairs = [](__m512 a, __m512 b) {
      return _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    };
    const __m512 low = pairs(x[0], x[1]), high = pairs(x[2], x[3]);
    const __m512 fours = _mm512_add_ps(_mm512_shuffle_ps(low, high, 0x44), _mm512_shuffle_ps(low, high, 0xee));
    const __m256 halves = _mm256_add_ps(_mm512_castps512_ps256(fours), _mm512_extractf32x8_ps(fours, 1));
    _mm_storeu_ps(sums, _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1)));
    return;
  }
#elif defined(CPU_CAPABILITY_AVX2)
  if constexpr (std::is_same_v<T, float>) {
    const auto pairs = [](__m256 a, __m256 b) {
      return _mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
    };
    const __m256 low = pairs(x[0], x[1]), high = pairs(x[2], x[3]);
    const __m256 fours = _mm256_add_ps(_mm256_shuffle_ps(low, high, 0x44), _mm256_shuffle_ps(low, high, 0xee));
    _mm_storeu_ps(sums, _mm_add_ps(_mm256_castps256_ps128(fours), _mm256_extractf128_ps(fours, 1)));
    return;
  }
#endif
  for (int i = 0; i < kSums; i++) sums[i] = sum_of_lanes(x[i]);
}

// The rows of a matrix, at a fixed distance from one another or wherever pointers say.
template <typename T>
struct Strided {
  T* first;
  int64_t stride;
  T* operator[](int64_t row) const { return first + row * stride; }
};

template <typename T>
struct Scattered {
  T* const* rows;
  T* operator[](int64_t row) const { return rows[row]; }
};

// Asks for `count` rows of `bytes` that a product will need soon. Rows at fixed distances come by themselves; scattered
// ones would each be waited for.
template <typename T>
inline void prefetch(const Strided<T>&, int64_t, int64_t, int64_t) {}

template <typename T>
inline void prefetch(const Scattered<T>& rows, int64_t first, int64_t count, int64_t bytes) {
  for (int64_t row = first; row < first + count; row++) {
    const char* start = reinterpret_cast<const char*>(rows[row]);
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(start + at, !std::is_const_v<T>, 3);
  }
}

// How a product uses its left operand: as it lies, or transposed.
enum class Left { kPlain, kTransposed };

// C[row : row + kRows, column : column + kVectors * lanes] = A B, or C + A B. The sum over the depth is completed
// before it is added to C: long sums in pieces round less.
template <typename T, int kRows, int kVectors, Left kLeft, typename A, typename B, typename C>
inline __attribute__((always_inline)) void micro_kernel(
    int64_t row, int64_t column, int64_t depth, const A& a, const B& b, const C& c, bool accumulate) {
  const T* left_rows[kRows];
  if constexpr (kLeft == Left::kPlain) {
#pragma GCC unroll 8
    for (int i = 0; i < kRows; i++) left_rows[i] = a[row + i];
  }
  Vec<T> sum[kRows][kVectors];
#pragma GCC unroll 8
  for (int i = 0; i < kRows; i++) {
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; j++) sum[i][j] = Vec<T>(T(0));
  }
  for (int64_t k = 0; k < depth; k++) {
    const T* right_row = b[k] + column;
    Vec<T> right[kVectors];
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; j++) right[j] = Vec<T>::loadu(right_row + j * kLanes<T>);
#pragma GCC unroll 8
    for (int i = 0; i < kRows; i++) {
      const Vec<T> left(kLeft == Left::kPlain ? left_rows[i][k] : a[k][row + i]);
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; j++) sum[i][j] = at::vec::fmadd(left, right[j], sum[i][j]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kRows; i++) {
    T* target = c[row + i] + column;
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; j++) {
      (accumulate ? sum[i][j] + Vec<T>::loadu(target + j * kLanes<T>) : sum[i][j]).store(target + j * kLanes<T>);
    }
  }
}

// C[rows, columns] = A B, or C + A B, with A[rows, depth] (plain) or A[depth, rows] (transposed) and B[depth, columns].
// C has rows up to a multiple of kTileRows and, like B, padded_columns(columns) columns; the padding of C is written.
// So are the rows of a plain A padded, and the columns of a transposed one; what the padding holds reaches only C's
// padding.
template <typename T, Left kLeft, typename A, typename B, typename C>
void multiply(int64_t rows, int64_t columns, int64_t depth, const A& a, const B& b, const C& c, bool accumulate) {
  int64_t column = 0;
  for (; column + 2 * kLanes<T> <= padded_columns<T>(columns); column += 2 * kLanes<T>) {
    for (int64_t row = 0; row < rows; row += kTileRows) {
      if (column == 0 && row + kTileRows < rows) {
        if (kLeft == Left::kPlain) prefetch(a, row + kTileRows, kTileRows, depth * sizeof(T));
        prefetch(c, row + kTileRows, kTileRows, columns * sizeof(T));
      }
      micro_kernel<T, kTileRows, 2, kLeft>(row, column, depth, a, b, c, accumulate);
    }
  }
  if (column < columns) {
    for (int64_t row = 0; row < rows; row += kTileRows) {
      micro_kernel<T, kTileRows, 1, kLeft>(row, column, depth, a, b, c, accumulate);
    }
  }
}

}  // namespace
