// Attention over selected blocks, block by block.
//
// A query reads a few blocks of its own choice, so neighbouring queries share little. A block, however, is read by many
// queries: the pairs (query, block) of a unit of queries are sorted by block, and each block meets its queries as rows
// of matrix products. A pair leaves its partial result in a slot, and each query's slots are merged in their order;
// dk and dv of a block belong to the block alone. So no bit depends on the number of threads, and nothing is atomic.

#include "blocks.h"

namespace {

// Sizes that measured best on AVX-512 with 2 MB of L2 cache. Larger units meet each block with more queries at once,
// but their slots leave the cache before they are merged.
constexpr int64_t kTileScores = 8192;  // of a tile: 128 rows for blocks of 64 keys
constexpr int64_t kMaxTileRows = 128;
constexpr int64_t kMaxUnitQueries = 512;
constexpr int64_t kMaxSlotElements = 1 << 21;  // of a unit: fewer queries where heads or choices are many
constexpr int64_t kItemQueries = 32;           // that a thread takes at once where queries share nothing

int64_t index_at(const Tensor& indices, int64_t batch, int64_t query, int64_t group, int64_t place) {
  const int64_t offset = row_offset(indices, batch, query, group) + place * indices.stride[3];
  return indices.dtype == kInt64 ? reinterpret_cast<const int64_t*>(indices.data)[offset]
                                 : reinterpret_cast<const int32_t*>(indices.data)[offset];
}

// A sequence is a batch entry and a group; queries are numbered through all sequences: [sequence][query]. This is where
// one of them stands.
struct Place {
  int64_t sequence, batch, group, position;

  Place(const Sizes& sizes, int64_t query)
      : sequence(query / sizes.queries),
        batch(sequence / sizes.groups),
        group(sequence % sizes.groups),
        position(query % sizes.queries) {}
};

// A pair's query within its unit, and which of the query's indices its block is.
struct Pair {
  int32_t query, choice;
};

// The pairs of the queries [first, last), sorted by block and, within a block, by query.
class Unit {
 public:
  int64_t first, last;

  Unit(const Sizes& sizes, int64_t num_selected, int64_t block_size, int64_t blocks)
      : sizes_(sizes), num_selected_(num_selected), block_size_(block_size), blocks_(blocks) {}

  void sort(const Tensor& indices, int64_t new_first, int64_t new_last) {
    first = new_first, last = new_last;
    // Divisions are slow, and each query is met many times.
    places_.clear();
    for (int64_t query = first; query < last; query++) places_.emplace_back(sizes_, query);
    first_sequence_ = places_.front().sequence;
    const int64_t num_blocks = (places_.back().sequence + 1 - first_sequence_) * blocks_;

    // A counting sort. begin_[b + 2] counts the pairs of block b; after the running sum begin_[b + 1] is where its
    // first pair goes, and moves on with each pair to where those of block b + 1 begin.
    begin_.assign(num_blocks + 2, 0);
    visit(indices, num_blocks, [&](int64_t block, Pair) { begin_[block + 2]++; });
    for (int64_t block = 0; block < num_blocks; block++) begin_[block + 2] += begin_[block + 1];
    pairs_.resize(begin_[num_blocks + 1]);
    visit(indices, num_blocks, [&](int64_t block, Pair pair) { pairs_[begin_[block + 1]++] = pair; });
    used_.clear();
    for (int64_t block = 0; block < num_blocks; block++) {
      if (begin_[block] < begin_[block + 1]) used_.push_back(block);
    }
  }

  // Blocks that any query reads; `used` numbers them. A block's number counts through all sequences.
  int64_t num_used() const { return used_.size(); }
  int64_t block(int64_t used) const { return first_sequence_ * blocks_ + used_[used]; }
  const Pair* begin(int64_t used) const { return pairs_.data() + begin_[used_[used]]; }
  const Pair* end(int64_t used) const { return pairs_.data() + begin_[used_[used] + 1]; }

  int64_t slot(const Pair& pair) const { return pair.query * num_selected_ + pair.choice; }
  const Place& place(int64_t query) const { return places_[query]; }  // of a query within the unit

 private:
  const Sizes& sizes_;
  int64_t num_selected_, block_size_, blocks_, first_sequence_ = 0;
  std::vector<int64_t> begin_, used_;
  std::vector<int32_t> last_query_;
  std::vector<Pair> pairs_;
  std::vector<Place> places_;

