// Attention to scores of a program, or sums of values by weights of one, backwards.

#include "scores.h"

namespace {

// PROGRAM

// Chunks of consecutive tiles with about the same work each. Few, because each has sums for all blocks that it reads;
// fewer still where the sequences give enough parallel work. Depends on shapes and tiles only.
template <typename Visible>
std::vector<Chunk> make_chunks(const Sizes& sizes, const Visible& visibility, int64_t tile_queries, int64_t most) {
  const int64_t tiles = divide_up(sizes.queries, tile_queries), blocks = divide_up(sizes.keys, kBlockKeys);
  std::vector<BlockSpan> spans(tiles);
  std::vector<int64_t> work(tiles + 1, 0);  // before each tile
  for (int64_t tile = 0; tile < tiles; tile++) {
    const int64_t start = tile * tile_queries, queries = std::min(tile_queries, sizes.queries - start);
    BlockSpan& span = spans[tile];
    span = {blocks, 0};
    work[tile + 1] = work[tile] + 1;
    for (int64_t block = 0; block < blocks; block++) {
      if (!visibility.used(start, queries, block)) continue;
      span = {std::min(span.first, block), block + 1};
      work[tile + 1]++;
    }
  }
  std::vector<Chunk> chunks;
  const int64_t share = divide_up(work[tiles], std::min(tiles, most));
  for (int64_t first = 0; first < tiles;) {
    int64_t last = first + 1;
    BlockSpan span = spans[first];
    for (; last < tiles && work[last + 1] - work[first] <= share; last++) {
      span = {std::min(span.first, spans[last].first), std::max(span.last, spans[last].last)};
    }
    chunks.push_back({first, 1, last, span.first < span.last ? span : BlockSpan{0, 0}});
    first = last;
  }
  return chunks;
}

// The gradients of one tensor that scores read. Where it differs between queries they are added up in place, each query
// by one thread; else each item has sums of its own, which are added in their order at the end. A tensor of distances
// between queries and keys is read one element farther back by each query.
template <typename T>
class LeafGradients {
 public:
  LeafGradients(const Tensor& target, const int64_t* shape, const Sizes& sizes, int64_t items, bool sequences_inside)
      : target_(target), in_place_(shape[1] > 1), inside_(sequences_inside), different_(shape[0] > 1) {
    const bool distances = shape[3] != 1 && shape[3] != sizes.keys;
    query_stride_ = distances ? -1 : 0;
    first_ = distances ? sizes.queries - 1 : 0;
    const int64_t of_sequence = shape[2] * shape[3];
    elements_ = (inside_ ? shape[0] : 1) * of_sequence;
    sequence_elements_ = of_sequence;
    head_stride_ = shape[2] > 1 ? shape[3] : 0;
    if (!in_place_) sums_ = Buffer<T>(items * elements_);
  }

  void clear(int64_t item) const {
    if (!in_place_) fill(sums_.data() + item * elements_, elements_, T(0));
  }

  LeafSums<T> of(int64_t item, int64_t sequence, T* lanes) const {
    if (in_place_) {
      T* data = reinterpret_cast<T*>(target_.data) + sequence * target_.stride[0];
      return {data, target_.stride[1], target_.stride[2], lanes};
    }
    const int64_t offset = inside_ && different_ ? sequence * sequence_elements_ : 0;
    return {sums_.data() + item * elements_ + offset + first_, query_stride_, head_stride_, lanes};
  }

  // `sequence_of(item)` is the sequence of an item, if it has one alone.
  template <typename SequenceOf>
  void store(int64_t items, const SequenceOf& sequence_of) const {
    if (in_place_) return;
    for (int64_t item = 0; item < items; item++) {
      const int64_t offset = inside_ || !different_ ? 0 : sequence_of(item) * sequence_elements_;
      T* target = reinterpret_cast<T*>(target_.data) + offset;
      for (int64_t i = 0; i < elements_; i++) target[i] += sums_.data()[item * elements_ + i];
    }
  }

