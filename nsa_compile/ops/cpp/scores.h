// What generated programs of scores are made of: vectors of numbers, integers and booleans, the tensors that scores
// read, and what is known of a tile from the bounds of what it reads.
#pragma once

#include "ranges.h"

namespace {

// Integers and booleans have as many lanes as the numbers beside them. A boolean has all bits set, or none.
template <typename T>
using IntOf = std::conditional_t<std::is_same_v<T, double>, int64_t, int32_t>;

template <typename T>
struct Mask {
  IntOf<T> bits;
};

template <typename T>
Vec<T> bits(const Vec<IntOf<T>>& x) {
  return at::vec::cast<T, IntOf<T>>(x);
}
template <typename T>
Vec<T> mask_of(bool x) {
  return bits<T>(Vec<IntOf<T>>(x ? -1 : 0));
}
template <typename T>
Vec<T> not_of(const Vec<T>& x) {
  return x ^ mask_of<T>(true);
}

template <typename T>
Vec<T> choose(const Vec<T>& condition, const Vec<T>& if_true, const Vec<T>& if_false) {
  return Vec<T>::blendv(if_false, if_true, condition);
}
template <typename T>
Vec<IntOf<T>> choose(const Vec<T>& condition, const Vec<IntOf<T>>& if_true, const Vec<IntOf<T>>& if_false) {
  const auto mask = at::vec::cast<IntOf<T>, T>(condition);
  return (if_true & mask) | (if_false & ~mask);
}

// -- from one kind to another

template <typename T, typename Int>
Vec<T> bool_to_float(const Vec<T>& x) {
  return x & Vec<T>(T(1));
}
template <typename T, typename Int>
Vec<Int> bool_to_int(const Vec<T>& x) {
  return at::vec::cast<Int, T>(x) & Vec<Int>(1);
}
template <typename T, typename Int>
Vec<T> int_to_float(const Vec<Int>& x) {
  return at::vec::convert_to_fp_of_same_size<T>(x);
}
template <typename T, typename Int>
Vec<T> int_to_bool(const Vec<Int>& x) {
  return bits<T>(x != Vec<Int>(0));
}
template <typename T, typename Int>
Vec<T> float_to_bool(const Vec<T>& x) {
  return x != Vec<T>(T(0));
}

// -- functions

template <typename T>
Vec<T> negative(const Vec<T>& x) {
  if constexpr (std::is_floating_point_v<T>) {
    return x.neg();
  } else {
    return Vec<T>(0) - x;
  }
}

template <typename T>
Vec<T> sign_of(const Vec<T>& x) {
  const Vec<T> zero(T(0)), one(T(1));
  return ((zero < x) & one) - ((x < zero) & one);
}

// To three units in the last place; by a quotient of polynomials, in which what is above 7.999 is 1.
inline Vec<float> tanh_of(const Vec<float>& x) {
  const Vec<float> limit(7.99881172180175781f);
  // The order of the operands lets NaN through.
  const Vec<float> a = at::vec::clamp_max(at::vec::clamp_min(x, limit.neg()), limit), square = a * a;
  Vec<float> p(-2.76076847742355e-16f);
  for (const float c : {2.00018790482477e-13f, -8.60467152213735e-11f, 5.12229709037114e-08f, 1.48572235717979e-05f,
                        6.37261928875436e-04f, 4.89352455891786e-03f}) {
    p = at::vec::fmadd(p, square, Vec<float>(c));
  }
  Vec<float> q(1.19825839466702e-06f);
  for (const float c : {1.18534705686654e-04f, 2.26843463243900e-03f, 4.89352518554385e-03f}) {
    q = at::vec::fmadd(q, square, Vec<float>(c));
  }
  return a * p / q;
}
inline Vec<double> tanh_of(const Vec<double>& x) {
  return x.tanh();
}

template <typename T>
Vec<T> sigmoid_of(const Vec<T>& x) {
  const Vec<T> small = exp_nonpositive(x.abs().neg()), one(T(1));
  return choose(x < Vec<T>(T(0)), small, one) / (one + small);
}

// Quotients rounded down, and what they leave. Estimates in floating point, twice, are at most one off; integers have at
// most 30 bits, or 50.
template <typename Int>
std::pair<Vec<Int>, Vec<Int>> divide(const Vec<Int>& a, const Vec<Int>& b) {
  using T = std::conditional_t<std::is_same_v<Int, int64_t>, double, float>;
  const auto estimate = [&](const Vec<Int>& x) {
    const Vec<T> quotient = int_to_float<T, Int>(x) / int_to_float<T, Int>(b);
    return at::vec::convert_to_int_of_same_size<T>(quotient.floor());
  };
  Vec<Int> quotient = estimate(a), rest = a - quotient * b;
  const Vec<Int> more = estimate(rest), zero(0);
  quotient = quotient + more, rest = rest - more * b;
  // Comparisons are -1 where they hold.
  const Vec<Int> negative_b = b < zero;
  const Vec<Int> below = ((rest < zero) ^ negative_b) & (rest != zero);
  quotient = quotient + below, rest = rest + (b & below);
  const Vec<Int> above = (rest.abs() >= b.abs());
  return {quotient - above, rest - (b & above)};
}
template <typename Int, typename = std::enable_if_t<std::is_integral_v<Int>>>
Vec<Int> floor_divide(const Vec<Int>& a, const Vec<Int>& b) {
  return divide(a, b).first;
}
template <typename T>
Vec<T> remainder_of(const Vec<T>& a, const Vec<T>& b) {
  if constexpr (std::is_integral_v<T>) {
    return divide(a, b).second;
  } else {
    const Vec<T> rest = a.fmod(b), zero(T(0));
    const Vec<T> other_side = ((rest < zero) ^ (b < zero)) & (rest != zero);
    return choose(other_side, rest + b, rest);
  }
}
inline Vec<float> floor_divide(const Vec<float>& a, const Vec<float>& b) {
  return ((a - remainder_of(a, b)) / b).round();
}
inline Vec<double> floor_divide(const Vec<double>& a, const Vec<double>& b) {
  return ((a - remainder_of(a, b)) / b).round();
}

// -- where in the scores a program works

// Rows of a tile against a block of keys. The rows are the heads of consecutive queries of a sequence.
struct Place {
  int64_t sequence, first_query, heads, rows, first_key;
  int64_t keys, columns;  // of the block, and these padded

