#include "kernels/kronecker.h"

#include <algorithm>
#include <vector>

#include "kernels/scratch.h"

namespace mergex::kernels {
namespace {

using Index = std::int64_t;

// Bytes of one tile: four of them stay in a second-level cache of 1 MiB.
constexpr Index kTileBytes = 128 * 1024;

/// A factor C [w, w] and its transpose, rows padded with zeros to whole vectors.
template <class T>
struct PaddedFactor {
  std::vector<T> straight, transposed;
  PaddedFactor(const T* c, Index w, Index padded)
      : straight(static_cast<std::size_t>(w * padded)), transposed(straight) {
    for (Index i = 0; i < w; ++i) {
      for (Index j = 0; j < w; ++j) {
        straight[static_cast<std::size_t>(i * padded + j)] = c[i * w + j];
        transposed[static_cast<std::size_t>(j * padded + i)] = c[i * w + j];
      }
    }
  }
};

/// A matrix [rows, columns] kept in vertical strips of `width` columns, one after another, so that a strip is a tile
/// without copying. Strips lie an odd number of cache lines apart: else a row's pieces would share one set of the cache.
template <class T>
struct Strips {
  T* data;
  Index rows, columns, width, stride;

  Strips(Index rows_, Index columns_, Index lanes)
      : data(nullptr),
        rows(rows_),
        columns(columns_),
        width(std::clamp(kTileBytes / static_cast<Index>(sizeof(T)) / rows_ / lanes * lanes, lanes,
                         (columns_ + lanes - 1) / lanes * lanes)),
        stride(((rows_ * width * static_cast<Index>(sizeof(T)) + 63) / 64 | 1) * 64 / static_cast<Index>(sizeof(T))) {}

  Index num_strips() const { return (columns + width - 1) / width; }
  Index entries() const { return num_strips() * stride; }
  T* strip(Index i) const { return data + i * stride; }

  /// Calls `body(in the strips, offset from `column`, count)` for the pieces of a row's [column, column + count).
  template <class Body>
  void each_piece(Index row, Index column, Index count, Body&& body) const {
    for (Index done = 0; done < count;) {
      const auto at = column + done, strip_index = at / width, inside = at % width;
      const auto length = std::min(count - done, width - inside);
      body(strip(strip_index) + row * width + inside, done, length);
      done += length;
    }
  }
  void put(Index row, Index column, Index count, const T* from) const {
    each_piece(row, column, count, [&](T* to, Index offset, Index n) { std::copy_n(from + offset, n, to); });
  }
  void get(Index row, Index column, Index count, T* to) const {
    each_piece(row, column, count, [&](const T* from, Index offset, Index n) { std::copy_n(from, n, to + offset); });
  }
  /// The columns that pad the last strip stay 0 through every product.
  void clear_padding() const {
    const auto used = columns - (num_strips() - 1) * width;
    if (used == width) return;
    for (Index row = 0; row < rows; ++row) {
      std::fill_n(strip(num_strips() - 1) + row * width + used, width - used, T{0});
    }
  }
};

/// The two factors of the rows of [A1, A2, I], on tiles [A1, A2, width].
template <class T>
class OutSide {
 public:
  OutSide(const VectorKernels<T>& k, Index a1, Index a2, Index width, const T* c1, const T* c2)
      : k_(k), a1_(a1), a2_(a2), width_(width), c1_(c1), c2_(c2) {}

  Index tile_entries() const { return a1_ * a2_ * width_; }
  Index factor1_entries() const { return a1_ * a1_; }
  Index factor2_entries() const { return a2_ * a2_; }

  /// y = C2 C1 x; y may be x
  void apply(const T* x, T* z, T* y) const {
    first(c1_, false, x, z);
    second(false, z, y);
  }

