// Attention over selected blocks, block by block; over the shortest ones query by query, see tokens.h.
//
// A query reads a few blocks of its own choice, so neighbouring queries share little. A block, however, is read by many
// queries: the pairs (query, block) of a unit of queries are sorted by block, and each block meets its queries as rows
// of matrix products. A unit belongs to one thread, which adds to its queries' results block after block, in ascending
// order; sums of dk and dv belong to a chunk of units. So no bit depends on the number of threads.

#include "tokens.h"

namespace {

// Sizes that measured best with 2 MB of L2 cache.
constexpr int64_t kTileScores = 8192;  // of a tile: 128 rows for blocks of 64 keys
constexpr int64_t kMaxTileRows = 128;
// Queries of a unit. In a larger one a block meets more queries each time it comes into the cache, but their results
// leave it in between: so units grow with the number of blocks. Small problems need units for several threads.
constexpr int64_t kMinUnitQueries = 64, kUnitQueries = 512, kUnitQueriesPerBlock = 4;
constexpr int64_t kMaxUnitElements = 1 << 22;  // of its results: fewer queries where heads are many and wide

// How the queries of a sequence are cut into units, and the pairs of a unit into tiles.
struct Layout {
  const Sizes& sizes;
  int64_t num_selected, block_size, blocks, heads;
  int64_t tile_queries, tile_rows, unit_queries, units;  // units of a sequence

  template <typename E>
  Layout(int64_t num_selected, int64_t block_size, const Sizes& sizes, const Blocks<E>& keys, int64_t result_width)
      : sizes(sizes),
        num_selected(num_selected),
        block_size(block_size),
        blocks(keys.count),
        heads(sizes.heads()),
        tile_queries(std::max<int64_t>(1, std::min(kMaxTileRows, kTileScores / keys.padded_size) / heads)),
        tile_rows(padded_rows<E>(tile_queries * heads)) {
    const int64_t fitting = std::max<int64_t>(1, kMaxUnitElements / (heads * result_width));
    const int64_t most = std::min(fitting, std::max(kUnitQueries, kUnitQueriesPerBlock * blocks));
    // Depends on the shapes only.
    unit_queries = std::clamp(sizes.queries * sizes.sequences() / 16, std::min(kMinUnitQueries, most), most);
    units = divide_up(sizes.queries, unit_queries);
  }
};

// The queries [first, last) of a sequence, and for each block those that see a key of it.
class Unit {
 public:
  int64_t sequence, batch, group, first, last;

  void sort(const Layout& layout, const Tensor& indices, int64_t new_sequence, int64_t number) {
    sequence = new_sequence, batch = sequence / layout.sizes.groups, group = sequence % layout.sizes.groups;
    first = number * layout.unit_queries, last = std::min(layout.sizes.queries, first + layout.unit_queries);

    // A counting sort. begin_[b + 2] counts the pairs of block b; after the running sum begin_[b + 1] is where its
    // first pair goes, and moves on with each pair to where those of block b + 1 begin.
    begin_.assign(layout.blocks + 2, 0);
    visit(layout, indices, [&](int64_t block, int32_t) { begin_[block + 2]++; });
    for (int64_t block = 0; block < layout.blocks; block++) begin_[block + 2] += begin_[block + 1];
    queries_.resize(begin_[layout.blocks + 1]);
    visit(layout, indices, [&](int64_t block, int32_t query) { queries_[begin_[block + 1]++] = query; });
  }

  // Runs `function(block, queries, count)` for tiles of pairs: blocks ascend, and so do the queries of a block.
  template <typename Function>
  void for_tiles(const Layout& layout, const Function& function) const {
    for (int64_t block = 0; block < layout.blocks; block++) {
      for (int64_t pair = begin_[block]; pair < begin_[block + 1]; pair += layout.tile_queries) {
        function(block, queries_.data() + pair, std::min(layout.tile_queries, begin_[block + 1] - pair));
      }
    }
  }

  // The keys that a query sees of the blocks it selects; queries count from `first`.
  KeyRange range(const Layout& layout, int32_t query) const {
    return {0, std::min(layout.sizes.keys, first + query + 1)};
  }

 private:
  std::vector<int64_t> begin_;
  std::vector<int32_t> last_query_, queries_;

