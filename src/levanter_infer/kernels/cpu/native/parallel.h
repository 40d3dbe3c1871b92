// A thread pool that runs independent pieces of work on threads that are still awake from the last call.
//
// A decode step makes some hundred calls of ten to a few hundred microseconds each. Waking a sleeping thread, as XLA's
// own pool does, costs tens of microseconds per call on a virtual machine. These workers spin for a moment before they
// sleep, so that they do not sleep during a step.
//
// Each thread takes pieces from a range of its own, one after the other, and then from what others have left: pieces
// that are next to each other are so in memory too, and a processor that reads on through them does not
// start its prefetching again at each.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>

namespace levanter_infer {

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

class Workers {
 public:
  // The workers of this process; never destroyed, because their threads are not joined at exit.
  static Workers& shared() {
    static Workers* workers = new Workers();
    return *workers;
  }

  // Calls `work(i)` for i in 0 … count - 1, in any order, on the caller and up to `threads` - 1 workers, and returns
  // when all have returned. A thread is given the i of its own range first, ascending, and then of what
  // others have left. While another thread's call
  // occupies the workers, the caller does all of the work.
  template <class Work>
  void run(int64_t threads, int64_t count, const Work& work) {
    std::unique_lock<std::mutex> turn(turn_, std::defer_lock);
    if (threads <= 1 || count <= 1 || !turn.try_lock()) {
      for (int64_t i = 0; i < count; ++i) work(i);
      return;
    }
    start(threads - 1);
    call_ = [](const void* work, int64_t i) { (*static_cast<const Work*>(work))(i); };
    work_ = &work;
    divide(count, threads);
    state_.store(++calls_ << 32 | OPEN);
    if (sleepers_.load() > 0) {
      std::lock_guard<std::mutex> lock(sleep_);
      awake_.notify_all();
    }
    take_pieces(0);
    state_.fetch_and(~OPEN);  // no worker joins from here on; wait for those that did
    while (static_cast<uint32_t>(state_.load(std::memory_order_acquire)) != 0) pause();
  }

 private:
  // The upper half of `state_` is the number of the call; the lower half is OPEN and how many workers have joined it.
  static constexpr uint64_t OPEN = 1u << 31;
  static constexpr int SPINS = 2000, YIELDS = 100;

  void start(int64_t workers) {
    try {
      for (; started_ < workers; ++started_) std::thread([this] { serve(); }).detach();
    } catch (const std::system_error&) {  // the system allows no more threads: work with those that have started
    }
  }

  // The pieces next … end - 1 are left of a thread's range.
  struct alignas(64) Range {
    std::atomic<int64_t> next{0};
    int64_t end = 0;
  };

  // Divides the pieces among the threads of a call, in ranges of about one size.
  void divide(int64_t count, int64_t threads) {
    if (threads > allocated_) {
      ranges_.reset(new Range[threads]);
      allocated_ = threads;
    }
    num_ranges_ = threads;
    for (int64_t i = 0; i < threads; ++i) {
      ranges_[i].next.store(count * i / threads, std::memory_order_relaxed);
      ranges_[i].end = count * (i + 1) / threads;
    }
  }

  // Calls the work for the pieces of range `own`, then for what is left of the others.
  void take_pieces(int64_t own) {
    for (int64_t k = 0; k < num_ranges_; ++k) {
      Range& range = ranges_[(own + k) % num_ranges_];
      for (int64_t i; (i = range.next.fetch_add(1, std::memory_order_relaxed)) < range.end;) call_(work_, i);
    }
  }

  // Joins the open call, unless its number is `last`; sets `last` to its number, and `own` to the range to begin with.
  bool join(uint64_t* last, int64_t* own) {
    uint64_t seen = state_.load(std::memory_order_acquire);
    if ((seen & OPEN) == 0 || seen >> 32 == *last) return false;
    if (!state_.compare_exchange_strong(seen, seen + 1, std::memory_order_acquire)) return false;
    *last = seen >> 32;
    *own = 1 + static_cast<int64_t>(seen & (OPEN - 1));
    return true;
  }

  void serve() {
    uint64_t last = 0;
    int64_t own = 0;
    for (int idle = 0;;) {
      if (join(&last, &own)) {
        take_pieces(own);
        state_.fetch_sub(1, std::memory_order_release);
        idle = 0;
      } else if (++idle < SPINS) {
        pause();
      } else if (idle < SPINS + YIELDS) {
        std::this_thread::yield();
      } else {
        std::unique_lock<std::mutex> lock(sleep_);
        sleepers_.fetch_add(1);
        awake_.wait(lock, [&] { return (state_.load() & OPEN) != 0 && state_.load() >> 32 != last; });
        sleepers_.fetch_sub(1);
        idle = 0;
      }
    }
  }

  std::mutex turn_;
  int64_t started_ = 0;
  void (*call_)(const void*, int64_t) = nullptr;
  const void* work_ = nullptr;
  std::unique_ptr<Range[]> ranges_;
  int64_t allocated_ = 0, num_ranges_ = 0;
  uint64_t calls_ = 0;
  std::atomic<uint64_t> state_{0};
  std::mutex sleep_;
  std::condition_variable awake_;
  std::atomic<int> sleepers_{0};
};

}  // namespace levanter_infer
