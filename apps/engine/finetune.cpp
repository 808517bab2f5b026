#include "finetune.h"

#include <torch/torch.h>

#include <algorithm>
#include <cstdio>

#include "core/error.h"
#include "core/interrupt.h"
#include "core/log.h"
#include "curves.h"
#include "device.h"
#include "finetune_run.h"
#include "io/atomic_file.h"
#include "report.h"

namespace mergex::engine {
namespace fs = std::filesystem;
using io::Json;

namespace {

Machine choose_machine(const CommandOptions& options) {
  Machine machine;
  machine.device = choose_device(options.device);
  if (options.threads > 0) at::set_num_threads(static_cast<int>(options.threads));
  machine.threads = at::get_num_threads();
  return machine;
}

bool holds_a_run(const fs::path& folder) {
  return fs::exists(folder / "recipe.resolved.json") || fs::exists(folder / "sweep.json");
}

/// Where the first difference between two documents is, as a JSON pointer; empty when there is none.
std::string first_difference(const Json& a, const Json& b) {
  const auto patch = nlohmann::json::diff(nlohmann::json(a), nlohmann::json(b));
  return patch.empty() ? "" : patch[0].at("path").get<std::string>();
}

/// Whether a run that was killed before its first file was whole left nothing else.
bool holds_only_leftovers(const fs::path& folder) {
  return std::ranges::all_of(fs::directory_iterator(folder),
                             [](const auto& entry) { return entry.path().extension() == ".partial"; });
}

/// Checks what is in the way; changes nothing. @param resolved  what this run's recipe file will hold
void check_folder(const fs::path& folder, const char* recipe_file, const Json& resolved,
                  const CommandOptions& options) {
  if (!fs::exists(folder)) return;
  if (!fs::is_directory(folder)) fail("{}: is a file, expected a folder; choose another --out", folder.string());
  if (holds_only_leftovers(folder)) return;
  if (!holds_a_run(folder)) {
    fail("{}: is not empty and holds no run; choose another --out", folder.string());
  }
  if (options.overwrite) return;
  if (!options.resume) {
    fail("{}: holds a run already; --resume goes on with it, --overwrite deletes it first", folder.string());
  }
  if (!fs::exists(folder / recipe_file)) {
    fail("{}: holds another kind of run (no {}); choose another --out", folder.string(), recipe_file);
  }
  const auto there = io::read_json(folder / recipe_file);
  if (const auto pointer = first_difference(there, resolved); !pointer.empty()) {
    fail("{}: the run there was started with another recipe (first difference: {}); give that recipe, or another --out",
         (folder / recipe_file).string(), pointer);
  }
}

/// For --overwrite, once every mistake in data and weights has been found.
void delete_run(const fs::path& out, const std::vector<fs::path>& inputs) {
  const auto folder = fs::weakly_canonical(out);
  for (const auto& input : inputs) {
    const auto relative = fs::weakly_canonical(input).lexically_relative(folder);
    if (!relative.empty() && *relative.begin() != "..") {
      fail("{}: lies in {}, which --overwrite would delete; choose another --out", input.string(), out.string());
    }
  }
  fs::remove_all(out);
}

std::optional<Json> finished(const fs::path& folder) {
  if (!fs::exists(folder / "results.json")) return std::nullopt;
  return io::read_json(folder / "results.json");
}

void print_result(const CommandOptions& options, const Report& report, const Json& json) {
  if (options.json) {
    fmt::print("{}\n", json.dump(2));
  } else {
    fmt::print("{}", report.terminal());
  }
}

struct Row {
  recipes::SweepRow recipe;
  FinetunePlan plan;
};

/// The run of a sweep that needs most.
class LargestRun {
 public:
  void add(const FinetuneRun& run) {
    const auto factors = run.memory_factors();
    if (!factors_ || estimate_memory(factors).peak > estimate_memory(*factors_).peak) factors_ = factors;
  }

  void warn_if_too_large(const Machine& machine) const {
    const auto available = machine.available_memory();
    if (!factors_ || !available) return;
    const auto peak = estimate_memory(*factors_).peak;
    if (peak <= *available) return;
    log::warn("needs about {} of memory at its peak, but {} are available; repairs, the cheapest first: {}", size_text(peak),
              size_text(*available), fmt::join(memory_repairs(*factors_, *available), ", then "));
  }