  /// Adds to the gradients of both factors, given `g`, that of `apply`'s result; dx may be x or g.
  void backward(const T* x, const T* g, T* z, T* u, T* dx, T* d1, T* d2) const {
    const auto slab = a2_ * width_;
    first(c1_, false, x, z);
    k_.multiply_transposed(a1_, a2_, a2_, width_, g, width_, slab, z, width_, slab, d2, a2_);
    second(true, g, u);
    k_.multiply_transposed(1, a1_, a1_, slab, u, slab, 0, x, slab, 0, d1, a1_);
    first(c1_, true, u, dx);
  }

  void finish(const T* d1, const T* d2, T* c1_gradient, T* c2_gradient) const {
    for (Index e = 0; e < a1_ * a1_; ++e) c1_gradient[e] += d1[e];
    for (Index e = 0; e < a2_ * a2_; ++e) c2_gradient[e] += d2[e];
  }

 private:
  void first(const T* c, bool transposed, const T* x, T* y) const {
    const auto slab = a2_ * width_;
    k_.multiply(a1_, slab, a1_, c, transposed ? 1 : a1_, transposed ? a1_ : 1, x, slab, y, slab, false);
  }
  void second(bool transposed, const T* x, T* y) const {
    const auto slab = a2_ * width_;
    for (Index j = 0; j < a1_; ++j) {
      k_.multiply(a2_, width_, a2_, c2_, transposed ? 1 : a2_, transposed ? a2_ : 1, x + j * slab, width_,
                  y + j * slab, width_, false);
    }
  }

  const VectorKernels<T>& k_;
  Index a1_, a2_, width_;
  const T *c1_, *c2_;
};

/// The two factors of the columns of [O, B1, B2], on tiles of some rows: [rows, B1, padded B2].
template <class T>
class InSide {
 public:
  InSide(const VectorKernels<T>& k, Index out_features, Index b1, Index b2, const T* c1, const T* c2)
      : k_(k),
        rows_(out_features),
        b1_(b1),
        b2_(b2),
        padded_((b2 + k.width - 1) / k.width * k.width),
        height_(std::clamp(kTileBytes / static_cast<Index>(sizeof(T)) / (b1 * padded_), Index{1}, out_features)),
        c1_(c1),
        c2_(c2, b2, padded_) {}

  Index num_tiles() const { return (rows_ + height_ - 1) / height_; }
  Index tile_entries() const { return height_ * b1_ * padded_; }
  Index factor1_entries() const { return b1_ * b1_; }
  Index factor2_entries() const { return b2_ * padded_; }
  Index height(Index tile) const { return std::min(height_, rows_ - tile * height_); }

  /// Calls `access(row, column, count, in the tile)` for the stretches of a tile that are contiguous in a matrix.
  template <class Access>
  void each_stretch(Index tile, T* x, Access&& access) const {
    for (Index row = tile * height_; row < tile * height_ + height(tile); ++row) {
      if (padded_ == b2_) {
        access(row, Index{0}, b1_ * b2_, x);
        x += b1_ * b2_;
      } else {
        for (Index j = 0; j < b1_; ++j, x += padded_) access(row, j * b2_, b2_, x);
      }
    }
  }
  template <class Access>
  void load(Index tile, T* x, Access&& access) const {
    if (padded_ != b2_) std::fill_n(x, tile_entries(), T{0});
    each_stretch(tile, x, access);
  }

  void apply(Index rows, const T* x, T* z, T* y) const {
    first(rows, false, x, z);
    second(rows, c2_.transposed.data(), z, y);
  }

  void backward(Index rows, const T* x, const T* g, T* z, T* u, T* dx, T* d1, T* d2) const {
    const auto slab = b1_ * padded_;
    first(rows, false, x, z);
    k_.multiply(b2_, padded_, rows * b1_, g, 1, padded_, z, padded_, d2, padded_, true);
    second(rows, c2_.straight.data(), g, u);
    k_.multiply_transposed(rows, b1_, b1_, padded_, u, padded_, slab, x, padded_, slab, d1, b1_);
    first(rows, true, u, dx);
  }

