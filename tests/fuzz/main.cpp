// mergex_fuzz: damaged files must be read or refused with one line, whatever is wrong with them.

#include <fmt/format.h>
#include <sys/resource.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <fstream>
#include <set>
#include <stdexcept>
#include <span>
#include <string>
#include <vector>

#include "core/error.h"
#include "core/log.h"
#include "fuzz/coverage.h"
#include "fuzz/mutator.h"
#include "fuzz/readers.h"
#include "io/atomic_file.h"
#include "io/sha256.h"

namespace mergex::fuzz {
namespace {
namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

constexpr std::int64_t kHangSeconds = 30;  // of the processor, so that a busy machine makes no hang

struct Options {
  std::string reader;
  double seconds = 60.0;
  std::uint64_t seed = 1;
  fs::path corpus;  ///< default: fuzz/<reader> in the working folder
  fs::path replay;
};

void write_plainly(const fs::path& path, const std::string& bytes) {
  // Removed first: some file systems sync what replaces the content of a file.
  fs::remove(path);
  std::ofstream(path, std::ios::binary) << bytes;
}

/// What a message says behind the place and before it quotes from the input: such messages are one outcome.
std::string message_kind(std::string_view message) {
  if (const auto place = message.find(": "); place != std::string_view::npos) message.remove_prefix(place);
  std::string kind;
  for (std::size_t i = 0; i < message.size() && message[i] != '"' && message[i] != '\''; ++i) {
    if (message.substr(i).starts_with("got ") || message.substr(i).starts_with(" is ")) break;
    if (message[i] < '0' || message[i] > '9') {
      kind += message[i];
    } else if (!kind.ends_with('#')) {
      kind += '#';
    }
  }
  return kind;
}

void set_alarm(std::int64_t seconds) {
  const itimerval timer{.it_interval = {}, .it_value = {seconds, 0}};
  ::setitimer(ITIMER_PROF, &timer, nullptr);
}

class Fuzzer {
 public:
  Fuzzer(const Reader& reader, const Options& options) : reader_(reader), options_(options), corpus_folder_(options.corpus) {
    std::string pattern = (fs::temp_directory_path() / "mergex-fuzz-XXXXXX").string();
    if (mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("cannot make a temporary folder");
    work_ = pattern;
  }
  ~Fuzzer() {
    std::error_code ignored;
    fs::remove_all(work_, ignored);
  }
  Fuzzer(const Fuzzer&) = delete;
  Fuzzer& operator=(const Fuzzer&) = delete;

  int run() {
    fmt::print(stderr, "{}: the input under test is {}; it stays there after a crash\n", reader_.name,
               (work_ / "input").string());
    fs::create_directories(corpus_folder_);
    for (const auto& seed : reader_.seeds()) {
      try_input(seed);
      if (!last_was_read_) return fail_run("a seed is refused: " + last_outcome_);
      corpus_.push_back(seed);
    }
    const auto num_seeds = corpus_.size();
    std::vector<fs::path> kept;
    for (const auto& entry : fs::directory_iterator(corpus_folder_)) kept.push_back(entry.path());
    std::ranges::sort(kept);
    for (const auto& file : kept) {
      if (file.filename().string().starts_with("finding-")) continue;
      auto input = io::read_file(file);
      try_input(input);
      corpus_.push_back(std::move(input));
    }

    Mutator mutator(options_.seed, reader_.tokens);
    const auto end = Clock::now() + std::chrono::duration<double>(options_.seconds);
    const auto num_before = corpus_.size();
    while (Clock::now() < end) {
      // Valid inputs reach farthest; the newest ones are those whose surroundings are unknown.
      const auto recent = std::min<std::size_t>(corpus_.size(), 16);
      const auto parent = mutator.one_in(3)   ? mutator.below(num_seeds)
                          : mutator.one_in(2) ? corpus_.size() - 1 - mutator.below(recent)
                                              : mutator.below(corpus_.size());
      auto input = reader_.mutate(mutator, corpus_[parent], corpus_);
      if (try_input(input)) keep(std::move(input));
    }
    fmt::print("{}: seed {}, {} executions, {} read, {} refused, {} kinds of outcome; {} inputs to start from, {} kept in {}; "
               "{} finding{}\n",
               reader_.name, options_.seed, num_executions_, num_read_, num_executions_ - num_read_, outcomes_.size(),
               num_before, corpus_.size() - num_before, corpus_folder_.string(), num_findings_,
               num_findings_ == 1 ? "" : "s");
    if (num_findings_ > 0) return 1;
    if (num_read_ == 0 || num_read_ == num_executions_) return fail_run("nothing was read, or nothing was refused");
    return 0;
  }

  int replay(const fs::path& file) {
    try_input(io::read_file(file));
    fmt::print("{}: {}\n", file.string(), last_outcome_);
    return num_findings_ > 0 ? 1 : 0;
  }

 private:
  int fail_run(const std::string& why) const {
    fmt::print(stderr, "{}: {}\n", reader_.name, why);
    return 1;
  }

  /// @return whether it did something new
  bool try_input(const std::string& input) {
    const auto file = work_ / "input";
    write_plainly(file, input);
    ++num_executions_;
    last_was_read_ = false;
    reached_new_code();
    set_alarm(kHangSeconds);
    try {
      last_outcome_ = reader_.read(file, input);
      last_was_read_ = true;
      ++num_read_;
    } catch (const UserError& error) {
      const std::string message = error.what();
      last_outcome_ = message_kind(message);
      if (message.empty() || message.find('\n') != std::string::npos) found(input, "not one line: " + message);
    } catch (const std::exception& error) {
      last_outcome_ = std::string("internal error: ") + error.what();
      found(input, last_outcome_);
    }
    set_alarm(0);
    const bool is_new_code = reached_new_code();
    return outcomes_.insert(last_outcome_).second || is_new_code;
  }

  void found(const std::string& input, const std::string& what) {
    if (!findings_.insert(message_kind(what)).second) return;
    ++num_findings_;
    if (!options_.replay.empty()) return;
    const auto file = corpus_folder_ / fmt::format("finding-{}", name_of(input));
    write_plainly(file, input);
    fmt::print(stderr, "{}: {}\n  input: {}\n", reader_.name, what, file.string());
  }

  void keep(std::string input) {
    write_plainly(corpus_folder_ / name_of(input), input);
    corpus_.push_back(std::move(input));
  }

  static std::string name_of(const std::string& input) {
    return io::sha256_hex(std::as_bytes(std::span(input))).substr(0, 16);
  }

  const Reader& reader_;
  const Options& options_;
  fs::path corpus_folder_, work_;
  std::vector<std::string> corpus_;
  std::set<std::string> outcomes_, findings_;
  std::uint64_t num_executions_ = 0, num_read_ = 0, num_findings_ = 0;
  bool last_was_read_ = false;
  std::string last_outcome_;
};

void report_hang(int) {
  constexpr char kMessage[] = "mergex_fuzz: an input takes longer than 30 s; it is in the file named above\n";
  [[maybe_unused]] const auto written = ::write(STDERR_FILENO, kMessage, sizeof kMessage - 1);
  ::_exit(1);
}

void limit_memory() {
#ifndef __SANITIZE_ADDRESS__  // its shadow takes terabytes of addresses
  const rlimit limit{std::uint64_t{4} << 30, std::uint64_t{4} << 30};
  ::setrlimit(RLIMIT_AS, &limit);
#endif
}

Options parse(std::span<char*> arguments) {
  std::string names;
  for (const auto& reader : readers()) names += fmt::format("\n  {:<14} {}", reader.name, reader.summary);
  const auto usage = fmt::format(
      "usage: mergex_fuzz READER [--seconds N] [--seed S] [--corpus FOLDER] | mergex_fuzz READER --replay FILE\n"
      "Readers:{}\n", names);
  Options options;
  for (std::size_t i = 1; i < arguments.size(); ++i) {
    const std::string argument = arguments[i];
    if (!argument.starts_with("--")) {
      options.reader = argument;
      continue;
    }
    if (i + 1 == arguments.size()) throw std::runtime_error(usage);
    const std::string value = arguments[++i];
    if (argument == "--seconds") {
      options.seconds = std::strtod(value.c_str(), nullptr);
    } else if (argument == "--seed") {
      options.seed = std::strtoull(value.c_str(), nullptr, 10);
    } else if (argument == "--corpus") {
      options.corpus = value;
    } else if (argument == "--replay") {
      options.replay = value;
    } else {
      throw std::runtime_error(usage);
    }
  }
  if (std::ranges::find(readers(), options.reader, &Reader::name) == readers().end()) throw std::runtime_error(usage);
  if (options.corpus.empty()) options.corpus = fs::path("fuzz") / options.reader;
  return options;
}

}  // namespace
}  // namespace mergex::fuzz

int main(int argc, char** argv) try {
  using namespace mergex::fuzz;
  mergex::log::set_level(mergex::log::Level::kQuiet);
  const auto options = parse({argv, static_cast<std::size_t>(argc)});
  std::signal(SIGPROF, report_hang);
  limit_memory();
  Fuzzer fuzzer(*std::ranges::find(readers(), options.reader, &Reader::name), options);
  return options.replay.empty() ? fuzzer.run() : fuzzer.replay(options.replay);
} catch (const std::exception& error) {
  fmt::print(stderr, "{}", error.what());
  return 2;
}
