#pragma once

#include <cmath>

namespace mergex::statistics {

/// A running sum that carries its rounding error along (Neumaier 1974), so that it does not grow with n.
class Sum {
 public:
  void add(double value) {
    const double next = sum_ + value;
    lost_ += std::abs(sum_) >= std::abs(value) ? (sum_ - next) + value : (value - next) + sum_;
    sum_ = next;
  }
  double total() const { return sum_ + lost_; }

 private:
  double sum_ = 0.0;
  double lost_ = 0.0;
};

}  // namespace mergex::statistics
