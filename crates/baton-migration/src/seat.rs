use baton_units::Incarnation;

use crate::{
    Place, Tag,
    message::{Entry, LostClass, Phase, ToGateway, ToPeer, ToSeat},
};

/// What one life of a replica knows of one request: what it holds, and the highest tag that it ran or stopped.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Seat<E> {
    incarnation: Incarnation,
    /// The tombstone: what is tagged up to this is over here, or was replaced.
    pub(crate) seen: Tag,
    pub(crate) holding: Option<Holding<E>>,
}

/// What a replica holds of a request.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Holding<E> {
    pub phase: Phase,
    /// Epoch, or attempt while [`Phase::is_arriving`].
    pub tag: Tag,
    /// The last attempt that it was part of, in either role; a source honours each once.
    pub attempt: Tag,
    /// The other side of `attempt`.
    pub peer: Option<Place>,
    /// All output, from index 0.
    pub entries: Vec<E>,
    /// Entries that the client has.
    pub acked: u32,
    /// Computes nothing until the gateway has confirmed it as the owner.
    pub paused: bool,
}

/// KV from which a request starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kv {
    /// That was moved here for the attempt, or that it ran with here before. It is good for so many entries; the rest is computed.
    Kept { entries: u32 },
    /// None: computed again from the prompt and the entries, as far as the prefix cache has nothing.
    None,
}

/// What the engine must do for a seat.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Work {
    /// Run the holding's entries on.
    Run { kv: Kv },
    /// Copy to the target while running, then freeze at the end of a step and call [`Seat::frozen`].
    Copy { attempt: Tag, target: Place },
    /// The copy for the attempt is over, whatever it had reached.
    EndCopy { attempt: Tag },
    /// Frozen before: join the batch again.
    Thaw,
    /// Compute no more until told to run or thaw, and keep the blocks.
    Pause,
    /// Let the blocks go; full ones stay as prefix cache.
    Free,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum SeatOutput<E> {
    ToGateway(ToGateway<E>),
    ToPeer { to: Place, message: ToPeer<E> },
    Work(Work),
}

impl<E: Entry> Seat<E> {
    pub fn new(incarnation: Incarnation) -> Self {
        Self { incarnation, seen: Tag::default(), holding: None }
    }

    pub fn incarnation(&self) -> Incarnation {
        self.incarnation
    }

    pub fn seen(&self) -> Tag {
        self.seen
    }

    pub fn holding(&self) -> Option<&Holding<E>> {
        self.holding.as_ref()
    }

    /// Whether the engine computes for it.
    pub fn is_computing(&self) -> bool {
        self.holding.as_ref().is_some_and(Holding::is_computing)
    }

    /// A message of the gateway. One for another incarnation must not come here.
    pub fn handle(&mut self, message: ToSeat<E>, out: &mut Vec<SeatOutput<E>>) {
        match message {
            ToSeat::Start { epoch, delivered } => self.start(epoch, delivered, out),
            ToSeat::Keep { epoch, next } => self.keep(epoch, next, out),
            ToSeat::Move { epoch, attempt, target } => self.begin_move(epoch, attempt, target, out),
            ToSeat::No { epoch, attempt } => self.no(epoch, attempt, out),
            ToSeat::Resume { epoch, attempt, resumed, next } => self.resume(epoch, attempt, resumed, next, out),
            ToSeat::Stop { upto } => self.stop(upto, out),
            ToSeat::Ack { epoch, next } => {
                if let Some(holding) = self.holding.as_mut().filter(|holding| holding.tag == epoch) {
                    holding.acked = holding.acked.max(next);
                }
            }
        }
    }

