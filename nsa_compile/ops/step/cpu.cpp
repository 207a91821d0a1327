// Attention of one query of each sequence, which reads the rows of a cache where they lie, and the blocks that its
// weights choose.
//
// What a group of heads reads is cut into pieces of a fixed number of rows. Each piece has a maximum, sums and a part of
// the output of its own; they are joined in their order, so that nothing depends on the number of threads.

#include "tensor.h"

// Mirrors the parameters of the operator.
struct Ranking {
  int64_t ratio;  // rows from one block to the next
  const int64_t* offsets;
  const int64_t* weights;
  int64_t terms, blocks, count;
};

namespace {

constexpr int64_t kPieceRows = 512;
constexpr int64_t kRowsAtOnce = 32;     // they stay near while all heads read them
constexpr int kHeadsAtOnce = 4;         // in registers, with as many rows for scores
constexpr int kWidest = kTileRows / 2;  // vectors of a row of values, in registers for each of these heads

template <typename T>
class Step {
 public:
  Step(const Sizes& sizes, const Tensor* tensors, int64_t index_count, int64_t block_size, double scale,
       const Ranking& ranking, int64_t threads)
      : sizes_(sizes),
        q_(tensors[0]),
        mask_(tensors[3]),
        indices_(tensors[4]),
        allowed_(tensors[5]),
        forced_(tensors[6]),
        out_(tensors[7]),
        chosen_(tensors[8]),
        keys_(tensors[1], sizes.key_dim),
        values_(tensors[2], sizes.value_dim),
        index_count_(index_count),
        block_size_(block_size),
        scale_(static_cast<T>(scale)),
        ranking_(ranking),
        heads_(sizes.heads()),
        key_columns_(padded_columns<T>(sizes.key_dim)),
        value_columns_(padded_columns<T>(sizes.value_dim)),
        most_pieces_(divide_up(index_count < 0 ? sizes.keys : index_count * block_size, kPieceRows)),
        weights_(ranking.count ? sizes.sequences() : threads, ranking.count ? most_pieces_ * piece_size() : piece_size()),
        maxima_(sizes.sequences(), most_pieces_ * heads_),
        sums_(sizes.sequences(), most_pieces_ * heads_),
        parts_(sizes.sequences(), most_pieces_ * heads_ * value_columns_),
        queries_(threads, heads_ * key_columns_),
        copies_(threads, kRowsAtOnce * std::max(key_columns_, value_columns_)),
        rows_(threads, kPieceRows),
        places_(threads, kPieceRows),
        joined_(threads, value_columns_),
        normals_(threads, most_pieces_ * heads_),
        importance_(threads, ranking.count ? sizes.keys : 0),
        scores_(threads, ranking.blocks),
        others_(threads, ranking.blocks) {}

  int64_t pieces() const { return most_pieces_; }

  // One piece of a group: weights relative to the maximum of the piece, and the part of the output that they give.
  void attend(int64_t item, int64_t piece, int64_t thread) const {
    const int64_t batch = item / sizes_.groups, group = item % sizes_.groups;
    const int64_t count = list_rows(item, piece, thread);
    const int32_t* rows = rows_[thread];
    T* weights = weights_of(item, piece, thread);
    for (int64_t head = 0; head < heads_; head++) {
      load_row(q_, batch, 0, group * heads_ + head, sizes_.key_dim, queries_[thread] + head * key_columns_);
    }
    const T* read[kRowsAtOnce];
    for (int64_t i = 0; i < count; i += kRowsAtOnce) {
      const int64_t there = find_rows(keys_, batch, group, rows, i, count, copies_[thread], key_columns_, read);
      in_tiles([&](auto tile, int64_t head) {
        for (int64_t j = 0; j < there; j += kSums) {
          score<tile>(queries_[thread] + head * key_columns_, read + j, weights + head * kPieceRows + i + j);
        }
      });
    }
    T* parts = parts_[item] + piece * heads_ * value_columns_;
    fill(parts, heads_ * value_columns_, T(0));
    for (int64_t head = 0; head < heads_; head++) {
      T* own = weights + head * kPieceRows;
      if (mask_.data != nullptr && mask_.stride[2] != 0) {  // a row is listed if any head keeps it
        for (int64_t i = 0; i < count; i++) own[i] = is_kept(batch, group, head, places_[thread][i]) ? own[i] : -kInfinity<T>;
      }
      const int64_t padded_count = padded_columns<T>(count);
      fill(own + count, padded_count - count, -kInfinity<T>);
      exponentiate(own, padded_count, maxima_[item][piece * heads_ + head], sums_[item][piece * heads_ + head]);
    }
    for (int64_t i = 0; i < count; i += kRowsAtOnce) {
      const int64_t there = find_rows(values_, batch, group, rows, i, count, copies_[thread], value_columns_, read);
      in_tiles([&](auto tile, int64_t head) {
        add_values<tile>(weights + head * kPieceRows + i, read, there, parts + head * value_columns_);
      });
    }
  }