  // Each pair that sees a key, once: of duplicates only the first counts.
  template <typename Function>
  void visit(const Layout& layout, const Tensor& indices, const Function& function) {
    last_query_.assign(layout.blocks, -1);
    for (int32_t query = 0; query < last - first; query++) {
      for (int32_t choice = 0; choice < layout.num_selected; choice++) {
        const int64_t block = index_at(indices, batch, first + query, group, choice);
        if (block < 0 || block >= layout.blocks || block * layout.block_size > first + query) continue;
        if (last_query_[block] == query) continue;
        last_query_[block] = query;
        function(block, query);
      }
    }
  }
};

// Pointers to the rows of a tile's queries in a tensor, one for each head; `copies` has room for all rows.
template <typename E, typename T>
Scattered<const T> gather(
    const RowSource<T>& source, const Unit& unit, const int32_t* queries, int64_t count, int64_t heads, int64_t width,
    T* copies, const T** rows) {
  for (int64_t i = 0; i < count; i++) {
    for (int64_t head = 0; head < heads; head++) {
      const int64_t row = i * heads + head;
      rows[row] = source.row(unit.batch, unit.first + queries[i], unit.group * heads + head, copies + row * width);
    }
  }
  pad_rows(rows, count * heads, padded_rows<E>(count * heads));
  return {rows};
}

// Pointers to the results of a tile's queries; those that only fill up a micro kernel share `unused`.
template <typename E, typename T>
Scattered<T> result_rows(
    T* results, const int32_t* queries, int64_t count, int64_t heads, int64_t width, T* unused, T** rows) {
  for (int64_t i = 0; i < count; i++) {
    for (int64_t head = 0; head < heads; head++) rows[i * heads + head] = results + (queries[i] * heads + head) * width;
  }
  for (int64_t row = count * heads; row < padded_rows<E>(count * heads); row++) rows[row] = unused;
  return {rows};
}

// The softmax of a unit's queries in progress: the largest score so far [rows], the lane-wise sum of
// exp(score - largest) [rows, lanes], and the sum of values weighted by these [rows, width].
template <typename T>
struct Progress {
  T *largest, *sums, *out;
  int64_t width;

  void reset(int64_t rows) const {
    fill(largest, rows, -kInfinity<T>);
    fill(sums, rows * kLanes<T>, T(0));
    fill(out, rows * width, T(0));
  }

