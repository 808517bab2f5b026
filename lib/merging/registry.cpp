#include <array>

#include "core/error.h"
#include "core/suggest.h"
#include "merging/methods.h"

namespace mergex::merging {

namespace {

constexpr std::array kMethods{&kLinear,
                              &kUniformSoup,
                              &kSlerp,
                              &kNuslerp,
                              &kMultislerp,
                              &kKarcher,
                              &kTaskArithmetic,
                              &kTies,
                              &kDareLinear,
                              &kDareTies,
                              &kDella,
                              &kDellaLinear,
                              &kBreadcrumbs,
                              &kBreadcrumbsTies,
                              &kSce,
                              &kModelStock,
                              &kNearswap,
                              &kArceeFusion,
                              &kRam,
                              &kRamplusTl,
                              &kPassthrough,
                              &kFisher,
                              &kRegmean};

}  // namespace

std::span<const Method* const> methods() { return kMethods; }

const Method& find_method(std::string_view name, std::string_view where) {
  std::vector<std::string> names;
  for (const auto* method : methods()) {
    if (method->name == name) return *method;
    names.emplace_back(method->name);
  }
  fail("{}: got \"{}\", no such method{} (mergex merge --list)", where, name, did_you_mean(name, names));
}

}  // namespace mergex::merging