  int64_t query(int64_t row) const { return first_query + row / heads; }
  int64_t head(int64_t row) const { return row % heads; }
  void move_to(int64_t block, int64_t all_keys) {
    first_key = block * kBlockKeys;
    keys = std::min(kBlockKeys, all_keys - first_key);
    columns = columns_seen(all_keys, first_key, kBlockKeys);
  }
};

// The rows of a tensor [N, S, m, width], and zeros up to whole micro kernels.
template <typename E>
void load_tile(const Tensor& x, const Place& place, int64_t width, const Strided<typename E::Value>& target) {
  for (int64_t row = 0; row < place.rows; row++) {
    load_row(x, place.sequence, place.query(row), place.head(row), width, target[row]);
  }
  clear_padding(target, place.rows, padded_rows<E>(place.rows));
}

// The keys of each product in blocks, as the engine multiplies queries with them, and by rows where these are asked for.
template <typename E>
std::vector<Blocks<E>> pack_keys(
    const E& engine, const Sizes& sizes, const int64_t* key_dims, const Tensor* k, int64_t products, bool by_rows,
    int64_t threads) {
  std::vector<Blocks<E>> keys;
  keys.reserve(products);
  for (int64_t i = 0; i < products; i++) {
    keys.emplace_back(engine, sizes, kBlockKeys, key_dims[i]);
    keys[i].pack(k[i], sizes, by_rows, true, typename E::Value(1), threads);
  }
  return keys;
}

// Scores after the last key of all are -inf, weights 0.
template <typename T>
Vec<T> hide_after(int64_t keys, const Vec<T>& scores, T hidden = -kInfinity<T>) {
  if (keys >= kLanes<T>) return scores;
  return Vec<T>::set(Vec<T>(hidden), scores, std::max<int64_t>(0, keys));
}

// -- the tensors [N, S, m, T] that scores read beside the products, with strides of 0 where they are the same

template <typename Stored>
const Stored* element_of(const Tensor& x, const Place& place, int64_t row, int64_t key) {
  const int64_t offset = place.sequence * x.stride[0] + place.query(row) * x.stride[1] +
      place.head(row) * x.stride[2] + key * x.stride[3];
  return reinterpret_cast<const Stored*>(x.data) + offset;
}

template <typename Element>
struct Lanes {
  template <typename Stored>
  static Element of(Stored x) {
    return static_cast<Element>(x);
  }
  static Vec<Element> all(Element x) { return Vec<Element>(x); }
};
template <typename T>
struct Lanes<Mask<T>> {
  static Mask<T> of(bool x) { return {x ? -1 : 0}; }
  static Vec<T> all(Mask<T> x) { return bits<T>(Vec<IntOf<T>>(x.bits)); }
};

// The element of a row that is the same for all keys, in every lane.
template <typename Stored, typename Element>
auto one_of(const Tensor& x, const Place& place, int64_t row) {
  return Lanes<Element>::all(Lanes<Element>::of(*element_of<Stored>(x, place, row, 0)));
}

// The elements of a row for the keys of the block, where they lie or copied to `copy`, zeros after the last key.
template <typename Stored, typename Element>
const Element* keys_of(const Tensor& x, const Place& place, int64_t row, Element* copy) {
  const Stored* source = element_of<Stored>(x, place, row, place.first_key);
  const int64_t stride = x.stride[3];
  if constexpr (std::is_same_v<Stored, Element>) {
    if (stride == 1 && place.keys == place.columns) return source;
  }
  int64_t i = 0;
  if constexpr (std::is_same_v<Element, float> && (std::is_same_v<Stored, c10::BFloat16> || std::is_same_v<Stored, c10::Half>)) {
    if (stride == 1) {
      constexpr int64_t step = Converter<float, Stored>::kStep;
      for (; i + step <= place.keys; i += step) Converter<float, Stored>::load(source + i, copy + i);
    }
  }
  if constexpr (std::is_same_v<Element, Mask<float>> && std::is_same_v<Stored, bool>) {
    if (stride == 1) {
      constexpr int64_t step = Vec<int32_t>::size();
      const uint8_t* const flags = reinterpret_cast<const uint8_t*>(source);
      for (; i + step <= place.keys; i += step) {
        (Vec<int32_t>(0) - at::vec::convert_to_int32<uint8_t>(flags + i)).store(copy + i);
      }
    }
  }
  for (; i < place.keys; i++) copy[i] = Lanes<Element>::of(source[i * stride]);
  for (; i < place.columns; i++) copy[i] = Lanes<Element>::of(Stored(0));
  return copy;
}

// -- sums of the gradients of such a tensor

template <typename T>
struct LeafSums {
  T* data;  // of the sequence
  int64_t query_stride, head_stride;
  T* lanes;  // [rows, lanes], for a tensor that does not differ between keys

