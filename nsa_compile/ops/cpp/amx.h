// Products by the matrix unit of x86 (AMX), for inputs of float32 and below.
//
// The unit multiplies bfloat16 and adds in float32. A float32 is the exact sum of three bfloat16, x = x0 + x1 + x2:
// eight bits of the significand each, cut off one after the other. Of the nine products of the parts of two numbers
// the six with i + j < 3 are computed; the others are at most 2^-21 of the whole together, 2^-23 on average, about a
// rounding of float32. The small ones are added first: then only the last sixth of the additions rounds at the size of
// the result, which leaves the error of a sum below that of a chain of float32 additions. bfloat16 inputs need one
// part, float16 ones two. Infinities become NaN, and what is below 2^-126 zero.
//
// The unit takes 16 rows of 16 pairs of numbers. Which numbers are a pair is free, as long as both operands agree:
// number d of 32 goes with d + 16. So a pair of vectors is packed lane by lane, whether its numbers lie in a row or in
// a column.
#pragma once

#include "tensor.h"

#if defined(CPU_CAPABILITY_AVX512) && defined(__AMX_TILE__) && defined(__AMX_BF16__)
#define HAS_AMX 1

#include <immintrin.h>

namespace {

class Amx {
 public:
  using Value = float;
  using Packed = uint16_t;
  static constexpr int64_t kRows = 16, kColumns = 16;

  // Tiles of an operand: [rows or columns / 16][depth / 32][pieces], each 1 KB.
  struct Operand {
    const uint16_t* tiles;
    int64_t depth_tiles, pieces;

    const uint16_t* tile(int64_t index, int64_t depth, int64_t piece) const {
      return tiles + ((index * depth_tiles + depth) * pieces + piece) * kTile;
    }
    // Where the pairs of row `i` of the first piece's tile go, while an operand is packed.
    uint16_t* row(int64_t index, int64_t depth, int64_t i) const {
      return const_cast<uint16_t*>(tile(index, depth, 0)) + i * 32;
    }
  };
  using Right = Operand;

  // The unit's configuration belongs to a thread, and others use the unit, too.
  struct Session {
    Session() {
      struct {
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
        uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
      } config;
      _tile_loadconfig(&config);
    }
    ~Session() { _tile_release(); }
  };

  explicit Amx(int64_t dtype)
      : input_pieces_(dtype == kBFloat16 ? 1 : dtype == kFloat16 ? 2 : 3),
        computed_pieces_(dtype == kFloat32 ? 3 : 2) {}

  // Parts of an input times a factor: a power of two keeps the number of significant bits.
  int64_t pieces(float factor) const {
    int exponent;
    return std::frexp(factor, &exponent) == 0.5f ? input_pieces_ : std::min<int64_t>(3, input_pieces_ + 1);
  }
  int64_t right_size(int64_t depth, int64_t columns, int64_t pieces) const {
    return divide_up(columns, 16) * divide_up(depth, 32) * pieces * kTile;
  }
  Right right(const Packed* packed, int64_t depth, int64_t, int64_t pieces) const {
    return {packed, divide_up(depth, 32), pieces};
  }
  // Packs [depth, columns], the columns padded to whole vectors.
  void pack_right(
      const Strided<const float>& source, int64_t depth, int64_t columns, int64_t pieces, Packed* target) const {
    with_pieces(pieces, [&](auto constant) {
      constexpr int kPieces = decltype(constant)::value;
      for (int64_t column = 0; column < columns; column += 16) {
        for (int64_t first = 0; first < depth; first += 32, target += kPieces * kTile) {
          for (int64_t i = 0; i < 16; i++) {
            const auto row = [&](int64_t row) {
              return row < depth ? _mm512_loadu_ps(source[row] + column) : _mm512_setzero_ps();
            };
            split<kPieces>(row(first + i), row(first + i + 16), target + i * 32);
          }
        }
      }
    });
  }

