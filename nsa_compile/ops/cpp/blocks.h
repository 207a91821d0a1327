// Keys and values cut into blocks, each packed for the products that read it, and attention over one block backwards.
#pragma once

#include "amx.h"
#include "vectors.h"

namespace {

// Rows of a left operand or of a result.
template <typename E>
constexpr int64_t padded_rows(int64_t rows) {
  return round_up(rows, E::kRows);
}

// A tensor [B, T, G, width] as blocks of rows, packed as right operands: [rows, width] for products that sum over the
// block's rows, [width, rows] for those that sum over the width. Rows after the end are zero.
template <typename E>
class Blocks {
 public:
  using T = typename E::Value;
  int64_t size, count, width;  // rows of a block, blocks of a sequence, columns
  int64_t padded_size, padded_width;

  Blocks(const E& engine, const Sizes& sizes, int64_t size, int64_t width)
      : size(size),
        count(divide_up(sizes.keys, size)),
        width(width),
        padded_size(round_up(round_up(size, E::kColumns), E::kRows)),
        padded_width(round_up(width, E::kColumns)),
        engine_(engine) {}

  int64_t elements() const { return padded_size * padded_width; }  // of a block's gradients
  // One block as [rows, width], and as [width, rows], the latter times the factor it was packed with.
  typename E::Right rows(int64_t sequence, int64_t block) const {
    return engine_.right(rows_.data() + (sequence * count + block) * rows_size(), size, width, row_pieces());
  }
  typename E::Right columns(int64_t sequence, int64_t block) const {
    return engine_.right(
        columns_.data() + (sequence * count + block) * columns_size(), width, padded_size, column_pieces_);
  }

  void pack(const Tensor& x, const Sizes& sizes, bool with_rows, bool with_columns, T factor, int64_t threads) {
    const int64_t blocks = sizes.sequences() * count;
    column_pieces_ = engine_.pieces(factor);
    if (with_rows) rows_ = Buffer<Packed>(blocks * rows_size());
    if (with_columns) columns_ = Buffer<Packed>(blocks * columns_size());
    const ThreadBuffers<T> loaded(threads, elements()), transposed(threads, with_columns ? elements() : 0);
    parallel_for(blocks, threads_to_copy(blocks * elements(), threads), [&](int64_t item, int64_t thread) {
      load_block(x, sizes, item / count, item % count, loaded[thread]);
      if (with_rows) {
        const Strided<const T> rows{loaded[thread], padded_width};
        engine_.pack_right(rows, size, width, row_pieces(), rows_.data() + item * rows_size());
      }
      if (with_columns) {
        transpose(loaded[thread], factor, transposed[thread]);
        const Strided<const T> columns{transposed[thread], padded_size};
        engine_.pack_right(columns, width, padded_size, column_pieces_, columns_.data() + item * columns_size());
      }
    });
  }

 private:
  using Packed = typename E::Packed;

  const E& engine_;
  int64_t column_pieces_ = 1;
  Buffer<Packed> rows_, columns_;

  int64_t row_pieces() const { return engine_.pieces(T(1)); }
  int64_t rows_size() const { return engine_.right_size(size, width, row_pieces()); }
  int64_t columns_size() const { return engine_.right_size(width, padded_size, column_pieces_); }

  void load_block(const Tensor& x, const Sizes& sizes, int64_t sequence, int64_t block, T* target) const {
    const int64_t first = block * size;
    const int64_t valid = std::min(size, sizes.keys - first);
    for (int64_t i = 0; i < valid; i++) {
      load_row(x, sequence / sizes.groups, first + i, sequence % sizes.groups, width, target + i * padded_width);
    }
    fill(target + valid * padded_width, (padded_size - valid) * padded_width, T(0));
  }

