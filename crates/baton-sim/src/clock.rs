use std::{cmp::Reverse, collections::BinaryHeap};

use baton_units::Time;

/// Events in the order of their time; those of one moment in the order in which they were scheduled.
#[derive(Debug)]
pub struct EventQueue<E> {
    events: BinaryHeap<Reverse<Scheduled<E>>>,
    scheduled: u64,
    now: Time,
}

#[derive(Debug)]
struct Scheduled<E> {
    at: Time,
    order: u64,
    event: E,
}

impl<E> Default for EventQueue<E> {
    fn default() -> Self {
        Self { events: BinaryHeap::new(), scheduled: 0, now: Time::ZERO }
    }
}

impl<E> EventQueue<E> {
    /// Schedules an event; one for the past happens now.
    pub fn schedule(&mut self, at: Time, event: E) {
        self.events.push(Reverse(Scheduled { at: at.max(self.now), order: self.scheduled, event }));
        self.scheduled += 1;
    }

    /// Moves the clock to the next event and returns it.
    pub fn pop(&mut self) -> Option<(Time, E)> {
        let Reverse(next) = self.events.pop()?;
        self.now = next.at;
        Some((next.at, next.event))
    }

    pub fn now(&self) -> Time {
        self.now
    }
}

impl<E> PartialEq for Scheduled<E> {
    fn eq(&self, other: &Self) -> bool {
        (self.at, self.order) == (other.at, other.order)
    }
}

impl<E> Eq for Scheduled<E> {}

impl<E> PartialOrd for Scheduled<E> {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl<E> Ord for Scheduled<E> {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at, self.order).cmp(&(other.at, other.order))
    }
}
