// The threads of one step and the phases that they go through together.
//
// A phase is over when all its units are done, not when all threads have come by: a thread that the
// system has taken its core from holds up at most the unit that it works on.
//
// Units are taken from both ends, by half of the threads each: so a thread reads on where it stopped,
// and it is known which unit it most likely takes next.
#pragma once
#include <sched.h>

#include <atomic>
#include <cstdint>

namespace loramux {

INLINE void pause_briefly() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

struct Phase {
    alignas(64) std::atomic<int64_t> next;  // units taken: from the front in the low half, from the back in the high
    alignas(64) std::atomic<int64_t> done;
};

class Member {
public:
    // `index`: of this thread among `threads`.
    Member(Phase* phases, int64_t index, int64_t threads)
        : phase_(phases), front_(index % 2 == 0), place_(index / 2), threads_(threads),
          beside_((threads + front_) / 2) {}

    // Takes part in the next phase: `unit(i, next)` for some of 0 .. units - 1. Returns when all are done.
    // `next`: what this thread will probably take after i, or -1.
    template <typename Unit>
    void share(int64_t units, Unit unit) {
        Phase& phase = *phase_++;
        for (;;) {
            int64_t taken = phase.next.fetch_add(front_ ? 1 : BACK, std::memory_order_relaxed);
            int64_t front = taken % BACK, back = taken / BACK, left = units - 1 - front - back;
            if (left < 0) break;
            int64_t mine = front_ ? front : units - 1 - back;
            unit(mine, left < threads_ ? -1 : front_ ? mine + beside_ : mine - beside_);
            phase.done.fetch_add(1, std::memory_order_release);
        }
        wait([&] { return phase.done.load(std::memory_order_acquire) >= units; });
    }

    // The unit of a phase that this thread probably takes first.
    int64_t first_of(int64_t units) const {
        int64_t place = place_ < units ? place_ : 0;
        return front_ ? place : units - 1 - place;
    }

    // The same for work that deals out its units itself: `over()` once none is left to take.
    template <typename Work, typename Over>
    void join(Work work, Over over) {
        Phase& phase = *phase_++;
        phase.next.fetch_add(1, std::memory_order_seq_cst);
        work();
        phase.done.fetch_add(1, std::memory_order_seq_cst);
        wait([&] {
            int64_t left = phase.done.load(std::memory_order_seq_cst);
            return over() && phase.next.load(std::memory_order_seq_cst) == left;
        });
    }

private:
    template <typename Over>
    static void wait(Over over) {
        for (int spins = 0; !over(); spins++) {
            if (spins < 4000) pause_briefly();
            else sched_yield();
        }
    }

    static constexpr int64_t BACK = int64_t(1) << 32;

    Phase* phase_;
    bool front_;
    int64_t place_, threads_, beside_;  // `beside_`: threads that take units from the same end
};

}  // namespace loramux
