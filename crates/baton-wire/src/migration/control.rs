use baton_migration::{LostClass, Phase, Place, RequestName, Tag, ToGateway, ToSeat};
use serde::{Deserialize, Serialize};

use super::{
    FrameError, OutputEntry, Sealer,
    body::{Bytes, Name, Payload, body, name, place, read, request, wire_place},
};

/// Of a replica's engine, sent to each gateway that is attached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Heartbeat {
    pub sequence: u64,
    /// Steps that the engine has finished.
    pub steps: u64,
    /// How long the engine thinks that the running step takes, in microseconds; 0 when none runs.
    pub step_predicted_us: u64,
    pub waiting: u32,
    pub running: u32,
}

/// A frame between a gateway and a replica.
#[derive(Debug, Clone, PartialEq)]
pub enum ControlFrame {
    /// Replica.
    Heartbeat(Heartbeat),
    /// Gateway: the heartbeat came.
    Lease { sequence: u64 },
    /// Replica, after a gateway attached or answers again: one for each request that it holds.
    Holds { request: RequestName, phase: Phase, tag: Tag, entries: u32 },
    /// Replica: all that it holds was told.
    AllHeld,
    /// Gateway, to a target before the source is told to move: who will come.
    Expect { request: RequestName, attempt: Tag, source: Place, nonce: [u8; 16] },
    /// Gateway. A start carries what to run, a move where the target's KV is taken and with which nonce.
    ToSeat { request: RequestName, message: ToSeat<OutputEntry>, with: Vec<u8> },
    /// Replica. `why`, of an attempt that was aborted and of a request that is lost, is a short text for people, empty where there is none.
    /// Other messages carry none.
    ToGateway { request: RequestName, message: ToGateway<OutputEntry>, why: String },
    /// Replica, once before the first output of a request whose prompt it computed: a hint, which may be lost.
    Scheduled {
        request: RequestName,
        epoch: Tag,
        /// Prompt tokens whose KV was in the prefix cache.
        cached: u32,
        /// From the start being heard to the first step that computed something for it, in microseconds.
        waited_us: u64,
    },
    /// Source, behind the message that asks to commit: what the move took. A hint, which may be lost.
    Moved { request: RequestName, attempt: Tag, copied: Copied },
    /// Gateway, to a replica that says in its report that it copies prefixes: bring what is cached of a prefix to `target`, which was told
    /// to expect it. `to` is a [`MoveTo`](super::MoveTo), `prefix` a [`RunRequest`](super::RunRequest) of which model, prompt, adapter and
    /// salt count.
    CopyPrefix { request: RequestName, attempt: Tag, target: Place, to: Vec<u8>, prefix: Vec<u8> },
    /// Either replica of a copied prefix: it is in its cache.
    PrefixCopied { request: RequestName, attempt: Tag, copied: PrefixCopied },
}

/// What the copy of a prefix came to, as one of its sides saw it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PrefixCopied {
    /// Leading blocks of the prefix that are in the cache of this side.
    pub blocks: u32,
    /// Blocks that the target had already.
    pub held: u32,
    /// Of the blocks that travelled.
    pub bytes: u64,
    /// From the order at the holder, or the connection at the target, to the end.
    pub took_us: u64,
}

/// What was copied for one attempt to move a request, as its source saw it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Copied {
    /// Of the blocks that were sent.
    pub bytes: u64,
    /// Blocks that the target had already.
    pub held: u32,
    /// Passes over new blocks while the request ran; the last blocks, sent while it stood still, are none.
    pub rounds: u32,
    /// From the end of the request's last step until the gateway was asked to commit, in microseconds.
    pub gap_us: u64,
}

fn phase_number(phase: Phase) -> u8 {
    PHASES.iter().position(|listed| *listed == phase).expect("all are listed") as u8
}

/// By their numbers on the wire.
const PHASES: [Phase; 8] = [
    Phase::Running,
    Phase::Copying,
    Phase::Frozen,
    Phase::Asking,
    Phase::Reclaiming,
    Phase::Preparing,
    Phase::Prepared,
    Phase::Withdrawing,
];

fn class_name(class: LostClass) -> &'static str {
    match class {
        LostClass::Lost => "lost",
        LostClass::Refused => "refused",
        LostClass::Busy => "busy",
    }
}

/// What a later version may add says as little as that the request is lost.
fn class_named(name: &str) -> LostClass {
    match name {
        "refused" => LostClass::Refused,
        "busy" => LostClass::Busy,
        _ => LostClass::Lost,
    }
}

/// Of the frame that carries a [`MoveTo`](super::MoveTo).
pub(super) const MOVE_KIND: u16 = kind::MOVE;