    /// A message of the other side of an attempt, `from`.
    pub fn handle_peer(&mut self, from: Place, message: ToPeer<E>, out: &mut Vec<SeatOutput<E>>) {
        match message {
            ToPeer::Prepare { attempt } => self.prepare(from, attempt, out),
            ToPeer::State { attempt, entries } => {
                let Some(holding) = self.arriving(attempt) else { return };
                if holding.phase == Phase::Preparing {
                    holding.phase = Phase::Prepared;
                    holding.entries = entries;
                }
                let entries = holding.entries.len() as u32;
                out.push(SeatOutput::ToPeer { to: from, message: ToPeer::Prepared { attempt, entries } });
            }
            ToPeer::Prepared { attempt, entries } => {
                let Some(holding) = &mut self.holding else { return };
                if holding.phase == Phase::Frozen && holding.attempt == attempt && holding.entries.len() as u32 == entries {
                    holding.phase = Phase::Asking;
                    out.push(SeatOutput::ToGateway(holding.commit_target()));
                }
            }
            ToPeer::Abort { attempt } => {
                let Some(holding) = &self.holding else { return };
                if holding.attempt != attempt {
                    return;
                }
                match holding.phase {
                    Phase::Copying | Phase::Frozen => self.abort(out),
                    Phase::Preparing | Phase::Prepared => self.withdraw(out),
                    // Once the gateway may have been asked, only its answer counts.
                    Phase::Running | Phase::Asking | Phase::Reclaiming | Phase::Withdrawing => {}
                }
            }
        }
    }

    /// The engine computed the next entry.
    pub fn output(&mut self, entry: E, out: &mut Vec<SeatOutput<E>>) {
        let Some(holding) = self.holding.as_mut().filter(|holding| holding.is_computing()) else { return };
        let finish = entry.is_finish();
        out.push(SeatOutput::ToGateway(ToGateway::Output {
            epoch: holding.tag,
            index: holding.entries.len() as u32,
            entry: entry.clone(),
        }));
        holding.entries.push(entry);
        if finish && holding.phase == Phase::Copying {
            self.abort(out);
        }
    }

    /// The engine has frozen it at the end of a step, for the copy that is under way.
    pub fn frozen(&mut self, out: &mut Vec<SeatOutput<E>>) {
        let Some(holding) = self.holding.as_mut().filter(|holding| holding.phase == Phase::Copying) else { return };
        holding.phase = Phase::Frozen;
        out.extend(holding.state());
    }

    /// Gives an attempt up that the gateway was not asked to commit. The request goes on here, frozen or not.
    pub fn abort(&mut self, out: &mut Vec<SeatOutput<E>>) {
        let Some(holding) = &mut self.holding else { return };
        if !matches!(holding.phase, Phase::Copying | Phase::Frozen) {
            return;
        }
        let thaw = holding.phase == Phase::Frozen;
        holding.phase = Phase::Running;
        let attempt = holding.attempt;
        out.push(SeatOutput::Work(Work::EndCopy { attempt }));
        if thaw && !holding.paused {
            out.push(SeatOutput::Work(Work::Thaw));
        }
        out.extend(holding.peer.map(|to| SeatOutput::ToPeer { to, message: ToPeer::Abort { attempt } }));
        out.push(SeatOutput::ToGateway(ToGateway::Aborted { epoch: holding.tag, attempt }));
    }

    /// The gateway does not answer whether the target is the owner: asks it to leave this one the owner.
    pub fn reclaim(&mut self, out: &mut Vec<SeatOutput<E>>) {
        let Some(holding) = self.holding.as_mut().filter(|holding| holding.phase == Phase::Asking) else { return };
        holding.phase = Phase::Reclaiming;
        out.push(SeatOutput::ToGateway(holding.commit_source()));
    }

    /// The request has not come for long: asks whether it still does. What is prepared goes only when the gateway says so.
    pub fn withdraw(&mut self, out: &mut Vec<SeatOutput<E>>) {
        let Some(holding) = &mut self.holding else { return };
        if matches!(holding.phase, Phase::Preparing | Phase::Prepared) {
            holding.phase = Phase::Withdrawing;
            out.push(SeatOutput::ToGateway(ToGateway::Withdraw { attempt: holding.tag }));
        }
    }