  T* row(const Place& place, int64_t row) const {
    return data + place.query(row) * query_stride + place.head(row) * head_stride;
  }
  T* keys(const Place& place, int64_t row) const { return this->row(place, row) + place.first_key; }
};

// Adds to the first `keys` of the lanes at `target`.
template <typename T>
void add_lanes(T* target, const Vec<T>& x, int64_t keys) {
  if (keys >= kLanes<T>) {
    (Vec<T>::loadu(target) + x).store(target);
  } else if (keys > 0) {
    alignas(64) T lanes[kLanes<T>];
    x.store(lanes);
    for (int64_t i = 0; i < keys; i++) target[i] += lanes[i];
  }
}

// -- what is known of a tile

// Integers, or booleans as 0 and 1, that lie between two numbers.
struct Bounds {
  int64_t low, high;

  static constexpr int64_t kLimit = int64_t(1) << 50;
  static Bounds all() { return {-kLimit, kLimit}; }
  static Bounds booleans() { return {0, 1}; }
  bool all_true() const { return low == 1; }
  bool all_false() const { return high == 0; }
  bool known() const { return low > -kLimit && high < kLimit; }
  void include(int64_t x) { low = std::min(low, x), high = std::max(high, x); }
};

// What leaves the limits is not known any more.
inline Bounds bounds_within(int64_t low, int64_t high) {
  return low > -Bounds::kLimit && high < Bounds::kLimit ? Bounds{low, high} : Bounds::all();
}
inline Bounds bounds_add(const Bounds& a, const Bounds& b) {
  return bounds_within(a.low + b.low, a.high + b.high);
}
inline Bounds bounds_sub(const Bounds& a, const Bounds& b) {
  return bounds_within(a.low - b.high, a.high - b.low);
}
inline Bounds bounds_neg(const Bounds& a) {
  return {-a.high, -a.low};
}
inline Bounds bounds_mul(const Bounds& a, const Bounds& b) {
  constexpr int64_t small = int64_t(1) << 25;
  if (a.low < -small || a.high > small || b.low < -small || b.high > small) return Bounds::all();
  const auto [low, high] = std::minmax({a.low * b.low, a.low * b.high, a.high * b.low, a.high * b.high});
  return bounds_within(low, high);
}
inline Bounds bounds_maximum(const Bounds& a, const Bounds& b) {
  return {std::max(a.low, b.low), std::max(a.high, b.high)};
}
inline Bounds bounds_minimum(const Bounds& a, const Bounds& b) {
  return {std::min(a.low, b.low), std::min(a.high, b.high)};
}
inline Bounds bounds_clamp_min(const Bounds& a, const Bounds& b) {
  return bounds_maximum(a, b);
}
inline Bounds bounds_clamp_max(const Bounds& a, const Bounds& b) {
  return bounds_minimum(a, b);
}
inline int64_t floor_quotient(int64_t a, int64_t b) {
  return a / b - (a % b < 0);
}
inline Bounds bounds_floor_divide(const Bounds& a, const Bounds& b) {
  if (b.low != b.high || b.low <= 0 || !a.known()) return Bounds::all();
  return {floor_quotient(a.low, b.low), floor_quotient(a.high, b.low)};
}
inline Bounds bounds_remainder(const Bounds& a, const Bounds& b) {
  if (b.low != b.high || b.low <= 0) return Bounds::all();
  const int64_t quotient = floor_quotient(a.low, b.low);
  if (!a.known() || quotient != floor_quotient(a.high, b.low)) return {0, b.low - 1};
  return {a.low - quotient * b.low, a.high - quotient * b.low};
}
inline Bounds bounds_lt(const Bounds& a, const Bounds& b) {
  return {a.high < b.low, a.low < b.high};
}
inline Bounds bounds_le(const Bounds& a, const Bounds& b) {
  return {a.high <= b.low, a.low <= b.high};
}
inline Bounds bounds_gt(const Bounds& a, const Bounds& b) {
  return bounds_lt(b, a);
}
inline Bounds bounds_ge(const Bounds& a, const Bounds& b) {
  return bounds_le(b, a);
}
inline Bounds bounds_not(const Bounds& a) {
  return {1 - a.high, 1 - a.low};
}
inline Bounds bounds_eq(const Bounds& a, const Bounds& b) {
  return {a.low == a.high && b.low == b.high && a.low == b.low, a.low <= b.high && b.low <= a.high};
}
inline Bounds bounds_ne(const Bounds& a, const Bounds& b) {
  return bounds_not(bounds_eq(a, b));
}
inline Bounds bounds_bitwise_and_booleans(const Bounds& a, const Bounds& b) {
  return bounds_minimum(a, b);
}
inline Bounds bounds_bitwise_or_booleans(const Bounds& a, const Bounds& b) {
  return bounds_maximum(a, b);
}
inline Bounds bounds_where(const Bounds& condition, const Bounds& a, const Bounds& b) {
  if (condition.all_true()) return a;
  if (condition.all_false()) return b;
  return {std::min(a.low, b.low), std::max(a.high, b.high)};
}

// An element of a tensor of integers or booleans.
inline int64_t integer_at(const Tensor& x, int64_t offset) {
  if (x.dtype == kBool) return reinterpret_cast<const bool*>(x.data)[offset];
  return reinterpret_cast<const int64_t*>(x.data)[offset];
}

// Between which numbers scores lie, or what they are made of.
template <typename T>
struct Reach {
  T low, high;