  // The output of a group from its pieces, and the blocks that it chooses.
  void join(int64_t item, int64_t thread) const {
    const int64_t batch = item / sizes_.groups, group = item % sizes_.groups, count = pieces();
    T *out = joined_[thread], *normals = normals_[thread];
    for (int64_t head = 0; head < heads_; head++) {
      const auto at = [&](int64_t piece) { return piece * heads_ + head; };
      T largest = -kInfinity<T>, sum = 0;
      for (int64_t piece = 0; piece < count; piece++) {
        const T maximum = maxima_[item][at(piece)];
        if (maximum > largest || maximum != maximum) largest = maximum;  // a NaN stays visible
      }
      fill(out, value_columns_, T(0));
      for (int64_t piece = 0; piece < count; piece++) {
        const T maximum = maxima_[item][at(piece)];
        const T factor = maximum == -kInfinity<T> ? T(0) : std::exp(maximum - largest);
        normals[at(piece)] = factor;
        if (maximum == -kInfinity<T>) continue;  // it keeps nothing
        sum += factor * sums_[item][at(piece)];
        const T* part = parts_[item] + at(piece) * value_columns_;
        for (int64_t i = 0; i < value_columns_; i++) out[i] += factor * part[i];
      }
      const T inverse = largest == -kInfinity<T> ? T(0) : T(1) / sum;
      store_row(out, inverse, out_, batch, 0, group * heads_ + head, sizes_.value_dim);
      for (int64_t piece = 0; piece < count; piece++) normals[at(piece)] *= inverse;
    }
    if (ranking_.count == 0) return;
    // eq. 10: the weights of a row summed over the heads, one after the other.
    T* importance = importance_[thread];
    fill(importance, sizes_.keys, T(0));
    for (int64_t piece = 0; piece < count; piece++) {
      const int64_t listed = list_rows(item, piece, thread);
      const int32_t* rows = rows_[thread];
      for (int64_t head = 0; head < heads_; head++) {
        const T* weights = weights_of(item, piece, thread) + head * kPieceRows;
        const T normal = normals[piece * heads_ + head];
        for (int64_t i = 0; i < listed; i++) importance[rows[i]] += weights[i] * normal;
      }
    }
    choose(item, importance, scores_[thread], others_[thread]);
  }

 private:
  const Sizes& sizes_;
  const Tensor &q_, &mask_, &indices_, &allowed_, &forced_, &out_, &chosen_;
  RowSource<T> keys_, values_;
  int64_t index_count_, block_size_;
  T scale_;
  const Ranking& ranking_;
  int64_t heads_, key_columns_, value_columns_, most_pieces_;
  ThreadBuffers<T> weights_;  // of each group, [piece, head, row]; of a thread where nobody needs them later
  ThreadBuffers<T> maxima_, sums_, parts_;  // of each group
  ThreadBuffers<T> queries_, copies_;
  ThreadBuffers<int32_t> rows_, places_;  // of a piece: what is read, and where the mask tells of it
  ThreadBuffers<T> joined_, normals_, importance_, scores_;
  ThreadBuffers<int32_t> others_;

  int64_t piece_size() const { return heads_ * kPieceRows; }

  T* weights_of(int64_t item, int64_t piece, int64_t thread) const {
    return ranking_.count ? weights_[item] + piece * piece_size() : weights_[thread];
  }

  bool is_kept(int64_t batch, int64_t group, int64_t head, int64_t place) const {
    const int64_t* stride = mask_.stride;
    return mask_.data[batch * stride[0] + group * stride[1] + head * stride[2] + place * stride[3]] != 0;
  }