    /// The gateway's lease has run out for computing: keeps what it has, and goes on when the gateway confirms it.
    pub fn pause(&mut self, out: &mut Vec<SeatOutput<E>>) {
        let Some(holding) = self.holding.as_mut().filter(|holding| !holding.phase.is_arriving() && !holding.paused) else { return };
        if holding.is_computing() {
            out.push(SeatOutput::Work(Work::Pause));
        }
        holding.paused = true;
    }

    /// The gateway's lease has run out altogether: nobody asks for this any more.
    pub fn lapse(&mut self, out: &mut Vec<SeatOutput<E>>) {
        if let Some(holding) = &self.holding {
            self.seen = self.seen.max(holding.tag);
            self.drop_holding(out);
        }
    }

    /// What it owns cannot be run here: forgets it up to its epoch, and tells the gateway.
    pub fn cannot_run(&mut self, class: LostClass, out: &mut Vec<SeatOutput<E>>) {
        let Some(epoch) = self.holding.as_ref().filter(|holding| !holding.phase.is_arriving()).map(|holding| holding.tag) else { return };
        self.drop_holding(out);
        self.seen = self.seen.max(epoch);
        out.push(SeatOutput::ToGateway(ToGateway::Lost { epoch, class }));
    }

    /// Whether [`Self::unanswered`] has something.
    pub fn is_waiting(&self) -> bool {
        self.holding.as_ref().is_some_and(|holding| match holding.phase {
            Phase::Running => holding.entries.len() as u32 > holding.acked,
            Phase::Preparing => false,
            Phase::Copying | Phase::Frozen | Phase::Asking | Phase::Reclaiming | Phase::Prepared | Phase::Withdrawing => true,
        })
    }

    /// What the other side may have missed: the same again does no harm.
    pub fn unanswered(&self) -> Vec<SeatOutput<E>> {
        let Some(holding) = &self.holding else { return Vec::new() };
        match holding.phase {
            Phase::Running => holding.outputs_from(holding.acked),
            Phase::Copying => {
                let prepare = |to| SeatOutput::ToPeer { to, message: ToPeer::Prepare { attempt: holding.attempt } };
                holding.outputs_from(holding.acked).into_iter().chain(holding.peer.map(prepare)).collect()
            }
            Phase::Frozen => holding.outputs_from(holding.acked).into_iter().chain(holding.state()).collect(),
            Phase::Asking => {
                let ask = SeatOutput::ToGateway(holding.commit_target());
                holding.outputs_from(holding.acked).into_iter().chain([ask]).collect()
            }
            Phase::Reclaiming => {
                let ask = SeatOutput::ToGateway(holding.commit_source());
                holding.outputs_from(holding.acked).into_iter().chain([ask]).collect()
            }
            Phase::Preparing => Vec::new(),
            Phase::Prepared => {
                let (attempt, entries) = (holding.tag, holding.entries.len() as u32);
                holding.peer.map(|to| SeatOutput::ToPeer { to, message: ToPeer::Prepared { attempt, entries } }).into_iter().collect()
            }
            Phase::Withdrawing => vec![SeatOutput::ToGateway(ToGateway::Withdraw { attempt: holding.tag })],
        }
    }