  static Reach all() { return {-kInfinity<T>, kInfinity<T>}; }
  static Reach of(T x) { return {x, x}; }
  static Reach of(const Bounds& x) { return x.known() ? Reach{T(x.low), T(x.high)} : all(); }
};

// A score of -inf stays one, whatever is added.
template <typename T>
Reach<T> reach_add(const Reach<T>& a, const Reach<T>& b) {
  const auto low = [](T x, T y) { return x == -kInfinity<T> || y == -kInfinity<T>; };
  return {low(a.low, b.low) ? -kInfinity<T> : a.low + b.low, low(a.high, b.high) ? -kInfinity<T> : a.high + b.high};
}
template <typename T>
Reach<T> reach_neg(const Reach<T>& a) {
  return {-a.high, -a.low};
}
template <typename T>
Reach<T> reach_sub(const Reach<T>& a, const Reach<T>& b) {
  return reach_add(a, reach_neg(b));
}
template <typename T>
Reach<T> reach_mul(const Reach<T>& a, T factor) {
  if (factor == T(0)) return Reach<T>::all();  // of what is infinite it is not 0
  return factor > T(0) ? Reach<T>{a.low * factor, a.high * factor} : Reach<T>{a.high * factor, a.low * factor};
}
template <typename T>
Reach<T> reach_where(const Bounds& condition, const Reach<T>& a, const Reach<T>& b) {
  if (condition.all_true()) return a;
  if (condition.all_false()) return b;
  return {std::min(a.low, b.low), std::max(a.high, b.high)};
}

// What no score of a block exceeds sinks it below the others from here on.
template <typename T>
constexpr T kSunk = T(-1000);
// A score that lies so far below the log-sum-exp of its row, or the largest score, weighs exactly 0.
template <typename T>
constexpr T kVanishing = std::is_same_v<T, double> ? T(-746) : T(-87.5);

// The largest norm of the rows of each `size` positions, [sequences, blocks], and of all their heads.
template <typename T>
std::vector<T> largest_norms(
    const Tensor& x, int64_t sequences, int64_t positions, int64_t heads, int64_t width, int64_t size, int64_t threads) {
  const int64_t blocks = divide_up(positions, size), padded = padded_columns<T>(width);
  std::vector<T> result(sequences * blocks);
  const ThreadBuffers<T> rows(threads, padded);
  const int64_t copiers = threads_to_copy(sequences * positions * heads * width, threads);
  parallel_for(sequences * blocks, copiers, [&](int64_t item, int64_t thread) {
    const int64_t first = item % blocks * size, last = std::min(positions, first + size);
    T largest(0);
    for (int64_t position = first; position < last; position++) {
      for (int64_t head = 0; head < heads; head++) {
        load_row(x, item / blocks, position, head, width, rows[thread]);
        const T square = dot(rows[thread], rows[thread], padded);
        if (!(square <= largest) && largest == largest) largest = square;  // NaN stays
      }
    }
    result[item] = std::sqrt(largest);
  });
  return result;
}

// A block of keys that a tile has to read: whether all its scores are shown, and what they do not exceed.
template <typename T>
struct LiveBlock {
  int64_t block;
  bool shown;
  T highest;
};

// Which blocks a tile of queries has to read, by what is known of their scores.
template <typename Program, typename T>
class Visibility {
 public:
  Visibility(
      const Sizes& sizes, const int64_t* key_dims, const Tensor* q, const Tensor* k, const Tensor* leaves,
      const Tensor& tiles, int64_t tile_queries, int64_t threads)
      : sizes_(sizes), leaves_(leaves), tiles_(tiles), tile_queries_(tile_queries),
        blocks_(divide_up(sizes.keys, kBlockKeys)) {
    for (int64_t leaf = 0; leaf < Program::kLeaves; leaf++) {
      const int64_t different = leaves[leaf].stride[0] == 0 ? 1 : sizes.sequences();
      offsets_.push_back(of_keys_.size());
      if (!of_keys(leaf)) continue;
      of_keys_.resize(of_keys_.size() + different * blocks_);
    }
    for (int64_t leaf = 0; leaf < Program::kLeaves; leaf++) {
      if (!of_keys(leaf)) continue;
      const int64_t different = leaves[leaf].stride[0] == 0 ? 1 : sizes.sequences();
      parallel_for(different, threads_to_copy(different * sizes.keys, threads), [&](int64_t sequence, int64_t) {
        for (int64_t block = 0; block < blocks_; block++) {
          const int64_t first = block * kBlockKeys, last = std::min(sizes.keys, first + kBlockKeys);
          const auto at = [&](int64_t key) {
            return integer_at(leaves[leaf], sequence * leaves[leaf].stride[0] + key * leaves[leaf].stride[3]);
          };
          Bounds bounds{at(first), at(first)};
          for (int64_t key = first + 1; key < last; key++) bounds.include(at(key));
          of_keys_[offsets_[leaf] + sequence * blocks_ + block] = bounds;
        }
      });
    }
    if constexpr (Program::kReadsProducts) {
      for (int64_t i = 0; i < Program::kProducts; i++) {
        of_queries_.push_back(
            largest_norms<T>(q[i], sizes.sequences(), sizes.queries, sizes.heads(), key_dims[i], tile_queries, threads));
        norms_.push_back(largest_norms<T>(k[i], sizes.sequences(), sizes.keys, 1, key_dims[i], kBlockKeys, threads));
      }
    }
  }

