#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "merging/driver.h"
#include "merging/plan.h"

namespace mergex::merging {

/// merge_report.json: what became of each tensor. Holds no time and no path but those that the recipe names.
class MergeReport {
 public:
  explicit MergeReport(const MergePlan& plan) : plan_(plan), distances_(plan.models.size(), 0.0) {}

  /// Method, parameters, norm of each task vector (without a base: distance of each input to the result), cosine of the
  /// result to each parent, share of elements whose task vectors' signs conflict, results that are not finite.
  io::Json entry(const PlannedTensor& tensor, const MergedTensor& merged) const;

  /// Tensors come in the order of the plan. @param entry  as `entry` returns it
  /// @return  its text, one line
  const std::string& add(const io::Json& entry, const PlannedTensor& tensor);
  std::int64_t num_not_finite() const { return num_not_finite_; }
  std::string text() const;

 private:
  const MergePlan& plan_;
  std::vector<std::string> entries_;  // as text, which is smaller
  std::vector<double> distances_;     // by model; squares
  std::int64_t num_merged_ = 0, num_not_finite_ = 0, num_elements_ = 0;
  double num_conflicts_ = 0.0;
};

}  // namespace mergex::merging