  int64_t left_size(int64_t rows, int64_t depth) const {
    return divide_up(rows, 16) * divide_up(depth, 32) * 3 * kTile;
  }
  template <typename Rows>
  Operand left(const Rows& rows, int64_t count, int64_t depth, Packed* target) const {
    return pack_left(rows, count, depth, input_pieces_, target);
  }
  template <typename Sums>
  Operand weights(
      const Strided<float>& scores, int64_t rows, int64_t columns, const float* shift, const Sums& sums, bool keep,
      Packed* target) const {
    const Operand operand{target, divide_up(columns, 32), computed_pieces_};
    with_pieces(computed_pieces_, [&](auto constant) {
      constexpr int kPieces = decltype(constant)::value;
      for (int64_t row = 0; row < rows; row++) {
        Vec<float> sum = Vec<float>::loadu(sums[row]);
        for (int64_t i = 0; i < columns; i += 32) {
          Vec<float> weights[2];
#pragma GCC unroll 2
          for (int j = 0; j < 2; j++) {
            float* at = scores[row] + i + 16 * j;
            weights[j] = Vec<float>(0.0f);
            if (j == 1 && i + 16 == columns) continue;
            weights[j] = exp_nonpositive(Vec<float>::loadu(at) - Vec<float>(shift[row]));
            if (keep) weights[j].store(at);
            sum = sum + weights[j];
          }
          split<kPieces>(weights[0], weights[1], operand.row(row / 16, i / 32, row % 16));
        }
        sum.store(sums[row]);
      }
    });
    return operand;
  }

  template <typename C>
  void multiply(
      int64_t rows, int64_t columns, int64_t, const Operand& a, const Operand& b, const C& c, bool accumulate) const {
    const int64_t row_tiles = divide_up(rows, 16), column_tiles = divide_up(columns, 16);
    for (int64_t row = 0; row < row_tiles; row += 2) {
      for (int64_t column = 0; column < column_tiles; column += 2) {
        const bool two_rows = row + 1 < row_tiles, two_columns = column + 1 < column_tiles;
        const auto run = two_rows ? (two_columns ? multiply_tiles<2, 2> : multiply_tiles<2, 1>)
                                  : (two_columns ? multiply_tiles<1, 2> : multiply_tiles<1, 1>);
        if constexpr (std::is_same_v<C, Strided<float>>) {
          if (!accumulate) {
            run(a, b, row, column, c[row * 16] + column * 16, c.stride);
            continue;
          }
        }
        alignas(64) float sums[32 * 32];
        run(a, b, row, column, sums, 32);
        for (int64_t i = 0; i < std::min<int64_t>(32, rows - row * 16); i++) {
          float* target = c[row * 16 + i] + column * 16;
          for (int64_t j = 0; j < (two_columns ? 32 : 16); j += 16) {
            const __m512 sum = _mm512_load_ps(sums + i * 32 + j);
            _mm512_storeu_ps(target + j, accumulate ? _mm512_add_ps(_mm512_loadu_ps(target + j), sum) : sum);
          }
        }
      }
    }
  }

  int64_t left_columns_size(int64_t count, int64_t width) const { return left_size(width, count); }
  template <typename Rows>
  Operand left_columns(const Rows& rows, int64_t count, int64_t width, Packed* target) const {
    return pack_left_columns(rows, count, width, target);
  }
  // The sums are [width, stride of the weights] here.
  int64_t transposed_size(int64_t rows, int64_t columns) const { return right_size(rows, columns, 3); }
  void add_transposed(
      const Strided<float>& weights, const Operand& x, int64_t rows, int64_t width, int64_t, int64_t columns,
      float* sums, Packed* scratch) const {
    pack_right({weights.first, weights.stride}, rows, columns, computed_pieces_, scratch);
    const Right right_weights = right(scratch, rows, columns, computed_pieces_);
    multiply(width, columns, rows, x, right_weights, Strided<float>{sums, weights.stride}, true);
  }
  Operand left_computed(const Strided<float>& rows, int64_t count, int64_t depth, Packed* target) const {
    return pack_left(rows, count, depth, computed_pieces_, target);
  }

  // As of `Vectors`, but for the sums of dk and dv, which are [width, size] here: their products want the queries along
  // the rows of the left operand, and q and grad are turned once a tile.
  template <typename Rows>
  class Gradients {
   public:
    static int64_t scratch_size(const Amx& engine, int64_t rows, int64_t size, int64_t key_dim, int64_t value_dim) {
      return engine.left_size(rows, key_dim) + engine.left_size(rows, value_dim) + engine.left_size(key_dim, rows) +
          engine.left_size(value_dim, rows) + engine.left_size(rows, size) + 2 * engine.right_size(rows, size, 3);
    }

    Gradients(
        const Amx& engine, const Rows& q, const Rows& grad, int64_t rows, int64_t key_dim, int64_t value_dim,
        Packed* scratch)
        : engine_(engine), rows_(rows), key_dim_(key_dim), value_dim_(value_dim) {
      const auto take = [&](int64_t size) { return std::exchange(scratch, scratch + size); };
      q_ = engine.left(q, rows, key_dim, take(engine.left_size(rows, key_dim)));
      grad_ = engine.left(grad, rows, value_dim, take(engine.left_size(rows, value_dim)));
      q_columns_ = engine.pack_left_columns(q, rows, key_dim, take(engine.left_size(key_dim, rows)));
      grad_columns_ = engine.pack_left_columns(grad, rows, value_dim, take(engine.left_size(value_dim, rows)));
      scratch_ = scratch;
    }

