#include <fmt/format.h>

#include <fstream>
#include <map>
#include <regex>

#include "support/catch.h"
#include "support/paths.h"

// docs/design.md: a library includes only what stands to its left, and torch only right of the line.

namespace fs = std::filesystem;

TEST_CASE("every include of lib/ points to a lower layer", "[layers]") {
  const std::vector<std::string> order{"core", "io", "text",      "merging", "tasks",   "statistics", "recipes", "kernels",
                                       "tensor", "nn", "backbones", "routing", "training", "evaluation"};
  const auto rank = [&](const std::string& layer) { return std::ranges::find(order, layer) - order.begin(); };
  const auto first_with_torch = rank("tensor");
  const std::regex include(R"(^#include [<"]([a-z_]+)/([a-zA-Z0-9_/.]+)[>"])");
  int seen = 0;
  for (const auto& entry : fs::recursive_directory_iterator(fs::path(MERGEX_SOURCE_DIR) / "lib")) {
    const auto extension = entry.path().extension();
    if (extension != ".h" && extension != ".cpp" && extension != ".inc") continue;
    const auto layer = entry.path().parent_path().filename().string();
    REQUIRE(std::ranges::find(order, layer) != order.end());
    std::ifstream in(entry.path());
    for (std::string line; std::getline(in, line);) {
      std::smatch match;
      if (!std::regex_search(line, match, include)) continue;
      ++seen;
      INFO(entry.path().string() << ": " << line);
      const std::string target = match[1];
      if (target == "torch" || target == "ATen" || target == "c10") {
        CHECK(rank(layer) >= first_with_torch);
      } else if (std::ranges::find(order, target) != order.end()) {
        CHECK(rank(target) <= rank(layer));
        CHECK(!(layer == "routing" && target == "backbones"));
        CHECK(!(layer == "backbones" && target == "routing"));
        CHECK(!(layer == "training" && (target == "evaluation" || target == "tasks" || target == "backbones")));
      }
    }
  }
  CHECK(seen > 100);
}