    fn start(&mut self, epoch: Tag, delivered: Vec<E>, out: &mut Vec<SeatOutput<E>>) {
        let next = delivered.len() as u32;
        let arrived = |holding: &Holding<E>| holding.tag == epoch && holding.phase.is_arriving();
        if !self.holding.as_ref().is_some_and(arrived) {
            if let Some(holding) = self.holding.as_mut().filter(|holding| holding.tag == epoch) {
                // Heard before; it may not have been answered.
                holding.unpause(out);
                out.extend(holding.outputs_from(next));
                return;
            }
            if epoch <= self.seen || self.holding.as_ref().is_some_and(|holding| holding.tag > epoch) {
                out.push(SeatOutput::ToGateway(ToGateway::Lost { epoch, class: LostClass::Lost }));
                return;
            }
        }
        // What it has beyond the client's entries is as good as those, if it was computed from them.
        let (entries, kv) = match self.holding.take() {
            None => (delivered, Kv::None),
            Some(former) => {
                out.extend(former.end_of_copy());
                if former.phase == Phase::Preparing {
                    (delivered, Kv::Kept { entries: 0 })
                } else if former.entries.starts_with(&delivered) {
                    let kept = former.entries.len() as u32;
                    (former.entries, Kv::Kept { entries: kept })
                } else {
                    let same = former.entries.iter().zip(&delivered).take_while(|(a, b)| a == b).count();
                    (delivered, Kv::Kept { entries: same as u32 })
                }
            }
        };
        self.seen = self.seen.max(epoch);
        let holding = Holding { phase: Phase::Running, tag: epoch, attempt: epoch, peer: None, entries, acked: next, paused: false };
        if holding.is_computing() {
            out.push(SeatOutput::Work(Work::Run { kv }));
        } else {
            out.push(SeatOutput::Work(Work::Free));
        }
        out.extend(holding.outputs_from(next));
        self.holding = Some(holding);
    }

    fn keep(&mut self, epoch: Tag, next: u32, out: &mut Vec<SeatOutput<E>>) {
        match &mut self.holding {
            Some(holding) if holding.tag == epoch && !holding.phase.is_arriving() => {
                holding.unpause(out);
                out.extend(holding.outputs_from(next));
            }
            // What arrives may have been committed: then its own question is answered.
            Some(_) => {}
            None => {
                self.seen = self.seen.max(epoch);
                out.push(SeatOutput::ToGateway(ToGateway::Lost { epoch, class: LostClass::Lost }));
            }
        }
    }

    fn begin_move(&mut self, epoch: Tag, attempt: Tag, target: Place, out: &mut Vec<SeatOutput<E>>) {
        let Some(holding) = &mut self.holding else { return };
        if holding.phase != Phase::Running || holding.tag != epoch {
            return;
        }
        if holding.attempt == attempt {
            // It ended here; that it did may not have been heard.
            out.push(SeatOutput::ToGateway(ToGateway::Aborted { epoch, attempt }));
        }
        if !holding.is_computing() || holding.attempt >= attempt {
            return;
        }
        holding.phase = Phase::Copying;
        holding.attempt = attempt;
        holding.peer = Some(target);
        out.push(SeatOutput::ToPeer { to: target, message: ToPeer::Prepare { attempt } });
        out.push(SeatOutput::Work(Work::Copy { attempt, target }));
    }

    /// The attempt is over, and so is every one before it. It is answered whatever is left of them here: the gateway says it until it is.
    fn no(&mut self, epoch: Tag, attempt: Tag, out: &mut Vec<SeatOutput<E>>) {
        let Some(holding) = self.holding.as_ref().filter(|holding| holding.tag == epoch && !holding.phase.is_arriving()) else { return };
        if holding.attempt <= attempt {
            match holding.phase {
                Phase::Asking => return self.reclaim(out),
                Phase::Reclaiming => return out.push(SeatOutput::ToGateway(holding.commit_source())),
                Phase::Copying | Phase::Frozen => self.abort(out),
                Phase::Running | Phase::Preparing | Phase::Prepared | Phase::Withdrawing => {}
            }
        }
        let holding = self.holding.as_mut().expect("it was just seen");
        // A message to move for it may be under way still.
        holding.attempt = holding.attempt.max(attempt);
        let answer = SeatOutput::ToGateway(ToGateway::Aborted { epoch, attempt });
        if out.last() != Some(&answer) {
            out.push(answer);
        }
    }

    fn resume(&mut self, epoch: Tag, attempt: Tag, resumed: Tag, next: u32, out: &mut Vec<SeatOutput<E>>) {
        if !self.is_at(Phase::Reclaiming, epoch, attempt) {
            return;
        }
        let holding = self.holding.as_mut().expect("it is at a phase");
        holding.phase = Phase::Running;
        holding.tag = resumed;
        holding.paused = false;
        self.seen = self.seen.max(resumed);
        out.push(SeatOutput::Work(Work::EndCopy { attempt }));
        out.push(SeatOutput::Work(Work::Thaw));
        out.extend(holding.outputs_from(next));
    }

