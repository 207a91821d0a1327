// Attention over compressed blocks, and the selection of blocks that follows from its weights.

#include "ranges.h"

// Mirrors the parameters of the operator.
struct Selection {
  int64_t block, ratio;  // tokens of a selection block, and the strides it holds
  const int64_t* offsets;
  const int64_t* weights;
  int64_t terms;  // offsets and weights
  int64_t count, initial, local;
};

namespace {

struct CompressedRange {
  int64_t blocks, block_size, stride;

  KeyRange operator()(int64_t query) const {
    const int64_t past_first = query - (block_size - 1);
    return {0, past_first < 0 ? 0 : std::min(blocks, past_first / stride + 1)};
  }
};

// The best `capacity` candidates, best first; among equals the one offered first.
template <typename T>
class Best {
 public:
  Best(int64_t capacity, T* scores, int32_t* indices) : capacity_(capacity), scores_(scores), indices_(indices) {}

  void offer(T score, int32_t index) {
    if (size_ == capacity_) {
      if (capacity_ == 0 || !(score > scores_[size_ - 1])) return;
    } else {
      size_++;
    }
    int64_t place = size_ - 1;
    for (; place > 0 && scores_[place - 1] < score; place--) {
      scores_[place] = scores_[place - 1];
      indices_[place] = indices_[place - 1];
    }
    scores_[place] = score;
    indices_[place] = index;
  }

  int64_t size() const { return size_; }

 private:
  int64_t capacity_, size_ = 0;
  T* scores_;
  int32_t* indices_;
};

// Chooses the selection blocks of a tile's queries from its softmax weights.
template <typename T>
class Selector {
 public:
  Selector(const Sizes& sizes, const Selection& selection, const Tensor& indices, int64_t threads)
      : sizes_(sizes),
        selection_(selection),
        indices_(indices),
        first_(selection.terms ? std::max<int64_t>(0, -selection.offsets[0]) : 0),
        importance_(threads, importance_size()),
        scores_(threads, sizes.queries / selection.block + 1),
        best_(threads, selection.count) {
    for (int64_t thread = 0; thread < threads; thread++) fill(importance_[thread], importance_size(), T(0));
  }

  void operator()(const ForwardTile<T>& tile, int64_t thread) const {
    T* importance = importance_[thread];
    for (int64_t query = 0; query < tile.queries; query++) {
      sum_heads(tile, query, importance + first_);
      choose(tile.sequence, tile.start + query, importance + first_, scores_[thread], best_[thread]);
    }
    // Later tiles of this thread may see fewer blocks, and rely on zeros after them.
    fill(importance + first_, tile.span.last * kBlockKeys, T(0));
  }

 private:
  const Sizes& sizes_;
  const Selection& selection_;
  const Tensor& indices_;
  int64_t first_;  // zeros before the importance of compressed block 0, so that offsets may reach there
  ThreadBuffers<T> importance_, scores_, best_;

  int64_t importance_size() const {
    const int64_t last_offset = selection_.terms ? std::max<int64_t>(0, selection_.offsets[selection_.terms - 1]) : 0;
    const int64_t reach = (sizes_.queries - 1) / selection_.block * selection_.ratio + last_offset + 1;
    return first_ + std::max(reach, round_up(sizes_.keys, kBlockKeys));
  }

  // eq. 10: the weights of a query summed over its heads, one after the other.
  void sum_heads(const ForwardTile<T>& tile, int64_t query, T* importance) const {
    const int64_t first_row = query * tile.heads;
    for (int64_t block = 0; block < tile.span.last; block++) {
      const T* weights = tile.scores + block * tile.block_stride + first_row * kBlockKeys;
      for (int64_t i = 0; i < kBlockKeys; i += kLanes<T>) {
        Vec<T> sum(T(0));
        for (int64_t head = 0; head < tile.heads; head++) {
          sum = sum + Vec<T>::loadu(weights + head * kBlockKeys + i) * Vec<T>(tile.inverse_sum[first_row + head]);
        }
        sum.store(importance + block * kBlockKeys + i);
      }
    }
  }

