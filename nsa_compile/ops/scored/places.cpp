// The places of the keys with the largest scores of a program, which are summed over the heads of a query.

#include "ranking.h"
#include "scores.h"

namespace {

// PROGRAM

template <typename E>
void rank(const E& engine, const Sizes& sizes, const int64_t* key_dims, const Tensor* tensors, int64_t threads) {
  using T = typename E::Value;
  using Scores = Program<T>;
  constexpr int64_t products = Scores::kProducts;
  const Tensor *q = tensors, *k = q + products, *leaves = k + products;
  const Tensor &tiles = leaves[Scores::kLeaves], &places = (&tiles)[1];
  const int64_t wanted = sizes.value_dim;

  const std::vector<Blocks<E>> keys = pack_keys(engine, sizes, key_dims, k, products, false, threads);
  const int64_t widest = *std::max_element(key_dims, key_dims + products);
  const int64_t heads = sizes.heads(), tile_queries = queries_of_tile(sizes);
  const Visibility<Scores, T> visibility(sizes, key_dims, q, k, leaves, tiles, tile_queries, threads);
  const int64_t count = divide_up(sizes.queries, tile_queries), rows = padded_rows<E>(tile_queries * heads);
  const int64_t q_elements = rows * round_up(widest, E::kColumns), left_size = engine.left_size(rows, widest);
  const int64_t width = round_up(sizes.keys, kBlockKeys);
  const ThreadBuffers<T> q_tiles(threads, products * q_elements), maxima(threads, rows * kLanes<T>);
  const ThreadBuffers<T> score_tiles(threads, products * rows * kBlockKeys), sums(threads, tile_queries * width);
  const ThreadBuffers<typename E::Packed> packed_queries(threads, products * left_size);
  std::vector<std::vector<LiveBlock<T>>> live(threads);
  for (auto& blocks : live) blocks.reserve(divide_up(sizes.keys, kBlockKeys));
  std::vector<Ranking<T>> rankings(threads);

  // The last tiles mostly see the most keys; starting with them balances the threads.
  parallel_for(sizes.sequences() * count, threads, [&](int64_t item, int64_t thread) {
    [[maybe_unused]] const typename E::Session session;
    Place place{item % sizes.sequences(), (count - 1 - item / sizes.sequences()) * tile_queries, heads, 0, 0, 0, 0};
    const int64_t queries = std::min(tile_queries, sizes.queries - place.first_query);
    place.rows = queries * heads;
    std::vector<LiveBlock<T>>& blocks = live[thread];
    visibility.find(place, blocks);
    // Behind the last block that is read all scores are -inf, and the first of these come first.
    int64_t seen = wanted;
    for (const LiveBlock<T>& block : blocks) seen = std::max(seen, std::min(sizes.keys, (block.block + 1) * kBlockKeys));
    for (int64_t query = 0; query < queries; query++) fill(sums[thread] + query * width, seen, -kInfinity<T>);

    const auto load_queries = [&](int64_t i) {
      const Strided<T> q_rows{q_tiles[thread] + i * q_elements, keys[i].padded_width};
      load_tile<E>(q[i], place, key_dims[i], q_rows);
      return engine.left(q_rows, place.rows, key_dims[i], packed_queries[thread] + i * left_size);
    };
    decltype(load_queries(0)) left[products];
    for (int64_t i = 0; i < products; i++) left[i] = load_queries(i);

    T* scores[products];
    for (int64_t i = 0; i < products; i++) scores[i] = score_tiles[thread] + i * rows * kBlockKeys;
    for (const LiveBlock<T>& block : blocks) {
      place.move_to(block.block, sizes.keys);
      for (int64_t i = 0; i < products; i++) {
        engine.multiply(
            place.rows, place.columns, key_dims[i], left[i], keys[i].columns(place.sequence, block.block),
            Strided<T>{scores[i], kBlockKeys}, false);
      }
      Scores::scores(block.shown, place, leaves, scores, maxima[thread]);
      for (int64_t query = 0; query < queries; query++) {
        const T* const own = scores[0] + query * heads * kBlockKeys;
        T* const sum = sums[thread] + query * width + place.first_key;
        for (int64_t i = 0; i < place.columns; i += kLanes<T>) {
          Vec<T> total = Vec<T>::loadu(own + i);
          for (int64_t head = 1; head < heads; head++) total = total + Vec<T>::loadu(own + head * kBlockKeys + i);
          total.store(sum + i);
        }
      }
    }
    for (int64_t query = 0; query < queries; query++) {
      int64_t* const found = reinterpret_cast<int64_t*>(places.data) + place.sequence * places.stride[0] +
          (place.first_query + query) * places.stride[1];
      rankings[thread].run(sums[thread] + query * width, seen, wanted, found);
    }
  });
}

}  // namespace

// tensors: every q, every k, every leaf, tiles, places [N, S, count]; sizes.value_dim is that count
extern "C" int scored_attention_forward(
    const Sizes* sizes, const Tensor* tensors, const int64_t* key_dims, int64_t threads, int64_t) {
  return guarded([&] { rank(make_engine<Engine>(tensors[0].dtype), *sizes, key_dims, tensors, threads); });
}
