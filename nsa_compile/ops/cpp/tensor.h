// Tensors as the Python side passes them, rows loaded and stored with conversion, buffers, and the parallel loop.
#pragma once

#include "simd.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstdlib>
#include <cstring>
#include <new>
#include <type_traits>
#include <utility>
#include <vector>

#ifdef _OPENMP
#include <omp.h>
#endif
#ifdef __linux__
#include <sys/mman.h>
#endif

// Mirrors of the ctypes structures in cpp/__init__.py.
struct Tensor {
  char* data;
  int64_t stride[4];  // in elements
  int64_t dtype;
};

struct Sizes {
  int64_t batch, queries, keys, query_heads, groups, key_dim, value_dim;

  int64_t heads() const { return query_heads / groups; }  // query heads of a group
  int64_t sequences() const { return batch * groups; }    // pairs of a batch entry and a group
};

namespace {

enum Dtype : int64_t { kFloat32, kFloat64, kBFloat16, kFloat16, kInt32, kInt64, kBool };

// Runs `function(item, thread)` for every item. Items must not share results: then nothing depends on the number of
// threads or on who runs what.
template <typename Function>
void parallel_for(int64_t items, int64_t threads, const Function& function) {
#ifdef _OPENMP
#pragma omp parallel for num_threads(static_cast<int>(threads)) schedule(dynamic, 1)
  for (int64_t item = 0; item < items; item++) function(item, static_cast<int64_t>(omp_get_thread_num()));
#else
  for (int64_t item = 0; item < items; item++) function(item, int64_t(0));
#endif
}

// As many threads as copying so many elements is worth: to wake one takes as long as copying some ten thousand.
inline int64_t threads_to_copy(int64_t elements, int64_t threads) {
  return std::min(threads, 1 + elements / (1 << 16));
}

constexpr int64_t kLargePage = 1 << 21;

// The first use of fresh memory costs a page fault for each of its pages: let those of large memory be large.
inline void prefer_large_pages(void* data, int64_t bytes) {
#ifdef __linux__
  const auto first = round_up(reinterpret_cast<int64_t>(data), kLargePage);
  const auto last = (reinterpret_cast<int64_t>(data) + bytes) / kLargePage * kLargePage;
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
}

// Uninitialised memory on a cache line's boundary. Throws std::bad_alloc, so it must not be made inside parallel_for.
template <typename T>
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(int64_t count) {
    if (count <= 0) return;
    const int64_t bytes = count * sizeof(T), alignment = bytes < 2 * kLargePage ? 64 : kLargePage;
    data_ = static_cast<T*>(std::aligned_alloc(alignment, round_up(bytes, alignment)));
    if (data_ == nullptr) throw std::bad_alloc();
    prefer_large_pages(data_, bytes);
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  Buffer(Buffer&& other) noexcept : data_(std::exchange(other.data_, nullptr)) {}
  Buffer& operator=(Buffer&& other) noexcept {
    std::swap(data_, other.data_);
    return *this;
  }
  ~Buffer() { std::free(data_); }

  T* data() const { return data_; }

 private:
  T* data_ = nullptr;
};

// One buffer for each thread.
template <typename T>
class ThreadBuffers {
 public:
  ThreadBuffers(int64_t threads, int64_t count) : count_(round_up(count, 64)), buffer_(threads * count_) {}
  T* operator[](int64_t thread) const { return buffer_.data() + thread * count_; }