  void transpose(const T* source, T factor, T* target) const {
    for (int64_t d = 0; d < width; d++) {
      for (int64_t i = 0; i < padded_size; i++) target[d * padded_size + i] = factor * source[i * padded_width + d];
    }
  }
};

// The keys [begin, end) that a query sees.
struct KeyRange {
  int64_t begin, end;
};

// Whether queries with these ranges, whose ends never decrease, all see the whole block.
inline bool sees_all(const KeyRange& first, const KeyRange& last, int64_t first_key, int64_t padded_size) {
  return last.begin <= first_key && first.end >= first_key + padded_size;
}

// How many columns of a block products need to compute, for queries that see no key from `end` on.
inline int64_t columns_seen(int64_t end, int64_t first_key, int64_t padded_size) {
  return std::min(padded_size, round_up(end - first_key, 32));
}

// Scores of one row against one block become -inf where the query does not see the key.
template <typename T>
void hide(T* scores, const KeyRange& range, int64_t first_key, int64_t size, int64_t padded_size) {
  const int64_t low = std::clamp<int64_t>(range.begin - first_key, 0, padded_size);
  const int64_t high = std::clamp<int64_t>(range.end - first_key, low, size);
  if (low == 0 && high == padded_size) return;
  fill(scores, low, -kInfinity<T>);
  fill(scores + high, padded_size - high, -kInfinity<T>);
}

// The queries of a tile in the backward pass: `rows` rows, the heads of a group for some queries.
template <typename T>
struct GradientTile {
  int64_t rows, heads;
  const T* lse;            // [rows], +inf for a query that sees nothing, which makes its weights zero
  const T* delta;          // [rows], as `delta_of` has it
  const KeyRange* ranges;  // [rows / heads], neither end ever decreasing
};

// lse as the backward pass wants it: exp(-inf - -inf) would be NaN, exp(-inf - inf) is 0.
template <typename T>
T finite_or_infinity(T lse) {
  return lse == -kInfinity<T> ? kInfinity<T> : lse;
}

// What is taken off the gradients of a row's weights: the sum of gradient times output, less the gradient of the
// log-sum-exp, if it has one. The rows have so many elements with their padding.
template <typename T>
T delta_of(
    const T* grad, const T* out, int64_t padded, const Tensor& grad_lse, int64_t batch, int64_t position,
    int64_t head) {
  const T delta = dot(grad, out, padded);
  return grad_lse.data == nullptr ? delta : delta - element<T>(grad_lse, batch, position, head);
}

// The scores and what they need of a tile of queries in the backward pass.
template <typename E>
struct GradientScratch {
  ThreadBuffers<typename E::Value> weights, dscores;    // [rows, padded size of a block]
  ThreadBuffers<typename E::Packed> products;

  GradientScratch(const E& engine, const Blocks<E>& keys, const Blocks<E>& values, int64_t rows, int64_t threads)
      : weights(threads, rows * keys.padded_size),
        dscores(threads, rows * keys.padded_size),
        products(threads, E::template Gradients<Strided<typename E::Value>>::scratch_size(
            engine, rows, keys.padded_size, keys.width, values.width)) {}
};

// Adds one block's part to the sums of dk and dv, and to dq [rows, key width] if `accumulate`, else writes it. The
// columns of the keys are packed with the factor of the scores; dk and dq lack it. `weights` and `dscores` are scratch.
template <typename E, typename Products, typename GradientRows>
void backward_block(
    const GradientTile<typename E::Value>& tile, const Products& products, const Blocks<E>& keys,
    const Blocks<E>& values, int64_t sequence, int64_t block, typename E::Value* dk, typename E::Value* dv,
    const GradientRows& dq, bool accumulate, typename E::Value* weights, typename E::Value* dscores) {
  using T = typename E::Value;
  const int64_t first_key = block * keys.size, size = keys.padded_size;
  const KeyRange &first = tile.ranges[0], &last = tile.ranges[tile.rows / tile.heads - 1];
  const int64_t columns = columns_seen(last.end, first_key, size);
  products.scores(keys.columns(sequence, block), values.columns(sequence, block), columns, size, weights, dscores);
  const int64_t seen = std::min(columns, keys.size);
  if (seen < columns || !sees_all(first, last, first_key, columns)) {
    for (int64_t row = 0; row < tile.rows; row++) {
      hide(weights + row * size, tile.ranges[row / tile.heads], first_key, seen, columns);
    }
  }
  products.add(
      weights, dscores, tile.lse, tile.delta, seen, columns, size, keys.rows(sequence, block), dk, dv, dq, accumulate);
}

// A block's sums of gradients, times a factor, to the rows of a tensor [B, T, G, width]. `scratch` has room for them.
template <typename E>
void store_block(
    const E& engine, const typename E::Value* sums, typename E::Value factor, const Tensor& x, const Sizes& sizes,
    const Blocks<E>& blocks, int64_t sequence, int64_t block, typename E::Value* scratch) {
  const auto rows = engine.sum_rows(sums, blocks.padded_size, blocks.padded_width, scratch);
  const int64_t first = block * blocks.size;
  for (int64_t i = 0; i < std::min(blocks.size, sizes.keys - first); i++) {
    store_row(rows[i], factor, x, sequence / sizes.groups, first + i, sequence % sizes.groups, blocks.width);
  }
}

// A tile's blocks [first, last).
struct BlockSpan {
  int64_t first, last;
};

// Tiles first, first + step, … below `last` of a sequence, which one thread computes one after the other, and the
// blocks whose gradients they add to.
struct Chunk {
  int64_t first_tile, step, last_tile;
  BlockSpan span;
};

// Sums of the gradients of keys or of values. Each chunk of each sequence has its own, which are added in the order of the
// chunks at the end: so no bit depends on the number of threads, and nothing is atomic.
template <typename E>
class BlockSums {
 public:
  using T = typename E::Value;