  // Takes the scores of a row into account; returns the largest one.
  T raise(int64_t row, const T* scores, int64_t columns) const {
    Vec<T> running(largest[row]);
    for (int64_t i = 0; i < columns; i += kLanes<T>) running = at::vec::clamp_min(Vec<T>::loadu(scores + i), running);
    const T previous = largest[row], current = std::max(previous, largest_lane(running));
    if (previous != -kInfinity<T> && previous != current) {
      const T factor = std::exp(previous - current);
      scale_row(sums + row * kLanes<T>, factor, kLanes<T>);
      scale_row(out + row * width, factor, width);
    }
    return largest[row] = current;
  }
};

template <typename E>
void forward(
    const E& engine, const Sizes& sizes, const Tensor* tensors, int64_t num_selected, int64_t block_size,
    typename E::Value scale, int64_t threads) {
  using T = typename E::Value;
  const auto& [q, k, v, indices, out, lse] = reinterpret_cast<const Tensor(&)[6]>(*tensors);
  Blocks<E> keys(engine, sizes, block_size, sizes.key_dim), values(engine, sizes, block_size, sizes.value_dim);
  keys.pack(k, sizes, false, true, scale, threads);
  values.pack(v, sizes, true, false, T(1), threads);
  const RowSource<T> q_source(q, sizes.key_dim);

  const int64_t size = keys.padded_size, key_width = keys.padded_width, value_width = values.padded_width;
  const Layout layout(num_selected, block_size, sizes, keys, value_width);
  const int64_t heads = layout.heads, unit_rows = layout.unit_queries * heads;
  const ThreadBuffers<T> results(threads, unit_rows * value_width), largest(threads, unit_rows);
  const ThreadBuffers<T> sums(threads, unit_rows * kLanes<T>), shifts(threads, layout.tile_rows);
  const ThreadBuffers<T> q_tiles(threads, layout.tile_rows * key_width), score_tiles(threads, layout.tile_rows * size);
  const ThreadBuffers<const T*> q_pointers(threads, layout.tile_rows);
  const ThreadBuffers<T*> result_pointers(threads, layout.tile_rows), sum_pointers(threads, layout.tile_rows);
  const ThreadBuffers<T> unused(threads, std::max(value_width, kLanes<T>));
  const int64_t packed_size = engine.left_size(layout.tile_rows, std::max(sizes.key_dim, size));
  const ThreadBuffers<typename E::Packed> packed(threads, packed_size);
  std::vector<Unit> units(threads);

  // The last units have the most pairs.
  parallel_for(sizes.sequences() * layout.units, threads, [&](int64_t item, int64_t thread) {
    [[maybe_unused]] const typename E::Session session;
    Unit& unit = units[thread];
    unit.sort(layout, indices, item % sizes.sequences(), layout.units - 1 - item / sizes.sequences());
    const Progress<T> progress{largest[thread], sums[thread], results[thread], value_width};
    progress.reset(unit_rows);

    unit.for_tiles(layout, [&](int64_t block, const int32_t* queries, int64_t count) {
      const int64_t rows = count * heads;
      const Strided<T> scores{score_tiles[thread], size};
      const auto q_rows =
          gather<E>(q_source, unit, queries, count, heads, key_width, q_tiles[thread], q_pointers[thread]);
      const auto result = result_rows<E>(
          progress.out, queries, count, heads, value_width, unused[thread], result_pointers[thread]);
      const auto row_sums =
          result_rows<E>(progress.sums, queries, count, heads, kLanes<T>, unused[thread], sum_pointers[thread]);
      const auto left = engine.left(q_rows, rows, keys.width, packed[thread]);
      const int64_t first_key = block * block_size;
      const KeyRange first = unit.range(layout, queries[0]), last = unit.range(layout, queries[count - 1]);
      const int64_t columns = columns_seen(last.end, first_key, size), seen = std::min(columns, block_size);
      engine.multiply(rows, columns, keys.width, left, keys.columns(unit.sequence, block), scores, false);
      // The last columns may only fill up a vector.
      const bool whole = seen == columns && sees_all(first, last, first_key, columns);
      for (int64_t row = 0; row < rows; row++) {
        const int32_t query = queries[row / heads];
        if (!whole) hide(scores[row], unit.range(layout, query), first_key, seen, columns);
        shifts[thread][row] = progress.raise(query * heads + row % heads, scores[row], columns);
      }
      const auto weights =
          engine.weights(scores, rows, columns, shifts[thread], row_sums, false, packed[thread]);
      engine.multiply(rows, values.width, seen, weights, values.rows(unit.sequence, block), result, true);
    });

    for (int64_t row = 0; row < (unit.last - unit.first) * heads; row++) {
      const T sum = sum_of_lanes(Vec<T>::loadu(progress.sums + row * kLanes<T>));
      const int64_t position = unit.first + row / heads, head = unit.group * heads + row % heads;
      const T inverse = sum == T(0) ? T(0) : T(1) / sum;
      store_row(results[thread] + row * value_width, inverse, out, unit.batch, position, head, sizes.value_dim);
      element<T>(lse, unit.batch, position, head) = largest[thread][row] + std::log(sum);
    }
  });
}

// Chunks of consecutive units. Few, because each has sums for all blocks up to its last query; fewer still where batch
// and groups give enough parallel work. Depends on the shapes only.
std::vector<Chunk> make_chunks(const Layout& layout) {
  const int64_t count = std::min(layout.units, std::clamp<int64_t>(8 / layout.sizes.sequences(), 1, 8));
  std::vector<Chunk> chunks;
  for (int64_t chunk = 0; chunk < count; chunk++) {
    const int64_t first = layout.units * chunk / count, last = layout.units * (chunk + 1) / count;
    const int64_t seen = divide_up(std::min(layout.sizes.queries, last * layout.unit_queries), layout.block_size);
    chunks.push_back({first, 1, last, {0, std::min(layout.blocks, seen)}});
  }
  return chunks;
}

template <typename E>
void backward(
    const E& engine, const Sizes& sizes, const Tensor* tensors, int64_t num_selected, int64_t block_size,
    typename E::Value scale, int64_t threads) {
  using T = typename E::Value;
  const auto& [grad, grad_lse, q, k, v, out, lse, indices, dq, dk, dv] =
      reinterpret_cast<const Tensor(&)[11]>(*tensors);
  Blocks<E> keys(engine, sizes, block_size, sizes.key_dim), values(engine, sizes, block_size, sizes.value_dim);
  keys.pack(k, sizes, true, true, scale, threads);
  values.pack(v, sizes, false, true, T(1), threads);
  const RowSource<T> q_source(q, sizes.key_dim), grad_source(grad, sizes.value_dim), out_source(out, sizes.value_dim);

  const int64_t key_width = keys.padded_width, value_width = values.padded_width;
  const Layout layout(num_selected, block_size, sizes, keys, key_width);
  const int64_t heads = layout.heads, unit_rows = layout.unit_queries * heads, tile_rows = layout.tile_rows;
  const std::vector<Chunk> chunks = make_chunks(layout);
  const BlockSums<E> key_sums(sizes, keys, chunks), value_sums(sizes, values, chunks);
  const ThreadBuffers<T> results(threads, unit_rows * key_width), lses(threads, unit_rows), deltas(threads, unit_rows);
  const ThreadBuffers<T> q_tiles(threads, tile_rows * key_width), grad_tiles(threads, tile_rows * value_width);
  const ThreadBuffers<T> out_rows(threads, value_width), unused(threads, key_width), row_values(threads, 2 * tile_rows);
  const ThreadBuffers<const T*> q_pointers(threads, tile_rows), grad_pointers(threads, tile_rows);
  const ThreadBuffers<T*> result_pointers(threads, tile_rows);
  const GradientScratch<E> scratch(engine, keys, values, tile_rows, threads);
  std::vector<std::vector<KeyRange>> ranges(threads, std::vector<KeyRange>(layout.tile_queries));
  std::vector<Unit> units(threads);

  const int64_t num_chunks = chunks.size();
  parallel_for(sizes.sequences() * num_chunks, threads, [&](int64_t item, int64_t thread) {
    [[maybe_unused]] const typename E::Session session;
    Unit& unit = units[thread];
    const int64_t sequence = item % sizes.sequences(), chunk = num_chunks - 1 - item / sizes.sequences();
    key_sums.clear(sequence, chunk);
    value_sums.clear(sequence, chunk);
    for (int64_t number = chunks[chunk].first_tile; number < chunks[chunk].last_tile; number++) {
      unit.sort(layout, indices, sequence, number);
      const int64_t count_rows = (unit.last - unit.first) * heads;
      for (int64_t row = 0; row < count_rows; row++) {
        const int64_t position = unit.first + row / heads, head = unit.group * heads + row % heads;
        const T* grad_row = grad_source.row(unit.batch, position, head, grad_tiles[thread]);
        const T* out_row = out_source.row(unit.batch, position, head, out_rows[thread]);
        deltas[thread][row] = delta_of(grad_row, out_row, value_width, grad_lse, unit.batch, position, head);
        lses[thread][row] = finite_or_infinity(element<T>(lse, unit.batch, position, head));
      }
      fill(results[thread], unit_rows * key_width, T(0));

      unit.for_tiles(layout, [&](int64_t block, const int32_t* queries, int64_t count) {
        const int64_t rows = count * heads;
        const auto q_rows =
            gather<E>(q_source, unit, queries, count, heads, key_width, q_tiles[thread], q_pointers[thread]);
        const auto grad_rows =
            gather<E>(grad_source, unit, queries, count, heads, value_width, grad_tiles[thread], grad_pointers[thread]);
        const auto result =
            result_rows<E>(results[thread], queries, count, heads, key_width, unused[thread], result_pointers[thread]);
        T *row_lse = row_values[thread], *delta = row_lse + tile_rows;
        for (int64_t i = 0; i < count; i++) {
          ranges[thread][i] = unit.range(layout, queries[i]);
          std::memcpy(row_lse + i * heads, lses[thread] + queries[i] * heads, heads * sizeof(T));
          std::memcpy(delta + i * heads, deltas[thread] + queries[i] * heads, heads * sizeof(T));
        }
        const GradientTile<T> tile{rows, heads, row_lse, delta, ranges[thread].data()};
        const typename E::template Gradients<Scattered<const T>> products(
            engine, q_rows, grad_rows, rows, sizes.key_dim, sizes.value_dim, scratch.products[thread]);
        backward_block(
            tile, products, keys, values, sequence, block, key_sums.of(sequence, chunk, block),
            value_sums.of(sequence, chunk, block), result, true, scratch.weights[thread], scratch.dscores[thread]);
      });

      for (int64_t row = 0; row < count_rows; row++) {
        const int64_t position = unit.first + row / heads, head = unit.group * heads + row % heads;
        store_row(results[thread] + row * key_width, scale, dq, unit.batch, position, head, sizes.key_dim);
      }
    }
  });
  key_sums.store(engine, scale, dk, threads);
  value_sums.store(engine, T(1), dv, threads);
}

}  // namespace