  // eq. 9 for the blocks [begin, end): the terms in the order of the offsets, each for all blocks, which keeps the
  // inner loop free of lookups.
  void compute_scores(const T* importance, int64_t begin, int64_t end, T* scores) const {
    fill(scores + begin, end - begin, T(0));
    for (int64_t term = 0; term < selection_.terms; term++) {
      const T weight = static_cast<T>(selection_.weights[term]);
      const T* p = importance + selection_.offsets[term];
      const int64_t ratio = selection_.ratio;
      for (int64_t block = begin; block < end; block++) scores[block] += weight * p[block * ratio];
    }
  }

  // eq. 11: forced blocks, ascending, then the best of the others, then -1.
  void choose(int64_t sequence, int64_t query, const T* importance, T* scores, T* best_scores) const {
    int32_t* chosen = &element<int32_t>(indices_, sequence / sizes_.groups, query, sequence % sizes_.groups);
    const int64_t current = query / selection_.block;
    const int64_t first_free = std::min(selection_.initial, current + 1);
    const int64_t first_local = std::max(first_free, current - selection_.local + 1);
    int64_t size = 0;
    const auto force = [&](int64_t begin, int64_t end) {
      for (int64_t block = begin; block < end && size < selection_.count; block++) chosen[size++] = block;
    };
    force(0, first_free);
    force(first_local, current + 1);
    Best<T> best(selection_.count - size, best_scores, chosen + size);
    compute_scores(importance, first_free, first_local, scores);
    for (int64_t block = first_free; block < first_local; block++) best.offer(scores[block], block);
    for (size += best.size(); size < selection_.count; size++) chosen[size] = -1;
  }
};

// The tiles dealt out to chunks in turn: later tiles see more blocks, so this balances them. Few chunks, because each
// has sums for all blocks; fewer still where batch and groups give enough parallel work. Depends on the shapes only.
std::vector<Chunk> make_chunks(const Sizes& sizes, const CompressedRange& range, int64_t tile_queries) {
  const int64_t tiles = divide_up(sizes.queries, tile_queries);
  const int64_t count = std::min(tiles, std::clamp<int64_t>(16 / sizes.sequences(), 1, 16));
  std::vector<Chunk> chunks;
  for (int64_t first = 0; first < count; first++) {
    const int64_t last = first + (tiles - 1 - first) / count * count;
    const int64_t stop = std::min(sizes.queries, (last + 1) * tile_queries);
    chunks.push_back({first, count, last + 1, blocks_seen(range, stop - 1, stop)});
  }
  return chunks;
}

}  // namespace

// tensors: q, k, v, out, lse, indices
extern "C" int compressed_attention_forward(
    const Sizes* sizes, const Tensor* tensors, int64_t block_size, int64_t stride, double scale, int64_t select_block,
    const int64_t* offsets, const int64_t* weights, int64_t terms, int64_t num_selected, int64_t num_initial,
    int64_t num_local, int64_t threads, int64_t matrix_unit) {
  return with_engine(tensors[0].dtype, matrix_unit, [&](const auto& engine) {
    using T = typename std::decay_t<decltype(engine)>::Value;
    const CompressedRange range{sizes->keys, block_size, stride};
    const Selection selection{select_block, select_block / stride, offsets,     weights,
                              terms,        num_selected,          num_initial, num_local};
    if (num_selected == 0) {
      forward_ranges(engine, *sizes, tensors, scale, threads, range, false, [](const auto&, int64_t) {});
    } else {
      const Selector<T> select(*sizes, selection, tensors[5], threads);
      forward_ranges(engine, *sizes, tensors, scale, threads, range, true, select);
    }
  });
}

// tensors: grad_out, grad_lse, q, k, v, out, lse, dq, dk, dv
extern "C" int compressed_attention_backward(
    const Sizes* sizes, const Tensor* tensors, int64_t block_size, int64_t stride, double scale, int64_t threads,
    int64_t matrix_unit) {
  return with_engine(tensors[0].dtype, matrix_unit, [&](const auto& engine) {
    const CompressedRange range{sizes->keys, block_size, stride};
    const int64_t tile_queries = queries_of_tile(*sizes);
    const std::vector<Chunk> chunks = make_chunks(*sizes, range, tile_queries);
    backward_ranges(engine, *sizes, tensors, scale, threads, range, chunks, tile_queries);
  });
}
