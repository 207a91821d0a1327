// Scores of the steps of a chunk whose keys decay column by column, and the products of those decays.
//
// A key is carried from its step to each later one, as the loop carries its state: a factor may be zero or of any sign,
// and nothing is divided.

#include "tensor.h"

namespace {

// The operands of one chunk, `[steps, width]` each, in whole vectors.
template <typename T>
struct Chunk {
  int64_t steps, width;
  T *q, *k, *a;

  void load(const Tensor* tensors, int64_t chunk, int64_t columns) {
    for (int64_t step = 0; step < steps; step++) {
      load_row(tensors[0], chunk, step, 0, columns, a + step * width);
      load_row(tensors[1], chunk, step, 0, columns, q + step * width);
      load_row(tensors[2], chunk, step, 0, columns, k + step * width);
    }
  }
};

// target = x * factor, element by element.
template <typename T>
inline void carry(const T* x, const T* factor, int64_t width, T* target) {
  for (int64_t c = 0; c < width; c += kLanes<T>) (Vec<T>::loadu(x + c) * Vec<T>::loadu(factor + c)).store(target + c);
}

// target += factor * x.
template <typename T>
inline void add_scaled(const Vec<T>& factor, const T* x, int64_t width, T* target) {
  for (int64_t c = 0; c < width; c += kLanes<T>) {
    at::vec::fmadd(factor, Vec<T>::loadu(x + c), Vec<T>::loadu(target + c)).store(target + c);
  }
}

// scores[i, j] = q[i] · (the factors after step j, up to step i) k[j]; with `late` = 1 for j < i alone, and without
// step i's own factor.
template <typename T>
void score(const Chunk<T>& chunk, int64_t late, T* carried, T* scores) {
  fill(scores, chunk.steps * chunk.steps, T(0));
  for (int64_t j = 0; j + late < chunk.steps; j++) {
    const T* key = chunk.k + j * chunk.width;
    for (int64_t i = j + late; i < chunk.steps; i++) {
      if (i > j + late) {
        carry(key, chunk.a + (i - late) * chunk.width, chunk.width, carried);
        key = carried;
      }
      scores[i * chunk.steps + j] = dot(chunk.q + i * chunk.width, key, chunk.width);
    }
  }
}

// Gradients of q, k and a, which are added to. `carried` holds a key at every step, `wanted` is one row.
template <typename T>
void differentiate(
    const Chunk<T>& chunk, const T* gradient, int64_t late, T* carried, T* wanted, const Chunk<T>& gradients) {
  const int64_t width = chunk.width;
  for (int64_t j = 0; j + late < chunk.steps; j++) {
    const int64_t first = j + late;
    std::copy_n(chunk.k + j * width, width, carried + first * width);
    for (int64_t i = first + 1; i < chunk.steps; i++) {
      carry(carried + (i - 1) * width, chunk.a + (i - late) * width, width, carried + i * width);
    }
    fill(wanted, width, T(0));
    for (int64_t i = chunk.steps - 1; i >= first; i--) {
      const Vec<T> of_score(gradient[i * chunk.steps + j]);
      add_scaled(of_score, carried + i * width, width, gradients.q + i * width);
      add_scaled(of_score, chunk.q + i * width, width, wanted);
      if (i == first) break;
      const T *factor = chunk.a + (i - late) * width, *earlier = carried + (i - 1) * width;
      T* of_factor = gradients.a + (i - late) * width;
      for (int64_t c = 0; c < width; c += kLanes<T>) {
        const Vec<T> here = Vec<T>::loadu(wanted + c);
        at::vec::fmadd(here, Vec<T>::loadu(earlier + c), Vec<T>::loadu(of_factor + c)).store(of_factor + c);
        (here * Vec<T>::loadu(factor + c)).store(wanted + c);
      }
    }
    add_to(gradients.k + j * width, wanted, width);
  }
}

template <typename T>
void forward(const Sizes& sizes, const Tensor* tensors, int64_t late, int64_t threads) {
  const int64_t steps = sizes.queries, width = padded_columns<T>(sizes.key_dim), size = steps * width;
  const ThreadBuffers<T> operands(threads, 3 * size), carried(threads, width);
  T* scores = reinterpret_cast<T*>(tensors[3].data);
  parallel_for(sizes.batch, threads, [&](int64_t item, int64_t thread) {
    T* first = operands[thread];
    Chunk<T> chunk{steps, width, first, first + size, first + 2 * size};
    chunk.load(tensors, item, sizes.key_dim);
    score(chunk, late, carried[thread], scores + item * steps * steps);
  });
}

template <typename T>
void backward(const Sizes& sizes, const Tensor* tensors, int64_t late, int64_t threads) {
  const int64_t steps = sizes.queries, columns = sizes.key_dim;
  const int64_t width = padded_columns<T>(columns), size = steps * width;
  const ThreadBuffers<T> operands(threads, 6 * size), carried(threads, size), wanted(threads, width);
  const T* gradient = reinterpret_cast<const T*>(tensors[3].data);
  parallel_for(sizes.batch, threads, [&](int64_t item, int64_t thread) {
    T* first = operands[thread];
    Chunk<T> chunk{steps, width, first, first + size, first + 2 * size};
    const Chunk<T> gradients{steps, width, first + 3 * size, first + 4 * size, first + 5 * size};
    chunk.load(tensors, item, columns);
    fill(gradients.q, 3 * size, T(0));
    differentiate(chunk, gradient + item * steps * steps, late, carried[thread], wanted[thread], gradients);
    for (int64_t step = 0; step < steps; step++) {
      store_row(gradients.a + step * width, T(1), tensors[4], item, step, 0, columns);
      store_row(gradients.q + step * width, T(1), tensors[5], item, step, 0, columns);
      store_row(gradients.k + step * width, T(1), tensors[6], item, step, 0, columns);
    }
  });
}

// up_to[i] = a[0] … a[i], after[i] = a[i + 1] … a[C - 1], column by column.
template <typename T>
void multiply_up(const Sizes& sizes, const Tensor* tensors, int64_t threads) {
  const int64_t steps = sizes.queries, columns = sizes.key_dim;
  const int64_t width = padded_columns<T>(columns), size = steps * width;
  const ThreadBuffers<T> rows(threads, 2 * size);
  parallel_for(sizes.batch, threads, [&](int64_t item, int64_t thread) {
    T *a = rows[thread], *product = a + size;
    for (int64_t step = 0; step < steps; step++) load_row(tensors[0], item, step, 0, columns, a + step * width);
    fill(product, width, T(1));
    for (int64_t step = 0; step < steps; step++) {
      carry(product, a + step * width, width, product);
      store_row(product, T(1), tensors[1], item, step, 0, columns);
    }
    fill(product, width, T(1));
    for (int64_t step = steps - 1; step >= 0; step--) {
      store_row(product, T(1), tensors[2], item, step, 0, columns);
      carry(product, a + step * width, width, product);
    }
  });
}

// The gradient of a, given those of up_to and after.
template <typename T>
void differentiate_products(const Sizes& sizes, const Tensor* tensors, int64_t threads) {
  const auto& [grad_up_to, grad_after, a, up_to, after, da] = reinterpret_cast<const Tensor(&)[6]>(*tensors);
  const int64_t steps = sizes.queries, columns = sizes.key_dim;
  const int64_t width = padded_columns<T>(columns), size = steps * width;
  const ThreadBuffers<T> sums(threads, size), rows(threads, 3 * width);
  parallel_for(sizes.batch, threads, [&](int64_t item, int64_t thread) {
    T *sum = sums[thread], *given = rows[thread], *factor = given + width, *wanted = factor + width;
    fill(sum, size, T(0));
    // From the last step: what is wanted of up_to[i] by all products that it is a part of.
    fill(wanted, width, T(0));
    for (int64_t i = steps - 1; i >= 0; i--) {
      load_row(grad_up_to, item, i, 0, columns, given);
      add_to(wanted, given, width);
      if (i == 0) {
        add_to(sum, wanted, width);
        break;
      }
      load_row(up_to, item, i - 1, 0, columns, given);
      carry(given, wanted, width, given);
      add_to(sum + i * width, given, width);
      load_row(a, item, i, 0, columns, factor);
      carry(wanted, factor, width, wanted);
    }
    // From the first step: what is wanted of after[i].
    fill(wanted, width, T(0));
    for (int64_t i = 0; i + 1 < steps; i++) {
      load_row(grad_after, item, i, 0, columns, given);
      add_to(wanted, given, width);
      load_row(after, item, i + 1, 0, columns, given);
      carry(given, wanted, width, given);
      add_to(sum + (i + 1) * width, given, width);
      load_row(a, item, i + 1, 0, columns, factor);
      carry(wanted, factor, width, wanted);
    }
    for (int64_t step = 0; step < steps; step++) {
      store_row(sum + step * width, T(1), da, item, step, 0, columns);
    }
  });
}

}  // namespace