  void finish(const T* d1, const T* d2, T* c1_gradient, T* c2_gradient) const {
    for (Index e = 0; e < b1_ * b1_; ++e) c1_gradient[e] += d1[e];
    for (Index q = 0; q < b2_; ++q) {
      for (Index m = 0; m < b2_; ++m) c2_gradient[q * b2_ + m] += d2[q * padded_ + m];
    }
  }

 private:
  void first(Index rows, bool transposed, const T* x, T* y) const {
    const auto slab = b1_ * padded_;
    for (Index r = 0; r < rows; ++r) {
      k_.multiply(b1_, padded_, b1_, c1_, transposed ? 1 : b1_, transposed ? b1_ : 1, x + r * slab, padded_,
                  y + r * slab, padded_, false);
    }
  }
  /// x C, rows of C padded
  void second(Index rows, const T* c, const T* x, T* y) const {
    k_.multiply(rows * b1_, padded_, b2_, x, padded_, 1, c, padded_, y, padded_, false);
  }

  const VectorKernels<T>& k_;
  Index rows_, b1_, b2_, padded_, height_;
  const T* c1_;
  PaddedFactor<T> c2_;
};

/// One expert and one term of the sum over the rank: the passes over its matrix. The out side works in place on strips;
/// the in side reads and writes rows. Memory outside the cache is only ever passed through row by row.
template <class T>
class Passes {
 public:
  Passes(const Kronecker<T>& p, Index expert, Index r)
      : p_(p),
        expert_(expert),
        at_(r * p.num_experts + expert),
        columns_(p.b1 * p.b2),
        x_(p.a1 * p.a2, columns_, p.vectors->width),
        y_(x_),
        out_(*p.vectors, p.a1, p.a2, x_.width, p.c1_out + at_ * p.a1 * p.a1, p.c2_out + at_ * p.a2 * p.a2),
        in_(*p.vectors, p.a1 * p.a2, p.b1, p.b2, p.c1_in + at_ * p.b1 * p.b1, p.c2_in + at_ * p.b2 * p.b2) {
    thread_local std::vector<T> memory;
    x_.data = scratch(memory, 2 * x_.entries() + 16);
    // To a whole cache line.
    while (reinterpret_cast<std::uintptr_t>(x_.data) % 64 != 0) ++x_.data;
    y_.data = x_.data + x_.entries();
    x_.clear_padding();
    y_.clear_padding();
  }

  /// `save(row, column, count, values)` takes gamma's share.
  template <class Save>
  void forward(Save&& save) {
    if (out_is_first()) {
      load_strips(x_, task_vector());
      each_strip([&](Index i, T* memory) { out_.apply(x_.strip(i), memory, x_.strip(i)); });
      apply_rows([&](Index row, Index column, Index count, T* to) { x_.get(row, column, count, to); }, save);
    } else {
      apply_rows(task_vector(),
                 [&](Index row, Index column, Index count, T* from) { x_.put(row, column, count, from); });
      each_strip([&](Index i, T* memory) { out_.apply(x_.strip(i), memory, x_.strip(i)); });
      save_strips(x_, save);
    }
  }

  /// `load(row, column, count, to)` gives gamma's gradient, `save` takes the task vector's.
  template <class Load, class Save>
  void backward(Load&& load, Save&& save, const typename Kronecker<T>::Gradients& gradients) {
    if (out_is_first()) {
      load_strips(x_, task_vector());
      each_strip([&](Index i, T* memory) { out_.apply(x_.strip(i), memory, y_.strip(i)); });
      backward_rows([&](Index row, Index column, Index count, T* to) { y_.get(row, column, count, to); }, load,
                    [&](Index row, Index column, Index count, T* from) { y_.put(row, column, count, from); },
                    gradients);
      backward_strips(gradients);
      save_strips(y_, save);
    } else {
      apply_rows(task_vector(),
                 [&](Index row, Index column, Index count, T* from) { x_.put(row, column, count, from); });
      load_strips(y_, load);
      backward_strips(gradients);
      backward_rows(task_vector(),
                    [&](Index row, Index column, Index count, T* to) { y_.get(row, column, count, to); }, save,
                    gradients);
    }
  }

