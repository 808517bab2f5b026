#include "kernels/merged_product.h"

#include <algorithm>
#include <vector>

#include "kernels/scratch.h"

namespace mergex::kernels {
namespace {

using Index = std::int64_t;

// A tile of one sentence's weight is 128 KiB of float32, and this many sentences are merged at a time: terms are read
// once for all of them, and the tiles stay in a second-level cache of 1 MiB.
constexpr Index kTileEntries = 32 * 1024;
constexpr Index kGroup = 4;

struct Tile {
  Index row, rows, column, columns;
  Index entries() const { return rows * columns; }
};

/// A matrix [O, I] cut into tiles of at most `kTileEntries`, `columns` wide.
struct Tiles {
  Index out_features, in_features, rows, columns;
  Tiles(Index o, Index i, Index wanted_columns) : out_features(o), in_features(i) {
    columns = std::min(i, wanted_columns);
    rows = std::min(o, kTileEntries / columns);
  }
  Index down() const { return (out_features + rows - 1) / rows; }
  Index across() const { return (in_features + columns - 1) / columns; }
  Tile at(Index i, Index j) const {
    return {i * rows, std::min(rows, out_features - i * rows), j * columns, std::min(columns, in_features - j * columns)};
  }
};

/// Calls `body(offset in the matrix, offset in the tile, count)` for each stretch of a tile that is contiguous in both.
template <class Body>
void each_stretch(const Tile& tile, Index in_features, Body&& body) {
  if (tile.columns == in_features) {
    body(tile.row * in_features, Index{0}, tile.entries());
    return;
  }
  for (Index r = 0; r < tile.rows; ++r) body((tile.row + r) * in_features + tile.column, r * tile.columns, tile.columns);
}

/// Merges a tile of the weights of the sentences [first, first + count).
template <class T>
void merge_tile(const MergedProduct<T>& p, const Tile& tile, Index first, Index count, T* out) {
  each_stretch(tile, p.in_features, [&](Index at, Index in_tile, Index entries) {
    p.vectors->mix(entries, count, p.num_terms, p.scores + first * p.num_terms, p.base == nullptr ? nullptr : p.base + at,
                   p.terms + at, p.out_features * p.in_features, out + in_tile, tile.entries());
  });
}

/// to[j, i] = from[i, j], in blocks that stay in a first-level cache.
template <class T>
void transpose(Index rows, Index columns, const T* from, Index from_row, T* to, Index to_row) {
  constexpr Index kBlock = 16;
  for (Index i = 0; i < rows; i += kBlock) {
    for (Index j = 0; j < columns; j += kBlock) {
      for (Index c = j; c < std::min(columns, j + kBlock); ++c) {
        for (Index r = i; r < std::min(rows, i + kBlock); ++r) to[c * to_row + r] = from[r * from_row + c];
      }
    }
  }
}

}  // namespace

template <class T>
void MergedProduct<T>::forward(T* y, T* x_BIT) const {
  // Computed as y^T = W x^T: rows of W are read as they lie, and x^T, the operand that is read in vectors, is made once.
  const auto padded = padded_tokens();
  parallel(num_sentences, [&](Index begin, Index end) {
    for (Index b = begin; b < end; ++b) {
      T* to = x_BIT + b * in_features * padded;
      transpose(num_tokens, in_features, x + b * num_tokens * in_features, in_features, to, padded);
      for (Index i = 0; padded > num_tokens && i < in_features; ++i) {
        std::fill_n(to + i * padded + num_tokens, padded - num_tokens, T{0});
      }
    }
  });
  const Tiles tiles(out_features, in_features, 512);
  parallel(tiles.down(), [&](Index begin, Index end) {
    thread_local std::vector<T> memory;
    T* weights = scratch(memory, kGroup * (kTileEntries + tiles.rows * padded));
    T* y_UOT = weights + kGroup * kTileEntries;
    for (Index i = begin; i < end; ++i) {
      for (Index first = 0; first < num_sentences; first += kGroup) {
        const auto count = std::min(kGroup, num_sentences - first);
        const auto row = tiles.at(i, 0).row, rows = tiles.at(i, 0).rows;
        for (Index j = 0; j < tiles.across(); ++j) {
          const auto tile = tiles.at(i, j);
          merge_tile(*this, tile, first, count, weights);
          for (Index u = 0; u < count; ++u) {
            vectors->multiply(rows, padded, tile.columns, weights + u * tile.entries(), tile.columns, 1,
                              x_BIT + ((first + u) * in_features + tile.column) * padded, padded,
                              y_UOT + u * rows * padded, padded, j > 0);
          }
        }
        for (Index u = 0; u < count; ++u) {
          transpose(rows, num_tokens, y_UOT + u * rows * padded, padded,
                    y + (first + u) * num_tokens * out_features + row, out_features);
        }
      }
    }
  });
}

template <class T>
void MergedProduct<T>::backward_input(const T* dy, T* dx) const {
  const Tiles tiles(out_features, in_features, 128);
  const auto groups = (num_sentences + kGroup - 1) / kGroup;
  parallel(tiles.across() * groups, [&](Index begin, Index end) {
    thread_local std::vector<T> memory;
    T* weights = scratch(memory, kGroup * kTileEntries);
    for (Index task = begin; task < end; ++task) {
      const auto first = task % groups * kGroup;
      const auto count = std::min(kGroup, num_sentences - first);
      for (Index i = 0; i < tiles.down(); ++i) {
        const auto tile = tiles.at(i, task / groups);
        merge_tile(*this, tile, first, count, weights);
        for (Index u = 0; u < count; ++u) {
          const auto b = first + u;
          vectors->multiply(num_tokens, tile.columns, tile.rows, dy + b * num_tokens * out_features + tile.row,
                            out_features, 1, weights + u * tile.entries(), tile.columns,
                            dx + b * num_tokens * in_features + tile.column, in_features, i > 0);
        }
      }
    }
  });
}

template <class T>
void MergedProduct<T>::backward_weights(const T* dy, T* terms_gradient, bool accumulate, T* base_gradient,
                                        T* scores_gradient) const {
  const Tiles tiles(out_features, in_features, 512);
  const auto n = num_terms, size = out_features * in_features, num_tiles = tiles.down() * tiles.across();
  // One partial sum a tile, added in order: the same for any number of threads.
  std::vector<T> partial(static_cast<std::size_t>(num_tiles * num_sentences * n));
  const T ones[kGroup] = {1, 1, 1, 1};
  parallel(num_tiles, [&](Index begin, Index end) {
    thread_local std::vector<T> memory;
    T* g = scratch(memory, kGroup * kTileEntries + tiles.rows * num_tokens);
    T* dy_TO = g + kGroup * kTileEntries;
    for (Index task = begin; task < end; ++task) {
      const auto tile = tiles.at(task / tiles.across(), task % tiles.across());
      for (Index first = 0; first < num_sentences; first += kGroup) {
        const auto count = std::min(kGroup, num_sentences - first);
        for (Index u = 0; u < count; ++u) {
          const auto b = first + u;
          for (Index t = 0; t < num_tokens; ++t) {
            std::copy_n(dy + (b * num_tokens + t) * out_features + tile.row, tile.rows, dy_TO + t * tile.rows);
          }
          vectors->multiply(tile.rows, tile.columns, num_tokens, dy_TO, 1, tile.rows,
                            x + b * num_tokens * in_features + tile.column, in_features, g + u * tile.entries(),
                            tile.columns, false);
        }
        each_stretch(tile, in_features, [&](Index at, Index in_tile, Index length) {
          if (!accumulate && first == 0) {
            for (Index i = 0; i < n; ++i) std::fill_n(terms_gradient + i * size + at, length, T{0});
          }
          vectors->mix_backward(length, count, n, scores + first * n, g + in_tile, tile.entries(), terms + at, size,
                                terms_gradient + at, partial.data() + (task * num_sentences + first) * n);
          if (base_gradient == nullptr) return;
          vectors->mix(length, 1, count, ones, first == 0 ? nullptr : base_gradient + at, g + in_tile, tile.entries(),
                       base_gradient + at, 0);
        });
      }
    }
  });
  if (num_sentences == 0) {
    if (!accumulate) std::fill_n(terms_gradient, n * size, T{0});
    if (base_gradient != nullptr) std::fill_n(base_gradient, size, T{0});
  }
  std::fill_n(scores_gradient, num_sentences * n, T{0});
  for (Index task = 0; task < num_tiles; ++task) {
    for (Index e = 0; e < num_sentences * n; ++e) {
      scores_gradient[e] += partial[static_cast<std::size_t>(task * num_sentences * n + e)];
    }
  }
}

template struct MergedProduct<float>;
template struct MergedProduct<double>;

}  // namespace mergex::kernels
