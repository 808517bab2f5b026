#include "core/interrupt.h"

#include <csignal>
#include <unistd.h>

namespace mergex {
namespace {

std::atomic<int> signal_seen{0};
static_assert(std::atomic<int>::is_always_lock_free, "a signal handler may only touch lock-free atomics");

void on_signal(int signal) {
  if (signal_seen.exchange(signal) != 0) _exit(128 + signal);
}

}  // namespace

Interrupted::Interrupted(int signal)
    : std::runtime_error(signal == SIGTERM ? "stopped by SIGTERM" : "stopped by Ctrl-C"), signal_(signal) {}

std::atomic<int>& stop_signal() { return signal_seen; }

void install_signal_handlers() {
  struct sigaction action {};
  action.sa_handler = on_signal;
  sigemptyset(&action.sa_mask);
  action.sa_flags = SA_RESTART;
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
}

void throw_if_interrupted() {
  if (const int signal = stop_signal().load(std::memory_order_relaxed)) throw Interrupted(signal);
}

}  // namespace mergex
