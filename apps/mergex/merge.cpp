#include "merge.h"

#include <fmt/format.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <thread>

#include "core/bytes.h"
#include "core/error.h"
#include "core/interrupt.h"
#include "core/log.h"
#include "io/yaml.h"
#include "merge_text.h"
#include "merging/adapter_section.h"
#include "merging/diff.h"
#include "merging/execute.h"
#include "merging/mergekit_recipe.h"
#include "merging/planner.h"
#include "merging/verify.h"
#include "recipes/recipe.h"

namespace mergex {
namespace fs = std::filesystem;
using io::Json;

namespace {

bool is_yaml(const fs::path& file) { return file.extension() == ".yaml" || file.extension() == ".yml"; }

// One merge of a file: a recipe is one, mergekit's YAML may hold several that build on each other.
std::vector<recipes::Recipe> read_recipes(const CommandOptions& options) {
  if (!is_yaml(options.recipe)) return {recipes::read_recipe(options.recipe, options.sets, options.seed)};
  std::vector<recipes::Recipe> all;
  for (const auto& document : io::read_yaml(options.recipe)) {
    all.push_back(recipes::changed_recipe(merging::recipe_from_mergekit(document), options.sets, options.seed));
  }
  return all;
}

// A line that renews itself on a terminal; elsewhere one line in ten seconds.
class Progress {
 public:
  void operator()(std::uint64_t done, std::uint64_t total, std::string_view tensor) {
    const auto now = Clock::now();
    const double seconds = std::chrono::duration<double>(now - start_).count();
    if (std::chrono::duration<double>(now - last_).count() < 0.2) return;
    last_ = now;
    const double rate = seconds > 0.0 ? static_cast<double>(done) / seconds : 0.0;
    const auto left_s = rate > 0.0 ? static_cast<double>(total - done) / rate : 0.0;
    const auto line = fmt::format("merge {:3.0f} % | {} of {} | {:.2f} GB/s | {:.0f} s left | {}",
                                  100.0 * static_cast<double>(done) / static_cast<double>(std::max<std::uint64_t>(total, 1)),
                                  bytes_text(done), bytes_text(total), rate / 1e9, left_s, tensor);
    if (!log::status(line) && std::chrono::duration<double>(now - last_line_).count() > 10.0) {
      last_line_ = now;
      log::info("{}", line);
    }
  }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point start_ = Clock::now(), last_ = start_, last_line_ = start_;
};

// What every recipe has beside its section. @return the seed
std::uint64_t read_common(io::JsonObject& root) {
  root.maybe<std::string>("name");
  root.maybe<std::string>("description");
  std::int64_t seed = 42;
  root.optional("seed", seed, {.at_least = 0});
  return static_cast<std::uint64_t>(seed);
}

// Where a merge goes that names no folder.
fs::path default_output(const recipes::Recipe& recipe) {
  const bool is_plain = !recipe.name.empty() && recipe.name != "." && recipe.name != ".." && recipe.name.size() < 200 &&
                        std::ranges::none_of(recipe.name, [](char c) { return c == '/' || static_cast<unsigned char>(c) < ' '; });
  if (!is_plain) fail("{}#/name: got {}, which names no folder of runs/; give --out", recipe.file.string(), io::shown(Json(recipe.name)));
  return fs::path("runs") / recipe.name;
}

int merge_adapters(const recipes::Recipe& recipe, const CommandOptions& options) {
  io::JsonObject root(recipe.document);
  const auto section = merging::read_adapter_section(root, read_common(root));
  root.finish();
  if (options.dry_run || options.explain) {
    fmt::print("{} ({}) of {} adapters\n", section.options.mode.name, section.options.mode.summary, section.inputs.size());
    return 0;
  }
  const auto out = options.out ? *options.out : default_output(recipe);
  const auto modules = merging::merge_adapters(section.inputs, section.options, out);
  double worst = 0.0;
  for (const auto& module : modules) worst = std::max(worst, module.relative_error);
  if (options.json) {
    auto list = Json::array();
    for (const auto& m : modules) list.push_back({{"module", m.name}, {"rank", m.rank}, {"norm", m.norm}, {"relative_error", m.relative_error}});
    fmt::print("{}\n", Json{{"out", out.string()}, {"modules", std::move(list)}}.dump());
  } else {
    fmt::print("{}: {} modules, largest relative error of a module by its rank {:.2g}\n", out.string(), modules.size(), worst);
  }
  return 0;
}

std::size_t num_threads(const CommandOptions& options) {
  return options.threads > 0 ? static_cast<std::size_t>(options.threads) : std::max<std::size_t>(1, std::thread::hardware_concurrency());
}

int verify(const CommandOptions& options) {
  const auto verification = merging::verify(options.verify, num_threads(options));
  if (options.json) {
    fmt::print("{}\n", Json{{"intact", verification.is_intact()}, {"tensors", verification.num_tensors},
                            {"files", verification.num_files}, {"problems", verification.problems}}.dump());
  } else {
    fmt::print("{}", verification.text());
  }
  return verification.is_intact() ? 0 : 2;
}

int compare(const CommandOptions& options) {
  const auto difference = merging::diff(io::CheckpointFolder(options.compare[0]), io::CheckpointFolder(options.compare[1]),
                                        num_threads(options));
  fmt::print("{}", options.json ? difference.json().dump() + "\n" : difference.text());
  return 0;
}

// The folder that is written may take the place of another: not of the one that holds the recipe.
void check_keeps_recipe(const CommandOptions& options, const fs::path& out) {
  std::error_code ignored;
  if (!options.overwrite || !fs::exists(out, ignored)) return;
  const auto inside = fs::weakly_canonical(options.recipe, ignored).lexically_relative(fs::weakly_canonical(out, ignored));
  if (!inside.empty() && *inside.begin() != "..") {
    fail("{}: lies in {}, which --overwrite would replace; choose another --out", options.recipe.string(), out.string());
  }
}

merging::MergePlan plan_of(recipes::Recipe& recipe, bool is_mergekit, const std::map<std::string, fs::path>& named) {
  io::JsonObject root(recipe.document);
  const auto seed = read_common(root);
  const auto section = merging::read_merge_section(
      root, is_mergekit ? merging::RelativeTo::kWorkingDir : merging::RelativeTo::kRecipe, named);
  root.finish();
  auto plan = merging::plan_merge(section, seed);
  Json whole{{"name", recipe.name}, {"seed", seed}, {"merge", std::move(plan.resolved)}};
  plan.resolved = std::move(whole);
  for (const auto& warning : plan.warnings) log::warn("{}", warning);
  return plan;
}

int merge_all(const CommandOptions& options) {
  auto recipes = read_recipes(options);
  if (merging::merges_adapters(io::JsonObject(recipes.back().document))) return merge_adapters(recipes.back(), options);
  const bool is_mergekit = is_yaml(options.recipe);
  const auto out = options.out ? *options.out : default_output(recipes.back());
  check_keeps_recipe(options, out);
  std::map<std::string, fs::path> named;
  for (std::size_t i = 0; i < recipes.size(); ++i) {
    const bool is_last = i + 1 == recipes.size();
    if (!is_last && !recipes[i].document->value.contains("name")) {
      fail("{}: document {} of {} has no \"name\"; only the last may be without", options.recipe.string(), i + 1, recipes.size());
    }
    const auto folder = is_last ? out : fs::path(out.string() + "." + recipes[i].name);
    const bool only_shows = options.dry_run || options.explain;
    if (!only_shows) merging::check_output(folder, options.resume, options.overwrite);
    const auto plan = plan_of(recipes[i], is_mergekit, named);
    if (only_shows) {
      if (options.json) {
        fmt::print("{}\n", plan_json(plan).dump(2));
      } else if (options.dry_run) {
        fmt::print("{}", plan_text(plan));
      } else {
        fmt::print("{}", explain_text(plan, *options.explain));
      }
      if (!is_last) log::info("{} more merges of this file build on the result, so they are not planned", recipes.size() - i - 1);
      // Nothing is open: to take the plan of tens of thousands of tensors apart would cost a seventh of the time.
      std::fflush(stdout);
      std::_Exit(0);
    }
    Progress progress;
    const auto done = merging::execute(plan, {.out = folder,
                                              .shard_bytes = options.shard_bytes,
                                              .memory_bytes = options.memory_bytes,
                                              .threads = num_threads(options),
                                              .resume = options.resume,
                                              .overwrite = options.overwrite,
                                              .version = MERGEX_VERSION,
                                              .progress = std::ref(progress)});
    if (options.json) {
      fmt::print("{}\n", Json{{"out", folder.string()}, {"tensors", plan.tensors.size()}, {"bytes", done.bytes}, {"seconds", done.seconds}}.dump());
    } else {
      fmt::print("{}: {} tensors, {} in {:.1f} s\n", folder.string(), plan.tensors.size(), bytes_text(done.bytes), done.seconds);
    }
    if (!is_last) named.emplace(recipes[i].name, folder);
  }
  return 0;
}

}  // namespace

int run_merge(const CommandOptions& options) {
  log::set_level(options.verbosity < 0 ? log::Level::kWarn : options.verbosity > 0 ? log::Level::kDebug : log::Level::kInfo);
  install_signal_handlers();
  if (options.list) {
    fmt::print("{}", options.json ? method_list_json().dump(2) + "\n" : method_list_text());
    return 0;
  }
  if (!options.verify.empty()) return verify(options);
  if (!options.compare.empty()) return compare(options);
  return merge_all(options);
}

}  // namespace mergex
