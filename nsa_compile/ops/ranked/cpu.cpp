// The places of the largest elements of each row: see `ranking.h`.

#include "ranking.h"

namespace {

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
