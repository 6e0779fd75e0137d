//! A replica that is wrong in one thing fails the case that is about it: a check that cannot fail would be worth nothing.

use std::time::Duration;

use baton_conform::{Options, Suite};
use baton_migration::{LostClass, Phase, Tag, ToGateway, ToSeat};
use baton_wire::migration::{ControlFrame, HeldBlocks, KvFrame, OutputEntry, PrefixCopied};

use crate::{
    proxy::{Change, KvChange, Mutant, Proxy},
    replica::{Fleet, MODEL},
};

/// Nothing is waited for longer where what is waited for never comes.
const PATIENCE: Duration = Duration::from_secs(1);

#[allow(clippy::unnecessary_wraps, reason = "it is one of the changes")]
fn passes(frame: ControlFrame) -> Option<ControlFrame> {
    Some(frame)
}

#[allow(clippy::unnecessary_wraps, reason = "it is one of the changes")]
fn passes_to_sources(frame: KvFrame, _before: u32) -> Option<KvFrame> {
    Some(frame)
}

const fn says(says: Change) -> Mutant {
    Mutant { hears: passes, says, says_to_sources: passes_to_sources }
}

const fn hears(hears: Change) -> Mutant {
    Mutant { hears, says: passes, says_to_sources: passes_to_sources }
}

const fn says_to_sources(says_to_sources: KvChange) -> Mutant {
    Mutant { hears: passes, says: passes, says_to_sources }
}

fn asks_nothing(frame: ControlFrame) -> Option<ControlFrame> {
    told(frame, |message| Some(message).filter(|message| !matches!(message, ToGateway::Withdraw { .. })))
}

fn prepares_nothing(frame: KvFrame, _before: u32) -> Option<KvFrame> {
    Some(frame).filter(|frame| !matches!(frame, KvFrame::Prepared { .. }))
}

/// Tells a request of this phase as a running one.
fn told_as_running(frame: ControlFrame, hidden: Phase) -> ControlFrame {
    match frame {
        ControlFrame::Holds { request, phase, tag, entries } if phase == hidden => {
            ControlFrame::Holds { request, phase: Phase::Running, tag, entries }
        }
        other => other,
    }
}

/// With another message where `change` gives one; none loses it.
fn told(frame: ControlFrame, change: fn(ToGateway<OutputEntry>) -> Option<ToGateway<OutputEntry>>) -> Option<ControlFrame> {
    match frame {
        ControlFrame::ToGateway { request, message, why } => {
            change(message).map(|message| ControlFrame::ToGateway { request, message, why })
        }
        other => Some(other),
    }
}

fn ordered(frame: ControlFrame, change: fn(ToSeat<OutputEntry>) -> Option<ToSeat<OutputEntry>>) -> Option<ControlFrame> {
    match frame {
        ControlFrame::ToSeat { request, message, with } => change(message).map(|message| ControlFrame::ToSeat { request, message, with }),
        other => Some(other),
    }
}

fn other_token(entry: OutputEntry) -> OutputEntry {
    match entry {
        OutputEntry::Token { id, logprobs } => OutputEntry::Token { id: id ^ 1, logprobs },
        finish @ OutputEntry::Finish(_) => finish,
    }
}