  // Lists the rows of a piece that some head keeps; returns how many. With indices a piece is one of their places.
  int64_t list_rows(int64_t item, int64_t piece, int64_t thread) const {
    const int64_t batch = item / sizes_.groups, group = item % sizes_.groups;
    const int64_t masks = mask_.data == nullptr ? 0 : mask_.stride[2] == 0 ? 1 : heads_;
    int32_t *rows = rows_[thread], *places = places_[thread];
    int64_t count = 0;
    const auto list = [&](int64_t row, int64_t place, int64_t end) {
      for (; place < end && row < sizes_.keys; row++, place++) {
        bool kept = masks == 0;
        for (int64_t head = 0; head < masks && !kept; head++) kept = is_kept(batch, group, head, place);
        rows[count] = static_cast<int32_t>(row);
        places[count] = static_cast<int32_t>(place);
        count += kept;
      }
    };
    const int64_t first = piece * kPieceRows, last = first + kPieceRows;
    if (index_count_ < 0) {
      list(first, first, last);
      return count;
    }
    const int64_t last_block = sizes_.keys / block_size_;
    int64_t i = first / block_size_, inside = first % block_size_;
    for (int64_t place = first; place < last && i < index_count_; i++, inside = 0) {
      const int64_t end = std::min(last, place - inside + block_size_), block = index(batch, group, i);
      if (block >= 0 && block <= last_block) list(block * block_size_ + inside, place, end);
      place = end;
    }
    return count;
  }

  int64_t index(int64_t batch, int64_t group, int64_t i) const {
    const int64_t at = batch * indices_.stride[0] + group * indices_.stride[1] + i * indices_.stride[2];
    return indices_.dtype == kInt32 ? reinterpret_cast<const int32_t*>(indices_.data)[at]
                                    : reinterpret_cast<const int64_t*>(indices_.data)[at];
  }

  // Rows first … first + kRowsAtOnce - 1 of those listed, the last one again where a product reads further; returns how
  // many there are.
  int64_t find_rows(
      const RowSource<T>& source, int64_t batch, int64_t group, const int32_t* rows, int64_t first, int64_t count,
      T* copies, int64_t columns, const T** read) const {
    const int64_t there = std::min(kRowsAtOnce, count - first);
    for (int64_t j = 0; j < there; j++) read[j] = source.row(batch, rows[first + j], group, copies + j * columns);
    for (int64_t j = there; j < round_up(there, kSums); j++) read[j] = read[there - 1];
    return there;
  }

  // Calls `use(tile, head)` for tiles of heads, as large as they may be.
  template <typename Use>
  void in_tiles(const Use& use) const {
    int64_t head = 0;
    for (; head + kHeadsAtOnce <= heads_; head += kHeadsAtOnce) use(std::integral_constant<int, kHeadsAtOnce>(), head);
    if (head + 2 <= heads_) use(std::integral_constant<int, 2>(), head), head += 2;
    if (head < heads_) use(std::integral_constant<int, 1>(), head);
  }

  // scores[head][j] = q[head] · rows[j] * scale
  template <int kHeads>
  void score(const T* queries, const T* const* rows, T* scores) const {
    Vec<T> sum[kHeads][kSums];
    for (int head = 0; head < kHeads; head++) {
      for (int j = 0; j < kSums; j++) sum[head][j] = Vec<T>(T(0));
    }
    for (int64_t i = 0; i < key_columns_; i += kLanes<T>) {
      Vec<T> row[kSums];
      for (int j = 0; j < kSums; j++) row[j] = Vec<T>::loadu(rows[j] + i);
      for (int head = 0; head < kHeads; head++) {
        const Vec<T> query = Vec<T>::loadu(queries + head * key_columns_ + i);
        for (int j = 0; j < kSums; j++) sum[head][j] = at::vec::fmadd(query, row[j], sum[head][j]);
      }
    }
    for (int head = 0; head < kHeads; head++) {
      T* own = scores + head * kPieceRows;
      sums_of_lanes(sum[head], own);
      for (int j = 0; j < kSums; j++) own[j] *= scale_;
    }
  }

  // part[head] += Σ weights[head][j] rows[j]
  template <int kHeads>
  void add_values(const T* weights, const T* const* rows, int64_t count, T* parts) const {
    int64_t column = add_columns<kHeads, kWidest>(weights, rows, count, parts, 0);
    column = add_columns<kHeads, 2>(weights, rows, count, parts, column);
    add_columns<kHeads, 1>(weights, rows, count, parts, column);
  }

  // So many vectors at a time, from a column on; returns the first column that is left.
  template <int kHeads, int kVectors>
  int64_t add_columns(const T* weights, const T* const* rows, int64_t count, T* parts, int64_t column) const {
    for (; column + kVectors * kLanes<T> <= value_columns_; column += kVectors * kLanes<T>) {
      micro_kernel<T, kHeads, kVectors, Left::kPlain>(
          0, column, count, Strided<const T>{weights, kPieceRows}, Scattered<const T>{rows},
          Strided<T>{parts, value_columns_}, true);
    }
    return column;
  }

