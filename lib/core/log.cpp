#include "core/log.h"

#include <spdlog/sinks/base_sink.h>
#include <spdlog/spdlog.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <memory>
#include <mutex>
#include <string>

namespace mergex::log {
namespace {

bool stderr_is_terminal() {
  static const bool result = isatty(STDERR_FILENO) != 0;
  return result;
}

// Clears a status line before anything else is written below it.
class TerminalSink : public spdlog::sinks::base_sink<std::mutex> {
 public:
  void show_status(std::string_view text) {
    const std::lock_guard<std::mutex> lock(mutex_);
    winsize size{};
    const std::size_t width =
        ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : std::size_t{80};
    const auto shown = text.substr(0, std::min(text.size(), width - 1));
    std::fprintf(stderr, "\r\033[K%.*s", static_cast<int>(shown.size()), shown.data());
    std::fflush(stderr);
    has_status_ = !text.empty();
  }

 protected:
  void sink_it_(const spdlog::details::log_msg& message) override {
    spdlog::memory_buf_t line;
    formatter_->format(message, line);
    if (has_status_) std::fputs("\r\033[K", stderr);
    has_status_ = false;
    std::fwrite(line.data(), 1, line.size(), stderr);
  }
  void flush_() override { std::fflush(stderr); }

 private:
  bool has_status_ = false;
};

struct State {
  std::shared_ptr<TerminalSink> sink = std::make_shared<TerminalSink>();
  spdlog::logger logger{"mergex", sink};
  std::atomic<Level> level{Level::kInfo};
  State() {
    logger.set_pattern("mergex: %v");
    logger.set_level(spdlog::level::trace);
    logger.flush_on(spdlog::level::trace);
  }
};

State& state() {
  static State instance;
  return instance;
}

}  // namespace

void set_level(Level level) { state().level = level; }
Level level() { return state().level; }

void write(Level level, std::string_view message) {
  auto& logger = state().logger;
  if (level == Level::kWarn) {
    logger.warn("warning: {}", message);
  } else {
    logger.info("{}", message);
  }
}

bool status(std::string_view text) {
  if (!stderr_is_terminal() || level() > Level::kInfo) return false;
  state().sink->show_status(text);
  return true;
}

}  // namespace mergex::log