 private:
  std::optional<MemoryFactors> factors_;
};

int dry_run(const std::vector<Row>& rows, const Machine& machine, const fs::path& out, const CommandOptions& options) {
  DatasetCache datasets(machine.threads, /*may_write=*/false);
  LargestRun largest;
  Json list = Json::array();
  for (const auto& row : rows) {
    const FinetuneRun run(row.plan, datasets.get(row.plan), machine, /*counts_only=*/true);
    largest.add(run);
    if (options.json) {
      auto json = run.plan_json();
      json["row"] = row.recipe.folder;
      list.push_back(json);
    } else {
      fmt::print("{}{}\n{}", row.plan.name, row.recipe.folder.empty() ? "" : " / " + row.recipe.folder, run.describe());
    }
  }
  if (options.json) {
    fmt::print("{}\n", list.dump(2));
  } else {
    fmt::print("{} run{} to {} on {}; nothing was written (--dry-run)\n", rows.size(), rows.size() == 1 ? "" : "s",
               out.string(), machine.describe());
  }
  largest.warn_if_too_large(machine);
  return 0;
}

/// A mistake in a late row is found before the first one runs, and before anything is written.
/// @return the files that the rows read
std::vector<fs::path> check_rows(const std::vector<Row>& rows, DatasetCache& datasets, const Machine& machine,
                                 const fs::path& out, const CommandOptions& options) {
  std::vector<fs::path> inputs;
  LargestRun largest;
  const auto level = log::level();
  for (const auto& row : rows) {
    if (!options.overwrite && finished(out / row.recipe.folder)) continue;
    const auto dataset = datasets.get(row.plan);
    log::set_level(log::Level::kQuiet);  // each row says what it has to say when it runs
    const FinetuneRun checked(row.plan, dataset, machine, /*counts_only=*/true);
    log::set_level(level);
    largest.add(checked);
    const auto files = checked.input_files();
    inputs.insert(inputs.end(), files.begin(), files.end());
  }
  largest.warn_if_too_large(machine);
  return inputs;
}

int run_single(const Row& row, const Machine& machine, const fs::path& out, const CommandOptions& options) {
  check_folder(out, "recipe.resolved.json", *row.plan.resolved, options);
  auto result = options.overwrite ? std::nullopt : finished(out);
  if (!result) {
    DatasetCache datasets(machine.threads, /*may_write=*/true);
    const auto inputs = check_rows({row}, datasets, machine, out, options);
    FinetuneRun run(row.plan, datasets.get(row.plan), machine, false);
    if (options.overwrite) delete_run(out, inputs);
    result = run.run(out);
  }
  const Report report(row.plan.name, {{row.plan.experts ? row.plan.experts->method : "dense", *result, out}});
  report.write(out);
  print_result(options, report, *result);
  if (!options.json) fmt::print("\n{}\n", report.where(out));
  return 0;
}

int run_sweep(const std::vector<Row>& rows, const recipes::Recipe& recipe, const Machine& machine, const fs::path& out,
              const CommandOptions& options) {
  // What identifies the sweep: every row's resolved recipe.
  Json sweep = Json::object();
  for (const auto& row : rows) sweep[row.recipe.folder] = *row.plan.resolved;
  check_folder(out, "sweep.json", sweep, options);
  DatasetCache datasets(machine.threads, /*may_write=*/true);
  const auto inputs = check_rows(rows, datasets, machine, out, options);
  if (options.overwrite) delete_run(out, inputs);
  make_folder(out);
  io::write_json(out / "sweep.json", sweep);

  std::vector<ReportRow> done;
  std::vector<std::string> failures;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const auto& row = rows[i];
    const auto folder = out / row.recipe.folder;
    throw_if_interrupted();
    auto result = finished(folder);
    if (!result) {
      log::info("row {}/{}: {}", i + 1, rows.size(), row.recipe.folder);
      try {
        FinetuneRun run(row.plan, datasets.get(row.plan), machine, false);
        result = run.run(folder);
      } catch (const Interrupted&) {
        throw;
      } catch (const c10::Error& error) {
        failures.push_back(fmt::format("{}: {}", row.recipe.folder, error.what_without_backtrace()));
      } catch (const std::exception& error) {
        failures.push_back(fmt::format("{}: {}", row.recipe.folder, error.what()));
      }
      if (!result) log::warn("row failed: {}", failures.back());
    }
    const auto method = row.plan.experts ? row.plan.experts->method : std::string("dense");
    if (!result) continue;
    done.push_back({row.recipe.group.empty() ? method : row.recipe.group, *result, folder});
    write_curves(folder, fmt::format("{} / {}", recipe.name, row.recipe.folder), {done.back()});
  }
  const Report report(recipe.name, done, failures);
  if (!done.empty()) report.write(out);
  Json json{{"rows", Json::array()}, {"failures", failures}};
  for (const auto& row : done) json["rows"].push_back({{"row", row.label}, {"result", row.result}});
  io::write_json(out / "results.json", json);
  if (!done.empty()) {
    print_result(options, report, json);
    if (!options.json) fmt::print("\n{}\n", report.where(out));
  }
  if (failures.empty()) return 0;
  throw GuardError(fmt::format("{} of {} rows failed; the first: {}", failures.size(), rows.size(), failures[0]));
}

}  // namespace

int finetune(const CommandOptions& options) {
  const auto recipe = recipes::read_recipe(options.recipe, options.sets, options.seed);
  std::vector<Row> rows;
  for (auto& row : recipes::expand_sweep(recipe)) {
    auto plan = FinetunePlan::read(row);
    rows.push_back({std::move(row), std::move(plan)});
  }
  const auto machine = choose_machine(options);
  const auto out = options.out.value_or(fs::path("runs") / recipe.name);
  if (options.dry_run) return dry_run(rows, machine, out, options);
  if (rows.size() == 1 && rows[0].recipe.labels.empty()) return run_single(rows[0], machine, out, options);
  return run_sweep(rows, recipe, machine, out, options);
}

}  // namespace mergex::engine
