#include "merging/journal.h"

#include <fcntl.h>
#include <unistd.h>

#include "core/error.h"
#include "io/atomic_file.h"

namespace mergex::merging {
namespace {

// Up to the end of the last whole line.
std::string whole_lines(const std::filesystem::path& path) {
  std::error_code ignored;
  if (!std::filesystem::exists(path, ignored)) return "";
  auto text = io::read_file(path);
  const auto end = text.rfind('\n');
  text.resize(end == std::string::npos ? 0 : end + 1);
  return text;
}

}  // namespace

std::vector<io::Json> Journal::read(const std::filesystem::path& path, const std::string& plan) {
  const auto text = whole_lines(path);
  std::vector<io::Json> groups;
  for (std::size_t begin = 0, line = 1; begin < text.size(); ++line) {
    const auto end = text.find('\n', begin);
    auto value =
        io::parse_json(std::string_view(text).substr(begin, end - begin), fmt::format("{}:{}", path.string(), line));
    if (line == 1 && value != io::Json{{"plan", plan}}) {
      fail(
          "{}: belongs to another merge (recipe, inputs or program differ); start again by --overwrite, or choose "
          "another --out",
          path.string());
    }
    if (line > 1) groups.push_back(std::move(value));
    begin = end + 1;
  }
  return groups;
}

Journal::Journal(const std::filesystem::path& path, const std::string& plan) : file_(path, O_RDWR | O_CREAT) {
  end_ = whole_lines(path).size();
  if (::ftruncate(file_.fd(), static_cast<off_t>(end_)) != 0) file_.fail_with_errno("written");
  if (end_ == 0) {
    const auto line = io::Json{{"plan", plan}}.dump() + "\n";
    file_.write_at(0, std::as_bytes(std::span(line)));
    end_ = line.size();
  }
  io::sync_folder(path.parent_path());
  thread_ = std::thread([this] { run(); });
}

Journal::~Journal() {
  {
    const std::lock_guard lock(mutex_);
    stops_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void Journal::add(std::function<void()> sync, std::string group) {
  const std::lock_guard lock(mutex_);
  if (error_) std::rethrow_exception(error_);
  jobs_.push_back({std::move(sync), std::move(group) + '\n'});
  changed_.notify_all();
}

void Journal::finish() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return jobs_.empty(); });
  if (error_) std::rethrow_exception(error_);
}

void Journal::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return stops_ || !jobs_.empty(); });
    if (jobs_.empty()) return;
    if (!error_) {
      const auto& job = jobs_.front();  // stays where it is while others are added
      lock.unlock();
      std::exception_ptr error;
      try {
        job.sync();
        file_.write_at(end_, std::as_bytes(std::span(job.line)));
        file_.sync();
        end_ += job.line.size();
      } catch (...) {
        error = std::current_exception();
      }
      lock.lock();
      error_ = error;
    }
    jobs_.pop_front();
    changed_.notify_all();
  }
}

}  // namespace mergex::merging
