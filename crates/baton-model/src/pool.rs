//! Threads that share one piece of work after another.

use std::marker::PhantomData;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;

/// How often a waiting thread looks before it sleeps. Steps have hundreds of pieces a few microseconds apart, so waking by the
/// system each time would cost more than the work; but spinning for long steals the core from other processes.
const SPINS: u32 = 2_000;

/// A pool of threads; the caller's is one of them.
///
/// Parts of the work are handed out one by one, so a helper that the system does not run holds up nothing but the part it took.
pub(crate) struct Pool {
    shared: Arc<Shared>,
    helpers: Vec<JoinHandle<()>>,
}

struct Shared {
    state: Mutex<State>,
    /// Counts pieces of work and the end, so that helpers can look without the lock.
    generation: AtomicU64,
    changed: Condvar,
    /// Helpers inside the present work.
    active: AtomicUsize,
    idle: Condvar,
    panicked: AtomicBool,
}

struct State {
    work: Option<Work>,
    stop: bool,
}

/// The present work. The pointers are valid while `State::work` is set or a helper is counted in `active`.
#[derive(Clone, Copy)]
struct Work {
    run: *const (dyn Fn(usize) + Sync),
    next: *const AtomicUsize,
    parts: usize,
}

// SAFETY: `run` is `Sync` and `next` is atomic, so both may be used from any thread; their lifetime is guarded as said above.
unsafe impl Send for Work {}

impl Pool {
    pub(crate) fn new(threads: usize) -> Self {
        let shared = Arc::new(Shared {
            state: Mutex::new(State { work: None, stop: false }),
            generation: AtomicU64::new(0),
            changed: Condvar::new(),
            active: AtomicUsize::new(0),
            idle: Condvar::new(),
            panicked: AtomicBool::new(false),
        });
        let helper = |index| {
            let shared = Arc::clone(&shared);
            let builder = std::thread::Builder::new().name(format!("baton-cpu-{index}"));
            builder.spawn(move || shared.help()).expect("the system starts threads")
        };
        let helpers = (1..threads).map(helper).collect();
        Self { shared, helpers }
    }

    pub(crate) fn threads(&self) -> usize {
        self.helpers.len() + 1
    }

    /// Runs `run(0)` to `run(parts - 1)`, each once, and returns when all are done.
    pub(crate) fn run(&self, parts: usize, run: impl Fn(usize) + Sync) {
        if self.helpers.is_empty() || parts <= 1 {
            (0..parts).for_each(run);
            return;
        }
        let next = AtomicUsize::new(0);
        let run: &(dyn Fn(usize) + Sync) = &run;
        // SAFETY: only the lifetime changes. `Finish` waits, also when a part panics here, until no helper uses the pointers.
        let run: &'static (dyn Fn(usize) + Sync) = unsafe { std::mem::transmute(run) };
        let work = Work { run, next: &raw const next, parts };
        let finish = Finish(&self.shared);
        self.shared.announce(|state| state.work = Some(work));
        take_parts(run, &next, parts);
        drop(finish);
        assert!(!self.shared.panicked.load(Ordering::Relaxed), "a thread of the pool panicked");
    }
}

/// Withdraws the work and waits for the helpers inside it.
struct Finish<'a>(&'a Shared);

impl Drop for Finish<'_> {
    fn drop(&mut self) {
        self.0.lock().work = None;
        for _ in 0..SPINS {
            if self.0.active.load(Ordering::Acquire) == 0 {
                return;
            }
            std::hint::spin_loop();
        }
        let mut state = self.0.lock();
        while self.0.active.load(Ordering::Acquire) != 0 {
            state = self.0.idle.wait(state).expect("no thread panics while it holds the lock");
        }
    }
}

fn take_parts(run: &(dyn Fn(usize) + Sync), next: &AtomicUsize, parts: usize) {
    loop {
        let part = next.fetch_add(1, Ordering::Relaxed);
        if part >= parts {
            return;
        }
        run(part);
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no thread panics while it holds the lock")
    }

    /// Changes the state and lets every helper see it.
    fn announce(&self, change: impl FnOnce(&mut State)) {
        let mut state = self.lock();
        change(&mut state);
        self.generation.fetch_add(1, Ordering::Release);
        drop(state);
        self.changed.notify_all();
    }

    fn help(&self) {
        let mut seen = 0;
        while let Some(work) = self.join(&mut seen) {
            // SAFETY: `join` counted this thread in `active` while the work was set.
            let (run, next) = unsafe { (&*work.run, &*work.next) };
            // The caller must not wait for ever for a thread that is gone; it panics in our place.
            if catch_unwind(AssertUnwindSafe(|| take_parts(run, next, work.parts))).is_err() {
                self.panicked.store(true, Ordering::Relaxed);
            }
            let state = self.lock();
            if self.active.fetch_sub(1, Ordering::Release) == 1 {
                self.idle.notify_all();
            }
            drop(state);
        }
    }

    /// Waits for work that this thread has not seen and enters it; `None` at the end of the pool.
    fn join(&self, seen: &mut u64) -> Option<Work> {
        for _ in 0..SPINS {
            if self.generation.load(Ordering::Acquire) != *seen {
                break;
            }
            std::hint::spin_loop();
        }
        let mut state = self.lock();
        loop {
            if state.stop {
                return None;
            }
            let generation = self.generation.load(Ordering::Acquire);
            if generation != *seen {
                *seen = generation;
                if let Some(work) = state.work {
                    self.active.fetch_add(1, Ordering::Relaxed);
                    return Some(work);
                }
            }
            state = self.changed.wait(state).expect("no thread panics while it holds the lock");
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.announce(|state| state.stop = true);
        for helper in self.helpers.drain(..) {
            helper.join().expect("helpers catch panics");
        }
    }
}

/// A matrix of rows whose parts are written by several threads.
pub(crate) struct SharedRows<'a> {
    start: *mut f32,
    rows: usize,
    columns: usize,
    borrow: PhantomData<&'a mut [f32]>,
}

// SAFETY: the only access is `part`, whose callers promise that no two threads have overlapping parts.
unsafe impl Sync for SharedRows<'_> {}

impl<'a> SharedRows<'a> {
    pub(crate) fn new(values: &'a mut [f32], columns: usize) -> Self {
        Self { start: values.as_mut_ptr(), rows: values.len() / columns, columns, borrow: PhantomData }
    }

    /// Some columns of one row.
    ///
    /// # Safety
    /// While the result lives no other part may be had that overlaps it.
    #[inline(always)]
    #[allow(clippy::mut_from_ref)] // The caller promises what a borrow would prove.
    pub(crate) unsafe fn part(&self, row: usize, columns: Range<usize>) -> &mut [f32] {
        assert!(row < self.rows && columns.start <= columns.end && columns.end <= self.columns);
        // SAFETY: the range lies in the borrowed slice, and the caller promises that it overlaps no other.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(row * self.columns + columns.start), columns.len()) }
    }
}
