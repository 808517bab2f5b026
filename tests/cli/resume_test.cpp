#include <fmt/format.h>

#include <csignal>

#include "cli/tiny_project.h"
#include "core/random.h"

namespace mergex {
namespace {
namespace fs = std::filesystem;

using Catch::Contains;
using io::Json;
using test::Interruption;
using test::Outcome;
using Words = std::vector<std::string>;
using Differences = std::vector<std::string>;

/// Methods that draw, each in another place: entries once a step, experts of a sentence, scores inside the router.
Json sweep_over(Json recipe) {
  auto whole_experts = recipe["experts"];
  whole_experts["profile"] = "release";
  whole_experts["share_curvature_across_layers"] = true;
  whole_experts["router_scope"] = "per_ffn";
  const Json smear{{"method", "soft_merge"}, {"num_experts", 3}, {"router", {{"level", "token"}, {"expert_dropout", 0.3}}}};
  recipe["sweep"] = {{"/experts", {{"dare", recipe["experts"]}, {"release", whole_experts}, {"smear", smear}}},
                     {"/seed", {1, 2}}};
  return recipe;
}

/// A run that is killed again and again, beside the same one left in peace.
class Ordeal {
 public:
  explicit Ordeal(const Json& recipe) : recipe_(project_.write("recipe.json", recipe)) {
    const auto peaceful = run("peaceful", std::nullopt);
    INFO(peaceful.err);
    REQUIRE(peaceful.exit_code == 0);
    expected_ = test::contents(project_ / "peaceful");
    wall_s_ = peaceful.wall_s;
  }

