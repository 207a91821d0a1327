// Attention over selected blocks, query by query: for blocks shorter than a vector.
//
// Blocks that short fill neither a vector with scores nor a tile with queries. But all heads of a group read the same
// keys: so heads lie side by side in a vector, and the keys of a query, wherever they are, are the rows of matrix
// products. A query belongs to one thread; sums of dk and dv belong to a chunk of queries, which one thread adds to in
// ascending order. So no bit depends on the number of threads, nor on the order of the indices.
#pragma once

#include "blocks.h"

namespace {

constexpr int64_t kItemQueries = 16;  // that a thread takes at a time
constexpr int64_t kPassKeys = 64;     // whose rows are asked for while those before them are multiplied


// Whether this is faster than block by block: what is computed of a vector's lanes for nothing, by heads or by keys,
// decides.
template <typename T>
bool suits_tokens(const Sizes& sizes, int64_t block_size) {
  const int64_t heads = sizes.heads(), block_lanes = padded_columns<T>(block_size);
  return block_size < kLanes<T> && padded_columns<T>(heads) * block_size <= 2 * heads * block_lanes;
}

inline int64_t index_at(const Tensor& indices, int64_t batch, int64_t query, int64_t group, int64_t place) {
  const int64_t offset = row_offset(indices, batch, query, group) + place * indices.stride[3];
  return indices.dtype == kInt64 ? reinterpret_cast<const int64_t*>(indices.data)[offset]
                                 : reinterpret_cast<const int32_t*>(indices.data)[offset];
}

// x[batch, :, group, :width] of all sequences, converted, as rows that start at whole vectors.
template <typename T>
class TokenRows {
 public:
  int64_t width, padded_width;

  TokenRows(const Tensor& x, const Sizes& sizes, int64_t width, int64_t threads)
      : width(width),
        padded_width(padded_columns<T>(width)),
        keys_(sizes.keys),
        rows_(sizes.sequences() * sizes.keys * padded_width) {
    const int64_t items = divide_up(sizes.keys, kPassKeys), copied = sizes.sequences() * sizes.keys * padded_width;
    parallel_for(sizes.sequences() * items, threads_to_copy(copied, threads), [&](int64_t item, int64_t) {
      const int64_t sequence = item / items, first = item % items * kPassKeys;
      for (int64_t key = first; key < std::min(sizes.keys, first + kPassKeys); key++) {
        load_row(x, sequence / sizes.groups, key, sequence % sizes.groups, width, at(sequence) + key * padded_width);
      }
    });
  }

  T* at(int64_t sequence) const { return rows_.data() + sequence * keys_ * padded_width; }

 private:
  int64_t keys_;
  Buffer<T> rows_;
};

// The keys of one query: those it sees of the blocks it selects, ascending, each once.
class Selection {
 public:
  std::vector<int32_t> keys;

  void read(const Sizes& sizes, const Tensor& indices, int64_t num_selected, int64_t block_size, int64_t sequence,
            int64_t query) {
    const int64_t end = std::min(sizes.keys, query + 1), blocks = divide_up(end, block_size);
    bits_.assign(divide_up(blocks, 64), 0);
    for (int64_t choice = 0; choice < num_selected; choice++) {
      const int64_t block = index_at(indices, sequence / sizes.groups, query, sequence % sizes.groups, choice);
      if (block >= 0 && block < blocks) bits_[block / 64] |= uint64_t(1) << block % 64;
    }
    keys.clear();
    for (size_t word = 0; word < bits_.size(); word++) {
      for (uint64_t bits = bits_[word]; bits != 0; bits &= bits - 1) {
        const int64_t first = (int64_t(word) * 64 + __builtin_ctzll(bits)) * block_size;
        for (int64_t key = first; key < std::min(end, first + block_size); key++) keys.push_back(key);
      }
    }
  }

 private:
  std::vector<uint64_t> bits_;
};

// What a thread needs for one query, by number: pointers to rows of keys, and matrices.
template <typename T>
class TokenScratch {
 public:
  Selection selection;

  // Pointers to the rows of the selected keys; those that only fill up a micro kernel go to `spare`, or to the first.
  Scattered<T> rows(size_t which, T* base, int64_t padded_width, T* spare = nullptr) {
    std::vector<T*>& pointers = pointers_[which];
    pointers.resize(round_up(selection.keys.size(), kTileRows));
    for (size_t i = 0; i < selection.keys.size(); i++) pointers[i] = base + selection.keys[i] * padded_width;
    for (size_t i = selection.keys.size(); i < pointers.size(); i++) pointers[i] = spare ? spare : pointers[0];
    return {pointers.data()};
  }
  // Uninitialised, of so many elements.
  T* matrix(size_t which, int64_t elements) {
    std::vector<T>& found = matrices_[which];
    if (static_cast<int64_t>(found.size()) < elements) found.resize(elements);
    return found.data();
  }