  BlockSums(const Sizes& sizes, const Blocks<E>& blocks, const std::vector<Chunk>& chunks)
      : sizes_(sizes), blocks_(blocks), chunks_(chunks) {
    for (const Chunk& chunk : chunks) {
      first_.push_back(count_);
      count_ += chunk.span.last - chunk.span.first;
    }
    sums_ = Buffer<T>(sizes.sequences() * count_ * blocks.elements());
  }

  T* of(int64_t sequence, int64_t chunk, int64_t block) const {
    const int64_t place = sequence * count_ + first_[chunk] + block - chunks_[chunk].span.first;
    return sums_.data() + place * blocks_.elements();
  }

  void clear(int64_t sequence, int64_t chunk) const {
    const auto [first, last] = chunks_[chunk].span;
    fill(of(sequence, chunk, first), (last - first) * blocks_.elements(), T(0));
  }

  // The sums times a factor.
  void store(const E& engine, T factor, const Tensor& target, int64_t threads) const {
    const int64_t elements = blocks_.elements(), copied = sizes_.sequences() * count_ * elements;
    const ThreadBuffers<T> sums(threads, elements), rows(threads, elements);
    const int64_t items = sizes_.sequences() * blocks_.count;
    parallel_for(items, threads_to_copy(copied, threads), [&](int64_t item, int64_t thread) {
      const int64_t sequence = item / blocks_.count, block = item % blocks_.count;
      T* sum = sums[thread];
      fill(sum, elements, T(0));
      for (size_t chunk = 0; chunk < chunks_.size(); chunk++) {
        const auto [first, last] = chunks_[chunk].span;
        if (block >= first && block < last) add_to(sum, of(sequence, chunk, block), elements);
      }
      store_block(engine, sum, factor, target, sizes_, blocks_, sequence, block, rows[thread]);
    });
  }

 private:
  const Sizes& sizes_;
  const Blocks<E>& blocks_;
  const std::vector<Chunk>& chunks_;
  std::vector<int64_t> first_;  // of a chunk, among the blocks of all chunks of a sequence
  int64_t count_ = 0;
  Buffer<T> sums_;
};

// An engine for inputs of a type.
template <typename E>
E make_engine(int64_t dtype) {
  if constexpr (std::is_constructible_v<E, int64_t>) {
    return E(dtype);
  } else {
    return E();
  }
}

// Runs `function(engine)` with the engine for inputs of a type: the matrix unit where there is one and it is wanted.
template <typename Function>
int with_engine(int64_t dtype, int64_t matrix_unit, const Function& function) {
  return guarded([&] {
    if (dtype == kFloat64) return function(Vectors<double>());
#ifdef HAS_AMX
    if (matrix_unit) return function(Amx(dtype));
#endif
    function(Vectors<float>());
  });
}

}  // namespace
