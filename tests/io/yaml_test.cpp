#include "io/yaml.h"

#include <fmt/format.h>

#include <array>

#include "support/catch.h"
#include "support/paths.h"

using namespace mergex;
using io::Json;
namespace fs = std::filesystem;

namespace {

Json value(const std::string& text) {
  const auto documents = io::parse_yaml(text, "r.yaml");
  REQUIRE(documents.size() == 1);
  return documents[0].value;
}

std::string fault_of(const std::string& text) {
  const auto message = test::user_error([&] { io::parse_yaml(text, "r.yaml"); });
  CHECK(message.starts_with("r.yaml:"));
  CHECK(message.find('\n') == std::string::npos);
  CHECK(message.size() < 300);
  return message.substr(std::string("r.yaml:").size());
}

}  // namespace

TEST_CASE("a recipe of mergekit is read in its order", "[io]") {
  const auto read = value(R"(# a comment
slices:
  - sources:
      - model: org/a
        layer_range: [0, 32]
      - {model: "org/b", layer_range: [0, 32]}
merge_method: slerp
base_model: org/a
parameters:
  t:
    - filter: self_attn
      value: [0, 0.5, 0.3, 0.7, 1]
    - value: 0.5
dtype: bfloat16
chat_template: >-
  folded
  text
)");
  CHECK(
      read.dump() ==
      R"({"slices":[{"sources":[{"model":"org/a","layer_range":[0,32]},{"model":"org/b","layer_range":[0,32]}]}],)"
      R"("merge_method":"slerp","base_model":"org/a","parameters":{"t":[{"filter":"self_attn","value":[0,0.5,0.3,0.7,1]},)"
      R"({"value":0.5}]},"dtype":"bfloat16","chat_template":"folded text"})");
}

TEST_CASE("scalars have the types of YAML 1.1", "[io]") {
  const auto scalar = [](const std::string& text) { return value("k: " + text + "\n")["k"]; };
  for (const auto* text : {"true", "True", "TRUE", "yes", "Yes", "YES", "on", "On", "ON"}) CHECK(scalar(text) == true);
  for (const auto* text : {"false", "False", "FALSE", "no", "No", "NO", "off", "Off", "OFF"}) {
    CHECK(scalar(text) == false);
  }
  for (const auto* text : {"", "~", "null", "Null", "NULL"}) CHECK(scalar(text).is_null());
  for (const auto& [text, number] :
       std::initializer_list<std::pair<const char*, int>>{{"0", 0}, {"-0", 0}, {"7", 7}, {"+7", 7}, {"-12", -12}}) {
    CHECK(scalar(text).is_number_integer());
    CHECK(scalar(text) == number);
  }
  CHECK(scalar("9223372036854775807") == INT64_MAX);
  CHECK(scalar("9223372036854775808") == 9223372036854775808.0);
  for (const auto& [text, number] : std::initializer_list<std::pair<const char*, double>>{{"0.5", 0.5},
                                                                                          {".5", 0.5},
                                                                                          {"1.", 1},
                                                                                          {"-2.25", -2.25},
                                                                                          {"+1.5", 1.5},
                                                                                          {"1e-3", 1e-3},
                                                                                          {"1e5", 1e5},
                                                                                          {"1E+5", 1e5},
                                                                                          {"1.5e-4", 1.5e-4}}) {
    INFO(text);
    CHECK(scalar(text).is_number_float());
    CHECK(scalar(text) == number);
  }
  for (const auto* text : {"'1'", "\"true\"", "'null'", "''", "!!str 1", "! 1"}) {
    INFO(text);
    CHECK(scalar(text).is_string());
  }
  for (const auto* text :
       {"y",   "n",   "truE", "nan",  "inf",        "infinity", "1.2.3", "1-2", "1e",  "e5",  "+",    ".",
        "--1", "+-1", "1e5x", "0o10", "2024-01-31", "a:b",      "12:3x", "a_1", "1_a", "0xg", "/x/0", "org/model-7b"}) {
    INFO(text);
    CHECK(scalar(text) == text);
  }
}

TEST_CASE("numbers that YAML's versions read differently are refused", "[io]") {
  for (const auto* text :
       {"010", "-010", "08", "00", "0b11", "0x1F", "1_000", "1_0.5", "1:30", "190:20:30", "1:30.5"}) {
    CHECK(fault_of(fmt::format("k: {}", text)) ==
          fmt::format("1:4: \"{}\" means different numbers in YAML 1.1 and 1.2; write it as a plain decimal number, or "
                      "in quotes if "
                      "it is a text",
                      text));
  }
  for (const auto* text : {".inf", "-.inf", "+.INF", ".nan", ".NaN"}) {
    CHECK(fault_of(fmt::format("k: {}", text)) == fmt::format("1:4: got {}, expected a finite number", text));
  }
  CHECK(fault_of("k: 1e999") ==
        "1:4: \"1e999\" is too large or too small for a number; put it in quotes if it is a text");
}