/// What is wrong, and the case that finds it.
const MUTANTS: &[(&str, Mutant, &str)] = &[
    ("tells of nothing held, not even that", says(|frame| (!matches!(frame, ControlFrame::AllHeld)).then_some(frame)), "nothing is held"),
    (
        "forgets to tell what it holds",
        says(|frame| (!matches!(frame, ControlFrame::Holds { .. })).then_some(frame)),
        "attaches again is told what is held",
    ),
    (
        "computes another token under a later epoch",
        says(|frame| {
            told(frame, |message| {
                Some(match message {
                    ToGateway::Output { epoch: Tag(3), index: 20, entry } => {
                        ToGateway::Output { epoch: Tag(3), index: 20, entry: other_token(entry) }
                    }
                    other => other,
                })
            })
        }),
        "sampled by a seed",
    ),
    (
        "answers no START that is too old",
        hears(|frame| {
            ordered(frame, |message| {
                Some(match message {
                    // A STOP up to nothing does nothing.
                    ToSeat::Start { epoch: Tag(4), .. } => ToSeat::Stop { upto: Tag(0) },
                    other => other,
                })
            })
        }),
        "a START below what runs is LOST",
    ),
    (
        "sends from its own next entry, not from where KEEP says",
        hears(|frame| {
            ordered(frame, |message| {
                Some(match message {
                    ToSeat::Keep { epoch, .. } => ToSeat::Keep { epoch, next: u32::MAX },
                    other => other,
                })
            })
        }),
        "KEEP goes on and brings",
    ),
    ("never asks whether a request still comes", says(asks_nothing), "a source that leaves before STATE"),
    (
        "does not wait for acknowledgements",
        hears(|frame| {
            ordered(frame, |message| {
                Some(match message {
                    ToSeat::Ack { epoch, .. } => ToSeat::Ack { epoch, next: u32::MAX / 2 },
                    other => other,
                })
            })
        }),
        "nobody acknowledges stands",
    ),
    (
        "never says STOPPED",
        says(|frame| told(frame, |message| Some(message).filter(|message| !matches!(message, ToGateway::Stopped { .. })))),
        "STOP ends what is tagged up to it",
    ),
    (
        "runs on after STOP",
        hears(|frame| {
            ordered(frame, |message| {
                Some(match message {
                    ToSeat::Stop { upto: Tag(3) } => ToSeat::Stop { upto: Tag(2) },
                    other => other,
                })
            })
        }),
        "STOP ends what is tagged up to it",
    ),
    (
        "gives no reason",
        says(|frame| {
            Some(match frame {
                ControlFrame::ToGateway { request, message, .. } => ControlFrame::ToGateway { request, message, why: String::new() },
                other => other,
            })
        }),
        "what cannot be run is LOST with a class",
    ),
    (
        "does not say that nobody will run what it does not",
        says(|frame| {
            told(frame, |message| {
                Some(match message {
                    ToGateway::Lost { epoch, .. } => ToGateway::Lost { epoch, class: LostClass::Lost },
                    other => other,
                })
            })
        }),
        "what cannot be run is LOST with a class",
    ),
    (
        "is silent of why a move ended",
        says(|frame| {
            Some(match frame {
                ControlFrame::ToGateway { request, message, .. } => ControlFrame::ToGateway { request, message, why: String::new() },
                other => other,
            })
        }),
        "REFUSE ends the attempt with its reason",
    ),
    (
        "skips heartbeats",
        says(|frame| match frame {
            ControlFrame::Heartbeat(mut beat) => {
                beat.sequence *= 2;
                Some(ControlFrame::Heartbeat(beat))
            }
            other => Some(other),
        }),
        "heartbeats count",
    ),
    (
        "hears no answer to what it asked",
        hears(|frame| ordered(frame, |message| Some(message).filter(|message| !matches!(message, ToSeat::Resume { .. })))),
        "RESUME lets it go on",
    ),
    (
        "asks to commit one entry too few",
        says(|frame| {
            told(frame, |message| {
                Some(match message {
                    ToGateway::CommitTarget { epoch, attempt, frozen } => {
                        ToGateway::CommitTarget { epoch, attempt, frozen: frozen.saturating_sub(1) }
                    }
                    other => other,
                })
            })
        }),
        "brings every block and all entries",
    ),
    (
        "tells of a prepared request as running",
        says(|frame| {
            Some(match frame {
                ControlFrame::Holds { request, phase: Phase::Prepared, tag, entries } => {
                    ControlFrame::Holds { request, phase: Phase::Running, tag, entries }
                }
                other => other,
            })
        }),
        "a prepared request is told as held",
    ),
    (
        "tells SCHEDULED to nobody",
        says(|frame| (!matches!(frame, ControlFrame::Scheduled { .. })).then_some(frame)),
        "SCHEDULED comes once",
    ),
    (
        "copies on although it is told NO",
        hears(|frame| ordered(frame, |message| Some(message).filter(|message| !matches!(message, ToSeat::No { .. })))),
        "NO during the copy",
    ),
    (
        "asks to stay where it need only go on",
        says(|frame| {
            told(frame, |message| {
                Some(match message {
                    ToGateway::Aborted { epoch, attempt } => ToGateway::CommitSource { epoch, attempt, frozen: 0 },
                    other => other,
                })
            })
        }),
        "NO while the source stands still",
    ),
    (
        "takes NO for that of an older attempt",
        hears(|frame| {
            ordered(frame, |message| {
                Some(match message {
                    ToSeat::No { epoch, attempt } => ToSeat::No { epoch, attempt: Tag(attempt.0 - 1) },
                    other => other,
                })
            })
        }),
        "NO before its MOVE",
    ),
    ("hides that it copies", says(|frame| Some(told_as_running(frame, Phase::Copying))), "what is on its way is told"),
    ("hides that it stands still", says(|frame| Some(told_as_running(frame, Phase::Frozen))), "what is on its way is told"),
    ("hides that it asks to stay", says(|frame| Some(told_as_running(frame, Phase::Reclaiming))), "what is on its way is told"),
    ("hides what it has room for", says(|frame| Some(told_as_running(frame, Phase::Preparing))), "what may come is told"),
    ("hides what it asked after", says(|frame| Some(told_as_running(frame, Phase::Withdrawing))), "what may come is told"),
    (
        "answers STATE once",
        says_to_sources(|frame, before| Some(frame).filter(|frame| before == 0 || !matches!(frame, KvFrame::Prepared { .. }))),
        "STATE again is answered the same",
    ),
    (
        "counts as held whatever has the key of a block that it holds",
        says_to_sources(|frame, _| {
            Some(match frame {
                KvFrame::Have { blocks, credit } => KvFrame::Have { blocks: HeldBlocks { held: blocks.held.max(2) }, credit },
                other => other,
            })
        }),
        "other tokens under the same keys",
    ),
    (
        "neither takes what it gave no credit for nor lets go of it",
        Mutant { hears: passes, says: asks_nothing, says_to_sources: prepares_nothing },
        "heeds no credit",
    ),
    (
        "expects nobody while another one says nothing",
        hears(|frame| Some(frame).filter(|frame| !matches!(frame, ControlFrame::Expect { request, .. } if request.sequence == 1))),
        "a source that says nothing",
    ),
    (
        "moves nothing that moved before",
        hears(|frame| {
            ordered(frame, |message| {
                Some(match message {
                    ToSeat::Move { epoch, attempt: Tag(3), target } => ToSeat::Move { epoch, attempt: Tag(2), target },
                    other => other,
                })
            })
        }),
        "an attempt is honoured once",
    ),
    (
        "says of no prefix that it was copied",
        says(|frame| (!matches!(frame, ControlFrame::PrefixCopied { .. })).then_some(frame)),
        "a holder opens, brings every block and an end",
    ),
    (
        "says of a prefix that it does not have that it was copied",
        says(|frame| {
            Some(match frame {
                ControlFrame::ToGateway { request, message: ToGateway::Aborted { attempt, .. }, .. } => {
                    ControlFrame::PrefixCopied { request, attempt, copied: PrefixCopied::default() }
                }
                other => other,
            })
        }),
        "COPY of what is not cached is ABORTED",
    ),
    (
        "answers a repeated order with other blocks",
        says(|frame| {
            Some(match frame {
                ControlFrame::PrefixCopied { request, attempt, copied } if copied.bytes == 0 => {
                    ControlFrame::PrefixCopied { request, attempt, copied: PrefixCopied { blocks: copied.blocks + 1, ..copied } }
                }
                other => other,
            })
        }),
        "COPY again is answered again",
    ),
    (
        "does not end a copy that is stopped",
        hears(|frame| {
            ordered(frame, |message| {
                Some(match message {
                    ToSeat::Stop { upto: Tag::ALL } => ToSeat::Stop { upto: Tag(0) },
                    other => other,
                })
            })
        }),
        "STOP during a copy ends it at the holder",
    ),
];

