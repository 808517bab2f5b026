#pragma once

#include <condition_variable>
#include <deque>
#include <exception>
#include <filesystem>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "io/file_descriptor.h"
#include "io/json.h"

namespace mergex::merging {

/// What is done of a merge, for --resume: a line of JSON for the plan, then one per group of tensors, written once the
/// group's data is durable.
class Journal {
 public:
  /// Groups that a journal holds; empty where there is none. A last line that was cut is not counted.
  /// @param plan  hash of the plan
  /// @throws UserError for a journal of another plan and for a damaged one
  static std::vector<io::Json> read(const std::filesystem::path& path, const std::string& plan);

  /// Appends behind the lines that `read` accepts, and makes the names of all files beside it durable. Works in a
  /// thread of its own, so that syncing does not hold up the merge.
  Journal(const std::filesystem::path& path, const std::string& plan);
  /// Waits for what was added.
  ~Journal();
  Journal(const Journal&) = delete;
  Journal& operator=(const Journal&) = delete;

  /// @param sync  makes the group's data durable
  /// @param group  a JSON value on one line
  /// @throws what an earlier group has failed with
  void add(std::function<void()> sync, std::string group);
  /// Waits until everything is on the disk. @throws as `add`
  void finish();

 private:
  struct Job {
    std::function<void()> sync;
    std::string line;
  };

  void run();

  io::FileDescriptor file_;
  std::uint64_t end_ = 0;  // used by the thread alone

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Job> jobs_;  // the first is being worked on
  bool stops_ = false;
  std::exception_ptr error_;
  std::thread thread_;
};

}  // namespace mergex::merging