  // The scores of a piece become exp(score - maximum); the maximum is -inf where nothing is kept.
  static void exponentiate(T* scores, int64_t count, T& maximum, T& sum) {
    Vec<T> largest(-kInfinity<T>), total(T(0));
    for (int64_t i = 0; i < count; i += kLanes<T>) largest = at::vec::maximum(largest, Vec<T>::loadu(scores + i));
    maximum = largest_lane(largest);
    sum = 0;
    if (maximum == -kInfinity<T>) return fill(scores, count, T(0));
    for (int64_t i = 0; i < count; i += kLanes<T>) {
      const Vec<T> weight = exp_nonpositive(Vec<T>::loadu(scores + i) - Vec<T>(maximum));
      weight.store(scores + i);
      total = total + weight;
    }
    sum = sum_of_lanes(total);
  }

  // eq. 9, the terms in the order of the offsets; then eq. 11: forced blocks, ascending, the best of the others, -1.
  void choose(int64_t item, const T* importance, T* scores, int32_t* others) const {
    const int64_t batch = item / sizes_.groups, group = item % sizes_.groups;
    const auto holds = [&](const Tensor& x, int64_t block) {
      return x.data[batch * x.stride[0] + group * x.stride[1] + block * x.stride[2]] != 0;
    };
    int32_t* chosen = &element<int32_t>(chosen_, batch, group, 0);
    int64_t size = 0, rest = 0;
    for (int64_t block = 0; block < ranking_.blocks; block++) {
      if (!holds(allowed_, block)) continue;
      if (holds(forced_, block)) {
        if (size < ranking_.count) chosen[size++] = static_cast<int32_t>(block);
        continue;
      }
      T sum = 0;
      for (int64_t term = 0; term < ranking_.terms; term++) {
        const int64_t row = block * ranking_.ratio + ranking_.offsets[term];
        if (row >= 0 && row < sizes_.keys) sum += static_cast<T>(ranking_.weights[term]) * importance[row];
      }
      scores[block] = sum;
      others[rest++] = static_cast<int32_t>(block);
    }
    // A NaN is no order: where there is one the output is NaN, too, and any choice will do.
    const auto better = [&](int32_t a, int32_t b) {
      const T x = scores[a] == scores[a] ? scores[a] : kInfinity<T>, y = scores[b] == scores[b] ? scores[b] : kInfinity<T>;
      return x > y || (x == y && a < b);
    };
    const int64_t taken = std::min(ranking_.count - size, rest);
    std::partial_sort(others, others + taken, others + rest, better);
    std::copy(others, others + taken, chosen + size);
    fill(chosen + size + taken, ranking_.count - size - taken, -1);
  }
};

template <typename T>
void run(const Step<T>& step, int64_t items, int64_t threads) {
  if (items >= threads) {
    return parallel_for(items, threads, [&](int64_t item, int64_t thread) {
      for (int64_t piece = 0; piece < step.pieces(); piece++) step.attend(item, piece, thread);
      step.join(item, thread);
    });
  }
  // Fewer groups than threads: the pieces of a group are dealt out, too.
  std::vector<std::pair<int64_t, int64_t>> pieces;
  for (int64_t item = 0; item < items; item++) {
    for (int64_t piece = 0; piece < step.pieces(); piece++) pieces.emplace_back(item, piece);
  }
  parallel_for(pieces.size(), threads, [&](int64_t i, int64_t thread) {
    step.attend(pieces[i].first, pieces[i].second, thread);
  });
  parallel_for(items, items, [&](int64_t item, int64_t thread) { step.join(item, thread); });
}

}  // namespace

// tensors: q [B, 1, Hq, D], k [B, T, G, D], v [B, T, G, Dv], mask [B, G, h, T], with
// indices [B, G, n] [B, G, h, n * block], allowed and forced
// [B, G, blocks], out [B, 1, Hq, Dv], chosen [B, G, count]; those that are not there have no data. Without indices their
// number is -1: an empty tensor has no data, either.
extern "C" int step_attention_forward(
    const Sizes* sizes, const Tensor* tensors, int64_t index_count, int64_t block_size, double scale, int64_t ratio,
    const int64_t* offsets, const int64_t* weights, int64_t terms, int64_t blocks, int64_t count, int64_t threads,
    int64_t) {
  return guarded([&] {
    const Ranking ranking{ratio, offsets, weights, terms, blocks, count};
    const auto start = [&](auto zero) {
      const Step<decltype(zero)> step(*sizes, tensors, index_count, block_size, scale, ranking, threads);
      run(step, sizes->sequences(), threads);
    };
    tensors[0].dtype == kFloat64 ? start(0.0) : start(0.0f);
  });
}