  Outcome run(const std::string& out, const std::optional<Interruption>& interruption, Words more = {}) const {
    Words arguments{"finetune", recipe_.string(), "--out", (project_ / out).string(), "--threads", "1"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return test::run_mergex(arguments, interruption);
  }
  Outcome resume(const std::string& out, const std::optional<Interruption>& interruption = std::nullopt) const {
    return run(out, interruption, {"--resume"});
  }
  /// Resumes to the end. @return what is not as in the run that was left in peace
  Differences differences_at_the_end(const std::string& out) const {
    const auto last = resume(out);
    INFO(last.err);
    REQUIRE(last.exit_code == 0);
    return test::differences(expected_, test::contents(project_ / out));
  }

  const test::TinyProject& project() const { return project_; }
  double wall_s() const { return wall_s_; }

 private:
  test::TinyProject project_;
  fs::path recipe_;
  std::map<std::string, std::string> expected_;
  double wall_s_ = 0.0;
};

/// Kills at random moments, every second one while something is being written.
void survives(const Json& recipe, int num_kills, std::uint64_t seed) {
  const Ordeal ordeal(recipe);
  SplitMix64 random(seed);
  int killed = 0, while_writing = 0, finished = 0;
  std::string out = "run-0";
  while (killed < num_kills) {
    const auto folder = ordeal.project() / out;
    Interruption kill{.signal = SIGKILL, .after_s = ordeal.wall_s() * (0.02 + 0.38 * random.uniform())};
    if (killed % 2 == 1) kill.when = [&](const Outcome&) { return test::holds_partial(folder); };
    const auto outcome = ordeal.resume(out, kill);
    if (outcome.signal == SIGKILL) {
      ++killed;
      while_writing += test::holds_partial(folder) ? 1 : 0;
      continue;
    }
    INFO(outcome.err);
    REQUIRE(outcome.exit_code == 0);
    REQUIRE(ordeal.differences_at_the_end(out) == Differences{});
    out = fmt::format("run-{}", ++finished);
  }
  REQUIRE(ordeal.differences_at_the_end(out) == Differences{});
  fmt::print("killed {} times, {} of them while a file was unfinished; {} runs finished, a run takes {:.1f} s\n",
             killed, while_writing, finished + 1, ordeal.wall_s());
  CHECK(while_writing > 0);
}

TEST_CASE("a run that was killed ends with the same bytes (E2, E11)", "[cli][law]") {
  const test::TinyProject project;
  survives(sweep_over(project.random_recipe(12)), 4, 1);
}

TEST_CASE("a run that was killed thirty times ends with the same bytes (E2, E11)", "[cli][law][.slow]") {
  const test::TinyProject project;
  survives(sweep_over(project.random_recipe(90)), 30, 2);
}

Json all_features(Json recipe) {
  recipe["sweep"] = {{"/training/precision", {"float16", "bfloat16"}}};
  return recipe;
}

TEST_CASE("a run with every option of the trainer that was killed ends with the same bytes (E2)", "[cli][law]") {
  const test::TinyProject project;
  survives(all_features(project.featured_recipe(12)), 4, 3);
}

TEST_CASE("a run with every option of the trainer that was killed thirty times ends with the same bytes (E2)",
          "[cli][law][.slow]") {
  const test::TinyProject project;
  survives(all_features(project.featured_recipe(90)), 30, 4);
}

/// The first time that the program has written a text.
Interruption after_text(int signal, const std::string& text) {
  return {.signal = signal,
          .when = [text](const Outcome& so_far) { return so_far.err.find(text) != std::string::npos; }};
}

TEST_CASE("Ctrl-C and SIGTERM save, and --resume goes on (E2)", "[cli][law]") {
  const test::TinyProject project;
  auto recipe = project.random_recipe(40);
  recipe["training"]["log_every"] = 1;
  recipe["training"]["save_every"] = 0;
  recipe["evaluation"]["every"] = 20;
  const Ordeal ordeal(recipe);
  const auto stop = [&](const std::string& out, int signal, const std::string& text, int exit_code) {
    const auto outcome = ordeal.resume(out, after_text(signal, text));
    INFO(outcome.err);
    CHECK(outcome.signal == 0);
    CHECK(outcome.exit_code == exit_code);
    CHECK_FALSE(test::holds_partial(ordeal.project() / out));
    CHECK_THAT(outcome.err, Contains("mergex: saved at step") && Contains("continue with --resume"));
    CHECK_THAT(outcome.err, Contains(signal == SIGTERM ? "stopped by SIGTERM" : "stopped by Ctrl-C"));
    CHECK(outcome.out.empty());
    CHECK_FALSE(fs::exists(ordeal.project() / out / "results.json"));
  };
  stop("once", SIGTERM, "step     3/40", 143);
  CHECK(ordeal.differences_at_the_end("once") == Differences{});

  stop("twice", SIGINT, "step     2/40", 130);
  stop("twice", SIGINT, "step    22/40", 130);
  CHECK(ordeal.differences_at_the_end("twice") == Differences{});

  stop("then-killed", SIGTERM, "step    21/40", 143);
  CHECK(ordeal.resume("then-killed", after_text(SIGKILL, "step    26/40")).signal == SIGKILL);
  CHECK(ordeal.differences_at_the_end("then-killed") == Differences{});
}

TEST_CASE("a signal stops an evaluation, between training steps and of the best checkpoint (E2)", "[cli][law]") {
  const test::TinyProject project;
  test::write_text(project / "validation.tsv", test::tiny_sentences(900, 3));
  auto recipe = project.recipe();
  recipe["task"]["files"] = {{"train", (project / "train.tsv").string()},
                             {"validation", (project / "validation.tsv").string()}};
  recipe["training"]["log_every"] = 1;
  recipe["training"]["max_steps"] = 4;
  recipe["evaluation"]["every"] = 2;
  recipe["evaluation"]["batch_size"] = 2;
  const Ordeal ordeal(recipe);

  const auto during = ordeal.resume("during", after_text(SIGTERM, "step     2/4 | loss"));
  INFO(during.err);
  CHECK(during.exit_code == 143);
  CHECK(fs::exists(ordeal.project() / "during/checkpoints/interrupted-step-2"));
  CHECK_FALSE(fs::exists(ordeal.project() / "during/checkpoints/step-2"));
  CHECK(ordeal.differences_at_the_end("during") == Differences{});

  const auto after = ordeal.resume("after", after_text(SIGINT, "step     4/4 | validation"));
  INFO(after.err);
  CHECK(after.exit_code == 130);
  CHECK_FALSE(fs::exists(ordeal.project() / "after/results.json"));
  CHECK(ordeal.differences_at_the_end("after") == Differences{});
}

TEST_CASE("a signal stops the tokenising, and nothing is there yet", "[cli]") {
  const test::TinyProject project;
  test::write_text(project / "train.tsv", test::tiny_sentences(200'000, 4));
  const auto recipe = project.write("recipe.json", project.recipe());
  const auto outcome = test::run_mergex({"finetune", recipe.string(), "--out", (project / "out").string(), "-v"},
                                        after_text(SIGTERM, "encoding"));
  INFO(outcome.err);
  CHECK(outcome.exit_code == 143);
  CHECK(outcome.signal == 0);
  CHECK_FALSE(fs::exists(project / "out"));
}

TEST_CASE("a folder that holds a run", "[cli]") {
  const test::TinyProject project;
  const auto single = project.recipe();
  auto sweep = single;
  sweep["sweep"] = {{"/seed", {1, 2}}};
  const bool is_sweep = GENERATE(false, true);
  const auto& recipe = is_sweep ? sweep : single;
  const auto first = project.finetune(recipe, "out");
  const auto before = test::contents(project / "out");

  const auto refused = project.finetune(recipe, "out", {}, 2);
  CHECK(test::num_lines(refused.err) == 1);
  CHECK_THAT(refused.err, Contains("holds a run already") && Contains("--resume") && Contains("--overwrite"));

  const auto again = project.finetune(recipe, "out", {"--resume"});
  CHECK(again.out == first.out);
  CHECK(again.err.empty());
  CHECK_FALSE(first.out.empty());

  auto other = recipe;
  other["training"]["optimizer"]["learning_rate"] = 0.001;
  const auto changed = project.finetune(other, "out", {"--resume"}, 2);
  CHECK(test::num_lines(changed.err) == 1);
  CHECK_THAT(changed.err, Contains("another recipe") && Contains("/training/optimizer/learning_rate"));
  const auto kind = project.finetune(is_sweep ? single : sweep, "out", {"--resume"}, 2);
  CHECK_THAT(kind.err, Contains("another kind of run"));

  CHECK(test::differences(before, test::contents(project / "out")) == Differences{});

  test::write_text(project / "notes/todo.txt", "not a run");
  for (const char* flag : {"--resume", "--overwrite"}) {
    CHECK_THAT(project.finetune(recipe, "notes", {flag}, 2).err, Contains("holds no run"));
  }
  CHECK(test::read_text(project / "notes/todo.txt") == "not a run");
}

TEST_CASE("--resume starts where there is nothing yet, or no more than leftovers", "[cli][law]") {
  const test::TinyProject project;
  const bool is_sweep = GENERATE(false, true);
  auto recipe = project.recipe();
  if (is_sweep) recipe["sweep"] = {{"/seed", Json::array({1})}};
  project.finetune(recipe, "fresh");
  const auto expected = test::contents(project / "fresh");

  project.finetune(recipe, "absent", {"--resume"});
  fs::create_directories(project / "empty");
  project.finetune(recipe, "empty", {"--resume"});
  const std::string first_file = is_sweep ? "sweep.json" : "recipe.resolved.json";
  test::write_text(project / "leftovers" / (first_file + ".partial"), "{\"na");
  project.finetune(recipe, "leftovers", {"--resume"});
  for (const char* out : {"absent", "empty", "leftovers"}) {
    CHECK(test::differences(expected, test::contents(project / out)) == Differences{});
  }
}

TEST_CASE("what a kill left half written is removed and never read (E11)", "[cli][law]") {
  const test::TinyProject project;
  auto recipe = project.random_recipe(24);
  recipe["training"]["log_every"] = 1;
  const Ordeal ordeal(recipe);
  const auto out = ordeal.project() / "out";
  REQUIRE(ordeal.resume("out", after_text(SIGKILL, "step     7/24")).signal == SIGKILL);

  // A newer checkpoint, half written; a link that was about to move; an old checkpoint, half deleted.
  const auto checkpoints = out / "checkpoints";
  test::write_text(checkpoints / "step-9.partial/training_state.json", "{\"step\": 9}");
  test::write_text(checkpoints / "step-9.partial/model.safetensors", "\x10");
  fs::create_directory_symlink("step-9", checkpoints / "best.partial");
  test::write_text(checkpoints / "step-1/config.json", "{}");
  test::write_text(checkpoints / "interrupted-step-3/config.json", "{}");
  test::write_text(out / "metrics.jsonl", test::read_text(out / "metrics.jsonl") + "{\"step\": 8, \"lo");
  test::write_text(out / "results.json.partial", "{\"na");
  CHECK(ordeal.differences_at_the_end("out") == Differences{});
}

TEST_CASE("killed between the last checkpoint and what follows it (E11)", "[cli][law]") {
  const test::TinyProject project;
  auto recipe = project.recipe();
  recipe["evaluation"]["select_best_by"] = "loss";
  const Ordeal ordeal(recipe);
  const auto done = ordeal.project() / "peaceful/checkpoints";
  REQUIRE(fs::read_symlink(done / "best") == "step-6");

  // As the disk is after the rename: `best` still points to the old one, which is still there.
  const auto out = ordeal.project() / "out";
  fs::copy(ordeal.project() / "peaceful", out, fs::copy_options::recursive | fs::copy_options::copy_symlinks);
  fs::copy(done / "step-6", out / "checkpoints/step-3", fs::copy_options::recursive);
  fs::copy(done / "step-6", out / "checkpoints/interrupted-step-5", fs::copy_options::recursive);
  fs::remove(out / "checkpoints/best");
  fs::create_directory_symlink("step-3", out / "checkpoints/best");
  for (const char* file : {"results.json", "predictions.jsonl", "table.md", "table.csv", "scores.svg"}) {
    fs::remove(out / file);
  }
  CHECK(ordeal.differences_at_the_end("out") == Differences{});
}

}  // namespace
}  // namespace mergex
