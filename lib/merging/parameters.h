#pragma once

#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "io/json_object.h"
#include "merging/method.h"

namespace mergex::merging {

/// Names of Dialect, in its order.
inline const std::vector<std::string> kDialectNames{"mergekit", "paper", "peft", "fusion_bench"};

/// How a filter's text is held against tensor names.
enum class FilterMatch {
  kSubstring,  ///< mergekit's: anywhere in the name
  kParts,      ///< whole parts between dots
};

/// One `parameters` object of a recipe: names -> a value, a gradient over the layers, or a list of {filter, value}.
/// A gradient of m numbers at position t in [0, 1] is read at x = t (m - 1) between its neighbours; lists of flags or
/// names are steps.
class ParameterLevel {
 public:
  ParameterLevel() = default;

  /// @param allows_inputs  whether parameters of one model may stand here, `allows_shared` those of the whole tensor
  /// @throws UserError for names that `method` does not have, values of another type, numbers out of range
  static ParameterLevel read(io::JsonObject& owner, const Method& method, FilterMatch match, bool allows_shared);

  /// The value for a tensor, where this level gives one; remembers which filters were of use.
  std::optional<double> find(const Parameter& parameter, std::string_view tensor, double position) const;
  bool has_filters() const;
  /// A filter that no tensor matched is a slip; one that hits whole parts of some names and pieces of others may be.
  /// @throws UserError for the first, with the nearest part of a name
  /// @return one warning for each of the second
  std::vector<std::string> check_filters(const std::set<std::string>& tensors) const;

 private:
  struct Entry {
    std::string filter = {};  // empty: every tensor
    std::vector<double> values = {};
    bool is_step = false;
    std::string where = {};
  };
  struct Setting {
    const Parameter* parameter;
    std::vector<Entry> entries;
  };
  bool matches(const Entry& entry, std::string_view tensor) const;

  FilterMatch match_ = FilterMatch::kSubstring;
  std::vector<Setting> settings_;
};

/// The first level that has a value wins; then the default.
/// @throws UserError "<where>: ..." for a parameter that must be given
double resolve(const Parameter& parameter, std::initializer_list<const ParameterLevel*> levels, std::string_view tensor,
               double position, std::string_view where);

}  // namespace mergex::merging