 private:
  std::vector<T*> pointers_[4];
  std::vector<T> matrices_[8];
};

// Heads `[heads, width]` of a query, times a factor, as columns `[width, lanes]`, zeros up to whole vectors.
template <typename T>
Strided<const T> as_columns(const Strided<T>& rows, int64_t heads, int64_t width, T factor, T* target) {
  const int64_t lanes = padded_columns<T>(heads);
  for (int64_t d = 0; d < width; d++) {
    for (int64_t head = 0; head < heads; head++) target[d * lanes + head] = factor * rows[head][d];
    fill(target + d * lanes + heads, lanes - heads, T(0));
  }
  return {target, lanes};
}

// x[batch, query, heads of the group, :width], converted, as rows.
template <typename T>
Strided<T> load_heads(
    const Tensor& x, const Sizes& sizes, int64_t sequence, int64_t query, int64_t width, T* target) {
  const Strided<T> rows{target, padded_columns<T>(width)};
  const int64_t first = sequence % sizes.groups * sizes.heads();
  for (int64_t head = 0; head < sizes.heads(); head++) {
    load_row(x, sequence / sizes.groups, query, first + head, width, rows[head]);
  }
  return rows;
}

// C[keys, lanes] = rows of keys times columns of heads.
template <typename T>
void multiply_keys(
    const Scattered<T>& rows, int64_t count, int64_t depth, const Strided<const T>& columns, const Strided<T>& c) {
  for (int64_t first = 0; first < count; first += kPassKeys) {
    const int64_t some = std::min(kPassKeys, count - first), next = std::min(kPassKeys, count - first - some);
    const Scattered<const T> asked{rows.rows + first + some}, here{rows.rows + first};
    prefetch(asked, 0, next, depth * sizeof(T));
    const Strided<T> target{c[first], c.stride};
    multiply<T, Left::kPlain>(some, c.stride, depth, here, columns, target, false);
  }
}

// C[heads, width] = weights[keys, lanes]ᵀ times rows of keys.
template <typename T>
void sum_keys(
    const Strided<T>& weights, const Scattered<T>& rows, int64_t count, int64_t heads, int64_t width,
    const Strided<T>& c) {
  for (int64_t first = 0; first < count; first += kPassKeys) {
    const int64_t some = std::min(kPassKeys, count - first), next = std::min(kPassKeys, count - first - some);
    const Scattered<const T> asked{rows.rows + first + some}, here{rows.rows + first};
    prefetch(asked, 0, next, width * sizeof(T));
    const Strided<T> of_keys{weights[first], weights.stride};
    multiply<T, Left::kTransposed>(heads, width, some, of_keys, here, c, first > 0);
  }
}

template <typename T>
void forward_tokens(
    const Sizes& sizes, const Tensor* tensors, int64_t num_selected, int64_t block_size, T scale, int64_t threads) {
  const auto& [q, k, v, indices, out, lse] = reinterpret_cast<const Tensor(&)[6]>(*tensors);
  const TokenRows<T> keys(k, sizes, sizes.key_dim, threads), values(v, sizes, sizes.value_dim, threads);
  const int64_t heads = sizes.heads(), lanes = padded_columns<T>(heads), key_width = keys.padded_width;
  const int64_t items = divide_up(sizes.queries, kItemQueries), value_width = values.padded_width;
  std::vector<TokenScratch<T>> scratches(threads);

  // The last queries have the most keys.
  parallel_for(sizes.sequences() * items, threads, [&](int64_t item, int64_t thread) {
    const int64_t sequence = item % sizes.sequences(), first = (items - 1 - item / sizes.sequences()) * kItemQueries;
    const int64_t batch = sequence / sizes.groups, first_head = sequence % sizes.groups * heads;
    TokenScratch<T>& scratch = scratches[thread];
    for (int64_t query = first; query < std::min(sizes.queries, first + kItemQueries); query++) {
      scratch.selection.read(sizes, indices, num_selected, block_size, sequence, query);
      const int64_t count = scratch.selection.keys.size();
      const auto key_rows = scratch.rows(0, keys.at(sequence), key_width);
      const auto value_rows = scratch.rows(1, values.at(sequence), value_width);
      const auto q_rows = load_heads(q, sizes, sequence, query, keys.width, scratch.matrix(0, heads * key_width));
      const auto q_columns = as_columns(q_rows, heads, keys.width, scale, scratch.matrix(1, keys.width * lanes));
      const Strided<T> weights{scratch.matrix(2, round_up(count, kTileRows) * lanes), lanes};
      const Strided<T> results{scratch.matrix(3, round_up(heads, kTileRows) * value_width), value_width};
      T *largest = scratch.matrix(4, lanes), *sums = scratch.matrix(5, lanes);
      multiply_keys(key_rows, count, keys.width, q_columns, weights);
      for (int64_t i = 0; i < lanes; i += kLanes<T>) {
        Vec<T> most(-kInfinity<T>), sum(T(0));
        for (int64_t key = 0; key < count; key++) most = at::vec::clamp_min(Vec<T>::loadu(weights[key] + i), most);
        most.store(largest + i);
        for (int64_t key = 0; key < count; key++) {
          const Vec<T> weight = exp_nonpositive(Vec<T>::loadu(weights[key] + i) - most);
          weight.store(weights[key] + i);
          sum = sum + weight;
        }
        sum.store(sums + i);
      }
      if (count == 0) fill(results[0], heads * value_width, T(0));
      sum_keys(weights, value_rows, count, heads, values.width, results);
      for (int64_t head = 0; head < heads; head++) {
        const T inverse = sums[head] == T(0) ? T(0) : T(1) / sums[head];
        store_row(results[head], inverse, out, batch, query, first_head + head, values.width);
        element<T>(lse, batch, query, first_head + head) = largest[head] + std::log(sums[head]);
      }
    }
  });
}

// The queries [first, last) of each sequence, which see the keys [0, keys).
struct TokenChunk {
  int64_t first, last, keys;
};

// Few, because each has sums for all keys up to its last query. Depends on the shapes only.
inline std::vector<TokenChunk> token_chunks(const Sizes& sizes) {
  const int64_t count = std::min(sizes.queries, std::clamp<int64_t>(8 / sizes.sequences(), 1, 8));
  std::vector<TokenChunk> chunks;
  for (int64_t chunk = 0; chunk < count; chunk++) {
    const int64_t first = sizes.queries * chunk / count, last = sizes.queries * (chunk + 1) / count;
    chunks.push_back({first, last, std::min(sizes.keys, last)});
  }
  return chunks;
}

// Sums of the gradients of keys or of values: of each chunk of each sequence, added in the order of the chunks.
template <typename T>
class TokenSums {
 public:
  TokenSums(const Sizes& sizes, const TokenRows<T>& rows, const std::vector<TokenChunk>& chunks)
      : sizes_(sizes), rows_(rows), chunks_(chunks) {
    for (const TokenChunk& chunk : chunks) {
      first_.push_back(count_);
      count_ += chunk.keys;
    }
    sums_ = Buffer<T>(sizes.sequences() * count_ * rows.padded_width);
  }

