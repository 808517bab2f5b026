#include "command_line.h"

#include <CLI/CLI.hpp>

#include <algorithm>
#include <array>
#include <charconv>
#include <string_view>
#include <vector>

#include "core/bytes.h"
#include "core/error.h"
#include "core/one_line.h"
#include "core/suggest.h"

namespace mergex {
namespace {

struct Subcommand {
  std::string_view name, summary;
  bool built;
};

constexpr std::array kSubcommands{
    Subcommand{"finetune", "fine-tune a checkpoint on a task, dense or with experts; one run or a sweep", true},
    Subcommand{"pretrain", "train a language model, from random weights or an upcycled checkpoint", false},
    Subcommand{"eval", "score a checkpoint", false},
    Subcommand{"merge", "merge checkpoints into one, tensor by tensor; reads mergekit's YAML", true},
    Subcommand{"probe", "look inside a model: probing classifiers, similarity, routing", false},
    Subcommand{"ttest", "test whether a difference between runs is real", false},
};

constexpr const char* kExamples = R"(
Examples:
  mergex finetune recipes/quickstart/pretrain.json --dry-run
  mergex finetune recipes/quickstart/pretrain.json --set /training/max_steps=50 --out runs/try
)";

constexpr const char* kMergeExamples = R"(
Examples:
  mergex merge recipes/merging/testament-soup.json --dry-run
  mergex merge --list
)";

std::string top_help() {
  std::string text =
      "mergex: fine-tune language models with experts that are merged, routed or mixed\n\n"
      "Usage: mergex SUBCOMMAND RECIPE [--set /pointer=value ...] [flags]\n\nSubcommands:\n";
  for (const auto& s : kSubcommands) {
    text += fmt::format("  {:<10} {}{}\n", s.name, s.summary, s.built ? "" : " (not built yet)");
  }
  return text + "\nmergex SUBCOMMAND --help lists the flags of one; mergex --version says which build this is.\n" + kExamples;
}

}  // namespace

std::variant<CommandOptions, std::string> parse_command_line(int argc, const char* const* argv) {
  std::vector<std::string> names;
  for (const auto& s : kSubcommands) names.emplace_back(s.name);
  const std::string first = argc > 1 ? argv[1] : "--help";
  if (first == "--help" || first == "-h" || first == "help") return top_help();
  if (first == "--version") return fmt::format("mergex {} ({})\n", MERGEX_VERSION, MERGEX_BUILD);
  const auto subcommand = std::ranges::find(kSubcommands, first, &Subcommand::name);
  if (subcommand == kSubcommands.end()) {
    fail("\"{}\" is no subcommand; expected {}{} (mergex --help)", first, quoted_list(names), did_you_mean(first, names));
  }

  CommandOptions options;
  options.subcommand = first;
  CLI::App app{std::string(subcommand->summary) + (subcommand->built ? "" : " (not built yet)"), "mergex " + first};
  const bool is_merge = first == "merge";
  if (subcommand->built) app.footer(is_merge ? kMergeExamples : kExamples);
  std::string shard_size = "5GB", memory = "512MiB", explain;
  std::string out, device = options.device;
  std::string seed_text;
  bool quiet = false, verbose = false;
  app.add_option("recipe", options.recipe, is_merge ? "recipe (JSON), or a mergekit configuration (YAML)" : "recipe (JSON)");
  app.add_option("--set", options.sets, "/pointer=value: change the recipe; JSON, or a plain string (repeatable)")
      ->allow_extra_args(false);
  const auto* out_option = app.add_option("--out", out, "folder of the run (default: runs/<recipe name>)");
  app.add_flag("--resume", options.resume, "go on with the run in that folder, or start it");
  app.add_flag("--overwrite", options.overwrite, "delete the run in that folder first");
  const auto* seed_option = app.add_option("--seed", seed_text, "instead of the recipe's seed");
  app.add_option("--device", device, "auto, cpu, cuda or cuda:N")->capture_default_str();
  app.add_option("--threads", options.threads, "CPU threads (0: all cores)")
      ->check(CLI::Range(0, 4096))
      ->capture_default_str();
  app.add_flag("--dry-run", options.dry_run, "check everything and print the plan; write nothing");
  app.add_flag("--list", options.list, "print what a recipe can name, and stop");
  app.add_flag("--json", options.json, "results as JSON on stdout");
  app.add_flag("--quiet", quiet, "warnings and results only");
  app.add_flag("-v,--verbose", verbose, "say more");
  if (is_merge) {
    app.add_option("--shard-size", shard_size, "largest file of weights")->capture_default_str();
    app.add_option("--memory", memory, "memory to work in, beside the files' pages that the system caches")->capture_default_str();
    app.add_option("--explain", explain, "say where each value of this tensor comes from; write nothing");
    app.add_option("--diff", options.compare, "compare two checkpoints tensor by tensor")->expected(2);
    app.add_option("--verify", options.verify, "hash a merged folder again and compare with its manifest.json");
  }
  try {
    app.parse(argc - 1, argv + 1);
  } catch (const CLI::CallForHelp&) {
    return app.help();
  } catch (const CLI::ExtrasError&) {
    std::vector<std::string> known;
    for (const auto* option : app.get_options()) {
      if (!option->get_lnames().empty()) known.push_back("--" + option->get_lnames()[0]);
    }
    for (const auto& extra : app.remaining()) {
      if (extra.starts_with("-")) {
        fail("\"{}\" is no flag of mergex {}{} (mergex {} --help)", extra, first, did_you_mean(extra, known), first);
      }
    }
    fail("got a second recipe \"{}\", expected one (mergex {} --help)", app.remaining().empty() ? "" : app.remaining()[0],
         first);
  } catch (const CLI::ParseError& error) {
    fail("{} (mergex {} --help)", error.what(), first);
  }
  if (out_option->count() > 0 && out.empty()) fail("--out: is empty, expected a folder (mergex {} --help)", first);
  if (out_option->count() > 0) options.out = out;
  if (seed_option->count() > 0) {
    std::int64_t seed = -1;
    const auto [end, error] = std::from_chars(seed_text.data(), seed_text.data() + seed_text.size(), seed);
    if (error != std::errc() || end != seed_text.data() + seed_text.size() || seed < 0) {
      fail("--seed: got {}, expected a whole number from 0 to 9223372036854775807 (mergex {} --help)", one_line(seed_text), first);
    }
    options.seed = seed;
  }
  options.device = device;
  options.verbosity = quiet ? -1 : verbose ? 1 : 0;
  if (options.resume && options.overwrite) fail("--resume and --overwrite exclude each other; keep one");
  if (quiet && verbose) fail("--quiet and --verbose exclude each other; keep one");
  if (!subcommand->built) {
    fail("mergex {} is not built yet; finetune and merge are the subcommands that run so far", first);
  }
  if (is_merge) {
    if (app.count("--explain") > 0) options.explain = explain;
    options.shard_bytes = parse_bytes(shard_size, "--shard-size");
    options.memory_bytes = parse_bytes(memory, "--memory");
    if (!options.compare.empty() || !options.verify.empty()) return options;  // no recipe
  }
  if (options.recipe.empty() && !options.list) fail("which recipe? (mergex {} RECIPE, see mergex {} --help)", first, first);
  if (!options.list && !std::filesystem::exists(options.recipe)) {  // sooner than the engine would be loaded
    fail("{}: no such file, expected a recipe (mergex {} --help)", options.recipe.string(), first);
  }
  return options;
}

}  // namespace mergex