mod kind {
    pub(super) const HEARTBEAT: u16 = 0x10;
    pub(super) const LEASE: u16 = 0x11;
    pub(super) const HOLDS: u16 = 0x12;
    pub(super) const ALL_HELD: u16 = 0x13;
    pub(super) const START: u16 = 0x20;
    pub(super) const KEEP: u16 = 0x21;
    pub(super) const EXPECT: u16 = 0x22;
    pub(super) const MOVE: u16 = 0x23;
    pub(super) const NO: u16 = 0x24;
    pub(super) const RESUME: u16 = 0x25;
    pub(super) const STOP: u16 = 0x26;
    pub(super) const ACK: u16 = 0x27;
    pub(super) const COPY: u16 = 0x28;
    pub(super) const OUTPUT: u16 = 0x30;
    pub(super) const COMMIT_TARGET: u16 = 0x31;
    pub(super) const COMMIT_SOURCE: u16 = 0x32;
    pub(super) const ABORTED: u16 = 0x33;
    pub(super) const WITHDRAW: u16 = 0x34;
    pub(super) const STOPPED: u16 = 0x35;
    pub(super) const LOST: u16 = 0x36;
    pub(super) const SCHEDULED: u16 = 0x37;
    pub(super) const MOVED: u16 = 0x38;
    pub(super) const COPIED: u16 = 0x39;
}

impl ControlFrame {
    /// Appends the frame to `out`.
    pub fn seal(&self, sealer: &mut Sealer, out: &mut Vec<u8>) {
        let (kind, body) = self.encode();
        sealer.seal(kind, &body, out);
    }

    fn encode(&self) -> (u16, Vec<u8>) {
        match self {
            Self::Heartbeat(beat) => (kind::HEARTBEAT, body(beat)),
            Self::Lease { sequence } => (kind::LEASE, body(&(sequence,))),
            Self::Holds { request, phase, tag, entries } => (kind::HOLDS, body(&(name(*request), phase_number(*phase), tag.0, entries))),
            Self::AllHeld => (kind::ALL_HELD, body(&())),
            Self::Expect { request, attempt, source, nonce } => {
                (kind::EXPECT, body(&(name(*request), attempt.0, wire_place(*source), nonce)))
            }
            Self::ToSeat { request, message, with } => {
                let request = name(*request);
                match message {
                    ToSeat::Start { epoch, delivered } => (kind::START, body(&(request, epoch.0, delivered, Bytes(with)))),
                    ToSeat::Keep { epoch, next } => (kind::KEEP, body(&(request, epoch.0, next))),
                    ToSeat::Move { epoch, attempt, target } => {
                        (kind::MOVE, body(&(request, epoch.0, attempt.0, wire_place(*target), Bytes(with))))
                    }
                    ToSeat::No { epoch, attempt } => (kind::NO, body(&(request, epoch.0, attempt.0))),
                    ToSeat::Resume { epoch, attempt, resumed, next } => {
                        (kind::RESUME, body(&(request, epoch.0, attempt.0, resumed.0, next)))
                    }
                    ToSeat::Stop { upto } => (kind::STOP, body(&(request, upto.0))),
                    ToSeat::Ack { epoch, next } => (kind::ACK, body(&(request, epoch.0, next))),
                }
            }
            Self::ToGateway { request, message, why } => {
                let request = name(*request);
                match message {
                    ToGateway::Output { epoch, index, entry } => (kind::OUTPUT, body(&(request, epoch.0, index, entry))),
                    ToGateway::CommitTarget { epoch, attempt, frozen } => {
                        (kind::COMMIT_TARGET, body(&(request, epoch.0, attempt.0, frozen)))
                    }
                    ToGateway::CommitSource { epoch, attempt, frozen } => {
                        (kind::COMMIT_SOURCE, body(&(request, epoch.0, attempt.0, frozen)))
                    }
                    ToGateway::Aborted { epoch, attempt } => (kind::ABORTED, body(&(request, epoch.0, attempt.0, why))),
                    ToGateway::Withdraw { attempt } => (kind::WITHDRAW, body(&(request, attempt.0))),
                    ToGateway::Stopped { upto } => (kind::STOPPED, body(&(request, upto.0))),
                    ToGateway::Lost { epoch, class } => (kind::LOST, body(&(request, epoch.0, class_name(*class), why))),
                }
            }
            Self::Scheduled { request, epoch, cached, waited_us } => (kind::SCHEDULED, body(&(name(*request), epoch.0, cached, waited_us))),
            Self::Moved { request, attempt, copied: Copied { bytes, held, rounds, gap_us } } => {
                (kind::MOVED, body(&(name(*request), attempt.0, bytes, held, rounds, gap_us)))
            }
            Self::CopyPrefix { request, attempt, target, to, prefix } => {
                (kind::COPY, body(&(name(*request), attempt.0, wire_place(*target), Bytes(to), Bytes(prefix))))
            }
            Self::PrefixCopied { request, attempt, copied: PrefixCopied { blocks, held, bytes, took_us } } => {
                (kind::COPIED, body(&(name(*request), attempt.0, blocks, held, bytes, took_us)))
            }
        }
    }