    void scores(
        const Right& key_columns, const Right& value_columns, int64_t columns, int64_t size, float* scores,
        float* dweights) const {
      engine_.multiply(rows_, columns, key_dim_, q_, key_columns, Strided<float>{scores, size}, false);
      engine_.multiply(rows_, columns, value_dim_, grad_, value_columns, Strided<float>{dweights, size}, false);
    }

    template <typename GradientRows>
    void add(
        const float* scores, const float* dweights, const float* lse, const float* delta, int64_t keys, int64_t columns,
        int64_t size, const Right& key_rows, float* dk, float* dv, const GradientRows& dq, bool accumulate) const {
      const int64_t pieces = engine_.computed_pieces_, row_tiles = divide_up(rows_, 32);
      Packed* const dscores_right = scratch_ + engine_.right_size(rows_, columns, pieces);
      Packed* const dscores_left = dscores_right + engine_.right_size(rows_, columns, pieces);
      const Operand weights{scratch_, row_tiles, pieces}, dscores{dscores_right, row_tiles, pieces};
      const Operand dscore_rows{dscores_left, divide_up(columns, 32), pieces};
      const Strided<const float> score_rows{scores, size}, dweight_rows{dweights, size};
      pack(score_rows, dweight_rows, lse, delta, columns, weights, dscores, dscore_rows);
      engine_.multiply(value_dim_, columns, rows_, grad_columns_, weights, Strided<float>{dv, size}, true);
      engine_.multiply(key_dim_, columns, rows_, q_columns_, dscores, Strided<float>{dk, size}, true);
      engine_.multiply(rows_, key_dim_, keys, dscore_rows, key_rows, dq, accumulate);
    }

   private:
    const Amx& engine_;
    int64_t rows_, key_dim_, value_dim_;
    Operand q_, grad_, q_columns_, grad_columns_;
    Packed* scratch_;

    // Weights and gradients of scores as operands, without a detour through memory: both as right ones, the latter as a
    // left one as well.
    void pack(
        const Strided<const float>& scores, const Strided<const float>& dweights, const float* lse, const float* delta,
        int64_t columns, const Operand& weights, const Operand& dscores, const Operand& dscore_rows) const {
      with_pieces(weights.pieces, [&](auto constant) {
        constexpr int kPieces = decltype(constant)::value;
        for (int64_t first = 0; first < rows_; first += 32) {
          for (int64_t column = 0; column < columns; column += 32) {
            const bool two_columns = column + 16 < columns, two_rows = first + 16 < rows_;
            for (int64_t i = 0; i < 16; i++) {
              __m512 w[2][2], ds[2][2];  // of rows first + i and + 16, columns from `column` and from 16 on
#pragma GCC unroll 2
              for (int half = 0; half < 2; half++) {
                const int64_t row = first + 16 * half + i;
                const bool valid = row < rows_;
                const Vec<float> row_lse(valid ? lse[row] : kInfinity<float>), row_delta(valid ? delta[row] : 0.0f);
#pragma GCC unroll 2
                for (int j = 0; j < 2; j++) {
                  const bool there = valid && (j == 0 || two_columns);
                  const int64_t at = column + 16 * j;
                  const Vec<float> score = there ? Vec<float>::loadu(scores[row] + at) : Vec<float>(-kInfinity<float>);
                  const Vec<float> dweight = there ? Vec<float>::loadu(dweights[row] + at) : Vec<float>(0.0f);
                  const Vec<float> weight = exp_nonpositive(score - row_lse);
                  w[half][j] = weight;
                  ds[half][j] = weight * (dweight - row_delta);
                }
              }
              split<kPieces>(w[0][0], w[1][0], weights.row(column / 16, first / 32, i));
              split<kPieces>(ds[0][0], ds[1][0], dscores.row(column / 16, first / 32, i));
              if (two_columns) {
                split<kPieces>(w[0][1], w[1][1], weights.row(column / 16 + 1, first / 32, i));
                split<kPieces>(ds[0][1], ds[1][1], dscores.row(column / 16 + 1, first / 32, i));
              }
              split<kPieces>(ds[0][0], ds[0][1], dscore_rows.row(first / 16, column / 32, i));
              if (two_rows) split<kPieces>(ds[1][0], ds[1][1], dscore_rows.row(first / 16 + 1, column / 32, i));
            }
          }
        }
      });
    }
  };