TEST_CASE("several documents are several values; empty ones are left out", "[io]") {
  const auto documents = io::parse_yaml("---\na: 1\n---\n---\nb: 2\n...\n---\n", "r.yaml");
  REQUIRE(documents.size() == 2);
  CHECK(documents[0].value == Json{{"a", 1}});
  CHECK(documents[1].value == Json{{"b", 2}});
  CHECK(documents[1].origin("/b") == "r.yaml:5");
  CHECK(io::parse_yaml("", "r.yaml").empty());
  test::TemporaryFolder folder;
  const auto path = test::write_text(folder / "e.yaml", "# nothing\n");
  CHECK(test::user_error([&] { io::read_yaml(path); }) == path.string() + ": holds no YAML document");
  CHECK(io::read_yaml(test::write_text(folder / "bom.yaml",
                                       "\xEF\xBB\xBF"
                                       "a: 1\r\nb: 2\r\n"))[0]
            .value == Json{{"a", 1}, {"b", 2}});
}

TEST_CASE("messages about options name file, line and pointer", "[io]") {
  auto document = std::make_shared<io::JsonDocument>(io::parse_yaml(R"(models:
  - model: a
    parameters:
      weight: high
      wieght: 2
  - model: b
)",
                                                                    "dir/r.yaml")[0]);
  io::JsonObject root(document);
  auto models = root.objects("models");
  REQUIRE(models.size() == 2);
  auto parameters = models[0].required_object("parameters");
  CHECK(test::user_error([&] { parameters.required<double>("weight"); }) ==
        "dir/r.yaml:4#/models/0/parameters/weight: got \"high\", expected a number");
  CHECK(test::user_error([&] { parameters.finish(); }) ==
        "dir/r.yaml:5#/models/0/parameters: unknown key \"wieght\"; did you mean \"weight\"?");
  CHECK(test::user_error([&] { models[1].required<std::string>("tokenizer"); }) ==
        "dir/r.yaml:6#/models/1: \"tokenizer\" is missing; add it");
  CHECK(models[1].required_path("model") == fs::current_path() / "dir/b");
}

TEST_CASE("anchors, aliases and merge keys", "[io]") {
  CHECK(value("a: &x {p: 1, q: [2]}\nb: *x\n") == Json{{"a", {{"p", 1}, {"q", {2}}}}, {"b", {{"p", 1}, {"q", {2}}}}});
  // What the mapping says itself wins, then the first of the list.
  CHECK(value("a: &x {p: 1, q: 2}\nb: &y {q: 3, r: 4}\nc: {<<: [*x, *y], p: 0}\n")["c"] ==
        Json{{"p", 0}, {"q", 2}, {"r", 4}});
  CHECK(value("a: &x {p: 1}\nb: {<<: *x, z: 1}\n")["b"] == Json{{"z", 1}, {"p", 1}});
  CHECK(value("a: {'<<': 1}\n")["a"] == Json{{"<<", 1}});
  CHECK(fault_of("a: {<<: 1}") == "1:9: << takes a mapping or a list of mappings");
  CHECK(fault_of("a: {<<: [1]}") == "1:10: << takes a mapping or a list of mappings");
  CHECK(fault_of("a: *x") == "1:4: not valid YAML: the referenced anchor is not defined");
  CHECK(fault_of("a: &x [1, *x]") == "1:11: the alias stands inside what it repeats");
  // The pointers of what an alias repeats lead to where it was written.
  const auto document = io::parse_yaml("a: &x\n  p: 1\nb: *x\n", "r.yaml")[0];
  CHECK(document.origin("/b") == "r.yaml:3");
  CHECK(document.origin("/b/p") == "r.yaml:2");
}