  T* at(int64_t sequence, int64_t chunk) const {
    return sums_.data() + (sequence * count_ + first_[chunk]) * rows_.padded_width;
  }
  void clear(int64_t sequence, int64_t chunk) const {
    fill(at(sequence, chunk), chunks_[chunk].keys * rows_.padded_width, T(0));
  }

  // The sums times a factor.
  void store(T factor, const Tensor& target, int64_t threads) const {
    const int64_t width = rows_.padded_width, items = divide_up(sizes_.keys, kPassKeys);
    const ThreadBuffers<T> sums(threads, width);
    const int64_t copied = sizes_.sequences() * count_ * width;
    parallel_for(sizes_.sequences() * items, threads_to_copy(copied, threads), [&](int64_t item, int64_t thread) {
      const int64_t sequence = item / items, first = item % items * kPassKeys;
      for (int64_t key = first; key < std::min(sizes_.keys, first + kPassKeys); key++) {
        fill(sums[thread], width, T(0));
        for (size_t chunk = 0; chunk < chunks_.size(); chunk++) {
          if (key < chunks_[chunk].keys) add_to(sums[thread], at(sequence, chunk) + key * width, width);
        }
        store_row(
            sums[thread], factor, target, sequence / sizes_.groups, key, sequence % sizes_.groups, rows_.width);
      }
    });
  }

