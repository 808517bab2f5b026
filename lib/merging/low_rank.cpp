#include "merging/low_rank.h"

#include <Eigen/Dense>
#include <algorithm>
#include <cmath>
#include <limits>

#include "core/random.h"

namespace mergex::merging {
namespace {

using Matrix = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using FloatMatrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

constexpr std::int64_t kDirectSide = 256;
constexpr std::int64_t kOversampling = 16;
constexpr int kMaxIterations = 30;
constexpr double kConverged = 1e-10;  // share of the matrix's square that an iteration may still add

// Products are cut into blocks by the size of the caches: fixed, so that every machine adds in the same order.
void fix_blocking() {
  static const bool done = [] {
    Eigen::setCpuCacheSizes(32 << 10, 256 << 10, 2 << 20);
    return true;
  }();
  (void)done;
}

/// An orthonormal basis of the columns, [num_rows, min(rows, columns)].
template <class M>
M orthonormal(const M& columns) {
  const Eigen::HouseholderQR<M> qr(columns);
  return qr.householderQ() * M::Identity(columns.rows(), std::min(columns.rows(), columns.cols()));
}

/// The `rank` largest terms of an SVD. @param floor  singular values below it are rounding errors
LowRank largest_terms(const Matrix& u, const Eigen::VectorXd& values, const Matrix& v, std::int64_t rank, double floor) {
  LowRank result;
  result.rank = std::min<std::int64_t>(rank, values.size());
  Matrix left = u.leftCols(result.rank), right = v.leftCols(result.rank).transpose();
  double kept = 0.0, lost = 0.0;
  for (Eigen::Index i = 0; i < values.size(); ++i) {
    const double value = values[i] > floor ? values[i] : 0.0;
    if (i < result.rank) {
      left.col(i) *= value;
      if (value == 0.0) right.row(i).setZero();
    }
    (i < result.rank ? kept : lost) += value * value;
  }
  result.left.assign(left.data(), left.data() + left.size());
  result.right.assign(right.data(), right.data() + right.size());
  result.norm = std::sqrt(kept + lost);
  result.relative_error = result.norm == 0.0 ? 0.0 : std::sqrt(lost / (kept + lost));
  return result;
}

/// |matrix - left * right| and |matrix|, some rows at a time.
void measure(const Eigen::Map<const FloatMatrix>& matrix, LowRank& result) {
  const Eigen::Map<const Matrix> left(result.left.data(), matrix.rows(), result.rank);
  const Eigen::Map<const Matrix> right(result.right.data(), result.rank, matrix.cols());
  double error = 0.0, norm = 0.0;
  constexpr Eigen::Index kRows = 64;
  for (Eigen::Index row = 0; row < matrix.rows(); row += kRows) {
    const auto count = std::min(kRows, matrix.rows() - row);
    const Matrix part = matrix.middleRows(row, count).cast<double>();
    norm += part.squaredNorm();
    error += (part - left.middleRows(row, count) * right).squaredNorm();
  }
  result.norm = std::sqrt(norm);
  result.relative_error = norm == 0.0 ? 0.0 : std::sqrt(error / norm);
}

}  // namespace

LowRank best_product(std::span<const double> left, std::span<const double> right, std::int64_t num_rows,
                     std::int64_t num_columns, std::int64_t terms, std::int64_t rank) {
  fix_blocking();
  const Matrix b = Eigen::Map<const Matrix>(left.data(), num_rows, terms);
  const Matrix a_transposed = Eigen::Map<const Matrix>(right.data(), terms, num_columns).transpose();
  const Matrix q_b = orthonormal(b), q_a = orthonormal(a_transposed);
  const Matrix core = (q_b.transpose() * b) * (q_a.transpose() * a_transposed).transpose();
  const Eigen::BDCSVD<Eigen::MatrixXd> svd(Eigen::MatrixXd(core), Eigen::ComputeThinU | Eigen::ComputeThinV);
  // Where terms cancel, what is left of them is rounding at the size that they had.
  const double floor = 16 * std::numeric_limits<double>::epsilon() * b.norm() * a_transposed.norm();
  return largest_terms(q_b * svd.matrixU(), svd.singularValues(), q_a * svd.matrixV(), rank, floor);
}

LowRank best_matrix(std::span<const float> values, std::int64_t num_rows, std::int64_t num_columns, std::int64_t rank) {
  fix_blocking();
  const Eigen::Map<const FloatMatrix> matrix(values.data(), num_rows, num_columns);
  const auto side = std::min(num_rows, num_columns);
  LowRank result;
  if (side <= kDirectSide) {
    const Eigen::BDCSVD<Eigen::MatrixXd> svd(matrix.cast<double>(), Eigen::ComputeThinU | Eigen::ComputeThinV);
    result = largest_terms(svd.matrixU(), svd.singularValues(), svd.matrixV(), rank, 0.0);
  } else if (rank >= side) {  // the matrix itself and the identity
    result.rank = side;
    const Matrix whole = matrix.cast<double>(), identity = Matrix::Identity(side, side);
    const auto& left = num_rows == side ? identity : whole;
    const auto& right = num_rows == side ? whole : identity;
    result.left.assign(left.data(), left.data() + left.size());
    result.right.assign(right.data(), right.data() + right.size());
  } else {
    const auto width = std::min(side, rank + kOversampling);
    SplitMix64 random(0x10F5);
    FloatMatrix start(num_columns, width);
    for (Eigen::Index i = 0; i < start.size(); ++i) start.data()[i] = static_cast<float>(2.0 * random.uniform() - 1.0);
    const double total = matrix.cast<double>().squaredNorm();
    FloatMatrix q = orthonormal<FloatMatrix>(matrix * start);
    FloatMatrix projected = q.transpose() * matrix;
    Eigen::BDCSVD<Eigen::MatrixXd> svd;
    double captured = -1.0;
    for (int iteration = 0; iteration < kMaxIterations; ++iteration) {
      // Of the projection [width, columns], the SVD by its small factor: projected^T = Q R.
      const Matrix transposed = projected.transpose().cast<double>();
      const Matrix q_right = orthonormal(transposed);
      svd.compute(Eigen::MatrixXd((q_right.transpose() * transposed).transpose()), Eigen::ComputeThinU | Eigen::ComputeThinV);
      const double now = svd.singularValues().head(rank).squaredNorm();
      const bool converged = now - captured <= kConverged * total;
      captured = now;
      if (converged || iteration + 1 == kMaxIterations) {
        result = largest_terms(q.cast<double>() * svd.matrixU(), svd.singularValues(), q_right * svd.matrixV(), rank, 0.0);
        break;
      }
      q = orthonormal<FloatMatrix>(matrix * q_right.cast<float>());
      projected = q.transpose() * matrix;
    }
  }
  measure(matrix, result);
  return result;
}

}  // namespace mergex::merging