    pub fn decode(kind: u16, body: &[u8]) -> Result<Self, FrameError> {
        let to_seat = |named: Name, message: ToSeat<OutputEntry>, with: Vec<u8>| Self::ToSeat { request: request(named), message, with };
        let reasoned =
            |named: Name, message: ToGateway<OutputEntry>, why: String| Self::ToGateway { request: request(named), message, why };
        let to_gateway = |named: Name, message: ToGateway<OutputEntry>| reasoned(named, message, String::new());
        Ok(match kind {
            kind::HEARTBEAT => Self::Heartbeat(read(kind, body)?),
            kind::LEASE => {
                let (sequence,) = read(kind, body)?;
                Self::Lease { sequence }
            }
            kind::HOLDS => {
                let (named, number, tag, entries): (Name, u8, u32, u32) = read(kind, body)?;
                let phase = PHASES.get(usize::from(number)).copied();
                let phase = phase.ok_or_else(|| FrameError::Malformed { kind, why: format!("no phase has number {number}") })?;
                Self::Holds { request: request(named), phase, tag: Tag(tag), entries }
            }
            kind::ALL_HELD => Self::AllHeld,
            kind::EXPECT => {
                let (named, attempt, source, nonce) = read(kind, body)?;
                Self::Expect { request: request(named), attempt: Tag(attempt), source: place(source), nonce }
            }
            kind::START => {
                let (named, epoch, delivered, Payload(with)) = read(kind, body)?;
                to_seat(named, ToSeat::Start { epoch: Tag(epoch), delivered }, with)
            }
            kind::KEEP => {
                let (named, epoch, next) = read(kind, body)?;
                to_seat(named, ToSeat::Keep { epoch: Tag(epoch), next }, Vec::new())
            }
            kind::MOVE => {
                let (named, epoch, attempt, target, Payload(with)) = read(kind, body)?;
                to_seat(named, ToSeat::Move { epoch: Tag(epoch), attempt: Tag(attempt), target: place(target) }, with)
            }
            kind::NO => {
                let (named, epoch, attempt) = read(kind, body)?;
                to_seat(named, ToSeat::No { epoch: Tag(epoch), attempt: Tag(attempt) }, Vec::new())
            }
            kind::RESUME => {
                let (named, epoch, attempt, resumed, next) = read(kind, body)?;
                to_seat(named, ToSeat::Resume { epoch: Tag(epoch), attempt: Tag(attempt), resumed: Tag(resumed), next }, Vec::new())
            }
            kind::STOP => {
                let (named, upto) = read(kind, body)?;
                to_seat(named, ToSeat::Stop { upto: Tag(upto) }, Vec::new())
            }
            kind::ACK => {
                let (named, epoch, next) = read(kind, body)?;
                to_seat(named, ToSeat::Ack { epoch: Tag(epoch), next }, Vec::new())
            }
            kind::OUTPUT => {
                let (named, epoch, index, entry) = read(kind, body)?;
                to_gateway(named, ToGateway::Output { epoch: Tag(epoch), index, entry })
            }
            kind::COMMIT_TARGET => {
                let (named, epoch, attempt, frozen) = read(kind, body)?;
                to_gateway(named, ToGateway::CommitTarget { epoch: Tag(epoch), attempt: Tag(attempt), frozen })
            }
            kind::COMMIT_SOURCE => {
                let (named, epoch, attempt, frozen) = read(kind, body)?;
                to_gateway(named, ToGateway::CommitSource { epoch: Tag(epoch), attempt: Tag(attempt), frozen })
            }
            kind::ABORTED => {
                let (named, epoch, attempt, why) = read(kind, body)?;
                reasoned(named, ToGateway::Aborted { epoch: Tag(epoch), attempt: Tag(attempt) }, why)
            }
            kind::WITHDRAW => {
                let (named, attempt) = read(kind, body)?;
                to_gateway(named, ToGateway::Withdraw { attempt: Tag(attempt) })
            }
            kind::STOPPED => {
                let (named, upto) = read(kind, body)?;
                to_gateway(named, ToGateway::Stopped { upto: Tag(upto) })
            }
            kind::LOST => {
                let (named, epoch, class, why): (Name, u32, String, String) = read(kind, body)?;
                reasoned(named, ToGateway::Lost { epoch: Tag(epoch), class: class_named(&class) }, why)
            }
            kind::SCHEDULED => {
                let (named, epoch, cached, waited_us) = read(kind, body)?;
                Self::Scheduled { request: request(named), epoch: Tag(epoch), cached, waited_us }
            }
            kind::MOVED => {
                let (named, attempt, bytes, held, rounds, gap_us) = read(kind, body)?;
                Self::Moved { request: request(named), attempt: Tag(attempt), copied: Copied { bytes, held, rounds, gap_us } }
            }
            kind::COPY => {
                let (named, attempt, target, Payload(to), Payload(prefix)) = read(kind, body)?;
                Self::CopyPrefix { request: request(named), attempt: Tag(attempt), target: place(target), to, prefix }
            }
            kind::COPIED => {
                let (named, attempt, blocks, held, bytes, took_us) = read(kind, body)?;
                let copied = PrefixCopied { blocks, held, bytes, took_us };
                Self::PrefixCopied { request: request(named), attempt: Tag(attempt), copied }
            }
            _ => return Err(FrameError::UnknownKind(kind)),
        })
    }
}
