#include <algorithm>
#include <array>

#include "cli/tiny_project.h"

namespace mergex {
namespace {

using test::Outcome;
using test::run_mergex;
using Words = std::vector<std::string>;

constexpr std::array kSubcommands{"finetune", "pretrain", "eval", "merge", "probe", "ttest"};

/// The one line that an error is, without its line feed.
std::string error_line(const Words& arguments) {
  const auto outcome = run_mergex(arguments);
  INFO(outcome.err);
  CHECK(outcome.exit_code == 2);
  CHECK(outcome.out.empty());
  CHECK(test::num_lines(outcome.err) == 1);
  return outcome.err.substr(0, outcome.err.find('\n'));
}

TEST_CASE("help of the program and of every subcommand", "[cli]") {
  const auto top = run_mergex({"--help"});
  CHECK(top.exit_code == 0);
  CHECK(top.err.empty());
  for (const std::string name : kSubcommands) {
    CHECK_THAT(top.out, Catch::Contains("\n  " + name));
    const auto help = run_mergex({name, "--help"});
    INFO(name);
    CHECK(help.exit_code == 0);
    CHECK(help.err.empty());
    for (const char* flag : {"--set", "--out", "--resume", "--overwrite", "--seed", "--device", "--threads", "--json",
                             "--quiet", "--verbose", "--dry-run", "--list"}) {
      CHECK_THAT(help.out, Catch::Contains(flag));
    }
    CHECK_THAT(help.out, Catch::Contains("mergex " + name));
  }
  CHECK(run_mergex({}).out == top.out);
  CHECK(run_mergex({"-h"}).out == top.out);
  CHECK_THAT(run_mergex({"--version"}).out, Catch::StartsWith("mergex 0."));
}

TEST_CASE("subcommands that are not built say so in one line", "[cli]") {
  for (const std::string name : kSubcommands) {
    if (name == "finetune" || name == "merge") continue;
    CHECK_THAT(error_line({name}), Catch::Contains("mergex " + name + " is not built yet"));
    CHECK_THAT(error_line({name, "recipe.json", "--dry-run"}), Catch::Contains("is not built yet"));
  }
}

TEST_CASE("a usage error is one line that says what to type instead", "[cli]") {
  using Catch::Contains;
  CHECK_THAT(error_line({"fintune", "r.json"}), Contains("\"fintune\" is no subcommand") &&
                                                    Contains("did you mean \"finetune\"?"));
  CHECK_THAT(error_line({"--verbose"}), Contains("is no subcommand"));
  CHECK_THAT(error_line({"finetune", "r.json", "--resme"}), Contains("\"--resme\"") &&
                                                                Contains("did you mean \"--resume\"?"));
  CHECK_THAT(error_line({"finetune", "r.json", "--zzzzzz"}), Contains("\"--zzzzzz\" is no flag") &&
                                                                 Contains("mergex finetune --help"));
  CHECK_THAT(error_line({"finetune", "r.json", "s.json"}), Contains("second recipe \"s.json\""));
  CHECK_THAT(error_line({"finetune"}), Contains("which recipe?"));
  CHECK_THAT(error_line({"finetune", "no-such-recipe.json"}), Contains("no-such-recipe.json: no such file"));
  CHECK_THAT(error_line({"finetune", "r.json", "--out"}), Contains("--out"));
  CHECK_THAT(error_line({"finetune", "r.json", "--threads", "many"}), Contains("--threads") && Contains("many"));
  CHECK_THAT(error_line({"finetune", "r.json", "--threads", "-1"}), Contains("--threads"));
  CHECK_THAT(error_line({"finetune", "r.json", "--seed", "1.5"}), Contains("--seed"));
  CHECK(error_line({"finetune", "r.json", "--seed", "-1"}) ==
        "mergex: error: --seed: got -1, expected a whole number from 0 to 9223372036854775807 (mergex finetune --help)");
  CHECK_THAT(error_line({"finetune", "r.json", "--resume", "--overwrite"}), Contains("exclude each other"));
  CHECK_THAT(error_line({"finetune", "r.json", "--quiet", "-v"}), Contains("exclude each other"));
}

TEST_CASE("help and usage errors answer within 50 ms", "[cli]") {
  const auto median_s = [](const Words& arguments) {
    std::array<double, 10> times{};
    for (auto& time : times) time = run_mergex(arguments).wall_s;
    std::ranges::sort(times);
    return (times[4] + times[5]) / 2;
  };
  CHECK(median_s({"--help"}) < 0.05);
  CHECK(median_s({"finetune", "--help"}) < 0.05);
  CHECK(median_s({"fintune"}) < 0.05);
  CHECK(median_s({"finetune", "r.json", "--resme"}) < 0.05);
  CHECK(median_s({"finetune", "no-such-recipe.json"}) < 0.05);
}

TEST_CASE("--set changes the recipe, as JSON or as a plain string", "[cli]") {
  const test::TinyProject project;
  const auto recipe = project.write("tiny.json", project.recipe());
  const auto plan = [&](Words sets) {
    Words arguments{"finetune", recipe.string(), "--dry-run", "--json", "--out", (project / "out").string()};
    for (auto& set : sets) {
      arguments.emplace_back("--set");
      arguments.push_back(std::move(set));
    }
    const auto outcome = run_mergex(arguments);
    INFO(outcome.err);
    REQUIRE(outcome.exit_code == 0);
    return io::parse_json(outcome.out, "stdout");
  };
  const auto plain = plan({});
  REQUIRE(plain.size() == 1);
  CHECK(plain[0]["name"] == "tiny");
  CHECK(plain[0]["steps"] == 6);
  CHECK(plain[0]["train_examples"] == 40);
  CHECK(plain[0]["parameters"]["experts"] == 0);
  CHECK(plan({"/training/max_steps=9"})[0]["steps"] == 9);
  CHECK(plan({"/training/max_steps=9", "/training/max_steps=4"})[0]["steps"] == 4);
  CHECK(plan({"/name=plain words"})[0]["name"] == "plain words");
  CHECK(plan({"/name=\"quoted\""})[0]["name"] == "quoted");
  CHECK(plan({"/training/max_steps=null", "/training/epochs=2"})[0]["steps"] == 10);
  CHECK(plan({"/experts={\"method\":\"camex\",\"num_experts\":2}"})[0]["method"] == "camex");
  CHECK(plan({"/sweep={\"/seed\":[1,2],\"/training/max_steps\":[3,4,5]}"}).size() == 6);
  CHECK_FALSE(std::filesystem::exists(project / "out"));

  using Catch::Contains;
  const auto refused = [&](const std::string& set) { return error_line({"finetune", recipe.string(), "--set", set}); };
  CHECK_THAT(refused("training/max_steps=3"), Contains("expected /pointer=value"));
  CHECK_THAT(refused("/training/max_steps"), Contains("expected /pointer=value"));
  CHECK_THAT(refused("/training/max_stps=3"), Contains("did you mean \"max_steps\"?"));
  CHECK_THAT(refused("/training/max_steps=three"),
             Contains("--set#/training/max_steps: got \"three\", expected a whole number"));
  CHECK_THAT(error_line({"finetune", recipe.string(), "--seed", "3", "--set", "/sweep={\"/seed\":[1,2]}"}),
             Contains("--seed") && Contains("sweep"));
}

TEST_CASE("a dry run prints the plan and writes nothing", "[cli]") {
  const test::TinyProject project;
  const auto outcome = project.finetune(project.random_recipe(7), "out", {"--dry-run"});
  using Catch::Contains;
  CHECK_THAT(outcome.out, Contains("camex") && Contains("40 training examples, 20 validation") &&
                              Contains("7 steps of 12 examples (4 an epoch)") && Contains("nothing was written"));
  CHECK_FALSE(std::filesystem::exists(project / "out"));
}

TEST_CASE("a run that does not fit into memory is warned of, with repairs", "[cli]") {
  using Catch::Contains;
  const test::TinyProject project;
  auto recipe = project.recipe();
  const auto fits = project.finetune(recipe, "out", {"--dry-run"});
  CHECK_THAT(fits.out, Contains("; peak about ") && Contains("multiply-adds a sentence of"));
  CHECK_THAT(fits.err, !Contains("of memory at its peak"));
  // Nothing is allocated, so the dry run itself fits anywhere.
  recipe["model"]["config"]["d_model"] = 65536;
  recipe["model"]["config"]["d_ff"] = 4194304;
  const auto does_not = project.finetune(recipe, "out", {"--dry-run"});
  CHECK_THAT(does_not.err, Contains("of memory at its peak") && Contains("/training/optimizer/name=adafactor"));
}

TEST_CASE("results go to stdout, everything else to stderr", "[cli]") {
  const test::TinyProject project;
  const auto run = project.finetune(project.recipe(), "out", {"--json"});
  CHECK(io::parse_json(run.out, "stdout") == test::read_json(project / "out/results.json"));
  using Catch::Contains;
  CHECK_THAT(run.err, Contains("1 threads") && Contains("cpu") && Contains("seed 42") && Contains("LibTorch"));
  CHECK_THAT(run.err, Contains("step     6/6 | loss ") && Contains(" | grad_norm ") && Contains(" | lr ") &&
                          Contains("examples/s"));
  const auto quiet = project.finetune(project.recipe(), "quiet", {"--quiet"});
  CHECK(quiet.err.empty());
  CHECK_THAT(quiet.out, Contains("accuracy") && Contains((project / "quiet/table.md").string()));
  const auto seeded = project.finetune(project.recipe(), "seeded", {"--seed", "7", "--json"});
  CHECK(io::parse_json(seeded.out, "stdout")["seed"] == 7);
  const auto manifest = test::read_json(project / "out/manifest.json");
  for (const char* key :
       {"mergex", "build", "libtorch", "device", "threads", "seed", "started", "finished", "inputs"}) {
    CHECK(manifest.contains(key));
  }
  CHECK(manifest["inputs"].contains((project / "train.tsv").string()));
}

TEST_CASE("the folder of a run is runs/<name> where --out is not given", "[cli]") {
  const test::TinyProject project;
  const auto recipe = project.write("other.json", project.recipe());
  const auto run = run_mergex({"finetune", recipe.string(), "--set", "/training/max_steps=1", "--set", "/name=mine",
                               "--threads", "1"},
                              std::nullopt, project / "");
  INFO(run.err);
  CHECK(run.exit_code == 0);
  CHECK(std::filesystem::exists(project / "runs/mine/results.json"));
}

TEST_CASE("--list names what a recipe can name", "[cli]") {
  const auto list = run_mergex({"finetune", "--list"});
  CHECK(list.exit_code == 0);
  for (const char* name : {"t5", "smoe", "soft_merge", "camex", "domain_specific", "ties", "dare", "noisy_top_k", "smear", "glue/rte",
                           "classification", "span_corruption", "matthews"}) {
    CHECK_THAT(list.out, Catch::Contains(name));
  }
}

}  // namespace
}  // namespace mergex
