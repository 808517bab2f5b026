#include "io/json.h"

#include "io/json_object.h"
#include "support/catch.h"
#include "support/paths.h"

using namespace mergex;
using io::Json;

namespace {

io::JsonObject object(const std::string& text, std::shared_ptr<Json> resolved = nullptr) {
  auto document = std::make_shared<io::JsonDocument>();
  document->value = io::parse_json(text, "r.json");
  document->file = "r.json";
  return io::JsonObject(document, std::move(resolved));
}

}  // namespace

TEST_CASE("a repeated key is an error that names its place", "[io]") {
  CHECK(test::user_error([] { io::parse_json(R"({"a": {"b": 1, "b": 2}})", "r.json"); }) ==
        "r.json#/a/b: key given twice; keep one");
  CHECK(io::parse_json(R"({"a": {"b": 1}, "c": {"b": 2}})", "r.json").size() == 2);
  CHECK(test::user_error([] { io::parse_json("{\n \"a\": tru }", "r.json"); }).starts_with("r.json:2:"));
  CHECK(test::user_error([] { io::parse_json("{} {}", "r.json"); }).starts_with("r.json:1:"));
  CHECK(test::user_error([] { io::parse_json(std::string(100000, '['), "r.json"); }).find("nested") !=
        std::string::npos);
}

TEST_CASE("options are read without conversions", "[io]") {
  auto options = object(R"({"n": 3.7, "flag": 1, "rate": 2, "word": "x"})");
  CHECK(test::user_error([&] { options.required<std::int64_t>("n"); }) == "r.json#/n: got 3.7, expected a whole number");
  CHECK(test::user_error([&] { options.required<bool>("flag"); }) == "r.json#/flag: got 1, expected true or false");
  CHECK(test::user_error([&] { options.required<double>("rate", {.above = 0.0, .at_most = 1.0}); }) ==
        "r.json#/rate: got 2, expected more than 0 and at most 1");
  CHECK(test::user_error([&] { options.required<double>("missing"); }) == "r.json: \"missing\" is missing; add it");
  const std::vector<std::string> names{"ties", "dare"};
  auto protocol = object(R"({"protocol": "tise"})");
  CHECK(test::user_error([&] { protocol.choice("protocol", names, 0); }) ==
        "r.json#/protocol: got \"tise\", expected \"ties\" or \"dare\"; did you mean \"ties\"?");
}

TEST_CASE("an unclaimed key is rejected with the nearest known one", "[io]") {
  auto options = object(R"({"training": {"batchsize": 3}})");
  auto training = options.required_object("training");
  std::int64_t batch_size = 1;
  training.optional("batch_size", batch_size);
  CHECK(test::user_error([&] { training.finish(); }) ==
        "r.json#/training: unknown key \"batchsize\"; did you mean \"batch_size\"?");
}

TEST_CASE("what was read is recorded with defaults and absolute paths", "[io]") {
  auto resolved = std::make_shared<Json>();
  auto options = object(R"({"a": {"x": 1}, "file": "d/e.txt"})", resolved);
  auto a = options.required_object("a");
  std::int64_t x = 0, y = 7;
  a.optional("x", x);
  a.optional("y", y);
  options.required_path("file");
  options.object_or_empty("b");
  const auto expected = Json{{"a", {{"x", 1}, {"y", 7}}},
                             {"file", (std::filesystem::current_path() / "d/e.txt").string()},
                             {"b", Json::object()}};
  CHECK(*resolved == expected);
}
