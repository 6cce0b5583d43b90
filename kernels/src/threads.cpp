#include "threads.h"

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#if !defined(_WIN32)
#include <pthread.h>
#endif

namespace {

struct Job {
  ak_chunks work;
  const void* args;
  ak_int64 chunks, at_once;
  std::atomic<ak_int64> next{0};
  std::atomic<int> result{0};

  void take_part() {
    for (;;) {
      ak_int64 from = next.fetch_add(at_once, std::memory_order_relaxed);
      if (from >= chunks) return;
      int got = work(args, from, from + at_once < chunks ? from + at_once : chunks);
      if (got) result.store(got, std::memory_order_relaxed);
    }
  }
};

class Pool {
 public:
  // One job at a time; a second caller is told false and does its work alone.
  bool run(Job& job, int helpers) {
    std::unique_lock<std::mutex> mine(jobs_, std::try_to_lock);
    if (!mine.owns_lock()) return false;
    {
      std::lock_guard<std::mutex> lock(state_);
      try {
        while (started_ < helpers) {
          std::thread(&Pool::wait_for_jobs, this, started_).detach();
          started_++;
        }
      } catch (const std::system_error&) {
        // No more threads are to be had: those that started do the work.
      }
      helpers = helpers < started_ ? helpers : started_;
      job_ = &job, wanted_ = helpers, working_ = helpers, turn_++;
    }
    if (helpers) wake_.notify_all();
    job.take_part();
    std::unique_lock<std::mutex> lock(state_);
    done_.wait(lock, [this] { return working_ == 0; });
    job_ = nullptr;
    return true;
  }

 private:
  void wait_for_jobs(int number) {
    unsigned long seen = 0;
    std::unique_lock<std::mutex> lock(state_);
    for (;;) {
      wake_.wait(lock, [&] { return turn_ != seen; });
      seen = turn_;
      if (!job_ || number >= wanted_) continue;
      Job* job = job_;
      lock.unlock();
      job->take_part();
      lock.lock();
      if (--working_ == 0) done_.notify_one();
    }
  }

  std::mutex jobs_, state_;
  std::condition_variable wake_, done_;
  Job* job_ = nullptr;
  int started_ = 0, wanted_ = 0, working_ = 0;
  unsigned long turn_ = 0;
};

// Never deleted: its threads may outlive whatever runs when a process ends.
std::atomic<Pool*> the_pool{nullptr};

Pool* pool() {
  Pool* found = the_pool.load();
  if (found) return found;
#if !defined(_WIN32)
  // A child has the memory of its parent's pool, and none of its threads.
  static int once = pthread_atfork(nullptr, nullptr, [] { the_pool.store(nullptr); });
  (void)once;
#endif
  Pool* made = new (std::nothrow) Pool;
  if (!made) return nullptr;
  if (the_pool.compare_exchange_strong(found, made)) return made;
  delete made;
  return found;
}

}  // namespace

int run_chunks(ak_chunks work, const void* args, ak_int64 chunks, int threads) {
  if (threads > chunks) threads = (int)chunks;
  if (threads <= 1) return chunks > 0 ? work(args, 0, chunks) : 0;
  Job job;
  job.work = work, job.args = args, job.chunks = chunks;
  // Many small tensors are many chunks: not one at a time.
  ak_int64 shares = (ak_int64)threads * 8;
  job.at_once = chunks / shares > 1 ? chunks / shares : 1;
  Pool* all = pool();
  if (!all || !all->run(job, threads - 1)) return work(args, 0, chunks);
  return job.result.load();
}
