#include <fmt/format.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <fstream>
#include <thread>

#include "core/error.h"
#include "core/interrupt.h"
#include "core/log.h"
#include "core/random.h"
#include "io/atomic_file.h"
#include "merging/execute.h"
#include "merging/shards.h"
#include "support/catch.h"
#include "support/paths.h"
#include "support/small_merges.h"

namespace mergex::merging {
namespace {
namespace fs = std::filesystem;
using Catch::Contains;
using test::SmallMerge;

constexpr std::uint64_t kFewTensorsAtOnce = std::uint64_t{8}
                                            << 20;  // of memory: many groups, so many lines of the journal

/// Runs until the n-th report of progress, as if Ctrl-C had been hit then. @return whether it was interrupted
bool run_interrupted(const MergePlan& plan, ExecuteOptions options, int reports) {
  options.progress = [&, left = reports](auto, auto, auto) mutable {
    if (--left == 0) stop_signal() = SIGINT;
    std::this_thread::sleep_for(std::chrono::milliseconds(22));  // so that every unit is reported
  };
  bool is_interrupted = false;
  try {
    execute(plan, options);
  } catch (const Interrupted& stop) {
    CHECK(stop.exit_code() == 130);
    is_interrupted = true;
  }
  stop_signal() = 0;
  return is_interrupted;
}

std::uint64_t first_offset(const MergePlan& plan) {
  return plan_shards(plan.tensors, ExecuteOptions().shard_bytes).places[0].offset;
}

std::size_t num_lines(const fs::path& path) {
  const auto text = io::read_file(path);
  return static_cast<std::size_t>(std::ranges::count(text, '\n'));
}

/// A merge in a process of its own that is killed after a random time, again and again, until it has finished.
void kill_until_finished(std::uint64_t seed, int kills) {
  const test::TemporaryFolder folder;
  const SmallMerge merge{.folder = folder.path(), .long_tensor = 300'000, .num_small = 60};
  merge.make_inputs();
  const auto plan = merge.plan();
  execute(plan, {.out = folder / "whole", .shard_bytes = 500'000, .threads = 2});
  const auto whole = test::comparable_content(folder / "whole");

  const auto out = folder / "out";
  SplitMix64 random(seed);
  double longest_us = 200'000.0;  // grows while children are killed before they get anywhere
  int num_killed = 0, num_finished = 0, num_resumable = 0;
  while (num_killed < kills) {
    const auto child = ::fork();
    REQUIRE(child >= 0);
    if (child == 0) {
      try {
        execute(plan,
                {.out = out,
                 .shard_bytes = 500'000,
                 .memory_bytes = kFewTensorsAtOnce,
                 .threads = 2,
                 .resume = true,
                 .progress = [](auto, auto, auto) { ::usleep(5'000); }});  // so that a kill is likely to meet the work
        ::_exit(0);
      } catch (...) {
        ::_exit(1);
      }
    }
    ::usleep(static_cast<useconds_t>(random.uniform() * longest_us));
    ::kill(child, SIGKILL);
    int status = 0;
    REQUIRE(::waitpid(child, &status, 0) == child);
    if (WIFSIGNALED(status)) {
      ++num_killed;
      longest_us *= 1.05;
      const auto journal = partial_folder(out) / kJournalFile;
      if (fs::exists(journal) && num_lines(journal) > 1) ++num_resumable;
      if (fs::exists(out)) {  // then it is whole: the kill came after the rename
        REQUIRE(test::comparable_content(out) == whole);
      }
      continue;
    }
    REQUIRE(WEXITSTATUS(status) == 0);
    REQUIRE(test::comparable_content(out) == whole);
    CHECK(!fs::exists(partial_folder(out)));
    fs::remove_all(out);
    ++num_finished;
    longest_us = std::max(20'000.0, 0.8 * longest_us);  // the machine is faster than was thought
  }
  if (!fs::exists(out))
    execute(plan,
            {.out = out, .shard_bytes = 500'000, .memory_bytes = kFewTensorsAtOnce, .threads = 2, .resume = true});
  CHECK(test::comparable_content(out) == whole);
  if (kills >= 100) CHECK(num_resumable > 10);
  fmt::print("killed {} times at random moments, {} of them with work to resume, finished {} times: byte-identical\n",
             num_killed, num_resumable, num_finished + 1);
}

}  // namespace

TEST_CASE("an interrupted merge is continued to the same bytes", "[merging][law]") {
  const test::TemporaryFolder folder;
  const SmallMerge merge{.folder = folder.path(), .long_tensor = 1'000'000, .num_small = 30};
  merge.make_inputs();
  const auto plan = merge.plan();
  execute(plan, {.out = folder / "whole"});
  const auto whole = test::comparable_content(folder / "whole");

  const auto out = folder / "out";
  const ExecuteOptions options{.out = out, .memory_bytes = kFewTensorsAtOnce, .threads = 2, .resume = true};
  log::set_level(log::Level::kQuiet);
  REQUIRE(run_interrupted(plan, options, 45));
  log::set_level(log::Level::kInfo);
  CHECK(!fs::exists(out));
  const auto journal = partial_folder(out) / kJournalFile;
  REQUIRE(fs::exists(journal));
  REQUIRE(num_lines(journal) > 1);

  SECTION("without --resume it is not thrown away") {
    CHECK_THAT(test::user_error([&] { execute(plan, {.out = out}); }),
               Contains("unfinished merge") && Contains("--resume"));
    CHECK(fs::exists(journal));
  }
  SECTION("a last line that was cut is ignored") {
    const auto text = io::read_file(journal);
    io::write_file(journal, text + text.substr(text.rfind('\n', text.size() - 2) + 1, 40));
  }
  SECTION("with other numbers of threads and more memory") {
    execute(plan, {.out = out, .threads = 3, .resume = true});
  }
  SECTION("by --overwrite it begins again") { execute(plan, {.out = out, .overwrite = true}); }
  SECTION("damaged data is not taken over") {
    std::fstream file(partial_folder(out) / "model.safetensors", std::ios::in | std::ios::out | std::ios::binary);
    const auto at = static_cast<std::streamoff>(first_offset(plan) + 4000);  // in the tensor that is done first
    file.seekg(at);
    const auto byte = static_cast<char>(file.get() ^ 1);
    file.seekp(at);
    file.put(byte);
    file.close();
    log::set_level(log::Level::kQuiet);
    execute(plan, options);
    log::set_level(log::Level::kInfo);
  }
  SECTION("another merge does not continue it") {
    auto other = merge.plan();
    other.resolved["seed"] = 8;
    CHECK_THAT(test::user_error([&] { execute(other, options); }), Contains("belongs to another merge"));
    CHECK_THAT(test::user_error([&] { execute(plan, {.out = out, .shard_bytes = 100'000, .resume = true}); }),
               Contains("belongs to another merge"));
    CHECK(fs::exists(journal));
  }
  if (!fs::exists(out)) execute(plan, options);
  CHECK(test::comparable_content(out) == whole);
  CHECK(!fs::exists(partial_folder(out)));
  execute(plan, options);  // a finished merge stays as it is
  CHECK(test::comparable_content(out) == whole);
  auto other = merge.plan();
  other.resolved["seed"] = 8;
  CHECK_THAT(test::user_error([&] { execute(other, options); }), Contains("no unfinished merge of this recipe"));
}

TEST_CASE("a merge that is stopped before anything is done leaves nothing", "[merging]") {
  const test::TemporaryFolder folder;
  const SmallMerge merge{.folder = folder.path(), .num_small = 3};
  merge.make_inputs();
  REQUIRE(run_interrupted(merge.plan(), {.out = folder / "out", .threads = 2}, 1));
  CHECK(!fs::exists(folder / "out"));
  CHECK(!fs::exists(partial_folder(folder / "out")));
}

TEST_CASE("a merge that is killed again and again finishes with the same bytes", "[merging][law]") {
  kill_until_finished(1, 10);
}

TEST_CASE("a merge that is killed a hundred times finishes with the same bytes", "[merging][slow]") {
  kill_until_finished(2, 100);
}

}  // namespace mergex::merging