// tensors: q, k, v, indices, out, lse
extern "C" int selected_attention_forward(
    const Sizes* sizes, const Tensor* tensors, int64_t num_selected, int64_t block_size, double scale, int64_t threads,
    int64_t matrix_unit) {
  return with_engine(tensors[0].dtype, matrix_unit, [&](const auto& engine) {
    using T = typename std::decay_t<decltype(engine)>::Value;
    if (suits_tokens<T>(*sizes, block_size)) {
      return forward_tokens<T>(*sizes, tensors, num_selected, block_size, scale, threads);
    }
    forward(engine, *sizes, tensors, num_selected, block_size, scale, threads);
  });
}

// tensors: grad_out, grad_lse, q, k, v, out, lse, indices, dq, dk, dv
extern "C" int selected_attention_backward(
    const Sizes* sizes, const Tensor* tensors, int64_t num_selected, int64_t block_size, double scale, int64_t threads,
    int64_t matrix_unit) {
  return with_engine(tensors[0].dtype, matrix_unit, [&](const auto& engine) {
    using T = typename std::decay_t<decltype(engine)>::Value;
    if (suits_tokens<T>(*sizes, block_size)) {
      return backward_tokens<T>(*sizes, tensors, num_selected, block_size, scale, threads);
    }
    backward(engine, *sizes, tensors, num_selected, block_size, scale, threads);
  });
}