#[tokio::test(flavor = "multi_thread")]
async fn a_replica_that_is_wrong_in_one_thing_fails_the_case_about_it() {
    let fleet = Fleet::timed(None).await;
    for (what, mutant, case) in MUTANTS {
        let proxy = Proxy::before(fleet.replicas[0].control.clone(), *mutant).await;
        let options = Options { patience: PATIENCE, ..Options::new(&proxy.address, MODEL) };
        let suite = Suite::new(options).await.unwrap();
        let mut whys = Vec::new();
        let summary = baton_conform::run(&suite, &[(*case).to_owned()], |_, checked| whys.push(format!("{checked:?}"))).await;
        assert_eq!((summary.failed, summary.met + summary.skipped), (1, 0), "it {what}: {whys:?}");
    }
    fleet.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_proxy_alone_changes_nothing() {
    let fleet = Fleet::timed(None).await;
    let proxy = Proxy::before(fleet.replicas[0].control.clone(), says(passes)).await;
    let suite = Suite::new(Options::new(&proxy.address, MODEL)).await.unwrap();
    for (_, _, case) in MUTANTS {
        let mut whys = Vec::new();
        let summary = baton_conform::run(&suite, &[(*case).to_owned()], |_, checked| whys.push(format!("{checked:?}"))).await;
        assert_eq!(summary.met, 1, "{case}: {whys:?}");
    }
    fleet.stop().await;
}
