// Runs independent pieces of work on XLA's own threads and the calling one.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "xla/ffi/api/ffi.h"

namespace levanter_infer {

// Calls `work(i)` for i in 0 … count - 1, in any order, and returns when all have returned.
//
// The caller takes part and waits only for pieces that somebody has begun, so it never waits for a thread that another
// call occupies. Waiting spins: pieces last microseconds.
template <class Work>
void parallel_for(::xla::ffi::ThreadPool& threads, int64_t count, const Work& work) {
  const int64_t helpers = std::min<int64_t>(threads.num_threads(), count) - 1;
  if (helpers <= 0) {
    for (int64_t i = 0; i < count; ++i) work(i);
    return;
  }
  struct State {
    std::atomic<int64_t> next{0}, finished{0};
    int64_t count;
    const Work* work;  // outlives every piece, and is not looked at by a thread that comes too late

    void run() {
      for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) {
        (*work)(i);
        finished.fetch_add(1, std::memory_order_release);
      }
    }
  };
  auto state = std::make_shared<State>();
  state->count = count;
  state->work = &work;
  for (int64_t i = 0; i < helpers; ++i) threads.Schedule([state] { state->run(); });
  state->run();
  while (state->finished.load(std::memory_order_acquire) < count) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
}

}  // namespace levanter_infer
