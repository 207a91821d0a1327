// Attention to scores of a program, or sums of values by weights of one, forwards.

#include "scores.h"

namespace {

// PROGRAM

template <typename E>
void forward(const E& engine, const Sizes& sizes, const int64_t* key_dims, const Tensor* tensors, int64_t threads) {
  using T = typename E::Value;
  using Scores = Program<T>;
  constexpr int64_t products = Scores::kProducts;
  const Tensor *q = tensors, *k = q + products, *leaves = k + products + 1;
  const Tensor &v = k[products], &tiles = leaves[Scores::kLeaves], &out = (&tiles)[1], &lse = (&tiles)[2], &total = (&tiles)[3];

  const std::vector<Blocks<E>> keys = pack_keys(engine, sizes, key_dims, k, products, false, threads);
  const int64_t widest = *std::max_element(key_dims, key_dims + products);
  Blocks<E> values(engine, sizes, kBlockKeys, sizes.value_dim);
  values.pack(v, sizes, true, false, T(1), threads);
  const int64_t heads = sizes.heads(), tile_queries = queries_of_tile(sizes);
  const Visibility<Scores, T> visibility(sizes, key_dims, q, k, leaves, tiles, tile_queries, threads);
  const int64_t count = divide_up(sizes.queries, tile_queries), rows = padded_rows<E>(tile_queries * heads);
  const int64_t block_elements = rows * kBlockKeys, pass_blocks = std::min(kPassBlocks, values.count);
  const int64_t q_elements = rows * round_up(widest, E::kColumns), left_size = engine.left_size(rows, widest);
  const ThreadBuffers<T> q_tiles(threads, products * q_elements);
  const ThreadBuffers<T> out_tiles(threads, rows * values.padded_width), row_values(threads, 2 * rows);
  const ThreadBuffers<T> score_tiles(threads, block_elements * (pass_blocks + products - 1));
  const ThreadBuffers<T> maxima(threads, rows * kLanes<T>), sums(threads, rows * kLanes<T>);
  const ThreadBuffers<typename E::Packed> packed_queries(threads, products * left_size);
  const ThreadBuffers<typename E::Packed> packed_weights(threads, engine.left_size(rows, kBlockKeys));
  std::vector<std::vector<LiveBlock<T>>> live(threads);
  for (auto& blocks : live) blocks.reserve(values.count);

  // The last tiles mostly see the most keys; starting with them balances the threads.
  parallel_for(sizes.sequences() * count, threads, [&](int64_t item, int64_t thread) {
    [[maybe_unused]] const typename E::Session session;
    Place place{item % sizes.sequences(), (count - 1 - item / sizes.sequences()) * tile_queries, heads, 0, 0, 0, 0};
    place.rows = std::min(tile_queries, sizes.queries - place.first_query) * heads;
    std::vector<LiveBlock<T>>& blocks = live[thread];
    const int64_t floating = visibility.find(place, blocks);

    ForwardTile<T> tile;
    tile.rows = place.rows;
    tile.out = out_tiles[thread], tile.maxima = maxima[thread], tile.sums = sums[thread];
    tile.largest = row_values[thread], tile.shift = tile.largest + rows;
    fill(tile.out, padded_rows<E>(place.rows) * values.padded_width, T(0));
    fill(tile.largest, rows, -kInfinity<T>);
    fill(tile.maxima, rows * kLanes<T>, -kInfinity<T>);
    fill(tile.sums, rows * kLanes<T>, T(0));

    const auto load_queries = [&](int64_t i) {
      const Strided<T> q_rows{q_tiles[thread] + i * q_elements, keys[i].padded_width};
      load_tile<E>(q[i], place, key_dims[i], q_rows);
      return engine.left(q_rows, place.rows, key_dims[i], packed_queries[thread] + i * left_size);
    };
    decltype(load_queries(0)) queries[products];
    for (int64_t i = 0; i < products; i++) queries[i] = load_queries(i);

    T* const more = score_tiles[thread] + block_elements * pass_blocks;
    const auto pass = [&](int64_t first, int64_t last) {
      for (int64_t at = first; at < last; at++) {
        T* scores[products] = {score_tiles[thread] + (at - first) * block_elements};
        for (int64_t i = 1; i < products; i++) scores[i] = more + (i - 1) * block_elements;
        place.move_to(blocks[at].block, sizes.keys);
        for (int64_t i = 0; i < products; i++) {
          engine.multiply(
              place.rows, place.columns, key_dims[i], queries[i], keys[i].columns(place.sequence, blocks[at].block),
              Strided<T>{scores[i], kBlockKeys}, false);
        }
        Scores::scores(blocks[at].shown, place, leaves, scores, tile.maxima);
      }
      if constexpr (Scores::kSoftmax) rescale(tile, values.padded_width);
      for (int64_t at = first; at < last; at++) {
        place.move_to(blocks[at].block, sizes.keys);
        const Strided<T> scores{score_tiles[thread] + (at - first) * block_elements, kBlockKeys};
        const auto weights = [&] {
          if constexpr (!Scores::kSoftmax) {
            return engine.left_computed(scores, place.rows, place.columns, packed_weights[thread]);
          } else {
            const Strided<T> sums{tile.sums, kLanes<T>};
            return engine.weights(scores, place.rows, place.columns, tile.shift, sums, false, packed_weights[thread]);
          }
        }();
        engine.multiply(
            place.rows, sizes.value_dim, place.columns, weights, values.rows(place.sequence, blocks[at].block),
            Strided<T>{tile.out, values.padded_width}, true);
      }
    };
    const auto pass_all = [&](int64_t first, int64_t last) {
      for (; first < last; first += pass_blocks) pass(first, std::min(last, first + pass_blocks));
    };
    pass_all(0, floating);
    if constexpr (Scores::kSoftmax) leave_vanishing(blocks, floating, tile.largest, place.rows);
    pass_all(floating, blocks.size());
    for (int64_t row = 0; row < place.rows; row++) {
      const int64_t query = place.query(row), head = place.head(row);
      if constexpr (!Scores::kSoftmax) {
        store_row(
            tile.out + row * values.padded_width, T(1), out, place.sequence, query, head, sizes.value_dim);
        continue;
      }
      const T sum = sum_of_lanes(Vec<T>::loadu(tile.sums + row * kLanes<T>));
      store_row(
          tile.out + row * values.padded_width, sum == T(0) ? T(0) : T(1) / sum, out, place.sequence, query, head,
          sizes.value_dim);
      element<T>(lse, place.sequence, query, head) = tile.largest[row] + std::log(sum);
      element<T>(total, place.sequence, query, head) = sum;
    }
  });
}

}  // namespace

// tensors: every q, every k, v, every leaf, tiles, out, and of a softmax lse, total
extern "C" int scored_attention_forward(
    const Sizes* sizes, const Tensor* tensors, const int64_t* key_dims, int64_t threads, int64_t) {
  return guarded([&] { forward(make_engine<Engine>(tensors[0].dtype), *sizes, key_dims, tensors, threads); });
}
