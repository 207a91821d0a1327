// Sliding-window attention: query s sees the keys s - window < p <= s.

#include "ranges.h"

namespace {

struct WindowRange {
  int64_t keys, window;

  KeyRange operator()(int64_t query) const {
    return {std::max<int64_t>(0, query - window + 1), std::min(keys, query + 1)};
  }
};

template <typename T>
void forward(const Sizes& sizes, const Tensor* tensors, int64_t window, double scale, int64_t threads) {
  const WindowRange range{sizes.keys, window};
  forward_ranges<T>(sizes, tensors, static_cast<T>(scale), threads, range, false, [](const auto&, int64_t) {});
}

// Chunks of consecutive queries. Neighbours overlap by a window of keys, so a chunk is at least a quarter of one: then
// their sums take at most five times the memory of dk and dv. Below that, shorter chunks give small problems parallel
// work. Depends on the shapes only, never on the number of threads.
std::vector<Chunk> make_chunks(const Sizes& sizes, const WindowRange& range, int64_t tile_queries) {
  const int64_t even_share = std::clamp<int64_t>(sizes.queries * sizes.sequences() / 16, 256, 2048);
  const int64_t chunk_tiles = divide_up(std::max(even_share, std::min(range.window, sizes.queries) / 4), tile_queries);
  const int64_t tiles = divide_up(sizes.queries, tile_queries);
  std::vector<Chunk> chunks;
  for (int64_t tile = 0; tile < tiles; tile += chunk_tiles) {
    const int64_t last = std::min(tiles, tile + chunk_tiles);
    const BlockSpan span = blocks_seen(range, tile * tile_queries, std::min(sizes.queries, last * tile_queries));
    chunks.push_back({tile, 1, last, span, 0});
  }
  return chunks;
}

template <typename T>
void backward(const Sizes& sizes, const Tensor* tensors, int64_t window, double scale, int64_t threads) {
  const WindowRange range{sizes.keys, window};
  const int64_t tile_queries = queries_of_tile(sizes);
  const std::vector<Chunk> chunks = make_chunks(sizes, range, tile_queries);
  backward_ranges<T>(sizes, tensors, static_cast<T>(scale), threads, range, chunks, tile_queries);
}

}  // namespace

// tensors: q, k, v, out, lse
extern "C" int window_attention_forward(
    const Sizes* sizes, const Tensor* tensors, int64_t window, double scale, int64_t threads) {
  return guarded([&] {
    const auto run = tensors[0].dtype == kFloat64 ? forward<double> : forward<float>;
    run(*sizes, tensors, window, scale, threads);
  });
}

// tensors: grad_out, q, k, v, out, lse, dq, dk, dv
extern "C" int window_attention_backward(
    const Sizes* sizes, const Tensor* tensors, int64_t window, double scale, int64_t threads) {
  return guarded([&] {
    const auto run = tensors[0].dtype == kFloat64 ? backward<double> : backward<float>;
    run(*sizes, tensors, window, scale, threads);
  });
}
