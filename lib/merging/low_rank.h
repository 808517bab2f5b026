#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace mergex::merging {

/// A matrix [num_rows, num_columns] as left * right, row major; the left factor carries the singular values.
struct LowRank {
  std::int64_t rank = 0;
  std::vector<double> left;     ///< [num_rows, rank]
  std::vector<double> right;    ///< [rank, num_columns]
  double norm = 0.0;            ///< Frobenius norm of the matrix itself
  double relative_error = 0.0;  ///< |matrix - left * right| / |matrix|, Frobenius; 0 for a zero matrix
};

/// The best approximation of left * right by a product of rank `rank` (Eckart and Young 1936), from the factors alone: QR
/// of both and the SVD of their small core. A result of fewer than `rank` terms is exact.
/// @param left   [num_rows, terms], @param right  [terms, num_columns]
LowRank best_product(std::span<const double> left, std::span<const double> right, std::int64_t num_rows,
                     std::int64_t num_columns, std::int64_t terms, std::int64_t rank);

/// The same of a matrix: its SVD where the shorter side is at most 256; otherwise subspace iteration (Halko, Martinsson and
/// Tropp 2011, arXiv:0909.4061) from fixed random vectors until what is captured stays the same, which is the best
/// approximation as far as the singular values around `rank` differ. The error is measured, not estimated.
LowRank best_matrix(std::span<const float> matrix, std::int64_t num_rows, std::int64_t num_columns, std::int64_t rank);

}  // namespace mergex::merging
