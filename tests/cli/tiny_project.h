#pragma once

#include <map>
#include <string>
#include <vector>

#include "io/json.h"
#include "support/catch.h"
#include "support/paths.h"
#include "support/process.h"

namespace mergex::test {

/// Runs the program itself.
Outcome run_mergex(const std::vector<std::string>& arguments,
                   const std::optional<Interruption>& interruption = std::nullopt,
                   const std::filesystem::path& working_directory = ".");

/// The quickstart's tokenizer.
std::filesystem::path tiny_tokenizer();

/// A T5 of 16 dimensions and one layer a side, as a `model` section names it.
io::Json tiny_model();

/// Sentences of two kinds that a few words tell apart, as a TSV table; every fifth one has the wrong label.
std::string tiny_sentences(std::size_t count, std::uint64_t seed);

/// A folder with tiny data, and recipes that use it.
class TinyProject {
 public:
  TinyProject();

  /// A dense model, 6 steps of 8 sentences, an evaluation every 3.
  io::Json recipe() const;
  /// With all that is random: dropout, a noisy router, DARE, and gradients accumulated over three forward passes.
  io::Json random_recipe(std::int64_t steps) const;
  /// The same with every option of the trainer that has a state, or an order, of its own.
  io::Json featured_recipe(std::int64_t steps) const;

  std::filesystem::path write(const std::string& name, const io::Json& recipe) const;
  std::filesystem::path operator/(const std::string& name) const { return folder_ / name; }

  /// `mergex finetune`, on one thread; fails the test where the exit code is another one.
  Outcome finetune(const io::Json& recipe, const std::string& out, std::vector<std::string> more = {},
                   int exit_code = 0) const;

 private:
  TemporaryFolder folder_;
};

io::Json read_json(const std::filesystem::path& file);
std::string read_text(const std::filesystem::path& file);
/// One value a line, as in metrics.jsonl.
std::vector<io::Json> json_lines(const std::filesystem::path& file);
std::size_t num_lines(const std::string& text);

/// Every file below a folder by its relative path, with its bytes; a link with where it points. Without what holds
/// times: manifest.json, timing.jsonl and event files.
std::map<std::string, std::string> contents(const std::filesystem::path& folder);

/// Names of files that differ, are missing or are too many.
std::vector<std::string> differences(const std::map<std::string, std::string>& expected,
                                     const std::map<std::string, std::string>& got);

/// Whether anything below a folder has an unfinished file's name. The folder may change meanwhile.
bool holds_partial(const std::filesystem::path& folder);

}  // namespace mergex::test
