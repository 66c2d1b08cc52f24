// The threads of one step and the phases that they go through together.
//
// A phase is over when all its units are done, not when all threads have come by: a thread that the
// system has taken its core from holds up at most the unit that it works on.
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
    alignas(64) std::atomic<int64_t> next;
    alignas(64) std::atomic<int64_t> done;
};

class Member {
public:
    explicit Member(Phase* phases) : phase_(phases) {}

    // Takes part in the next phase: `unit(i)` for some of 0 .. units - 1. Returns when all are done.
    template <typename Unit>
    void share(int64_t units, Unit unit) {
        Phase& phase = *phase_++;
        for (;;) {
            int64_t mine = phase.next.fetch_add(1, std::memory_order_relaxed);
            if (mine >= units) break;
            unit(mine);
            phase.done.fetch_add(1, std::memory_order_release);
        }
        wait([&] { return phase.done.load(std::memory_order_acquire) >= units; });
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

    Phase* phase_;
};

}  // namespace loramux
