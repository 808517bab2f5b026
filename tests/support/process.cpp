#include "support/process.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <csignal>
#include <stdexcept>
#include <system_error>

namespace mergex::test {
namespace {

using Clock = std::chrono::steady_clock;

[[noreturn]] void throw_error(int code, const char* what) {
  throw std::system_error(code, std::generic_category(), what);
}

struct Pipe {
  int read_end = -1, write_end = -1;
  Pipe() {
    std::array<int, 2> ends{};
    if (pipe2(ends.data(), O_CLOEXEC) != 0) throw_error(errno, "pipe2");
    read_end = ends[0];
    write_end = ends[1];
  }
  ~Pipe() {
    close_write();
    ::close(read_end);
  }
  Pipe(const Pipe&) = delete;
  Pipe& operator=(const Pipe&) = delete;
  void close_write() {
    if (write_end >= 0) ::close(write_end);
    write_end = -1;
  }
};

pid_t start(const std::filesystem::path& program, const std::vector<std::string>& arguments,
            const std::filesystem::path& working_directory, const Pipe& out, const Pipe& err) {
  auto words = arguments;
  words.insert(words.begin(), program.string());
  std::vector<char*> argv;
  for (auto& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);

  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_adddup2(&actions, out.write_end, STDOUT_FILENO);
  posix_spawn_file_actions_adddup2(&actions, err.write_end, STDERR_FILENO);
  posix_spawn_file_actions_addchdir_np(&actions, working_directory.c_str());
  pid_t child = 0;
  const int error = posix_spawn(&child, program.c_str(), &actions, nullptr, argv.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  if (error != 0) throw_error(error, program.c_str());
  return child;
}

/// @return false at the end of the stream
bool read_some(int fd, std::string& text) {
  std::array<char, 65536> buffer;
  const auto count = ::read(fd, buffer.data(), buffer.size());
  if (count > 0) text.append(buffer.data(), static_cast<std::size_t>(count));
  return count > 0 || (count < 0 && errno == EINTR);
}

}  // namespace

Outcome run_process(const std::filesystem::path& program, const std::vector<std::string>& arguments,
                    const std::optional<Interruption>& interruption, const std::filesystem::path& working_directory,
                    double timeout_s) {
  Pipe out, err;
  Outcome outcome;
  const auto started = Clock::now();
  const auto elapsed_s = [&] { return std::chrono::duration<double>(Clock::now() - started).count(); };
  const pid_t child = start(program, arguments, working_directory, out, err);
  out.close_write();
  err.close_write();

  bool out_open = true, err_open = true, sent = !interruption.has_value(), too_late = false;
  while (out_open || err_open) {
    if (!sent && elapsed_s() >= interruption->after_s && (!interruption->when || interruption->when(outcome))) {
      ::kill(child, interruption->signal);
      sent = true;
    }
    if (!too_late && elapsed_s() > timeout_s) {
      ::kill(child, SIGKILL);
      too_late = true;
    }
    const bool watching = !sent && elapsed_s() >= interruption->after_s;
    std::array<pollfd, 2> streams{
        {{out_open ? out.read_end : -1, POLLIN, 0}, {err_open ? err.read_end : -1, POLLIN, 0}}};
    ::poll(streams.data(), streams.size(), watching ? 0 : !sent ? 1 : 200);
    if (streams[0].revents != 0) out_open = read_some(out.read_end, outcome.out);
    if (streams[1].revents != 0) err_open = read_some(err.read_end, outcome.err);
  }
  int status = 0;
  while (::waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  outcome.wall_s = elapsed_s();
  outcome.signal = WIFSIGNALED(status) ? WTERMSIG(status) : 0;
  outcome.exit_code = outcome.signal != 0 ? 128 + outcome.signal : WEXITSTATUS(status);
  if (too_late) {
    throw std::runtime_error(fmt::format("{} {} ran for more than {} s; it wrote: {}", program.string(),
                                         fmt::join(arguments, " "), timeout_s, outcome.err));
  }
  return outcome;
}

}  // namespace mergex::test