  // Whether the caller says that none of some queries sees a block.
  bool used(int64_t first_query, int64_t queries, int64_t block) const {
    if (tiles_.data == nullptr) return true;
    for (int64_t row = first_query / kBlockKeys; row <= (first_query + queries - 1) / kBlockKeys; row++) {
      if (reinterpret_cast<const bool*>(tiles_.data)[row * tiles_.stride[0] + block * tiles_.stride[1]]) return true;
    }
    return false;
  }

  // The blocks in which a score may be more than -inf. Those that are not sunk come first; returned is their number.
  int64_t find(Place place, std::vector<LiveBlock<T>>& found) const {
    Bounds bounds[Program::kLeaves + 1];
    Reach<T> numbers[Program::kLeaves + 1], products[Program::kProducts];
    for (int64_t leaf = 0; leaf < Program::kLeaves; leaf++) bounds[leaf] = of_rows(place, leaf);
    found.clear();
    for (int64_t block = 0; block < blocks_; block++) {
      if (!used(place.first_query, place.rows / place.heads, block)) continue;
      place.move_to(block, sizes_.keys);
      for (int64_t leaf = 0; leaf < Program::kLeaves; leaf++) {
        if (of_keys(leaf)) {
          const int64_t sequence = leaves_[leaf].stride[0] == 0 ? 0 : place.sequence;
          bounds[leaf] = of_keys_[offsets_[leaf] + sequence * blocks_ + block];
        } else if (Program::kFlags[leaf]) {
          bounds[leaf] = flags(place, leaf);
        } else if (Program::kNumbers[leaf]) {
          numbers[leaf] = below(place, leaf);
        }
      }
      if constexpr (Program::kReadsProducts) {
        for (int64_t i = 0; i < Program::kProducts; i++) products[i] = product(place, block, i);
      }
      const T highest = Program::highest(bounds, numbers, products);
      if (highest != -kInfinity<T>) found.push_back({block, Program::shown(bounds), highest});
    }
    const auto floats = [](const LiveBlock<T>& block) { return block.highest > kSunk<T>; };
    return std::stable_partition(found.begin(), found.end(), floats) - found.begin();
  }