 private:
  const Tensor& target_;
  bool in_place_, inside_, different_;
  int64_t elements_, sequence_elements_, head_stride_, query_stride_, first_;
  Buffer<T> sums_;
};

template <typename E>
void backward(
    const E& engine, const Sizes& sizes, const int64_t* key_dims, const int64_t* leaf_shapes, const Tensor* tensors,
    int64_t threads) {
  using T = typename E::Value;
  using Packed = typename E::Packed;
  using Gradients = Program<T>;
  constexpr int64_t products = Gradients::kProducts, wanted = Gradients::kWanted;
  const Tensor &grad = tensors[0], &grad_lse = tensors[1];
  const Tensor *q = tensors + 2, *k = q + products, *leaves = k + products + 1;
  const Tensor &v = k[products], &tiles = leaves[Gradients::kLeaves], &out = (&tiles)[1], &lse = (&tiles)[2];
  const Tensor *dq = &lse + 1, *dk = dq + products, *dleaves = dk + products + 1;
  const Tensor& dv = dk[products];

  const std::vector<Blocks<E>> keys = pack_keys(engine, sizes, key_dims, k, products, true, threads);
  const int64_t widest = *std::max_element(key_dims, key_dims + products);
  Blocks<E> values(engine, sizes, kBlockKeys, sizes.value_dim);
  values.pack(v, sizes, false, true, T(1), threads);

  // The gradient of a tensor that all sequences share and queries do not is added up by one thread for each query.
  bool inside = false;
  for (int64_t i = 0; i < wanted; i++) inside |= leaf_shapes[4 * i] == 1 && leaf_shapes[4 * i + 1] > 1;
  const int64_t heads = sizes.heads(), tile_queries = queries_of_tile(sizes);
  const Visibility<Gradients, T> visibility(sizes, key_dims, q, k, leaves, tiles, tile_queries, threads);
  const int64_t most = std::clamp<int64_t>(inside ? 16 : 16 / sizes.sequences(), 1, 16);
  const std::vector<Chunk> chunks = make_chunks(sizes, visibility, tile_queries, most);
  const int64_t num_chunks = chunks.size(), items = inside ? num_chunks : num_chunks * sizes.sequences();

  std::vector<BlockSums<E>> key_sums;
  key_sums.reserve(products);
  for (int64_t i = 0; i < products; i++) key_sums.emplace_back(sizes, keys[i], chunks);
  const BlockSums<E> value_sums(sizes, values, chunks);
  std::vector<LeafGradients<T>> leaf_gradients;
  leaf_gradients.reserve(wanted);
  for (int64_t i = 0; i < wanted; i++) leaf_gradients.emplace_back(dleaves[i], leaf_shapes + 4 * i, sizes, items, inside);

  const int64_t rows = padded_rows<E>(tile_queries * heads), block_elements = rows * kBlockKeys;
  const int64_t value_width = values.padded_width, q_elements = rows * round_up(widest, E::kColumns);
  const int64_t left_size = engine.left_size(rows, widest), columns_size = engine.left_columns_size(rows, widest);
  const ThreadBuffers<T> q_tiles(threads, products * q_elements), dq_tiles(threads, products * q_elements);
  const ThreadBuffers<T> grad_tiles(threads, rows * value_width), out_rows(threads, value_width);
  const ThreadBuffers<T> score_tiles(threads, products * block_elements), dweight_tiles(threads, block_elements);
  const ThreadBuffers<T> row_values(threads, 2 * rows), lanes(threads, std::max<int64_t>(1, wanted) * rows * kLanes<T>);
  const ThreadBuffers<Packed> packed_queries(threads, products * (left_size + columns_size));
  const ThreadBuffers<Packed> packed_grad(
      threads, engine.left_size(rows, sizes.value_dim) + engine.left_columns_size(rows, sizes.value_dim));
  const ThreadBuffers<Packed> scratch(
      threads, std::max(engine.transposed_size(rows, kBlockKeys), engine.left_size(rows, kBlockKeys)));
  std::vector<std::vector<LiveBlock<T>>> live(threads);
  for (auto& blocks : live) blocks.reserve(values.count);

  const auto compute_chunk = [&](int64_t sequence, int64_t chunk, int64_t item, int64_t thread) {
    for (const auto& sums : key_sums) sums.clear(sequence, chunk);
    value_sums.clear(sequence, chunk);
    T *row_lse = row_values[thread], *delta = row_lse + rows;
    std::vector<LiveBlock<T>>& blocks = live[thread];
    LeafSums<T> sums[wanted + 1];
    for (int64_t i = 0; i < wanted; i++) {
      sums[i] = leaf_gradients[i].of(item, sequence, lanes[thread] + i * rows * kLanes<T>);
    }

    for (int64_t index = chunks[chunk].first_tile; index < chunks[chunk].last_tile; index++) {
      Place place{sequence, index * tile_queries, heads, 0, 0, 0, 0};
      place.rows = std::min(tile_queries, sizes.queries - place.first_query) * heads;
      [[maybe_unused]] const int64_t floating = visibility.find(place, blocks);

      const Strided<T> grad_rows{grad_tiles[thread], value_width};
      load_tile<E>(grad, place, sizes.value_dim, grad_rows);
      for (int64_t row = 0; Gradients::kSoftmax && row < place.rows; row++) {
        const int64_t query = place.query(row), head = place.head(row);
        load_row(out, sequence, query, head, sizes.value_dim, out_rows[thread]);
        delta[row] = delta_of(grad_rows[row], out_rows[thread], value_width, grad_lse, sequence, query, head);
        row_lse[row] = finite_or_infinity(element<T>(lse, sequence, query, head));
      }
      if constexpr (Gradients::kSoftmax) leave_vanishing(blocks, floating, row_lse, place.rows);
      const auto q_rows = [&](int64_t i) {
        return Strided<T>{q_tiles[thread] + i * q_elements, keys[i].padded_width};
      };
      const auto dq_rows = [&](int64_t i) {
        return Strided<T>{dq_tiles[thread] + i * q_elements, keys[i].padded_width};
      };
      const auto pack_left = [&](int64_t i) {
        return engine.left(q_rows(i), place.rows, key_dims[i], packed_queries[thread] + i * left_size);
      };
      const auto pack_columns = [&](int64_t i) {
        Packed* target = packed_queries[thread] + products * left_size + i * columns_size;
        return engine.left_columns(q_rows(i), place.rows, key_dims[i], target);
      };
      decltype(pack_left(0)) queries[products];
      decltype(pack_columns(0)) query_columns[products];
      for (int64_t i = 0; i < products; i++) {
        load_tile<E>(q[i], place, key_dims[i], q_rows(i));
        queries[i] = pack_left(i);
        query_columns[i] = pack_columns(i);
        fill(dq_rows(i)[0], padded_rows<E>(place.rows) * keys[i].padded_width, T(0));
      }
      const auto grads = engine.left(grad_rows, place.rows, sizes.value_dim, packed_grad[thread]);
      const auto grad_columns = engine.left_columns(
          grad_rows, place.rows, sizes.value_dim, packed_grad[thread] + engine.left_size(rows, sizes.value_dim));
      fill(lanes[thread], wanted * rows * kLanes<T>, T(0));

      const Strided<T> dweights{dweight_tiles[thread], kBlockKeys};
      T* scores[products];
      for (int64_t i = 0; i < products; i++) scores[i] = score_tiles[thread] + i * block_elements;
      for (const auto [block, shown, highest] : blocks) {
        place.move_to(block, sizes.keys);
        for (int64_t i = 0; i < products; i++) {
          engine.multiply(
              place.rows, place.columns, key_dims[i], queries[i], keys[i].columns(sequence, block),
              Strided<T>{scores[i], kBlockKeys}, false);
        }
        engine.multiply(
            place.rows, place.columns, sizes.value_dim, grads, values.columns(sequence, block), dweights, false);
        Gradients::gradients(shown, place, leaves, scores, dweights.first, row_lse, delta, sums);
        engine.add_transposed(
            Strided<T>{scores[0], kBlockKeys}, grad_columns, place.rows, sizes.value_dim, place.keys, place.columns,
            value_sums.of(sequence, chunk, block), scratch[thread]);
        for (int64_t i = 0; i < products; i++) {
          const Strided<T> dscores{i == 0 ? dweights.first : scores[i], kBlockKeys};
          engine.add_transposed(
              dscores, query_columns[i], place.rows, key_dims[i], place.keys, place.columns,
              key_sums[i].of(sequence, chunk, block), scratch[thread]);
          const auto left = engine.left_computed(dscores, place.rows, place.columns, scratch[thread]);
          engine.multiply(
              place.rows, key_dims[i], place.keys, left, keys[i].rows(sequence, block), dq_rows(i), true);
        }
      }
      for (int64_t row = 0; row < place.rows; row++) {
        for (int64_t i = 0; i < products; i++) {
          store_row(dq_rows(i)[row], T(1), dq[i], sequence, place.query(row), place.head(row), key_dims[i]);
        }
        for (int64_t i = 0; i < wanted; i++) {
          if (Gradients::kWantedByKey[i]) continue;
          *sums[i].row(place, row) += sum_of_lanes(Vec<T>::loadu(sums[i].lanes + row * kLanes<T>));
        }
      }
    }
  };

  parallel_for(items, threads, [&](int64_t item, int64_t thread) {
    [[maybe_unused]] const typename E::Session session;
    // The last chunks come first: their tiles mostly see the most keys.
    const int64_t chunk = num_chunks - 1 - (inside ? item : item / sizes.sequences());
    for (const auto& gradients : leaf_gradients) gradients.clear(item);
    if (!inside) return compute_chunk(item % sizes.sequences(), chunk, item, thread);
    for (int64_t sequence = 0; sequence < sizes.sequences(); sequence++) compute_chunk(sequence, chunk, item, thread);
  });

  for (int64_t i = 0; i < products; i++) key_sums[i].store(engine, T(1), dk[i], threads);
  value_sums.store(engine, T(1), dv, threads);
  for (const auto& gradients : leaf_gradients) {
    gradients.store(items, [&](int64_t item) { return item % sizes.sequences(); });
  }
}

}  // namespace

// tensors: grad_out, grad_lse, every q, every k, v, every leaf, tiles, out, lse (of a softmax; else they are not read),
// every dq, every dk, dv, every wanted gradient of a leaf; of the latter the shapes
extern "C" int scored_attention_backward(
    const Sizes* sizes, const Tensor* tensors, const int64_t* key_dims, const int64_t* leaf_shapes, int64_t threads,
    int64_t) {
  return guarded([&] { backward(make_engine<Engine>(tensors[0].dtype), *sizes, key_dims, leaf_shapes, tensors, threads); });
}