 private:
  /// The side in front is computed twice in the backward pass: the cheaper one.
  bool out_is_first() const { return p_.a1 + p_.a2 <= p_.b1 + p_.b2; }

  auto task_vector() const {
    return [this](Index row, Index column, Index count, T* to) {
      const auto at = row * columns_ + column, in_all = expert_ * x_.rows * columns_ + at;
      p_.vectors->difference(count, p_.experts + in_all, p_.base == nullptr ? nullptr : p_.base + at,
                             p_.keep_before == nullptr ? nullptr : p_.keep_before + in_all, p_.scale, to);
    };
  }

  template <class Body>
  void each_strip(Body&& body) const {
    p_.parallel(x_.num_strips(), [&](Index begin, Index end) {
      thread_local std::vector<T> memory;
      T* z = scratch(memory, 2 * out_.tile_entries());
      for (Index i = begin; i < end; ++i) body(i, z);
    });
  }

  template <class Load>
  void load_strips(const Strips<T>& strips, Load&& load) const {
    each_row([&](Index row, T* memory) {
      load(row, Index{0}, columns_, memory);
      strips.put(row, 0, columns_, memory);
    });
  }
  template <class Save>
  void save_strips(const Strips<T>& strips, Save&& save) const {
    each_row([&](Index row, T* memory) {
      strips.get(row, 0, columns_, memory);
      save(row, Index{0}, columns_, memory);
    });
  }
  template <class Body>
  void each_row(Body&& body) const {
    p_.parallel(x_.rows, [&](Index begin, Index end) {
      thread_local std::vector<T> memory;
      T* buffer = scratch(memory, columns_);
      for (Index row = begin; row < end; ++row) body(row, buffer);
    });
  }

  template <class Load, class Save>
  void apply_rows(Load&& load, Save&& save) const {
    p_.parallel(in_.num_tiles(), [&](Index begin, Index end) {
      thread_local std::vector<T> memory;
      const auto size = in_.tile_entries();
      T* x = scratch(memory, 2 * size);
      for (Index tile = begin; tile < end; ++tile) {
        in_.load(tile, x, load);
        in_.apply(in_.height(tile), x, x + size, x);
        in_.each_stretch(tile, x, save);
      }
    });
  }

  template <class Load, class LoadGradient, class Save>
  void backward_rows(Load&& load, LoadGradient&& load_gradient, Save&& save,
                     const typename Kronecker<T>::Gradients& gradients) const {
    sum_over_tiles(in_.num_tiles(), in_, gradients.c1_in + at_ * p_.b1 * p_.b1, gradients.c2_in + at_ * p_.b2 * p_.b2,
                   [&](Index tile, T* d1, T* d2) {
                     thread_local std::vector<T> memory;
                     const auto size = in_.tile_entries();
                     T* x = scratch(memory, 4 * size);
                     in_.load(tile, x, load);
                     in_.load(tile, x + size, load_gradient);
                     in_.backward(in_.height(tile), x, x + size, x + 2 * size, x + 3 * size, x, d1, d2);
                     in_.each_stretch(tile, x, save);
                   });
  }

  /// From the input in `x_` and the gradient in `y_`, which becomes that of the input.
  void backward_strips(const typename Kronecker<T>::Gradients& gradients) const {
    sum_over_tiles(x_.num_strips(), out_, gradients.c1_out + at_ * p_.a1 * p_.a1,
                   gradients.c2_out + at_ * p_.a2 * p_.a2, [&](Index i, T* d1, T* d2) {
                     thread_local std::vector<T> memory;
                     const auto size = out_.tile_entries();
                     T* z = scratch(memory, 2 * size);
                     out_.backward(x_.strip(i), y_.strip(i), z, z + size, y_.strip(i), d1, d2);
                   });
  }

