#include "core/thread_pool.h"

#include <algorithm>
#include <utility>

#include "core/interrupt.h"

namespace mergex {

ThreadPool::ThreadPool(std::size_t num_threads) {
  for (std::size_t thread = 1; thread < num_threads; ++thread) workers_.emplace_back([this, thread] { work(thread); });
}

ThreadPool::~ThreadPool() {
  {
    const std::lock_guard lock(mutex_);
    stops_ = true;
  }
  loop_begins_.notify_all();
  for (auto& worker : workers_) worker.join();
}

void ThreadPool::parallel_for(std::size_t count, const Body& body, std::size_t max_threads) {
  body_ = &body;
  count_ = count;
  max_threads_ = std::max<std::size_t>(1, max_threads);
  next_ = 0;
  error_ = nullptr;
  const bool is_shared = count > 1 && max_threads_ > 1 && !workers_.empty();
  if (is_shared) {
    {
      const std::lock_guard lock(mutex_);
      ++loop_;
      num_working_ = workers_.size();
    }
    loop_begins_.notify_all();
  }
  take_indices(0);
  if (is_shared) {
    std::unique_lock lock(mutex_);
    loop_ends_.wait(lock, [&] { return num_working_ == 0; });
  }
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
}

void ThreadPool::work(std::size_t thread) {
  std::uint64_t last_loop = 0;
  std::unique_lock lock(mutex_);
  while (true) {
    loop_begins_.wait(lock, [&] { return stops_ || loop_ != last_loop; });
    if (stops_) return;
    last_loop = loop_;
    lock.unlock();
    if (thread < max_threads_) take_indices(thread);
    lock.lock();
    if (--num_working_ == 0) loop_ends_.notify_one();
  }
}

void ThreadPool::take_indices(std::size_t thread) noexcept {
  try {
    while (true) {
      const auto index = next_.fetch_add(1, std::memory_order_relaxed);
      if (index >= count_) return;
      throw_if_interrupted();
      (*body_)(index, thread);
    }
  } catch (...) {
    next_ = count_;
    const std::lock_guard lock(mutex_);
    if (!error_) error_ = std::current_exception();
  }
}

}  // namespace mergex
