// Products by fused multiply-adds on vectors: for every machine and every type.
#pragma once

#include "tensor.h"

namespace {

// An engine multiplies matrices. This one and `Amx` offer the same: operands on the right are packed once by `Blocks`,
// those on the left belong to a tile of queries.
template <typename T>
class Vectors {
 public:
  using Value = T;
  using Packed = T;
  using Right = Strided<const T>;
  static constexpr int64_t kRows = kTileRows;     // to a multiple of which a result's rows are padded,
  static constexpr int64_t kColumns = kLanes<T>;  // and its columns
  struct Session {};                              // what a thread holds while it multiplies

  // A right operand [depth, columns] is kept as it is.
  int64_t pieces(T) const { return 1; }
  int64_t right_size(int64_t depth, int64_t columns, int64_t) const { return depth * padded_columns<T>(columns); }
  Right right(const Packed* packed, int64_t, int64_t columns, int64_t) const {
    return {packed, padded_columns<T>(columns)};
  }
  void pack_right(const Strided<const T>& source, int64_t depth, int64_t columns, int64_t, Packed* target) const {
    for (int64_t row = 0; row < depth; row++) {
      std::memcpy(target + row * padded_columns<T>(columns), source[row], padded_columns<T>(columns) * sizeof(T));
    }
  }

  // A left operand [rows, depth] is read where it lies.
  int64_t left_size(int64_t, int64_t) const { return 0; }
  template <typename Rows>
  Rows left(const Rows& rows, int64_t, int64_t, Packed*) const {
    return rows;
  }
  // exp(scores - shift) as a left operand, and in place as well if they are to be kept; adds it to `sums`
  // [rows, lanes].
  template <typename Sums>
  Strided<T> weights(
      const Strided<T>& scores, int64_t rows, int64_t columns, const T* shift, const Sums& sums, bool, Packed*) const {
    for (int64_t row = 0; row < rows; row++) {
      Vec<T> sum = Vec<T>::loadu(sums[row]);
      for (int64_t i = 0; i < columns; i += kLanes<T>) {
        const Vec<T> weight = exp_nonpositive(Vec<T>::loadu(scores[row] + i) - Vec<T>(shift[row]));
        weight.store(scores[row] + i);
        sum = sum + weight;
      }
      sum.store(sums[row]);
    }
    return scores;
  }

  // C[rows, columns] = A B, or C + A B.
  template <typename Left, typename C>
  void multiply(
      int64_t rows, int64_t columns, int64_t depth, const Left& a, const Right& b, const C& c, bool accumulate) const {
    ::multiply<T, ::Left::kPlain>(rows, columns, depth, a, b, c, accumulate);
  }

  // The columns of a matrix [count, width] as the rows of a left operand, for `add_transposed`.
  int64_t left_columns_size(int64_t, int64_t) const { return 0; }
  template <typename Rows>
  Rows left_columns(const Rows& rows, int64_t, int64_t, Packed*) const {
    return rows;
  }
  // sums [keys, width] += weightsᵀ x, with x [rows, width] as `left_columns` has it and weights [rows, columns], of which
  // the first `keys` columns count.
  int64_t transposed_size(int64_t, int64_t) const { return 0; }
  template <typename Rows>
  void add_transposed(
      const Strided<T>& weights, const Rows& x, int64_t rows, int64_t width, int64_t keys, int64_t, T* sums,
      Packed*) const {
    const Strided<T> sum_rows{sums, padded_columns<T>(width)};
    ::multiply<T, ::Left::kTransposed>(keys, width, rows, weights, x, sum_rows, true);
  }
  // A matrix computed here, as a left operand.
  Strided<T> left_computed(const Strided<T>& rows, int64_t, int64_t, Packed*) const { return rows; }

  // The products of the backward pass for a tile of queries: q [rows, key_dim], grad [rows, value_dim].
  template <typename Rows>
  class Gradients {
   public:
    static int64_t scratch_size(const Vectors&, int64_t, int64_t, int64_t, int64_t) { return 0; }

    Gradients(
        const Vectors&, const Rows& q, const Rows& grad, int64_t rows, int64_t key_dim, int64_t value_dim, Packed*)
        : q_(q), grad_(grad), rows_(rows), key_dim_(key_dim), value_dim_(value_dim) {}

    // q Kᵀ and grad Vᵀ: [rows, columns], with rows `size` apart.
    void scores(
        const Right& key_columns, const Right& value_columns, int64_t columns, int64_t size, T* scores,
        T* dweights) const {
      const Strided<T> score_rows{scores, size}, dweight_rows{dweights, size};
      ::multiply<T, ::Left::kPlain>(rows_, columns, key_dim_, q_, key_columns, score_rows, false);
      ::multiply<T, ::Left::kPlain>(rows_, columns, value_dim_, grad_, value_columns, dweight_rows, false);
    }

    // From scores and the gradients of weights, which are overwritten: weights = exp(scores - lse) and
    // dscores = weights (dweights - delta); then dv += weightsᵀ grad, dk += dscoresᵀ q, and dq (+)= dscores K, for
    // the first `keys` of the block's `size` padded keys; `columns` are these, padded.
    template <typename GradientRows>
    void add(
        T* scores, T* dweights, const T* lse, const T* delta, int64_t keys, int64_t columns, int64_t size,
        const Right& key_rows, T* dk, T* dv, const GradientRows& dq, bool accumulate) const {
      const Strided<T> weights{scores, size}, dscores{dweights, size};
      for (int64_t row = 0; row < rows_; row++) {
        for (int64_t i = 0; i < columns; i += kLanes<T>) {
          const Vec<T> weight = exp_nonpositive(Vec<T>::loadu(weights[row] + i) - Vec<T>(lse[row]));
          weight.store(weights[row] + i);
          (weight * (Vec<T>::loadu(dscores[row] + i) - Vec<T>(delta[row]))).store(dscores[row] + i);
        }
      }
      const Strided<T> dv_rows{dv, padded_columns<T>(value_dim_)}, dk_rows{dk, padded_columns<T>(key_dim_)};
      ::multiply<T, ::Left::kTransposed>(keys, value_dim_, rows_, weights, grad_, dv_rows, true);
      ::multiply<T, ::Left::kTransposed>(keys, key_dim_, rows_, dscores, q_, dk_rows, true);
      ::multiply<T, ::Left::kPlain>(rows_, key_dim_, keys, dscores, key_rows, dq, accumulate);
    }

   private:
    const Rows &q_, &grad_;
    int64_t rows_, key_dim_, value_dim_;
  };

  // Sums of dk or dv as rows [size, width].
  Strided<const T> sum_rows(const T* sums, int64_t, int64_t padded_width, T*) const { return {sums, padded_width}; }
};

}  // namespace
