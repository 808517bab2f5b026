#include "core/thread_pool.h"

#include <atomic>
#include <stdexcept>
#include <thread>

#include "core/interrupt.h"
#include "support/catch.h"

namespace mergex {

TEST_CASE("a loop visits every index once, with threads of its own", "[core]") {
  for (const std::size_t num_threads : {1u, 2u, 3u, 8u}) {
    ThreadPool pool(num_threads);
    REQUIRE(pool.num_threads() == num_threads);
    for (const std::size_t count : {0u, 1u, 2u, 1000u}) {
      std::vector<std::atomic<int>> visits(count), active(num_threads);
      pool.parallel_for(count, [&](std::size_t index, std::size_t thread) {
        if (thread >= num_threads) throw std::logic_error("no such thread");  // Catch2 checks from one thread only
        if (active[thread].fetch_add(1) != 0) throw std::logic_error("two at once with one number");
        ++visits[index];
        --active[thread];
      });
      CHECK(std::ranges::all_of(visits, [](const auto& n) { return n == 1; }));
    }
  }
}

TEST_CASE("fewer threads take part where that is asked for", "[core]") {
  ThreadPool pool(4);
  std::atomic<std::size_t> highest{0};
  pool.parallel_for(
      200,
      [&](std::size_t, std::size_t thread) {
        auto seen = highest.load();
        while (thread > seen && !highest.compare_exchange_weak(seen, thread)) {
        }
      },
      2);
  CHECK(highest < 2);
}

TEST_CASE("the first exception ends a loop, and the pool goes on", "[core]") {
  for (const std::size_t num_threads : {1u, 3u}) {
    ThreadPool pool(num_threads);
    std::atomic<std::size_t> begun{0};
    const auto loop = [&] {
      pool.parallel_for(1'000, [&](std::size_t index, std::size_t) {
        ++begun;
        if (index == 5) throw std::runtime_error("index 5");
      });
    };
    CHECK_THROWS_WITH(loop(), "index 5");
    if (num_threads == 1) CHECK(begun == 6);  // with several, the others may be done before the exception is on its way
    std::atomic<int> visits{0};
    pool.parallel_for(10, [&](std::size_t, std::size_t) { ++visits; });
    CHECK(visits == 10);
  }
}

TEST_CASE("a stop is noticed between two indices", "[core]") {
  for (const std::size_t num_threads : {1u, 2u, 3u}) {
    ThreadPool pool(num_threads);
    std::atomic<std::size_t> begun{0};
    const auto loop = [&] {
      pool.parallel_for(100'000, [&](std::size_t index, std::size_t) {
        ++begun;
        if (index == 10) stop_signal() = 2;
        while (index > 10 && stop_signal() == 0) std::this_thread::yield();  // begun before the stop
      });
    };
    CHECK_THROWS_AS(loop(), Interrupted);
    stop_signal() = 0;
    CHECK(begun <= 10 + num_threads);  // indices 0 to 10, and one in each other thread
  }
}

}  // namespace mergex
