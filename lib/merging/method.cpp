#include "merging/method.h"

#include <stdexcept>

namespace mergex::merging {

void Values::set(std::string_view name, double value) {
  for (auto& [known, old] : values_) {
    if (known == name) {
      old = value;
      return;
    }
  }
  values_.emplace_back(name, value);
}

double Values::operator[](std::string_view name) const {
  for (const auto& [known, value] : values_) {
    if (known == name) return value;
  }
  throw std::logic_error("no parameter \"" + std::string(name) + "\"");
}

std::int64_t TensorContext::num_elements() const {
  std::int64_t count = 1;
  for (const auto dimension : shape) count *= dimension;
  return count;
}

std::int64_t TensorContext::row_length() const { return shape.empty() ? 1 : shape.back(); }

std::int64_t TensorContext::num_rows() const { return row_length() == 0 ? 0 : num_elements() / row_length(); }

}  // namespace mergex::merging