  /// Gradients of a side's factors: a partial sum for each tile, added in order, so that the number of threads does not
  /// change the result.
  template <class Side, class Body>
  void sum_over_tiles(Index num_tiles, const Side& side, T* c1_gradient, T* c2_gradient, Body&& body) const {
    const auto size1 = side.factor1_entries(), size = size1 + side.factor2_entries();
    std::vector<T> partial(static_cast<std::size_t>(num_tiles * size));
    p_.parallel(num_tiles, [&](Index begin, Index end) {
      for (Index tile = begin; tile < end; ++tile) {
        T* d1 = partial.data() + tile * size;
        body(tile, d1, d1 + size1);
      }
    });
    for (Index tile = 0; tile < num_tiles; ++tile) {
      const T* d1 = partial.data() + tile * size;
      side.finish(d1, d1 + size1, c1_gradient, c2_gradient);
    }
  }

  const Kronecker<T>& p_;
  Index expert_, at_, columns_;
  Strips<T> x_, y_;
  OutSide<T> out_;
  InSide<T> in_;
};

}  // namespace

template <class T>
void Kronecker<T>::forward(T* gamma) const {
  const auto columns = b1 * b2, size = a1 * a2 * columns;
  for (Index n = 0; n < num_experts; ++n) {
    for (Index r = 0; r < rank; ++r) {
      Passes<T>(*this, n, r).forward([&](Index row, Index column, Index count, T* from) {
        T* to = gamma + n * size + row * columns + column;
        if (r > 0) {
          for (Index e = 0; e < count; ++e) from[e] += to[e];
        }
        vectors->difference(count, from, nullptr,
                            keep_after == nullptr ? nullptr : keep_after + n * size + row * columns + column, T{1}, to);
      });
    }
  }
}

template <class T>
void Kronecker<T>::backward(const T* gamma_gradient, const Gradients& gradients) const {
  const auto columns = b1 * b2, size = a1 * a2 * columns;
  std::fill_n(gradients.c1_out, rank * num_experts * a1 * a1, T{0});
  std::fill_n(gradients.c2_out, rank * num_experts * a2 * a2, T{0});
  std::fill_n(gradients.c1_in, rank * num_experts * b1 * b1, T{0});
  std::fill_n(gradients.c2_in, rank * num_experts * b2 * b2, T{0});
  for (Index n = 0; n < num_experts; ++n) {
    for (Index r = 0; r < rank; ++r) {
      const bool last = r == rank - 1;
      Passes<T>(*this, n, r).backward(
          [&](Index row, Index column, Index count, T* to) {
            const auto at = n * size + row * columns + column;
            vectors->difference(count, gamma_gradient + at, nullptr, keep_after == nullptr ? nullptr : keep_after + at,
                                T{1}, to);
          },
          [&](Index row, Index column, Index count, T* from) {
            const auto at = n * size + row * columns + column;
            T* to = gradients.experts + at;
            if (r > 0) {
              for (Index e = 0; e < count; ++e) from[e] += to[e];
            }
            vectors->difference(count, from, nullptr, last && keep_before != nullptr ? keep_before + at : nullptr,
                                last ? scale : T{1}, to);
          },
          gradients);
    }
  }
  if (gradients.base == nullptr) return;
  const std::vector<T> minus(static_cast<std::size_t>(num_experts), T{-1});
  parallel(a1 * a2, [&](Index begin, Index end) {
    T* to = gradients.base + begin * columns;
    vectors->mix((end - begin) * columns, 1, num_experts, minus.data(), nullptr, gradients.experts + begin * columns,
                 size, to, 0);
  });
}

template struct Kronecker<float>;
template struct Kronecker<double>;

}  // namespace mergex::kernels
