//! What this process uses of its machine's cores.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// CPU time that this process has used, all of its threads together.
#[must_use]
pub fn cpu_time() -> Duration {
    read(ClockId::ProcessCPUTime)
}

/// CPU time that this thread has used.
#[must_use]
pub fn thread_cpu_time() -> Duration {
    read(ClockId::ThreadCPUTime)
}

fn read(clock: ClockId) -> Duration {
    let time = clock_gettime(clock);
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec.unsigned_abs() as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_threads_work_counts_for_it_and_for_its_process() {
        let (process, thread) = (cpu_time(), thread_cpu_time());
        let goal = thread + Duration::from_millis(1);
        while thread_cpu_time() < goal {
            std::hint::spin_loop();
        }
        assert!(cpu_time() >= process + Duration::from_millis(1));
    }
}
