// Few rows times a matrix that is read once: out[m, n] = Σ_k x[m, k] weight[n, k] + bias[n].
//
// The time goes into reading the matrix, so its rows are dealt out to the threads, and each is used for all rows of x
// while it is near. An element is one sum over k, in vectors and then over their lanes: it depends neither on the number
// of rows nor on the number of threads.

#include "tensor.h"

namespace {

constexpr int kColumns = 4;                  // rows of the matrix in a tile: each is a stream from memory
constexpr int kFewColumns = 3;               // beside kTileRows rows of x: as many sums as there are registers for
constexpr int64_t kBytesOfThread = 1 << 16;  // of the matrix: waking a thread takes as long as reading some

struct Product {
  int64_t rows, columns, depth;     // M, N, K
  int64_t x_stride, weight_stride;  // from one row to the next, in elements
};

template <typename T>
class Skinny {
 public:
  Skinny(const Product& product, const void* x, const void* weight, const void* bias, void* out, int64_t threads)
      : product_(product),
        depth_(padded_columns<T>(product.depth)),
        in_place_(depth_ == product.depth),
        weight_(static_cast<const T*>(weight)),
        bias_(static_cast<const T*>(bias)),
        out_(static_cast<T*>(out)),
        x_(product.rows * depth_),
        copies_(threads, in_place_ ? 0 : kColumns * depth_) {
    for (int64_t m = 0; m < product.rows; m++) {
      load(static_cast<const T*>(x) + m * product.x_stride, x_.data() + m * depth_);
    }
  }

  // Columns first … last - 1 of the output.
  void columns(int64_t first, int64_t last, int64_t thread) const {
    if (product_.rows >= kTileRows) return in_tiles<kFewColumns>(first, last, thread);
    in_tiles<kColumns>(first, last, thread);
  }

 private:
  const Product& product_;
  int64_t depth_;  // in whole vectors
  bool in_place_;  // whether the matrix can be read as it lies
  const T *weight_, *bias_;
  T* out_;
  Buffer<T> x_;
  ThreadBuffers<T> copies_;

  // A row of x or of the matrix, zeros up to whole vectors.
  void load(const T* row, T* target) const {
    load_elements(row, 1, product_.depth, target);
    fill(target + product_.depth, depth_ - product_.depth, T(0));
  }

  template <int kWidth>
  void in_tiles(int64_t first, int64_t last, int64_t thread) const {
    int64_t n = first;
    for (; n + kWidth <= last; n += kWidth) all_rows<kWidth>(n, thread);
    for (; n < last; n++) all_rows<1>(n, thread);
  }

  template <int kWidth>
  void all_rows(int64_t n, int64_t thread) const {
    const T* weight[kWidth];
    for (int j = 0; j < kWidth; j++) {
      const T* row = weight_ + (n + j) * product_.weight_stride;
      T* copy = copies_[thread] + j * depth_;
      if (!in_place_) load(row, copy);
      weight[j] = in_place_ ? row : copy;
    }
    int64_t m = 0;
    if constexpr (kWidth <= kFewColumns) m = tiles_of<kTileRows>(m, n, weight);
    m = tiles_of<kTileRows / 2>(m, n, weight);
    tiles_of<1>(m, n, weight);
  }

  // Tiles of so many rows from row m on; returns the first row that is left. The first tile of all asks for the next rows
  // of the matrix: of rows as long as its pages the processor does not foresee them.
  template <int kHeight, int kWidth>
  int64_t tiles_of(int64_t m, int64_t n, const T* const (&weight)[kWidth]) const {
    if (m == 0 && kHeight <= product_.rows && in_place_) tile<kHeight, kWidth, true>(m, n, weight), m += kHeight;
    for (; m + kHeight <= product_.rows; m += kHeight) tile<kHeight, kWidth, false>(m, n, weight);
    return m;
  }

  template <int kHeight, int kWidth, bool kAsks>
  void tile(int64_t m, int64_t n, const T* const* weight) const {
    constexpr int kCount = round_up(kHeight * kWidth, kSums);
    Vec<T> sum[kCount];  // [row, column]
#pragma GCC unroll 32
    for (int i = 0; i < kCount; i++) sum[i] = Vec<T>(T(0));
    const T* x = x_.data() + m * depth_;
    for (int64_t k = 0; k < depth_; k += kLanes<T>) {
      Vec<T> w[kWidth];
#pragma GCC unroll 4
      for (int j = 0; j < kWidth; j++) {
        if constexpr (kAsks) __builtin_prefetch(weight[j] + kWidth * product_.weight_stride + k);
        w[j] = Vec<T>::loadu(weight[j] + k);
      }
#pragma GCC unroll 8
      for (int i = 0; i < kHeight; i++) {
        const Vec<T> row = Vec<T>::loadu(x + i * depth_ + k);
#pragma GCC unroll 4
        for (int j = 0; j < kWidth; j++) sum[i * kWidth + j] = at::vec::fmadd(w[j], row, sum[i * kWidth + j]);
      }
    }
    T sums[kCount];
#pragma GCC unroll 8
    for (int i = 0; i < kCount; i += kSums) sums_of_lanes(sum + i, sums + i);
    for (int i = 0; i < kHeight; i++) {
      for (int j = 0; j < kWidth; j++) {
        const T bias = bias_ == nullptr ? T(0) : bias_[n + j];
        out_[(m + i) * product_.columns + n + j] = sums[i * kWidth + j] + bias;
      }
    }
  }
};

template <typename T>
void multiply(const Product& product, const void* x, const void* weight, const void* bias, void* out, int64_t threads) {
  const int64_t bytes = product.columns * product.depth * sizeof(T);
  const int64_t parts = std::min(threads, 1 + bytes / kBytesOfThread);
  const int64_t each = round_up(divide_up(product.columns, parts), kColumns * kFewColumns);
  const Skinny<T> skinny(product, x, weight, bias, out, parts);
  parallel_for(parts, parts, [&](int64_t part, int64_t thread) {
    skinny.columns(std::min(part * each, product.columns), std::min((part + 1) * each, product.columns), thread);
  });
}

}  // namespace

// x [M, K] and weight [N, K] with elements side by side, bias [N] or null, out [M, N], all float32 or all float64.
extern "C" int skinny_linear(
    const void* x, const void* weight, const void* bias, void* out, int64_t rows, int64_t columns, int64_t depth,
    int64_t x_stride, int64_t weight_stride, int64_t dtype, int64_t threads) {
  return guarded([&] {
    const Product product{rows, columns, depth, x_stride, weight_stride};
    if (dtype == kFloat64) return multiply<double>(product, x, weight, bias, out, threads);
    multiply<float>(product, x, weight, bias, out, threads);
  });
}