 private:
  const Sizes& sizes_;
  const Tensor* leaves_;
  const Tensor& tiles_;
  int64_t tile_queries_, blocks_;
  std::vector<int64_t> offsets_;  // of each leaf
  std::vector<Bounds> of_keys_;   // [sequences that differ, blocks] of each leaf that differs between keys
  std::vector<std::vector<T>> of_queries_, norms_;  // of each product: [sequences, tiles] and [sequences, blocks]

  static bool of_keys(int64_t leaf) { return Program::kBounded[leaf] && Program::kByKey[leaf]; }

  Bounds of_rows(const Place& place, int64_t leaf) const {
    const Tensor& x = leaves_[leaf];
    if (!Program::kBounded[leaf]) return x.dtype == kBool ? Bounds::booleans() : Bounds::all();
    if (Program::kByKey[leaf]) return {0, 0};
    const auto at = [&](int64_t row) {
      return integer_at(x, place.sequence * x.stride[0] + place.query(row) * x.stride[1] + place.head(row) * x.stride[2]);
    };
    Bounds bounds{at(0), at(0)};
    for (int64_t row = 1; row < place.rows; row++) bounds.include(at(row));
    return bounds;
  }

  // Calls `each` with the rows of a leaf, of those that are the same with one, until it returns false.
  template <typename Each>
  static void different_rows(const Place& place, const Tensor& x, const Each& each) {
    const int64_t step = x.stride[2] == 0 ? place.heads : 1, last = x.stride[1] == 0 ? place.heads : place.rows;
    for (int64_t row = 0; row < last; row += step) {
      if (!each(row)) return;
    }
  }

