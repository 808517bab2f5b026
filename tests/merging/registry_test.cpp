#include <regex>
#include <set>

#include "merging/methods.h"
#include "support/catch.h"
#include "support/merging.h"
#include "support/paths.h"

namespace mergex::merging {

TEST_CASE("every method has a name, a summary and a source, and merges with its defaults", "[merging]") {
  std::set<std::string_view> names;
  for (const auto* method : methods()) {
    INFO(method->name);
    CHECK(names.insert(method->name).second);
    CHECK(std::regex_match(std::string(method->name), std::regex("[a-z][a-z0-9_]*")));
    CHECK_FALSE(method->summary.empty());
    CHECK_FALSE(method->paper.empty());
    CHECK(method->min_inputs <= method->max_inputs);
    std::set<std::string_view> parameters;
    test::Named required;
    for (const auto& p : method->parameters) {
      INFO(p.name);
      CHECK(parameters.insert(p.name).second);
      CHECK_FALSE(p.summary.empty());
      CHECK(p.choices.empty() == (p.kind != Parameter::Kind::kChoice));
      if (p.kind == Parameter::Kind::kChoice) CHECK(*p.fallback < static_cast<double>(p.choices.size()));
      if (!p.fallback) required[std::string(p.name)] = 0.5;
    }
    const auto context =
        test::context_for(*method, {3, 4}, std::max<std::size_t>(1, method->min_inputs), {required}, required);
    if (method->problem != nullptr) CHECK(method->problem(context).empty());
    const auto state = method->model_state != nullptr ? method->model_state(context) : nullptr;
    CHECK(method->make_float(context, state.get()) != nullptr);
    CHECK(method->make_double(context, state.get()) != nullptr);
  }
}

TEST_CASE("an unknown method is answered with the nearest", "[merging]") {
  CHECK(test::user_error([] { find_method("tise", "pair.json#/merge/method"); }) ==
        "pair.json#/merge/method: got \"tise\", no such method; did you mean \"ties\"? (mergex merge --list)");
  CHECK(&find_method("ties", "") == &kTies);
}

}  // namespace mergex::merging