 private:
  int64_t count_;
  Buffer<T> buffer_;
};

template <typename T>
void fill(T* target, int64_t count, T value) {
  for (int64_t i = 0; i < count; i++) target[i] = value;
}

// Vectors of the computation's type from and to memory of the tensor's type, as many elements as one step handles.
template <typename T, typename Stored>
struct Converter {
  static constexpr int64_t kStep = Vec<Stored>::size();
  static void load(const Stored* source, T* target) {
    const auto [low, high] = at::vec::convert_to_float<Stored>(Vec<Stored>::loadu(source));
    low.store(target);
    high.store(target + kLanes<T>);
  }
  static void store(const T* source, const Vec<T>& factor, Stored* target) {
    const Vec<T> low = Vec<T>::loadu(source) * factor, high = Vec<T>::loadu(source + kLanes<T>) * factor;
    at::vec::convert_from_float<Stored>(low, high).store(target);
  }
};

template <typename T>
struct Converter<T, T> {
  static constexpr int64_t kStep = kLanes<T>;
  static void load(const T* source, T* target) { Vec<T>::loadu(source).store(target); }
  static void store(const T* source, const Vec<T>& factor, T* target) {
    (Vec<T>::loadu(source) * factor).store(target);
  }
};

template <typename T, typename Stored>
void load_elements(const Stored* source, int64_t stride, int64_t count, T* target) {
  int64_t i = 0;
  if (stride == 1) {
    constexpr int64_t step = Converter<T, Stored>::kStep;
    for (; i + step <= count; i += step) Converter<T, Stored>::load(source + i, target + i);
  }
  for (; i < count; i++) target[i] = static_cast<T>(source[i * stride]);
}

template <typename T, typename Stored>
void store_elements(const T* source, int64_t stride, int64_t count, T factor, Stored* target) {
  int64_t i = 0;
  if (stride == 1) {
    const Vec<T> factors(factor);
    constexpr int64_t step = Converter<T, Stored>::kStep;
    for (; i + step <= count; i += step) Converter<T, Stored>::store(source + i, factors, target + i);
  }
  for (; i < count; i++) target[i * stride] = static_cast<Stored>(source[i] * factor);
}

inline int64_t row_offset(const Tensor& x, int64_t batch, int64_t position, int64_t head) {
  return batch * x.stride[0] + position * x.stride[1] + head * x.stride[2];
}

// x[batch, position, head, :count], converted, to `target`, zeros up to whole vectors.
template <typename T>
void load_row(const Tensor& x, int64_t batch, int64_t position, int64_t head, int64_t count, T* target) {
  const int64_t offset = row_offset(x, batch, position, head), stride = x.stride[3];
  if constexpr (std::is_same_v<T, double>) {
    load_elements(reinterpret_cast<const double*>(x.data) + offset, stride, count, target);
  } else if (x.dtype == kFloat32) {
    load_elements(reinterpret_cast<const float*>(x.data) + offset, stride, count, target);
  } else if (x.dtype == kBFloat16) {
    load_elements(reinterpret_cast<const c10::BFloat16*>(x.data) + offset, stride, count, target);
  } else {
    load_elements(reinterpret_cast<const c10::Half*>(x.data) + offset, stride, count, target);
  }
  fill(target + count, padded_columns<T>(count) - count, T(0));
}

// The rows of a tensor as the products read them: where they lie if type, stride and width allow it, else as copies.
template <typename T>
class RowSource {
 public:
  RowSource(const Tensor& x, int64_t width)
      : x_(x),
        width_(width),
        in_place_(
            x.dtype == (std::is_same_v<T, double> ? kFloat64 : kFloat32) && x.stride[3] == 1 &&
            width % kLanes<T> == 0) {}

  // Row [batch, position, head], in place or copied to `copy`, zeros up to whole vectors.
  const T* row(int64_t batch, int64_t position, int64_t head, T* copy) const {
    if (in_place_) return reinterpret_cast<const T*>(x_.data) + row_offset(x_, batch, position, head);
    load_row(x_, batch, position, head, width_, copy);
    return copy;
  }

 private:
  const Tensor& x_;
  int64_t width_;
  bool in_place_;
};

// Pointers to rows, up to whole micro kernels. The last ones repeat a row that can be read.
template <typename T>
void pad_rows(const T** rows, int64_t count, int64_t padded_count) {
  for (int64_t row = count; row < padded_count; row++) rows[row] = rows[0];
}

// Zeros in the rows that fill up a micro kernel.
template <typename T>
void clear_padding(const Strided<T>& rows, int64_t count, int64_t padded_count) {
  fill(rows[count], (padded_count - count) * rows.stride, T(0));
}

// x[batch, position, head, :count] = source * factor, converted.
template <typename T>
void store_row(
    const T* source, T factor, const Tensor& x, int64_t batch, int64_t position, int64_t head, int64_t count) {
  const int64_t offset = row_offset(x, batch, position, head), stride = x.stride[3];
  if constexpr (std::is_same_v<T, double>) {
    store_elements(source, stride, count, factor, reinterpret_cast<double*>(x.data) + offset);
  } else if (x.dtype == kFloat32) {
    store_elements(source, stride, count, factor, reinterpret_cast<float*>(x.data) + offset);
  } else if (x.dtype == kBFloat16) {
    store_elements(source, stride, count, factor, reinterpret_cast<c10::BFloat16*>(x.data) + offset);
  } else {
    store_elements(source, stride, count, factor, reinterpret_cast<c10::Half*>(x.data) + offset);
  }
}

// Element [batch, position, head] of a tensor whose type is that of the computation.
template <typename T>
T& element(const Tensor& x, int64_t batch, int64_t position, int64_t head) {
  return reinterpret_cast<T*>(x.data)[row_offset(x, batch, position, head)];
}

template <typename T>
T dot(const T* a, const T* b, int64_t padded) {
  Vec<T> sum(T(0));
  for (int64_t i = 0; i < padded; i += kLanes<T>) sum = at::vec::fmadd(Vec<T>::loadu(a + i), Vec<T>::loadu(b + i), sum);
  return sum_of_lanes(sum);
}

// row *= factor
template <typename T>
void scale_row(T* row, T factor, int64_t padded) {
  const Vec<T> factors(factor);
  for (int64_t i = 0; i < padded; i += kLanes<T>) (Vec<T>::loadu(row + i) * factors).store(row + i);
}

// target += source
template <typename T>
void add_to(T* target, const T* source, int64_t padded) {
  for (int64_t i = 0; i < padded; i += kLanes<T>)
    (Vec<T>::loadu(target + i) + Vec<T>::loadu(source + i)).store(target + i);
}

// Runs an operator and reports whether memory sufficed: exceptions must not reach ctypes.
template <typename Function>
int guarded(const Function& function) {
  try {
    function();
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}

}  // namespace