  Strided<const float> sum_rows(const float* sums, int64_t padded_size, int64_t padded_width, float* scratch) const {
    for (int64_t i = 0; i < padded_size; i += 16) {
      for (int64_t d = 0; d < padded_width; d += 16) {
        const float* sources[16];
        for (int64_t j = 0; j < 16; j++) sources[j] = sums + (d + j) * padded_size + i;
        transpose(sources, scratch + i * padded_width + d, padded_width);
      }
    }
    return {scratch, padded_width};
  }

 private:
  static constexpr int64_t kTile = 512;  // numbers

  int64_t input_pieces_, computed_pieces_;

  template <typename Function>
  static void with_pieces(int64_t pieces, const Function& function) {
    if (pieces == 1) {
      function(std::integral_constant<int, 1>());
    } else if (pieces == 2) {
      function(std::integral_constant<int, 2>());
    } else {
      function(std::integral_constant<int, 3>());
    }
  }

  // The parts of two vectors as pairs, one tile after the other. A part is the upper half of what the parts before
  // leave, cut off: NaN stays NaN.
  template <int kPieces>
  static inline __attribute__((always_inline)) void split(__m512 low, __m512 high, uint16_t* target) {
    const __m512i upper = _mm512_set1_epi32(0xffff0000);
#pragma GCC unroll 3
    for (int piece = 0; piece < kPieces; piece++, target += kTile) {
      const __m512i low_bits = _mm512_castps_si512(low), high_bits = _mm512_castps_si512(high);
      // (upper & high) | low
      _mm512_storeu_si512(target, _mm512_ternarylogic_epi32(upper, high_bits, _mm512_srli_epi32(low_bits, 16), 0xea));
      low = _mm512_sub_ps(low, _mm512_castsi512_ps(_mm512_and_si512(low_bits, upper)));
      high = _mm512_sub_ps(high, _mm512_castsi512_ps(_mm512_and_si512(high_bits, upper)));
    }
  }

  // Packs [count, depth], the rows padded to whole vectors.
  template <typename Rows>
  static Operand pack_left(const Rows& rows, int64_t count, int64_t depth, int64_t pieces, Packed* target) {
    const Operand operand{target, divide_up(depth, 32), pieces};
    with_pieces(pieces, [&](auto constant) {
      constexpr int kPieces = decltype(constant)::value;
      for (int64_t row = 0; row < count; row += 16) {
        for (int64_t first = 0; first < depth; first += 32, target += kPieces * kTile) {
          for (int64_t i = 0; i < 16; i++) {
            __m512 low = _mm512_setzero_ps(), high = low;
            if (row + i < count) {
              low = _mm512_loadu_ps(rows[row + i] + first);
              if (first + 16 < depth) high = _mm512_loadu_ps(rows[row + i] + first + 16);
            }
            split<kPieces>(low, high, target + i * 32);
          }
        }
      }
    });
    return operand;
  }

  // Packs the columns of [count, width] as rows.
  template <typename Rows>
  Operand pack_left_columns(const Rows& rows, int64_t count, int64_t width, Packed* target) const {
    const Operand operand{target, divide_up(count, 32), input_pieces_};
    alignas(64) float halves[2][16 * 16];
    with_pieces(input_pieces_, [&](auto constant) {
      constexpr int kPieces = decltype(constant)::value;
      for (int64_t column = 0; column < width; column += 16) {
        for (int64_t first = 0; first < count; first += 32, target += kPieces * kTile) {
          for (int64_t half = 0; half < 2; half++) {
            const float* sources[16];
            const int64_t start = first + half * 16;
            for (int64_t i = 0; i < 16; i++) sources[i] = start + i < count ? rows[start + i] + column : kZeros;
            transpose(sources, halves[half], 16);
          }
          for (int64_t i = 0; i < 16; i++) {
            split<kPieces>(_mm512_load_ps(halves[0] + i * 16), _mm512_load_ps(halves[1] + i * 16), target + i * 32);
          }
        }
      }
    });
    return operand;
  }

  alignas(64) static constexpr float kZeros[16] = {};