    fn stop(&mut self, upto: Tag, out: &mut Vec<SeatOutput<E>>) {
        if self.holding.as_ref().is_some_and(|holding| holding.tag <= upto) {
            self.drop_holding(out);
        }
        self.seen = self.seen.max(upto);
        out.push(SeatOutput::ToGateway(ToGateway::Stopped { upto }));
    }

    fn prepare(&mut self, from: Place, attempt: Tag, out: &mut Vec<SeatOutput<E>>) {
        if self.arriving(attempt).is_some() {
            return;
        }
        if attempt <= self.seen || self.holding.as_ref().is_some_and(|holding| holding.tag >= attempt) {
            out.push(SeatOutput::ToPeer { to: from, message: ToPeer::Abort { attempt } });
            return;
        }
        self.drop_holding(out);
        self.seen = self.seen.max(attempt.before());
        self.holding = Some(Holding {
            phase: Phase::Preparing,
            tag: attempt,
            attempt,
            peer: Some(from),
            entries: Vec::new(),
            acked: 0,
            paused: false,
        });
    }

    fn arriving(&mut self, attempt: Tag) -> Option<&mut Holding<E>> {
        self.holding.as_mut().filter(|holding| holding.tag == attempt && holding.phase.is_arriving())
    }

    fn is_at(&self, phase: Phase, tag: Tag, attempt: Tag) -> bool {
        self.holding.as_ref().is_some_and(|holding| (holding.phase, holding.tag, holding.attempt) == (phase, tag, attempt))
    }

    fn drop_holding(&mut self, out: &mut Vec<SeatOutput<E>>) {
        if let Some(holding) = self.holding.take() {
            out.extend(holding.end_of_copy());
            out.push(SeatOutput::Work(Work::Free));
        }
    }
}

impl<E: Entry> Holding<E> {
    pub fn has_finished(&self) -> bool {
        self.entries.last().is_some_and(Entry::is_finish)
    }

    pub fn is_computing(&self) -> bool {
        matches!(self.phase, Phase::Running | Phase::Copying) && !self.has_finished() && !self.paused
    }

    fn unpause(&mut self, out: &mut Vec<SeatOutput<E>>) {
        if self.paused {
            self.paused = false;
            if self.is_computing() {
                out.push(SeatOutput::Work(Work::Thaw));
            }
        }
    }

    fn outputs_from(&self, next: u32) -> Vec<SeatOutput<E>> {
        let (epoch, skipped) = (self.tag, next as usize);
        let numbered = self.entries.iter().enumerate().skip(skipped);
        numbered
            .map(|(index, entry)| SeatOutput::ToGateway(ToGateway::Output { epoch, index: index as u32, entry: entry.clone() }))
            .collect()
    }

    fn state(&self) -> Option<SeatOutput<E>> {
        let message = ToPeer::State { attempt: self.attempt, entries: self.entries.clone() };
        self.peer.map(|to| SeatOutput::ToPeer { to, message })
    }

    fn end_of_copy(&self) -> Option<SeatOutput<E>> {
        let copies = matches!(self.phase, Phase::Copying | Phase::Frozen | Phase::Asking | Phase::Reclaiming);
        copies.then_some(SeatOutput::Work(Work::EndCopy { attempt: self.attempt }))
    }

    fn commit_target(&self) -> ToGateway<E> {
        ToGateway::CommitTarget { epoch: self.tag, attempt: self.attempt, frozen: self.entries.len() as u32 }
    }

    fn commit_source(&self) -> ToGateway<E> {
        ToGateway::CommitSource { epoch: self.tag, attempt: self.attempt, frozen: self.entries.len() as u32 }
    }
}
