#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace mergex {

/// A fixed number of threads that share the work of loops; the calling thread is one of them.
class ThreadPool {
 public:
  /// @param index   in [0, count), each once, handed out in ascending order
  /// @param thread  in [0, num_threads()): which of the threads works on it
  using Body = std::function<void(std::size_t index, std::size_t thread)>;

  explicit ThreadPool(std::size_t num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  std::size_t num_threads() const { return workers_.size() + 1; }

  /// Returns when every index is done. After an exception no further index begins; the first one is thrown on.
  /// Not to be called from `body`, nor from two threads at once.
  /// @param max_threads  how many of the threads may take part
  /// @throws Interrupted when the user asked for a stop, after what had begun is done
  void parallel_for(std::size_t count, const Body& body, std::size_t max_threads = SIZE_MAX);

 private:
  void work(std::size_t thread);
  void take_indices(std::size_t thread) noexcept;

  std::mutex mutex_;
  std::condition_variable loop_begins_, loop_ends_;
  std::uint64_t loop_ = 0;  // number of the current loop, guarded by mutex_ like all up to the next blank line
  std::size_t num_working_ = 0;
  bool stops_ = false;
  std::exception_ptr error_;

  const Body* body_ = nullptr;  // of the current loop
  std::size_t count_ = 0, max_threads_ = 0;
  std::atomic<std::size_t> next_{0};

  std::vector<std::thread> workers_;
};

}  // namespace mergex