  // Each pair that sees a key, once: of duplicates only the first counts.
  template <typename Function>
  void visit(const Tensor& indices, int64_t num_blocks, const Function& function) {
    last_query_.assign(num_blocks, -1);
    for (int32_t query = 0; query < last - first; query++) {
      const Place& at = places_[query];
      for (int32_t choice = 0; choice < num_selected_; choice++) {
        const int64_t index = index_at(indices, at.batch, at.position, at.group, choice);
        if (index < 0 || index >= blocks_ || index * block_size_ > at.position) continue;
        const int64_t block = (at.sequence - first_sequence_) * blocks_ + index;
        if (last_query_[block] == query) continue;
        last_query_[block] = query;
        function(block, Pair{query, choice});
      }
    }
  }
};

// What both directions need to know about the problem.
struct Layout {
  const Sizes& sizes;
  int64_t num_selected, block_size, heads;
  int64_t tile_queries, tile_rows, unit_queries;

  Layout(
      const Sizes& sizes, int64_t num_selected, int64_t block_size, int64_t padded_block, int64_t slot_width,
      int64_t row_multiple)
      : sizes(sizes),
        num_selected(num_selected),
        block_size(block_size),
        heads(sizes.heads()),
        tile_queries(std::max<int64_t>(1, std::min(kMaxTileRows, kTileScores / padded_block) / heads)),
        tile_rows(round_up(tile_queries * heads, row_multiple)),
        unit_queries(
            std::clamp<int64_t>(
                kMaxSlotElements / std::max<int64_t>(1, num_selected * heads * slot_width), 16, kMaxUnitQueries)) {}

  int64_t queries() const { return sizes.queries * sizes.sequences(); }
  int64_t slots() const { return unit_queries * num_selected; }

  // Runs `function(used block, first pair, number of pairs, thread)` for tiles of a unit's pairs. The tiles of one
  // block come one after the other, by one thread.
  template <typename E, typename Function>
  void for_tiles(const Unit& unit, int64_t threads, const Function& function) const {
    parallel_for(unit.num_used(), threads, [&](int64_t used, int64_t thread) {
      [[maybe_unused]] const typename E::Session session;
      for (const Pair* pair = unit.begin(used); pair < unit.end(used); pair += tile_queries) {
        function(unit.block(used), pair, std::min<int64_t>(tile_queries, unit.end(used) - pair), thread);
      }
    });
  }

  // Runs `function(query within the unit, thread)` for the queries of a unit.
  template <typename Function>
  void for_queries(const Unit& unit, int64_t threads, const Function& function) const {
    const int64_t count = unit.last - unit.first;
    parallel_for(divide_up(count, kItemQueries), threads, [&](int64_t item, int64_t thread) {
      const int64_t first = item * kItemQueries;
      for (int64_t query = first; query < std::min(count, first + kItemQueries); query++) function(query, thread);
    });
  }

  KeyRange range(const Place& place) const { return {0, std::min(sizes.keys, place.position + 1)}; }
};

// Pointers to the rows of the pairs' queries, one for each head; `copies` has room for all rows.
template <typename T>
void gather(
    const RowSource<T>& source, const Unit& unit, const Pair* pairs, int64_t count, int64_t heads,
    int64_t padded_count, int64_t padded_width, T* copies, const T** rows) {
  for (int64_t i = 0; i < count; i++) {
    const Place& at = unit.place(pairs[i].query);
    for (int64_t head = 0; head < heads; head++) {
      const int64_t row = i * heads + head;
      rows[row] = source.row(at.batch, at.position, at.group * heads + head, copies + row * padded_width);
    }
  }
  pad_rows(rows, count * heads, padded_count);
}

// Pointers to the rows of the pairs' slots; those that only fill up a micro kernel share `unused`.
template <typename T>
void slot_rows(
    T* slots, const Unit& unit, const Pair* pairs, int64_t count, int64_t heads, int64_t padded_count, int64_t width,
    T* unused, T** rows) {
  for (int64_t i = 0; i < count; i++) {
    T* first = slots + unit.slot(pairs[i]) * heads * width;
    for (int64_t head = 0; head < heads; head++) rows[i * heads + head] = first + head * width;
  }
  for (int64_t row = count * heads; row < padded_count; row++) rows[row] = unused;
}

// Scores of one row to exp(score - largest); their largest and their sum.
template <typename T>
void softmax_row(T* scores, int64_t padded_size, T& largest, T& sum) {
  Vec<T> running(-kInfinity<T>);
  for (int64_t i = 0; i < padded_size; i += kLanes<T>) running = at::vec::clamp_min(Vec<T>::loadu(scores + i), running);
  largest = largest_lane(running);
  const Vec<T> shift(largest);
  Vec<T> total(T(0));
  for (int64_t i = 0; i < padded_size; i += kLanes<T>) {
    const Vec<T> weight = exp_nonpositive(Vec<T>::loadu(scores + i) - shift);
    weight.store(scores + i);
    total = total + weight;
  }
  sum = sum_of_lanes(total);
}

// The largest score and the sum of exp(score - largest) over the slots of a query's head.
template <typename T>
struct Merged {
  T largest, sum;
};

// The partial results of a unit: for each slot and head the largest score, the sum of exp(score - largest), and the
// values weighted by these.
template <typename T>
struct Slots {
  int64_t heads, width;
  Buffer<T> largest, sum, out;