 private:
  const Sizes& sizes_;
  const TokenRows<T>& rows_;
  const std::vector<TokenChunk>& chunks_;
  std::vector<int64_t> first_;  // of a chunk, among the keys of all chunks of a sequence
  int64_t count_ = 0;
  Buffer<T> sums_;
};

template <typename T>
void backward_tokens(
    const Sizes& sizes, const Tensor* tensors, int64_t num_selected, int64_t block_size, T scale, int64_t threads) {
  const auto& [grad, grad_lse, q, k, v, out, lse, indices, dq, dk, dv] =
      reinterpret_cast<const Tensor(&)[11]>(*tensors);
  const TokenRows<T> keys(k, sizes, sizes.key_dim, threads), values(v, sizes, sizes.value_dim, threads);
  const int64_t heads = sizes.heads(), lanes = padded_columns<T>(heads), head_rows = round_up(heads, kTileRows);
  const int64_t key_width = keys.padded_width, value_width = values.padded_width;
  const std::vector<TokenChunk> chunks = token_chunks(sizes);
  const TokenSums<T> key_sums(sizes, keys, chunks), value_sums(sizes, values, chunks);
  const ThreadBuffers<T> spare(threads, std::max(key_width, value_width));
  std::vector<TokenScratch<T>> scratches(threads);

  const int64_t num_chunks = chunks.size();
  parallel_for(sizes.sequences() * num_chunks, threads, [&](int64_t item, int64_t thread) {
    const int64_t sequence = item % sizes.sequences(), chunk = num_chunks - 1 - item / sizes.sequences();
    const int64_t batch = sequence / sizes.groups, first_head = sequence % sizes.groups * heads;
    TokenScratch<T>& scratch = scratches[thread];
    key_sums.clear(sequence, chunk);
    value_sums.clear(sequence, chunk);
    for (int64_t query = chunks[chunk].first; query < chunks[chunk].last; query++) {
      scratch.selection.read(sizes, indices, num_selected, block_size, sequence, query);
      const int64_t count = scratch.selection.keys.size(), padded = round_up(count, kTileRows);
      const auto key_rows = scratch.rows(0, keys.at(sequence), key_width);
      const auto value_rows = scratch.rows(1, values.at(sequence), value_width);
      const auto dk_rows = scratch.rows(2, key_sums.at(sequence, chunk), key_width, spare[thread]);
      const auto dv_rows = scratch.rows(3, value_sums.at(sequence, chunk), value_width, spare[thread]);
      const auto q_rows = load_heads(q, sizes, sequence, query, keys.width, scratch.matrix(0, heads * key_width));
      const auto grad_rows =
          load_heads(grad, sizes, sequence, query, values.width, scratch.matrix(1, heads * value_width));
      T *row_lse = scratch.matrix(2, 2 * lanes), *delta = row_lse + lanes;
      fill(row_lse, 2 * lanes, T(0));
      const auto out_rows =
          load_heads(out, sizes, sequence, query, values.width, scratch.matrix(3, heads * value_width));
      for (int64_t head = 0; head < heads; head++) {
        row_lse[head] = finite_or_infinity(element<T>(lse, batch, query, first_head + head));
        delta[head] =
            delta_of(grad_rows[head], out_rows[head], value_width, grad_lse, batch, query, first_head + head);
      }

      T* columns = scratch.matrix(4, std::max(keys.width, values.width) * lanes);
      const Strided<T> weights{scratch.matrix(5, padded * lanes), lanes};
      const Strided<T> dscores{scratch.matrix(6, padded * lanes), lanes};
      multiply_keys(key_rows, count, keys.width, as_columns(q_rows, heads, keys.width, scale, columns), weights);
      const auto grad_columns = as_columns(grad_rows, heads, values.width, T(1), columns);
      multiply_keys(value_rows, count, values.width, grad_columns, dscores);
      for (int64_t key = 0; key < count; key++) {
        for (int64_t i = 0; i < lanes; i += kLanes<T>) {
          const Vec<T> weight = exp_nonpositive(Vec<T>::loadu(weights[key] + i) - Vec<T>::loadu(row_lse + i));
          weight.store(weights[key] + i);
          (weight * (Vec<T>::loadu(dscores[key] + i) - Vec<T>::loadu(delta + i))).store(dscores[key] + i);
        }
      }
      const Strided<T> dq_rows{scratch.matrix(7, head_rows * key_width), key_width};
      if (count == 0) fill(dq_rows[0], heads * key_width, T(0));
      sum_keys(dscores, key_rows, count, heads, keys.width, dq_rows);
      multiply<T, Left::kPlain>(count, values.width, heads, weights, grad_rows, dv_rows, true);
      multiply<T, Left::kPlain>(count, keys.width, heads, dscores, q_rows, dk_rows, true);
      for (int64_t head = 0; head < heads; head++) {
        store_row(dq_rows[head], scale, dq, batch, query, first_head + head, keys.width);
      }
    }
  });
  key_sums.store(scale, dk, threads);
  value_sums.store(T(1), dv, threads);
}

}  // namespace