  // Of a leaf of booleans that differs between rows and keys.
  Bounds flags(const Place& place, int64_t leaf) const {
    const Tensor& x = leaves_[leaf];
    const bool first = *element_of<bool>(x, place, 0, place.first_key);
    bool same = true;
    different_rows(place, x, [&](int64_t row) {
      const bool* const flags = element_of<bool>(x, place, row, place.first_key);
      if (x.stride[3] == 1) {
        same = std::memchr(flags, !first, place.keys) == nullptr;
      } else {
        for (int64_t key = 0; key < place.keys; key++) same &= flags[key * x.stride[3]] == first;
      }
      return same;
    });
    return same ? Bounds{first, first} : Bounds::booleans();
  }

  // Of a leaf of numbers: what sinks a block, or nothing.
  Reach<T> below(const Place& place, int64_t leaf) const {
    const Tensor& x = leaves_[leaf];
    switch (x.dtype) {
      case kFloat32: return below<float>(place, x);
      case kFloat64: return below<double>(place, x);
      case kBFloat16: return below<c10::BFloat16>(place, x);
      default: return below<c10::Half>(place, x);
    }
  }
  template <typename Stored>
  static Reach<T> below(const Place& place, const Tensor& x) {
    T highest = -kInfinity<T>;
    different_rows(place, x, [&](int64_t row) {
      const Stored* const numbers = element_of<Stored>(x, place, row, place.first_key);
      for (int64_t key = 0; key < (x.stride[3] == 0 ? 1 : place.keys); key++) {
        const T number = static_cast<T>(numbers[key * x.stride[3]]);
        highest = number <= kSunk<T> ? std::max(highest, number) : kInfinity<T>;  // NaN sinks nothing
        if (highest == kInfinity<T>) return false;
      }
      return true;
    });
    return {-kInfinity<T>, highest};
  }

  // By the norms of queries and keys, with room for roundings.
  Reach<T> product(const Place& place, int64_t block, int64_t i) const {
    const int64_t tiles = divide_up(sizes_.queries, tile_queries_);
    const T most = T(1.01) * of_queries_[i][place.sequence * tiles + place.first_query / tile_queries_] *
        norms_[i][place.sequence * blocks_ + block];
    return most < kInfinity<T> ? Reach<T>{-most, most} : Reach<T>::all();
  }
};

// Leave those blocks from one on that weigh nothing beside the smallest of some sizes: of each row the largest score
// that is known, or the log-sum-exp.
template <typename T>
void leave_vanishing(std::vector<LiveBlock<T>>& blocks, int64_t from, const T* sizes, int64_t rows) {
  if (from == static_cast<int64_t>(blocks.size())) return;
  T smallest = kInfinity<T>;
  for (int64_t row = 0; row < rows; row++) {
    if (!(sizes[row] >= smallest) && smallest == smallest) smallest = sizes[row];  // NaN stays
  }
  const auto vanishes = [&](const LiveBlock<T>& block) { return block.highest - smallest < kVanishing<T>; };
  blocks.erase(std::remove_if(blocks.begin() + from, blocks.end(), vanishes), blocks.end());
}

}  // namespace