  Slots(int64_t slots, int64_t heads, int64_t width)
      : heads(heads), width(width), largest(slots * heads), sum(slots * heads), out(slots * heads * width) {}

  // Values of a query's head from `count` slots, beginning with `first`, to `merged`; they lack the division by the
  // sum. Slots that no pair used have a largest score of -inf.
  Merged<T> merge(int64_t first, int64_t count, int64_t head, T* merged) const {
    Merged<T> total{-kInfinity<T>, T(0)};
    for (int64_t slot = first; slot < first + count; slot++) {
      total.largest = std::max(total.largest, largest.data()[slot * heads + head]);
    }
    fill(merged, width, T(0));
    for (int64_t slot = first; slot < first + count; slot++) {
      const int64_t row = slot * heads + head;
      if (largest.data()[row] == -kInfinity<T>) continue;
      const T factor = std::exp(largest.data()[row] - total.largest);
      total.sum += factor * sum.data()[row];
      const Vec<T> factors(factor);
      const T* values = out.data() + row * width;
      for (int64_t i = 0; i < width; i += kLanes<T>) {
        at::vec::fmadd(factors, Vec<T>::loadu(values + i), Vec<T>::loadu(merged + i)).store(merged + i);
      }
    }
    return total;
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
  const Layout layout(sizes, num_selected, block_size, size, value_width, E::kRows);
  const int64_t heads = layout.heads;
  const Slots<T> slots(layout.slots(), heads, value_width);
  const ThreadBuffers<T> q_tiles(threads, layout.tile_rows * key_width), score_tiles(threads, layout.tile_rows * size);
  const ThreadBuffers<const T*> q_pointers(threads, layout.tile_rows);
  const ThreadBuffers<T*> out_pointers(threads, layout.tile_rows);
  const ThreadBuffers<T> merged_rows(threads, value_width);
  const ThreadBuffers<typename E::Packed> packed(threads, engine.left_size(layout.tile_rows, std::max(sizes.key_dim, size)));
  Unit unit(sizes, num_selected, block_size, keys.count);
  for (int64_t first = 0; first < layout.queries(); first += layout.unit_queries) {
    unit.sort(indices, first, std::min(layout.queries(), first + layout.unit_queries));
    fill(slots.largest.data(), layout.slots() * heads, -kInfinity<T>);

    layout.template for_tiles<E>(unit, threads, [&](int64_t block, const Pair* pairs, int64_t count, int64_t thread) {
      const T** q_rows = q_pointers[thread];
      T** out_rows = out_pointers[thread];
      T* scores = score_tiles[thread];
      const int64_t rows = count * heads, padded = padded_rows<E>(rows), first_key = block % keys.count * block_size;
      gather(q_source, unit, pairs, count, heads, padded, key_width, q_tiles[thread], q_rows);
      slot_rows(slots.out.data(), unit, pairs, count, heads, padded, value_width, merged_rows[thread], out_rows);
      const auto queries = engine.left(Scattered<const T>{q_rows}, rows, keys.width, packed[thread]);
      engine.multiply(rows, size, keys.width, queries, keys.columns(0, block), Strided<T>{scores, size}, false);
      for (int64_t i = 0; i < count; i++) {
        const KeyRange range = layout.range(unit.place(pairs[i].query));
        const int64_t slot_row = unit.slot(pairs[i]) * heads;
        for (int64_t head = 0; head < heads; head++) {
          T* row = scores + (i * heads + head) * size;
          hide(row, range, first_key, block_size, size);
          softmax_row(row, size, slots.largest.data()[slot_row + head], slots.sum.data()[slot_row + head]);
        }
      }
      const auto weights = engine.computed_left(Strided<T>{scores, size}, rows, block_size, packed[thread]);
      engine.multiply(rows, values.width, block_size, weights, values.rows(0, block), Scattered<T>{out_rows}, false);
    });

    layout.for_queries(unit, threads, [&](int64_t query, int64_t thread) {
      const Place& at = unit.place(query);
      for (int64_t head = 0; head < heads; head++) {
        const Merged<T> total = slots.merge(query * num_selected, num_selected, head, merged_rows[thread]);
        const T inverse = total.sum == T(0) ? T(0) : T(1) / total.sum;
        const int64_t query_head = at.group * heads + head;
        store_row(merged_rows[thread], inverse, out, at.batch, at.position, query_head, sizes.value_dim);
        element<T>(lse, at.batch, at.position, query_head) = total.largest + std::log(total.sum);
      }
    });
  }
}

// lse and the sum of gradient times output: [sequence][query][head].
template <typename T>
struct RowTerms {
  Buffer<T> lse, delta;

