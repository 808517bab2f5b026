#include "kernels/kronecker.h"

#include <algorithm>
#include <vector>

namespace mergex::kernels {
namespace {

using Index = std::int64_t;

// Bytes of one tile: four of them stay in a second-level cache of 1 MiB.
constexpr Index kTileBytes = 128 * 1024;

/// Memory that a thread keeps from call to call: fresh pages cost more than the work on them.
template <class T>
T* scratch(std::vector<T>& memory, Index entries) {
  if (static_cast<Index>(memory.size()) < entries) memory.resize(static_cast<std::size_t>(entries));
  return memory.data();
}

/// Copies or combines `count` entries of a matrix that start at (row, column).
template <class T>
using Access = std::function<void(Index row, Index column, Index count, T* tile)>;

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

/// The two factors of the rows of [A1, A2, I], on tiles of some columns: [A1, A2, width].
template <class T>
class OutSide {
 public:
  OutSide(const VectorKernels<T>& k, Index a1, Index a2, Index in_features, const T* c1, const T* c2)
      : k_(k), a1_(a1), a2_(a2), columns_(in_features), c1_(c1), c2_(c2) {
    const auto w = static_cast<Index>(k.width);
    const auto fitting = kTileBytes / static_cast<Index>(sizeof(T)) / (a1 * a2) / w * w;
    width_ = std::clamp(fitting, w, (in_features + w - 1) / w * w);
  }

  Index num_tiles() const { return (columns_ + width_ - 1) / width_; }
  Index tile_entries() const { return a1_ * a2_ * width_; }
  Index factor1_entries() const { return a1_ * a1_; }
  Index factor2_entries() const { return a2_ * a2_; }

  template <class F>
  void each_row(Index tile, T* x, F&& access) const {
    const auto column = tile * width_, count = std::min(width_, columns_ - column);
    for (Index row = 0; row < a1_ * a2_; ++row) access(row, column, count, x + row * width_);
  }
  void load(Index tile, T* x, const Access<T>& access) const {
    if (columns_ - tile * width_ < width_) std::fill_n(x, tile_entries(), T{0});
    each_row(tile, x, access);
  }

  /// y = C2 C1 x
  void apply(Index, const T* x, T* z, T* y) const {
    first(c1_, false, x, z);
    second(false, z, y);
  }

