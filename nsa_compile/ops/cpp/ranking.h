// The places of the largest elements of each row, in the order of a stable, descending sort.
//
// A pivot from a sample leaves little more than what is wanted. Of that, a number and its place become one integer that
// orders as the sort does, so that nothing has ties, and is selected and sorted.
#pragma once

#include <algorithm>
#include <numeric>

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
    const int64_t left = find_candidates(row, width, count);
    keys_.resize(left);
    for (int64_t i = 0; i < left; i++) keys_[i] = ranked(row[candidates_[i]], candidates_[i]);
    std::nth_element(keys_.begin(), keys_.begin() + count - 1, keys_.end());
    std::sort(keys_.begin(), keys_.begin() + count - 1);
    for (int64_t i = 0; i < count; i++) places[i] = place_of(keys_[i]);
  }

 private:
  std::vector<Key> keys_, sample_;
  std::vector<int64_t> candidates_;

  // Writes the places that may be among the first ones; returns how many these are.
  int64_t find_candidates(const T* row, int64_t width, int64_t count) {
    candidates_.resize(width);
    const int64_t step = width / kSample, rank = count * kSample / width + kSample / 16;
    if (step >= 4 && rank < kSample) {
      sample_.resize(kSample);
      for (int64_t i = 0; i < kSample; i++) sample_[i] = ranked(row[i * step], i * step);
      std::nth_element(sample_.begin(), sample_.begin() + rank, sample_.end());
      const T pivot = row[place_of(sample_[rank])];
      int64_t left = 0;
      for (int64_t i = 0; i < width; i++) {
        candidates_[left] = i;
        left += !(row[i] < pivot);  // NaN is one
      }
      if (left >= count) return left;
    }
    std::iota(candidates_.begin(), candidates_.end(), int64_t(0));
    return width;
  }
};

}  // namespace