TEST_CASE("aliases that explode are refused", "[io]") {
  std::string laughs = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n", merged = "m0: &m0 {k: 1}\n";
  for (int i = 1; i < 20; ++i) {
    laughs += fmt::format("a{0}: &a{0} [*a{1}, *a{1}, *a{1}, *a{1}, *a{1}, *a{1}, *a{1}, *a{1}, *a{1}]\n", i, i - 1);
  }
  for (int i = 1; i < 60; ++i) merged += fmt::format("m{0}: &m{0} {{<<: [*m{1}, *m{1}, *m{1}]}}\n", i, i - 1);
  CHECK(fault_of(laughs).find("expands to more than 16 MiB; repeat less") != std::string::npos);
  CHECK(fault_of(merged).find("expands to more than 16 MiB; repeat less") != std::string::npos);
  std::string chain = "m0: &m0 {k: 1}\n";
  for (int i = 1; i < 100; ++i) chain += fmt::format("m{0}: &m{0} {{<<: *m{1}}}\n", i, i - 1);
  CHECK(fault_of(chain).find("nested more than 64 levels deep") != std::string::npos);
  // Long keys count where they are repeated in pointers.
  CHECK(fault_of(std::string(400'000, 'k') + ": [" + std::string(400, 'x') + ", a" + std::string(600, ',') + "]")
            .find("16 MiB") == std::string::npos);
  std::string many = "[a";
  for (int i = 0; i < 400; ++i) many += ", a";
  CHECK(fault_of("? " + std::string(400'000, 'k') + "\n: " + many + "]\n").find("expands to more than 16 MiB") !=
        std::string::npos);
}

TEST_CASE("every fault of a YAML file is an error of one line with its place", "[io]") {
  CHECK(fault_of("a: 1\nb:\n  c: 2\n  c: 3\n") == "4:3: key \"c\" given twice, first in line 3; keep one");
  CHECK(fault_of("1: a") == "1:1: a key is read as 1, expected a text; put it in quotes");
  CHECK(fault_of("yes: a") == "1:1: a key is read as true, expected a text; put it in quotes");
  CHECK(fault_of("~: a") == "1:1: a key is read as null, expected a text; put it in quotes");
  CHECK(fault_of("? [a]\n: b") == "1:3: a key is a list or a mapping, expected a text");
  CHECK(fault_of("a: !!python/object:os.system x") ==
        "1:4: tag \"tag:yaml.org,2002:python/object:os.system\" is not understood here; remove it");
  CHECK(fault_of("a: !x [1]") == "1:4: tag \"!x\" is not understood here; remove it");
  CHECK(fault_of("a: !!float 1") == "1:4: tag \"tag:yaml.org,2002:float\" is not understood here; remove it");
  CHECK(fault_of("a: !!seq 1").find("is not understood here") != std::string::npos);
  CHECK(fault_of("a: [1, 2\nb: 3").find(": not valid YAML: ") != std::string::npos);
  CHECK(fault_of("a: b: c").find("1:5: not valid YAML: ") == 0);
  CHECK(fault_of("a: 1\n---\n\n, b\n") == "4:1: not valid YAML: a value was expected here");
  CHECK(fault_of("a: \"x").find(": not valid YAML: ") != std::string::npos);
  CHECK(fault_of("a: 1\nb: caf\xE9\n") == "2:7: not valid UTF-8 text; save the file as UTF-8");
  CHECK(fault_of(std::string("a\0b", 3)) == "1:2: not valid UTF-8 text; save the file as UTF-8");
  CHECK(fault_of("\xFF\xFE"
                 "a")
            .starts_with("1:1: not valid UTF-8"));
  CHECK(fault_of(R"(a: "x\_y")") == "1:4: an escape in the text makes no valid UTF-8; write it as \\u00A0 or \\u0085");
  for (const char bracket : {'[', '{'}) {
    CHECK(fault_of(std::string(65, bracket)).find("nested more than 64 levels deep") != std::string::npos);
    fault_of(std::string(100'000, bracket));
  }
  std::string deep;
  for (int i = 0; i < 1000; ++i) deep += std::string(static_cast<std::size_t>(i), ' ') + "k:\n";
  CHECK(fault_of(deep).find("nested more than 64 levels deep") != std::string::npos);
  CHECK(fault_of(std::string(9 << 20, ' ')) == " 9437184 bytes, expected a YAML file of at most 8 MiB");
}

TEST_CASE("all recipes among the reference merges are read", "[io][golden]") {
  const auto folder = test::golden_folder("merge");
  if (!folder) return;
  int num_recipes = 0;
  for (const auto& item : fs::directory_iterator(*folder / "recipes")) {
    INFO(item.path().string());
    const auto documents = io::read_yaml(item.path());
    CHECK(documents.size() == 1);
    CHECK(documents[0].value.contains("merge_method"));
    ++num_recipes;
  }
  CHECK(num_recipes >= 99);
  test::log_golden("merge/recipes", fmt::format("ok, {} read", num_recipes));
}