  // Sixteen rows of sixteen numbers to columns.
  static inline __attribute__((always_inline)) void transpose(
      const float* const* sources, float* target, int64_t target_stride) {
    __m512 a[16], b[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_ps(sources[i]);
    // Pairs of rows, then of pairs: b[4 j + i] holds column i of each four in rows 4 j … 4 j + 3.
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
      b[i] = _mm512_unpacklo_ps(a[i], a[i + 1]);
      b[i + 1] = _mm512_unpackhi_ps(a[i], a[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
      const auto pd = [](__m512 x) { return _mm512_castps_pd(x); };
      a[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(pd(b[i]), pd(b[i + 2])));
      a[i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(pd(b[i]), pd(b[i + 2])));
      a[i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(pd(b[i + 1]), pd(b[i + 3])));
      a[i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(pd(b[i + 1]), pd(b[i + 3])));
    }
    // The four quarters of each vector are columns 0, 4, 8, 12 apart.
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
      b[i] = _mm512_shuffle_f32x4(a[i], a[4 + i], 0x88);
      b[4 + i] = _mm512_shuffle_f32x4(a[i], a[4 + i], 0xdd);
      b[8 + i] = _mm512_shuffle_f32x4(a[8 + i], a[12 + i], 0x88);
      b[12 + i] = _mm512_shuffle_f32x4(a[8 + i], a[12 + i], 0xdd);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
      _mm512_storeu_ps(target + i * target_stride, _mm512_shuffle_f32x4(b[i], b[8 + i], 0x88));
      _mm512_storeu_ps(target + (8 + i) * target_stride, _mm512_shuffle_f32x4(b[i], b[8 + i], 0xdd));
      _mm512_storeu_ps(target + (4 + i) * target_stride, _mm512_shuffle_f32x4(b[4 + i], b[12 + i], 0x88));
      _mm512_storeu_ps(target + (12 + i) * target_stride, _mm512_shuffle_f32x4(b[4 + i], b[12 + i], 0xdd));
    }
  }

  // One or two neighbouring tiles to registers 4 and 5, or 6 and 7.
  template <int kRowTiles>
  static inline __attribute__((always_inline)) void load_left(
      const Operand& x, int64_t row, int64_t depth, int64_t piece) {
    _tile_loadd(4, x.tile(row, depth, piece), 64);
    if (kRowTiles == 2) _tile_loadd(5, x.tile(row + 1, depth, piece), 64);
  }

  template <int kColumnTiles>
  static inline __attribute__((always_inline)) void load_right(
      const Operand& x, int64_t column, int64_t depth, int64_t piece) {
    _tile_loadd(6, x.tile(column, depth, piece), 64);
    if (kColumnTiles == 2) _tile_loadd(7, x.tile(column + 1, depth, piece), 64);
  }

  // Registers 0 to 3 += 4, 5 times 6, 7.
  template <int kRowTiles, int kColumnTiles>
  static inline __attribute__((always_inline)) void add_products() {
    _tile_dpbf16ps(0, 4, 6);
    if (kColumnTiles == 2) _tile_dpbf16ps(1, 4, 7);
    if (kRowTiles == 2) _tile_dpbf16ps(2, 5, 6);
    if (kRowTiles == 2 && kColumnTiles == 2) _tile_dpbf16ps(3, 5, 7);
  }

  // 16 · kRowTiles rows and 16 · kColumnTiles columns of A B.
  template <int kRowTiles, int kColumnTiles>
  static void multiply_tiles(
      const Operand& a, const Operand& b, int64_t row, int64_t column, float* target, int64_t target_stride) {
    _tile_zero(0);
    if (kColumnTiles == 2) _tile_zero(1);
    if (kRowTiles == 2) _tile_zero(2);
    if (kRowTiles == 2 && kColumnTiles == 2) _tile_zero(3);
    // The products of parts but the first, in an order in which each shares an operand with the one before.
    const int64_t orders = std::max(a.pieces, b.pieces);
    for (int64_t depth = 0; depth < a.depth_tiles; depth++) {
      int64_t loaded = -1;
      for (int64_t i = a.pieces - 1; i >= 0; i--) {
        load_left<kRowTiles>(a, row, depth, i);
        for (int64_t j = i == 0; j < std::min(b.pieces, orders - i); j++) {
          if (j != loaded) load_right<kColumnTiles>(b, column, depth, j);
          loaded = j;
          add_products<kRowTiles, kColumnTiles>();
        }
      }
    }
    for (int64_t depth = 0; depth < a.depth_tiles; depth++) {
      load_left<kRowTiles>(a, row, depth, 0);
      load_right<kColumnTiles>(b, column, depth, 0);
      add_products<kRowTiles, kColumnTiles>();
    }
    const int64_t stride = target_stride * sizeof(float);
    _tile_stored(0, target, stride);
    if (kColumnTiles == 2) _tile_stored(1, target + 16, stride);
    if (kRowTiles == 2) _tile_stored(2, target + 16 * target_stride, stride);
    if (kRowTiles == 2 && kColumnTiles == 2) _tile_stored(3, target + 16 * target_stride + 16, stride);
  }
};

}  // namespace

#endif
