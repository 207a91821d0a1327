// Attention in which every query sees one range of consecutive keys, and later queries no earlier ones: windows and
// compressed blocks. Keys come in blocks of 64; a tile is the heads of a group for some consecutive queries.
#pragma once

#include "blocks.h"

namespace {

constexpr int64_t kBlockKeys = 64;
constexpr int64_t kQueryRows = 64;   // of a tile: its scores stay in the L2 cache
constexpr int64_t kPassBlocks = 16;  // whose scores a tile holds at once, unless it needs all of them

inline int64_t queries_of_tile(const Sizes& sizes) {
  return std::max<int64_t>(1, kQueryRows / sizes.heads());
}

// The blocks for queries [start, stop) of which the first sees the earliest, the last the latest keys.
template <typename Range>
BlockSpan blocks_seen(const Range& range, int64_t start, int64_t stop) {
  const int64_t begin = range(start).begin, end = range(stop - 1).end;
  if (begin >= end) return {0, 0};
  return {begin / kBlockKeys, divide_up(end, kBlockKeys)};
}

// What one thread needs for a tile of the forward pass. Scores are [block][row][64]. Maxima and sums are kept lane by
// lane, [row][lanes], as long as scores come in.
template <typename T>
struct ForwardTile {
  int64_t sequence, start, queries, heads, rows;
  std::vector<KeyRange> ranges;  // of the queries
  BlockSpan span;
  int64_t block_stride;                     // of the scores
  T *scores, *out;                          // out [rows, width]: the sum of values weighted by exp(score - largest)
  T *maxima, *sums;                         // [rows, lanes]
  T *largest, *shift, *inverse_sum;         // [rows]; the shift is `largest` where that is finite
};

// Hides the scores of one block that queries do not see, and raises the maxima by the others.
template <typename T>
void raise_maxima(const ForwardTile<T>& tile, const Strided<T>& scores, int64_t first_key, int64_t columns) {
  const bool whole = sees_all(tile.ranges[0], tile.ranges[tile.queries - 1], first_key, columns);
  for (int64_t row = 0; row < tile.rows; row++) {
    if (!whole) hide(scores[row], tile.ranges[row / tile.heads], first_key, columns, columns);
    T* maxima = tile.maxima + row * kLanes<T>;
    Vec<T> largest = Vec<T>::loadu(maxima);
    for (int64_t i = 0; i < columns; i += kLanes<T>) {
      largest = at::vec::clamp_min(Vec<T>::loadu(scores[row] + i), largest);
    }
    largest.store(maxima);
  }
}

// Takes over the maxima, and rescales what was summed up under smaller ones.
template <typename T>
void rescale(const ForwardTile<T>& tile, int64_t value_width) {
  for (int64_t row = 0; row < tile.rows; row++) {
    const T previous = tile.largest[row];
    const T current = std::max(previous, largest_lane(Vec<T>::loadu(tile.maxima + row * kLanes<T>)));
    if (previous != -kInfinity<T> && previous != current) {
      const T factor = std::exp(previous - current);
      scale_row(tile.sums + row * kLanes<T>, factor, kLanes<T>);
      scale_row(tile.out + row * value_width, factor, value_width);
    }
    tile.largest[row] = current;
    tile.shift[row] = current == -kInfinity<T> ? T(0) : current;
  }
}

// Output and log-sum-exp for every query. `range(s)` is the KeyRange of query s. With `whole_rows` a tile's scores are
// all computed before the softmax and passed on: `after(tile, thread)` finds exp(score - largest) in them.
template <typename E, typename Range, typename After>
void forward_ranges(
    const E& engine, const Sizes& sizes, const Tensor* tensors, typename E::Value scale, int64_t threads,
    const Range& range, bool whole_rows, const After& after) {
  using T = typename E::Value;
  const auto& [q, k, v, out, lse] = reinterpret_cast<const Tensor(&)[5]>(*tensors);
  Blocks<E> keys(engine, sizes, kBlockKeys, sizes.key_dim), values(engine, sizes, kBlockKeys, sizes.value_dim);
  keys.pack(k, sizes, false, true, scale, threads);
  values.pack(v, sizes, true, false, T(1), threads);

  const int64_t heads = sizes.heads();
  const int64_t tile_queries = queries_of_tile(sizes);
  const int64_t tiles = divide_up(sizes.queries, tile_queries), rows = padded_rows<E>(tile_queries * heads);
  const int64_t pass_blocks = whole_rows ? std::max<int64_t>(1, keys.count) : std::min(kPassBlocks, keys.count);
  const ThreadBuffers<T> q_tiles(threads, rows * keys.padded_width), out_tiles(threads, rows * values.padded_width);
  const ThreadBuffers<T> score_tiles(threads, rows * kBlockKeys * pass_blocks), row_values(threads, 3 * rows);
  const ThreadBuffers<T> maxima(threads, rows * kLanes<T>), sums(threads, rows * kLanes<T>);
  const ThreadBuffers<typename E::Packed> packed_queries(threads, engine.left_size(rows, sizes.key_dim));
  const ThreadBuffers<typename E::Packed> packed_weights(threads, engine.left_size(rows, kBlockKeys));
  std::vector<ForwardTile<T>> of_thread(threads);
  for (auto& tile : of_thread) tile.ranges.resize(tile_queries);

  // The last tiles see the most keys; starting with them balances the threads.
  parallel_for(sizes.sequences() * tiles, threads, [&](int64_t item, int64_t thread) {
    [[maybe_unused]] const typename E::Session session;
    ForwardTile<T>& tile = of_thread[thread];
    tile.sequence = item % sizes.sequences();
    tile.start = (tiles - 1 - item / sizes.sequences()) * tile_queries;
    tile.queries = std::min(tile_queries, sizes.queries - tile.start);
    tile.heads = heads;
    tile.rows = tile.queries * heads;
    tile.span = blocks_seen(range, tile.start, tile.start + tile.queries);
    tile.scores = score_tiles[thread], tile.out = out_tiles[thread];
    const Strided<T> q_rows{q_tiles[thread], keys.padded_width};
    tile.maxima = maxima[thread], tile.sums = sums[thread];
    tile.largest = row_values[thread], tile.shift = tile.largest + rows;
    tile.inverse_sum = tile.shift + rows;
    const int64_t batch = tile.sequence / sizes.groups, first_head = tile.sequence % sizes.groups * heads;

    for (int64_t i = 0; i < tile.queries; i++) tile.ranges[i] = range(tile.start + i);
    for (int64_t row = 0; row < tile.rows; row++) {
      load_row(q, batch, tile.start + row / heads, first_head + row % heads, sizes.key_dim, q_rows[row]);
    }
    clear_padding(q_rows, tile.rows, padded_rows<E>(tile.rows));
    fill(tile.out, padded_rows<E>(tile.rows) * values.padded_width, T(0));
    fill(tile.largest, rows, -kInfinity<T>);
    fill(tile.maxima, rows * kLanes<T>, -kInfinity<T>);
    fill(tile.sums, rows * kLanes<T>, T(0));

    const auto queries = engine.left(q_rows, tile.rows, sizes.key_dim, packed_queries[thread]);
    tile.block_stride = padded_rows<E>(tile.rows) * kBlockKeys;
    const int64_t last_key = tile.ranges[tile.queries - 1].end;
    const auto scores_of = [&](int64_t block, int64_t first) {
      return Strided<T>{tile.scores + (block - first) * tile.block_stride, kBlockKeys};
    };
    for (int64_t first = tile.span.first; first < tile.span.last; first += pass_blocks) {
      const int64_t last = std::min(tile.span.last, first + pass_blocks);
      for (int64_t block = first; block < last; block++) {
        const int64_t columns = columns_seen(last_key, block * kBlockKeys, kBlockKeys);
        const Strided<T> scores = scores_of(block, first);
        engine.multiply(tile.rows, columns, sizes.key_dim, queries, keys.columns(tile.sequence, block), scores, false);
        raise_maxima(tile, scores, block * kBlockKeys, columns);
      }
      rescale(tile, values.padded_width);
      for (int64_t block = first; block < last; block++) {
        const int64_t columns = columns_seen(last_key, block * kBlockKeys, kBlockKeys);
        const Strided<T> scores = scores_of(block, first), row_sums{tile.sums, kLanes<T>};
        const auto weights =
            engine.weights(scores, tile.rows, columns, tile.shift, row_sums, whole_rows, packed_weights[thread]);
        engine.multiply(
            tile.rows, sizes.value_dim, columns, weights, values.rows(tile.sequence, block),
            Strided<T>{tile.out, values.padded_width}, true);
        if (!whole_rows) continue;
        for (int64_t row = 0; row < tile.rows; row++) fill(scores[row] + columns, kBlockKeys - columns, T(0));
      }
    }
    for (int64_t row = 0; row < tile.rows; row++) {
      const T sum = sum_of_lanes(Vec<T>::loadu(tile.sums + row * kLanes<T>));
      tile.inverse_sum[row] = sum == T(0) ? T(0) : T(1) / sum;
      const int64_t position = tile.start + row / heads, head = first_head + row % heads;
      store_row(
          tile.out + row * values.padded_width, tile.inverse_sum[row], out, batch, position, head, sizes.value_dim);
      element<T>(lse, batch, position, head) = tile.largest[row] + std::log(sum);
    }
    after(tile, thread);
  });
}

// Gradients for every query, key and value.
template <typename E, typename Range>
void backward_ranges(
    const E& engine, const Sizes& sizes, const Tensor* tensors, typename E::Value scale, int64_t threads,
    const Range& range, const std::vector<Chunk>& chunks, int64_t tile_queries) {
  using T = typename E::Value;
  const auto& [grad, grad_lse, q, k, v, out, lse, dq, dk, dv] = reinterpret_cast<const Tensor(&)[10]>(*tensors);
  Blocks<E> keys(engine, sizes, kBlockKeys, sizes.key_dim), values(engine, sizes, kBlockKeys, sizes.value_dim);
  keys.pack(k, sizes, true, true, scale, threads);
  values.pack(v, sizes, false, true, T(1), threads);

  const int64_t heads = sizes.heads(), rows = padded_rows<E>(tile_queries * heads);
  const int64_t key_width = keys.padded_width, value_width = values.padded_width;
  const BlockSums<E> key_sums(sizes, keys, chunks), value_sums(sizes, values, chunks);
  const ThreadBuffers<T> q_tiles(threads, rows * key_width), grad_tiles(threads, rows * value_width);
  const ThreadBuffers<T> dq_tiles(threads, rows * key_width), out_rows(threads, value_width);
  const GradientScratch<E> scratch(engine, keys, values, rows, threads);
  const ThreadBuffers<T> row_values(threads, 2 * rows);
  std::vector<std::vector<KeyRange>> ranges(threads, std::vector<KeyRange>(tile_queries));

  const int64_t num_chunks = chunks.size();
  parallel_for(sizes.sequences() * num_chunks, threads, [&](int64_t item, int64_t thread) {
    [[maybe_unused]] const typename E::Session session;
    const int64_t sequence = item % sizes.sequences();
    const int64_t chunk_index = num_chunks - 1 - item / sizes.sequences();
    const Chunk& chunk = chunks[chunk_index];
    const int64_t batch = sequence / sizes.groups, first_head = sequence % sizes.groups * heads;
    key_sums.clear(sequence, chunk_index);
    value_sums.clear(sequence, chunk_index);
    const Strided<T> q_rows{q_tiles[thread], key_width}, grad_rows{grad_tiles[thread], value_width};
    const Strided<T> dq_rows{dq_tiles[thread], key_width};
    T *row_lse = row_values[thread], *delta = row_lse + rows;

    for (int64_t index = chunk.first_tile; index < chunk.last_tile; index += chunk.step) {
      const int64_t start = index * tile_queries, queries = std::min(tile_queries, sizes.queries - start);
      const GradientTile<T> tile{queries * heads, heads, row_lse, delta, ranges[thread].data()};
      for (int64_t i = 0; i < queries; i++) ranges[thread][i] = range(start + i);
      for (int64_t row = 0; row < tile.rows; row++) {
        const int64_t position = start + row / heads, head = first_head + row % heads;
        load_row(q, batch, position, head, sizes.key_dim, q_rows[row]);
        load_row(grad, batch, position, head, sizes.value_dim, grad_rows[row]);
        load_row(out, batch, position, head, sizes.value_dim, out_rows[thread]);
        delta[row] = delta_of(grad_rows[row], out_rows[thread], value_width, grad_lse, batch, position, head);
        row_lse[row] = finite_or_infinity(element<T>(lse, batch, position, head));
      }
      clear_padding(q_rows, tile.rows, padded_rows<E>(tile.rows));
      clear_padding(grad_rows, tile.rows, padded_rows<E>(tile.rows));
      const typename E::template Gradients<Strided<T>> products(
          engine, q_rows, grad_rows, tile.rows, sizes.key_dim, sizes.value_dim, scratch.products[thread]);

      const BlockSpan span = blocks_seen(range, start, start + queries);
      if (span.first == span.last) fill(dq_rows[0], tile.rows * key_width, T(0));
      for (int64_t block = span.first; block < span.last; block++) {
        backward_block(
            tile, products, keys, values, sequence, block, key_sums.of(sequence, chunk_index, block),
            value_sums.of(sequence, chunk_index, block), dq_rows, block > span.first, scratch.weights[thread],
            scratch.dscores[thread]);
      }
      for (int64_t row = 0; row < tile.rows; row++) {
        const int64_t position = start + row / heads, head = first_head + row % heads;
        store_row(dq_rows[row], scale, dq, batch, position, head, sizes.key_dim);
      }
    }
  });

  key_sums.store(engine, scale, dk, threads);
  value_sums.store(engine, T(1), dv, threads);
}

}  // namespace
