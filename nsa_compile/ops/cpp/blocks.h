// Keys and values cut into blocks, each packed for the products that read it, and attention over one block backwards.
#pragma once

#include "tensor.h"

namespace {

// A tensor [B, T, G, width] as blocks of rows: [rows, width] for products that sum over the block's rows, [width, rows]
// for those that sum over the width, both padded. Rows after the end are zero.
template <typename T>
class Blocks {
 public:
  int64_t size, count, width;  // rows of a block, blocks of a sequence, columns
  int64_t padded_size, padded_width;

  Blocks(const Sizes& sizes, int64_t size, int64_t width)
      : size(size),
        count(divide_up(sizes.keys, size)),
        width(width),
        padded_size(round_up(padded_columns<T>(size), kTileRows)),
        padded_width(padded_columns<T>(width)) {}

  int64_t elements() const { return padded_size * padded_width; }
  // One block as [rows, width], and as [width, rows], the latter times the factor it was packed with.
  Strided<const T> rows(int64_t sequence, int64_t block) const {
    return {rows_.data() + (sequence * count + block) * elements(), padded_width};
  }
  Strided<const T> columns(int64_t sequence, int64_t block) const {
    return {columns_.data() + (sequence * count + block) * elements(), padded_size};
  }

  void pack(const Tensor& x, const Sizes& sizes, bool with_rows, bool with_columns, T factor, int64_t threads) {
    const int64_t blocks = sizes.sequences() * count;
    if (with_rows) rows_ = Buffer<T>(blocks * elements());
    if (with_columns) columns_ = Buffer<T>(blocks * elements());
    const ThreadBuffers<T> scratch(with_rows ? 0 : threads, elements());
    parallel_for(blocks, threads, [&](int64_t item, int64_t thread) {
      T* target = with_rows ? rows_.data() + item * elements() : scratch[thread];
      load_block(x, sizes, item / count, item % count, target);
      if (with_columns) transpose(target, factor, columns_.data() + item * elements());
    });
  }

 private:
  Buffer<T> rows_, columns_;

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
template <typename T, typename Rows>
struct GradientTile {
  int64_t rows, heads;
  Rows q;                  // [rows, key width]
  Rows grad;               // [rows, value width], the gradient of the output
  const T* lse;            // [rows], +inf for a query that sees nothing, which makes its weights zero
  const T* delta;          // [rows], the sum of gradient times output
  const KeyRange* ranges;  // [rows / heads], neither end ever decreasing
};

// lse as the backward pass wants it: exp(-inf - -inf) would be NaN, exp(-inf - inf) is 0.
template <typename T>
T finite_or_infinity(T lse) {
  return lse == -kInfinity<T> ? kInfinity<T> : lse;
}

// Adds one block's part to dk and dv [padded_size, width], and to dq [rows, key width] if `accumulate`, else writes it.
// The columns of the keys are packed with the factor of the scores; dk and dq lack it. `weights` and `dscores` are
// scratch of [rows, padded_size].
template <typename T, typename Rows, typename GradientRows>
void backward_block(
    const GradientTile<T, Rows>& tile, const Blocks<T>& keys, const Blocks<T>& values, int64_t sequence, int64_t block,
    T* dk, T* dv, const GradientRows& dq, bool accumulate, T* weights, T* dscores) {
  const int64_t size = keys.padded_size;
  const Strided<T> weight_rows{weights, size}, dscore_rows{dscores, size};
  multiply<T, Left::kPlain>(tile.rows, size, keys.width, tile.q, keys.columns(sequence, block), weight_rows, false);
  multiply<T, Left::kPlain>(
      tile.rows, size, values.width, tile.grad, values.columns(sequence, block), dscore_rows, false);
  const int64_t first_key = block * keys.size;
  const bool whole = sees_all(tile.ranges[0], tile.ranges[tile.rows / tile.heads - 1], first_key, size);
  for (int64_t row = 0; row < tile.rows; row++) {
    T* p = weights + row * size;
    T* ds = dscores + row * size;
    if (!whole) hide(p, tile.ranges[row / tile.heads], first_key, keys.size, size);
    const Vec<T> lse(tile.lse[row]), delta(tile.delta[row]);
    for (int64_t i = 0; i < size; i += kLanes<T>) {
      const Vec<T> weight = exp_nonpositive(Vec<T>::loadu(p + i) - lse);
      weight.store(p + i);
      (weight * (Vec<T>::loadu(ds + i) - delta)).store(ds + i);
    }
  }
  multiply<T, Left::kTransposed>(
      keys.size, values.width, tile.rows, weight_rows, tile.grad, Strided<T>{dv, values.padded_width}, true);
  multiply<T, Left::kTransposed>(
      keys.size, keys.width, tile.rows, dscore_rows, tile.q, Strided<T>{dk, keys.padded_width}, true);
  multiply<T, Left::kPlain>(tile.rows, keys.width, keys.size, dscore_rows, keys.rows(sequence, block), dq, accumulate);
}

// A block of gradients, times a factor, to the rows of a tensor [B, T, G, width].
template <typename T>
void store_block(
    const T* source, T factor, const Tensor& x, const Sizes& sizes, const Blocks<T>& blocks, int64_t sequence,
    int64_t block) {
  const int64_t first = block * blocks.size;
  for (int64_t i = 0; i < std::min(blocks.size, sizes.keys - first); i++) {
    store_row(
        source + i * blocks.padded_width, factor, x, sequence / sizes.groups, first + i, sequence % sizes.groups,
        blocks.width);
  }
}

}  // namespace
