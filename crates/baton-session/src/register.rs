use std::fmt;

use baton_units::ReplicaId;

/// Counts the attempts of one request; the current one alone may add to the client's stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Epoch(pub u32);

impl fmt::Display for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "e{}", self.0)
    }
}

/// Who computes a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Owner {
    pub replica: ReplicaId,
    pub epoch: Epoch,
}

/// What to do with output that arrived.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Offer {
    /// Pass it on, without its first `skip` tokens: the client has those.
    Deliver { skip: u32 },
    /// It is not the client's: from an attempt that is over, or all of it was delivered before.
    Drop,
}

/// The owner of a request and how much of each choice its client has.
#[derive(Debug, Default)]
pub(crate) struct Register {
    owner: Option<Owner>,
    epochs: u32,
    choices: Vec<Choice>,
}

#[derive(Debug, Default, Clone, Copy)]
struct Choice {
    delivered: u32,
    finished: bool,
}

/// An index past the next one: output in between is lost.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Gap;

impl Register {
    pub(crate) fn owner(&self) -> Option<Owner> {
        self.owner
    }

    pub(crate) fn is_current(&self, epoch: Epoch) -> bool {
        self.owner.is_some_and(|owner| owner.epoch == epoch)
    }

    pub(crate) fn attempts(&self) -> u32 {
        self.epochs
    }

    /// Makes `replica` the owner under a new epoch. The former owner must have been released.
    pub(crate) fn take(&mut self, replica: ReplicaId) -> Owner {
        assert!(self.owner.is_none(), "a request has one owner");
        self.epochs += 1;
        let owner = Owner { replica, epoch: Epoch(self.epochs) };
        self.owner = Some(owner);
        owner
    }

    /// The attempt under `epoch` goes on at `replica`.
    pub(crate) fn move_to(&mut self, epoch: Epoch, replica: ReplicaId) {
        if let Some(owner) = self.owner.as_mut().filter(|owner| owner.epoch == epoch) {
            owner.replica = replica;
        }
    }

    pub(crate) fn release(&mut self) -> Option<Owner> {
        self.owner.take()
    }

    /// Forgets all output, for a client that has been shown none of it.
    pub(crate) fn forget_output(&mut self) {
        self.choices.clear();
    }

    /// Tokens delivered over all choices.
    pub(crate) fn delivered(&self) -> u64 {
        self.choices.iter().map(|choice| u64::from(choice.delivered)).sum()
    }

    pub(crate) fn delivered_of(&self, choice: u32) -> u32 {
        self.choices.get(choice as usize).map_or(0, |choice| choice.delivered)
    }

    /// Tokens `index..index + count` of `choice` under `epoch`.
    pub(crate) fn offer(&mut self, epoch: Epoch, choice: u32, index: u32, count: u32) -> Result<Offer, Gap> {
        if !self.is_current(epoch) {
            return Ok(Offer::Drop);
        }
        let choice = self.choice_mut(choice);
        if index > choice.delivered || (choice.finished && count > 0) {
            return Err(Gap);
        }
        let skip = choice.delivered - index;
        if skip >= count && count > 0 {
            return Ok(Offer::Drop);
        }
        choice.delivered += count.saturating_sub(skip);
        Ok(Offer::Deliver { skip })
    }

    pub(crate) fn finish(&mut self, choice: u32) {
        self.choice_mut(choice).finished = true;
    }

    /// Whether every choice has finished: all `expected` ones, or every one seen when the number is not known.
    pub(crate) fn is_complete(&self, expected: Option<u32>) -> bool {
        let finished = self.choices.iter().filter(|choice| choice.finished).count();
        let wanted = expected.map_or(self.choices.len(), |expected| self.choices.len().max(expected as usize));
        finished == wanted && finished > 0
    }

    fn choice_mut(&mut self, choice: u32) -> &mut Choice {
        let choice = choice as usize;
        if self.choices.len() <= choice {
            self.choices.resize(choice + 1, Choice::default());
        }
        &mut self.choices[choice]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn owned() -> (Register, Epoch) {
        let mut register = Register::default();
        let epoch = register.take(ReplicaId(0)).epoch;
        (register, epoch)
    }

    #[test]
    fn a_token_is_delivered_once_and_in_order() {
        let (mut register, epoch) = owned();
        assert_eq!(register.offer(epoch, 0, 0, 2), Ok(Offer::Deliver { skip: 0 }));
        assert_eq!(register.offer(epoch, 0, 0, 2), Ok(Offer::Drop));
        assert_eq!(register.offer(epoch, 0, 1, 3), Ok(Offer::Deliver { skip: 1 }));
        assert_eq!(register.offer(epoch, 0, 5, 1), Err(Gap));
        assert_eq!(register.delivered_of(0), 4);
    }

    #[test]
    fn output_of_an_attempt_that_is_over_is_dropped() {
        let (mut register, old) = owned();
        register.release();
        let new = register.take(ReplicaId(1)).epoch;
        assert_eq!(register.offer(old, 0, 0, 1), Ok(Offer::Drop));
        assert_eq!(register.offer(new, 0, 0, 1), Ok(Offer::Deliver { skip: 0 }));
    }

    #[test]
    fn all_expected_choices_must_finish() {
        let (mut register, epoch) = owned();
        register.offer(epoch, 0, 0, 1).unwrap();
        register.finish(0);
        assert!(register.is_complete(None) && register.is_complete(Some(1)) && !register.is_complete(Some(2)));
        assert!(!Register::default().is_complete(None));
    }
}
