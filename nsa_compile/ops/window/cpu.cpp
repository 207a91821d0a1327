// Sliding-window attention: query s sees the keys s - window < p <= s.

#include "ranges.h"

namespace {

struct WindowRange {
  int64_t keys, window;

  KeyRange operator()(int64_t query) const {
    return {std::max<int64_t>(0, query - window + 1), std::min(keys, query + 1)};
  }
};

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
    chunks.push_back({tile, 1, last, span});
  }
  return chunks;
}

}  // namespace

// tensors: q, k, v, out, lse
extern "C" int window_attention_forward(
    const Sizes* sizes, const Tensor* tensors, int64_t window, double scale, int64_t threads, int64_t matrix_unit) {
  return with_engine(tensors[0].dtype, matrix_unit, [&](const auto& engine) {
    const WindowRange range{sizes->keys, window};
    forward_ranges(engine, *sizes, tensors, scale, threads, range, false, [](const auto&, int64_t) {});
  });
}

// tensors: grad_out, grad_lse, q, k, v, out, lse, dq, dk, dv
extern "C" int window_attention_backward(
    const Sizes* sizes, const Tensor* tensors, int64_t window, double scale, int64_t threads, int64_t matrix_unit) {
  return with_engine(tensors[0].dtype, matrix_unit, [&](const auto& engine) {
    const WindowRange range{sizes->keys, window};
    const int64_t tile_queries = queries_of_tile(*sizes);
    const std::vector<Chunk> chunks = make_chunks(*sizes, range, tile_queries);
    backward_ranges(engine, *sizes, tensors, scale, threads, range, chunks, tile_queries);
  });
}