  /// Adds to the gradients of both factors, given that of `apply`'s result; leaves the tile's in `z`.
  void backward(Index, const T* x, const T* g, T* z, T* u, T* d1, T* d2) const {
    const auto slab = a2_ * width_;
    first(c1_, false, x, z);
    k_.multiply_transposed(a1_, a2_, a2_, width_, g, width_, slab, z, width_, slab, d2, a2_);
    second(true, g, u);
    k_.multiply_transposed(1, a1_, a1_, slab, u, slab, 0, x, slab, 0, d1, a1_);
    first(c1_, true, u, z);
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
  Index a1_, a2_, columns_, width_;
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

  template <class F>
  void each_row(Index tile, T* x, F&& access) const {
    for (Index row = tile * height_; row < tile * height_ + height(tile); ++row) {
      if (padded_ == b2_) {
        access(row, 0, b1_ * b2_, x);
        x += b1_ * b2_;
      } else {
        for (Index j = 0; j < b1_; ++j, x += padded_) access(row, j * b2_, b2_, x);
      }
    }
  }
  void load(Index tile, T* x, const Access<T>& access) const {
    if (padded_ != b2_) std::fill_n(x, tile_entries(), T{0});
    each_row(tile, x, access);
  }

  void apply(Index tile, const T* x, T* z, T* y) const {
    first(tile, false, x, z);
    second(tile, c2_.transposed.data(), z, y);
  }

  void backward(Index tile, const T* x, const T* g, T* z, T* u, T* d1, T* d2) const {
    const auto slab = b1_ * padded_;
    first(tile, false, x, z);
    k_.multiply(b2_, padded_, height(tile) * b1_, g, 1, padded_, z, padded_, d2, padded_, true);
    second(tile, c2_.straight.data(), g, u);
    k_.multiply_transposed(height(tile), b1_, b1_, padded_, u, padded_, slab, x, padded_, slab, d1, b1_);
    first(tile, true, u, z);
  }

  void finish(const T* d1, const T* d2, T* c1_gradient, T* c2_gradient) const {
    for (Index e = 0; e < b1_ * b1_; ++e) c1_gradient[e] += d1[e];
    for (Index q = 0; q < b2_; ++q) {
      for (Index m = 0; m < b2_; ++m) c2_gradient[q * b2_ + m] += d2[q * padded_ + m];
    }
  }

 private:
  Index height(Index tile) const { return std::min(height_, rows_ - tile * height_); }
  void first(Index tile, bool transposed, const T* x, T* y) const {
    const auto slab = b1_ * padded_;
    for (Index r = 0; r < height(tile); ++r) {
      k_.multiply(b1_, padded_, b1_, c1_, transposed ? 1 : b1_, transposed ? b1_ : 1, x + r * slab, padded_,
                  y + r * slab, padded_, false);
    }
  }
  /// x C, rows of C padded
  void second(Index tile, const T* c, const T* x, T* y) const {
    k_.multiply(height(tile) * b1_, padded_, b2_, x, padded_, 1, c, padded_, y, padded_, false);
  }

  const VectorKernels<T>& k_;
  Index rows_, b1_, b2_, padded_, height_;
  const T* c1_;
  PaddedFactor<T> c2_;
};

template <class T, class Parallel, class Side>
void apply_side(const Side& side, Parallel parallel, const Access<T>& load, const Access<T>& save) {
  parallel(side.num_tiles(), [&](Index begin, Index end) {
    thread_local std::vector<T> memory;
    const auto size = side.tile_entries();
    T* x = scratch(memory, 3 * size);
    for (Index tile = begin; tile < end; ++tile) {
      side.load(tile, x, load);
      side.apply(tile, x, x + size, x + 2 * size);
      side.each_row(tile, x + 2 * size, save);
    }
  });
}

template <class T, class Parallel, class Side>
void backward_side(const Side& side, Parallel parallel, const Access<T>& load, const Access<T>& load_gradient,
                   const Access<T>& save, T* c1_gradient, T* c2_gradient) {
  // One partial sum a tile, added in order: the same for any number of threads.
  const auto size1 = side.factor1_entries(), size2 = side.factor2_entries();
  std::vector<T> partial(static_cast<std::size_t>(side.num_tiles() * (size1 + size2)));
  parallel(side.num_tiles(), [&](Index begin, Index end) {
    thread_local std::vector<T> memory;
    const auto size = side.tile_entries();
    T* x = scratch(memory, 4 * size);
    for (Index tile = begin; tile < end; ++tile) {
      T* d1 = partial.data() + tile * (size1 + size2);
      side.load(tile, x, load);
      side.load(tile, x + size, load_gradient);
      side.backward(tile, x, x + size, x + 2 * size, x + 3 * size, d1, d1 + size1);
      side.each_row(tile, x + 2 * size, save);
    }
  });
  for (Index tile = 0; tile < side.num_tiles(); ++tile) {
    const T* d1 = partial.data() + tile * (size1 + size2);
    side.finish(d1, d1 + size1, c1_gradient, c2_gradient);
  }
}

/// Reads or writes whole rows of a matrix [.., columns].
template <class T>
Access<T> reading(const T* matrix, Index columns) {
  return [=](Index row, Index column, Index count, T* tile) {
    std::copy_n(matrix + row * columns + column, count, tile);
  };
}
template <class T>
Access<T> writing(T* matrix, Index columns) {
  return [=](Index row, Index column, Index count, T* tile) {
    std::copy_n(tile, count, matrix + row * columns + column);
  };
}

/// Calls `body(first, second)` with the side that is cheaper to compute twice in front.
template <class T, class Body>
void with_sides(const Kronecker<T>& p, Index at, Body&& body) {
  const auto o = p.a1 * p.a2, i = p.b1 * p.b2;
  const OutSide<T> out(*p.vectors, p.a1, p.a2, i, p.c1_out + at * p.a1 * p.a1, p.c2_out + at * p.a2 * p.a2);
  const InSide<T> in(*p.vectors, o, p.b1, p.b2, p.c1_in + at * p.b1 * p.b1, p.c2_in + at * p.b2 * p.b2);
  if (p.a1 + p.a2 <= p.b1 + p.b2) {
    body(out, in, true);
  } else {
    body(in, out, false);
  }
}

template <class T>
Access<T> task_vector(const Kronecker<T>& p, Index expert) {
  const auto columns = p.b1 * p.b2, size = p.a1 * p.a2 * columns;
  return [=, &p](Index row, Index column, Index count, T* tile) {
    const auto at = row * columns + column;
    p.vectors->difference(count, p.experts + expert * size + at, p.base == nullptr ? nullptr : p.base + at,
                          p.keep_before == nullptr ? nullptr : p.keep_before + expert * size + at, p.scale, tile);
  };
}

}  // namespace

template <class T>
void Kronecker<T>::forward(T* gamma) const {
  const auto columns = b1 * b2, size = a1 * a2 * columns;
  thread_local std::vector<T> memory;
  T* between = scratch(memory, size);
  for (Index n = 0; n < num_experts; ++n) {
    for (Index r = 0; r < rank; ++r) {
      with_sides(*this, r * num_experts + n, [&](const auto& first, const auto& second, bool) {
        apply_side<T>(first, parallel, task_vector(*this, n), writing(between, columns));
        apply_side<T>(second, parallel, reading<T>(between, columns),
                      [&](Index row, Index column, Index count, T* tile) {
                        const auto at = n * size + row * columns + column;
                        for (Index e = 0; e < count; ++e) {
                          const T value = r == 0 ? tile[e] : gamma[at + e] + tile[e];
                          const bool kept = keep_after == nullptr || keep_after[at + e] != 0;
                          gamma[at + e] = kept ? value : T{0};
                        }
                      });
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
  thread_local std::vector<T> memory;
  T* between = scratch(memory, 2 * size);
  T* sent_back = between + size;
  for (Index n = 0; n < num_experts; ++n) {
    for (Index r = 0; r < rank; ++r) {
      const auto at_factor = r * num_experts + n;
      with_sides(*this, at_factor, [&](const auto& first, const auto& second, bool out_first) {
        T* out1 = gradients.c1_out + at_factor * a1 * a1;
        T* out2 = gradients.c2_out + at_factor * a2 * a2;
        T* in1 = gradients.c1_in + at_factor * b1 * b1;
        T* in2 = gradients.c2_in + at_factor * b2 * b2;
        apply_side<T>(first, parallel, task_vector(*this, n), writing(between, columns));
        backward_side<T>(
            second, parallel, reading<T>(between, columns),
            [&](Index row, Index column, Index count, T* tile) {
              const auto at = n * size + row * columns + column;
              vectors->difference(count, gamma_gradient + at, nullptr,
                                  keep_after == nullptr ? nullptr : keep_after + at, T{1}, tile);
            },
            writing(sent_back, columns), out_first ? in1 : out1, out_first ? in2 : out2);
        backward_side<T>(
            first, parallel, task_vector(*this, n), reading<T>(sent_back, columns),
            [&](Index row, Index column, Index count, T* tile) {
              const auto in_expert = row * columns + column, at = n * size + in_expert;
              for (Index e = 0; e < count; ++e) {
                T value = r == 0 ? tile[e] : gradients.experts[at + e] + tile[e];
                if (r == rank - 1) {
                  value = keep_before == nullptr || keep_before[at + e] != 0 ? scale * value : T{0};
                  if (gradients.base != nullptr) gradients.base[in_expert + e] -= value;
                }
                gradients.experts[at + e] = value;
              }
            },
            out_first ? out1 : in1, out_first ? out2 : in2);
      });
    }
  }
}

template struct Kronecker<float>;
template struct Kronecker<double>;

}  // namespace mergex::kernels