  RowTerms(
      const Layout& layout, const RowSource<T>& grad_source, const RowSource<T>& out_source, const Tensor& lses,
      int64_t threads)
      : lse(layout.queries() * layout.heads), delta(layout.queries() * layout.heads) {
    const int64_t heads = layout.heads, padded_width = padded_columns<T>(layout.sizes.value_dim);
    const ThreadBuffers<T> grad_copies(threads, padded_width), out_copies(threads, padded_width);
    parallel_for(divide_up(layout.queries(), kItemQueries), threads, [&](int64_t item, int64_t thread) {
      const int64_t last = std::min(layout.queries(), (item + 1) * kItemQueries);
      for (int64_t query = item * kItemQueries; query < last; query++) {
        const Place at(layout.sizes, query);
        for (int64_t head = 0; head < heads; head++) {
          const int64_t query_head = at.group * heads + head;
          const T* grad_row = grad_source.row(at.batch, at.position, query_head, grad_copies[thread]);
          const T* out_row = out_source.row(at.batch, at.position, query_head, out_copies[thread]);
          delta.data()[query * heads + head] = dot(grad_row, out_row, padded_width);
          const T row_lse = element<T>(lses, at.batch, at.position, query_head);
          lse.data()[query * heads + head] = finite_or_infinity(row_lse);
        }
      }
    });
  }
};

template <typename E>
void backward(
    const E& engine, const Sizes& sizes, const Tensor* tensors, int64_t num_selected, int64_t block_size,
    typename E::Value scale, int64_t threads) {
  using T = typename E::Value;
  const auto& [grad, q, k, v, out, lse, indices, dq, dk, dv] = reinterpret_cast<const Tensor(&)[10]>(*tensors);
  Blocks<E> keys(engine, sizes, block_size, sizes.key_dim), values(engine, sizes, block_size, sizes.value_dim);
  keys.pack(k, sizes, true, true, scale, threads);
  values.pack(v, sizes, false, true, T(1), threads);
  const RowSource<T> q_source(q, sizes.key_dim), grad_source(grad, sizes.value_dim), out_source(out, sizes.value_dim);

  const int64_t size = keys.padded_size, key_width = keys.padded_width, value_width = values.padded_width;
  const Layout layout(sizes, num_selected, block_size, size, key_width, E::kRows);
  const int64_t heads = layout.heads;
  const RowTerms<T> terms(layout, grad_source, out_source, lse, threads);
  const int64_t blocks = sizes.sequences() * keys.count;
  const Buffer<T> key_sums(blocks * keys.elements()), value_sums(blocks * values.elements());
  parallel_for(blocks, threads, [&](int64_t block, int64_t) {
    fill(key_sums.data() + block * keys.elements(), keys.elements(), T(0));
    fill(value_sums.data() + block * values.elements(), values.elements(), T(0));
  });

  const Buffer<T> slot_dq(layout.slots() * heads * key_width);
  std::vector<uint8_t> slot_used(layout.slots());
  const ThreadBuffers<T> q_tiles(threads, layout.tile_rows * key_width);
  const ThreadBuffers<T> grad_tiles(threads, layout.tile_rows * value_width);
  const ThreadBuffers<const T*> q_pointers(threads, layout.tile_rows), grad_pointers(threads, layout.tile_rows);
  const ThreadBuffers<T*> dq_pointers(threads, layout.tile_rows);
  const ThreadBuffers<T> row_values(threads, 2 * layout.tile_rows);
  const GradientScratch<E> scratch(engine, keys, values, layout.tile_rows, threads);
  const ThreadBuffers<T> merged_rows(threads, key_width);
  std::vector<std::vector<KeyRange>> ranges(threads, std::vector<KeyRange>(layout.tile_queries));
  Unit unit(sizes, num_selected, block_size, keys.count);
  for (int64_t first = 0; first < layout.queries(); first += layout.unit_queries) {
    unit.sort(indices, first, std::min(layout.queries(), first + layout.unit_queries));
    std::fill(slot_used.begin(), slot_used.end(), uint8_t(0));

    layout.template for_tiles<E>(unit, threads, [&](int64_t block, const Pair* pairs, int64_t count, int64_t thread) {
      T *row_lse = row_values[thread], *delta = row_lse + layout.tile_rows;
      const int64_t rows = count * heads, padded = padded_rows<E>(rows);
      gather(q_source, unit, pairs, count, heads, padded, key_width, q_tiles[thread], q_pointers[thread]);
      gather(grad_source, unit, pairs, count, heads, padded, value_width, grad_tiles[thread], grad_pointers[thread]);
      slot_rows(slot_dq.data(), unit, pairs, count, heads, padded, key_width, merged_rows[thread], dq_pointers[thread]);
      for (int64_t i = 0; i < count; i++) {
        const int64_t query = unit.first + pairs[i].query;
        ranges[thread][i] = layout.range(unit.place(pairs[i].query));
        slot_used[unit.slot(pairs[i])] = 1;
        std::memcpy(row_lse + i * heads, terms.lse.data() + query * heads, heads * sizeof(T));
        std::memcpy(delta + i * heads, terms.delta.data() + query * heads, heads * sizeof(T));
      }
      const GradientTile<T> tile{rows, heads, row_lse, delta, ranges[thread].data()};
      const Scattered<const T> q_rows{q_pointers[thread]}, grad_rows{grad_pointers[thread]};
      const typename E::template Gradients<Scattered<const T>> products(
          engine, q_rows, grad_rows, rows, sizes.key_dim, sizes.value_dim, scratch.products[thread]);
      backward_block(
          tile, products, keys, values, block / keys.count, block % keys.count, key_sums.data() + block * keys.elements(),
          value_sums.data() + block * values.elements(), Scattered<T>{dq_pointers[thread]}, false, scratch.weights[thread],
          scratch.dscores[thread]);
    });

    layout.for_queries(unit, threads, [&](int64_t query, int64_t thread) {
      const Place& at = unit.place(query);
      const int64_t first_slot = query * num_selected;
      for (int64_t head = 0; head < heads; head++) {
        fill(merged_rows[thread], key_width, T(0));
        for (int64_t slot = first_slot; slot < first_slot + num_selected; slot++) {
          if (slot_used[slot])
            add_to(merged_rows[thread], slot_dq.data() + (slot * heads + head) * key_width, key_width);
        }
        store_row(
            merged_rows[thread], scale, dq, at.batch, at.position, at.group * heads + head,
            sizes.key_dim);
      }
    });
  }

  const ThreadBuffers<T> sum_rows(threads, std::max(keys.elements(), values.elements()));
  parallel_for(blocks, threads, [&](int64_t item, int64_t thread) {
    const int64_t sequence = item / keys.count, block = item % keys.count;
    T* rows = sum_rows[thread];
    store_block(engine, key_sums.data() + item * keys.elements(), scale, dk, sizes, keys, sequence, block, rows);
    store_block(engine, value_sums.data() + item * values.elements(), T(1), dv, sizes, values, sequence, block, rows);
  });
}

}  // namespace

// tensors: q, k, v, indices, out, lse
extern "C" int selected_attention_forward(
    const Sizes* sizes, const Tensor* tensors, int64_t num_selected, int64_t block_size, double scale, int64_t threads,
    int64_t matrix_unit) {
  return with_engine(tensors[0].dtype, matrix_unit, [&](const auto& engine) {
    forward(engine, *sizes, tensors, num_selected, block_size, scale, threads);
  });
}

// tensors: grad_out, q, k, v, out, lse, indices, dq, dk, dv
extern "C" int selected_attention_backward(
    const Sizes* sizes, const Tensor* tensors, int64_t num_selected, int64_t block_size, double scale, int64_t threads,
    int64_t matrix_unit) {
  return with_engine(tensors[0].dtype, matrix_unit, [&](const auto& engine) {
    backward(engine, *sizes, tensors, num_selected, block_size, scale, threads);
  });
}
