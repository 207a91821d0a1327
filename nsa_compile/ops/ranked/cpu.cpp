// The places of the largest elements of each row, in the order of a stable, descending sort.
//
// A number and its place become one integer that orders as the sort does, so nothing has ties. A pivot from a sample
// leaves little more than what is wanted, which is then selected and sorted.

#include "tensor.h"

namespace {

// Ascending as floats do, +0 and -0 alike, NaN above all.
template <typename Bits, typename T>
Bits ordered(T x) {
  constexpr Bits sign = Bits(1) << (8 * sizeof(Bits) - 1);
  if (x != x) return ~Bits(0);
  if (x == T(0)) return sign;
  Bits bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits & sign ? ~bits : bits | sign;
}

// A number and its place: ascending means larger numbers first, and of equal ones the first.
inline uint64_t ranked(float x, int64_t place) {
  return uint64_t(uint32_t(~ordered<uint32_t>(x))) << 32 | static_cast<uint32_t>(place);
}
inline int64_t place_of(uint64_t key) {
  return static_cast<uint32_t>(key);
}
inline std::pair<uint64_t, int64_t> ranked(double x, int64_t place) {
  return {~ordered<uint64_t>(x), place};
}
inline int64_t place_of(const std::pair<uint64_t, int64_t>& key) {
  return key.second;
}

constexpr int64_t kSample = 256;

template <typename T>
class Ranking {
 public:
  using Key = decltype(ranked(T(), 0));

  // The first `count` places of `row [width]`.
  void run(const T* row, int64_t width, int64_t count, int64_t* places) {
    keys_.resize(width);
    for (int64_t i = 0; i < width; i++) keys_[i] = ranked(row[i], i);
    const int64_t left = drop_most(width, count);
    std::nth_element(keys_.begin(), keys_.begin() + count - 1, keys_.begin() + left);
    std::sort(keys_.begin(), keys_.begin() + count - 1);
    for (int64_t i = 0; i < count; i++) places[i] = place_of(keys_[i]);
  }

 private:
  std::vector<Key> keys_, sample_;

  // Moves the first keys, and some more, to the front; returns how many these are.
  int64_t drop_most(int64_t width, int64_t count) {
    const int64_t step = width / kSample, rank = count * kSample / width + kSample / 16;
    if (step < 4 || rank >= kSample) return width;
    sample_.resize(kSample);
    for (int64_t i = 0; i < kSample; i++) sample_[i] = keys_[i * step];
    std::nth_element(sample_.begin(), sample_.begin() + rank, sample_.end());
    const Key pivot = sample_[rank];
    if (std::count_if(keys_.begin(), keys_.end(), [&](const Key& key) { return key <= pivot; }) < count) return width;
    int64_t left = 0;
    for (int64_t i = 0; i < width; i++) {
      const Key key = keys_[i];
      keys_[left] = key;
      left += key <= pivot;
    }
    return left;
  }
};

template <typename T>
void rank_rows(const Sizes& sizes, const Tensor& x, const Tensor& places, int64_t threads) {
  std::vector<Ranking<T>> rankings(threads);
  constexpr int64_t some = 8;  // rows that a thread takes at a time
  parallel_for(divide_up(sizes.queries, some), threads, [&](int64_t item, int64_t thread) {
    for (int64_t row = item * some; row < std::min(sizes.queries, (item + 1) * some); row++) {
      rankings[thread].run(
          reinterpret_cast<const T*>(x.data) + row * x.stride[1], sizes.keys, sizes.key_dim,
          reinterpret_cast<int64_t*>(places.data) + row * places.stride[1]);
    }
  });
}

}  // namespace

// tensors: x [1, rows, width], places [1, rows, count]
extern "C" int ranked_attention_forward(const Sizes* sizes, const Tensor* tensors, int64_t threads, int64_t) {
  return guarded([&] {
    if (tensors[0].dtype == kFloat64) {
      rank_rows<double>(*sizes, tensors[0], tensors[1], threads);
    } else {
      rank_rows<float>(*sizes, tensors[0], tensors[1], threads);
    }
  });
}
