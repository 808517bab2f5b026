#include "recipes/recipe.h"

#include "support/catch.h"
#include "support/paths.h"

using namespace mergex;
using recipes::read_recipe;

namespace {

std::vector<std::string> folders(const recipes::Recipe& recipe) {
  std::vector<std::string> names;
  for (const auto& row : recipes::expand_sweep(recipe)) names.push_back(row.folder);
  return names;
}

}  // namespace

TEST_CASE("a recipe extends another: null deletes, objects merge, paths stay where they were named", "[recipes]") {
  test::TemporaryFolder folder;
  test::write_text(folder / "base/common.json", R"({"a": {"x": 1, "y": 2}, "path": "data", "gone": 3})");
  const auto file = test::write_text(folder / "r.json", R"({"extends": "base/common.json", "a": {"y": 5}, "gone": null})");
  const auto recipe = read_recipe(file, {}, std::nullopt);
  CHECK(recipe.document->value == io::Json{{"a", {{"x", 1}, {"y", 5}}}, {"path", "data"}});
  io::JsonObject object(recipe.document);
  CHECK(object.path("path") == folder / "base/data");
  auto a = object.required_object("a");
  CHECK(a.where("y") == (file.string() + "#/a/y"));
  CHECK(a.where("x") == ((folder / "base/common.json").string() + "#/a/x"));

  const auto circle = test::write_text(folder / "c.json", R"({"extends": "c.json"})");
  CHECK(test::user_error([&] { read_recipe(circle, {}, std::nullopt); }).find("circle") != std::string::npos);
}

TEST_CASE("--set changes, creates and deletes", "[recipes]") {
  test::TemporaryFolder folder;
  const auto file = test::write_text(folder / "r.json", R"({"training": {"batch_size": 8}, "experts": {"a": 1}})");
  const std::vector<std::string> sets{"/training/batch_size=4", "/new/deep=\"text\"", "/word=plain text",
                                      "/experts={\"b\": 2}"};
  const auto recipe = read_recipe(file, sets, 7);
  CHECK(recipe.document->value == io::Json{{"training", {{"batch_size", 4}}}, {"experts", {{"b", 2}}},
                                           {"new", {{"deep", "text"}}}, {"word", "plain text"}, {"seed", 7}});
  const std::vector<std::string> deletion{"/experts=null"};
  CHECK(!read_recipe(file, deletion, std::nullopt).document->value.contains("experts"));
  const std::vector<std::string> bad{"training=3"};
  CHECK(test::user_error([&] { read_recipe(file, bad, std::nullopt); }).find("expected /pointer=value") != std::string::npos);
}

TEST_CASE("a sweep is the product of its axes", "[recipes]") {
  test::TemporaryFolder folder;
  const auto file = test::write_text(folder / "r.json", R"({"experts": {"method": "x"}, "sweep": {
      "/experts": {"dense": null, "ties + curvature": {"method": "camex"}}, "/seed": [1, 2]}})");
  const auto recipe = read_recipe(file, {}, std::nullopt);
  CHECK(folders(recipe) == std::vector<std::string>{"dense.seed-1", "dense.seed-2", "ties-curvature.seed-1", "ties-curvature.seed-2"});
  const auto rows = recipes::expand_sweep(recipe);
  CHECK(!rows[0].document->value.contains("experts"));
  CHECK(rows[3].document->value["experts"] == io::Json{{"method", "camex"}});
  CHECK(rows[3].group == "ties + curvature");
  CHECK(rows[3].document->value["seed"] == 2);
  CHECK(!rows[3].document->value.contains("sweep"));
  CHECK(test::user_error([&] { read_recipe(file, {}, 5); }).find("sweeps over /seed") != std::string::npos);
  const std::vector<std::string> empty{"/sweep/~1seed=[]"};
  CHECK(test::user_error([&] { folders(read_recipe(file, empty, std::nullopt)); }).find("is empty") != std::string::npos);
}

TEST_CASE("messages stay on one line, whatever a name holds", "[recipes]") {
  test::TemporaryFolder folder;
  const auto file = test::write_text(folder / "r.json", R"({"name": "r"})");
  const auto error_of = [&](const std::string& set) {
    const std::vector<std::string> sets{set};
    return test::user_error([&] { recipes::expand_sweep(read_recipe(file, sets, std::nullopt)); });
  };
  // Each of these was found by mergex_fuzz recipe.
  CHECK(error_of("a\nb") == R"(--set: got "a\nb", expected /pointer=value, for example /training/batch_size=8)");
  CHECK(error_of("/~\n=1") == R"(--set: "/~\n" is no JSON pointer)");
  CHECK(error_of("/sweep/a\tb=[]") == R"(--set#/sweep/a\tb: expected a JSON pointer such as /seed)");
  CHECK(error_of("/name=\xFF").starts_with("--set: got \"/name="));
  CHECK(error_of("/a\n=" + std::string(300, '[') + std::string(300, ']')) ==
        R"(--set /a\n: nested more than 200 levels deep)");
  const auto repeated = test::write_text(folder / "s.json", R"({"a\nb": {"c\u0001": 1, "c\u0001": 2}})");
  CHECK(test::user_error([&] { read_recipe(repeated, {}, std::nullopt); }) ==
        repeated.string() + R"(#/a\nb/c\x01: key given twice; keep one)");
}