// tensors: a, q, k [N, C, 1, K] and scores [N, C, C], which lie in one piece.
extern "C" int decayed_attention_forward(
    const Sizes* sizes, const Tensor* tensors, int64_t late, int64_t threads, int64_t) {
  return guarded([&] {
    tensors[0].dtype == kFloat64 ? forward<double>(*sizes, tensors, late, threads)
                                 : forward<float>(*sizes, tensors, late, threads);
  });
}

// tensors: a, q, k, the gradient of the scores, and da, dq, dk.
extern "C" int decayed_attention_backward(
    const Sizes* sizes, const Tensor* tensors, int64_t late, int64_t threads, int64_t) {
  return guarded([&] {
    tensors[0].dtype == kFloat64 ? backward<double>(*sizes, tensors, late, threads)
                                 : backward<float>(*sizes, tensors, late, threads);
  });
}

// tensors: a, up_to and after, [N, C, 1, D] each.
extern "C" int decayed_attention_products(const Sizes* sizes, const Tensor* tensors, int64_t threads, int64_t) {
  return guarded([&] {
    tensors[0].dtype == kFloat64 ? multiply_up<double>(*sizes, tensors, threads)
                                 : multiply_up<float>(*sizes, tensors, threads);
  });
}

// tensors: the gradients of up_to and after, a, up_to, after, and da.
extern "C" int decayed_attention_products_backward(
    const Sizes* sizes, const Tensor* tensors, int64_t threads, int64_t) {
  return guarded([&] {
    tensors[0].dtype == kFloat64 ? differentiate_products<double>(*sizes, tensors, threads)
                                 : differentiate_products<float>(*sizes, tensors, threads);
  });
}
