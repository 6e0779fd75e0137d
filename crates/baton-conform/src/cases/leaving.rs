//! The replica is the source, and the suite its target.

use baton_migration::{Phase, Tag, ToGateway, ToSeat};
use baton_wire::migration::{HeldBlocks, KvFrame, Refusal};

use crate::{
    Checked, Suite,
    gateway::{News, same},
    kv::{Departure, Order, Told},
    verdict::{demand, failed, skipped},
};

/// Blocks that may be under way.
const AHEAD: u64 = 4;

/// As far as the first block, and no other may come.
async fn copying(suite: &Suite) -> Checked<Departure> {
    let mut departure = Departure::begin(suite, &suite.sampled(suite.options.output)).await?;
    let bytes = departure.coming.block_bytes();
    departure.coming.say(&KvFrame::Have { blocks: HeldBlocks { held: 0 }, credit: bytes }).await?;
    departure.coming.next().await?;
    Ok(departure)
}

/// As far as the source has asked to commit, with this many entries.
async fn asked(suite: &Suite) -> Checked<(Departure, u32)> {
    let mut departure = Departure::begin(suite, &suite.sampled(suite.options.output)).await?;
    let brought = departure.coming.take(0, AHEAD).await?;
    departure.coming.say(&KvFrame::Prepared { entries: brought.next() }).await?;
    let frozen = departure.asked().await?;
    demand!(frozen == brought.next(), "{frozen} entries are asked to be committed, and {} were brought", brought.next());
    same(&brought.entries, &departure.stream.entries)?;
    Ok((departure, frozen))
}

/// `COMMIT_SOURCE` comes, with nothing computed before it.
async fn asks_to_stay(departure: &mut Departure, frozen: u32) -> Checked {
    let (epoch, attempt) = (departure.stream.epoch, departure.coming.attempt);
    loop {
        let (message, why) = departure.answer().await?;
        if message == (ToGateway::CommitSource { epoch, attempt, frozen }) {
            break;
        }
        let asks_again = message == ToGateway::CommitTarget { epoch, attempt, frozen };
        demand!(asks_again, "COMMIT_SOURCE({epoch}, {attempt}, {frozen}) was due, and {message:?} came {why}");
    }
    stands(departure, frozen)
}

fn stands(departure: &Departure, frozen: u32) -> Checked {
    let next = departure.stream.next();
    demand!(next == frozen, "it stood at {frozen} entries, and computed {} more unasked", next - frozen);
    Ok(())
}

async fn resume(suite: &Suite, mut departure: Departure) -> Checked {
    let (stream, attempt) = (&mut departure.stream, departure.coming.attempt);
    let (epoch, resumed, next) = (stream.epoch, Tag(attempt.0 + 1), stream.next());
    stream.epoch = resumed;
    let resume = ToSeat::Resume { epoch, attempt, resumed, next };
    // Heard twice it does the same.
    for _ in 0..2 {
        departure.gateway.tell(departure.stream.at, departure.stream.sequence, resume.clone()).await?;
    }
    departure.goes_on(suite, &suite.sampled(suite.options.output)).await
}

async fn no(departure: &mut Departure) -> Checked {
    let (epoch, attempt) = (departure.stream.epoch, departure.coming.attempt);
    departure.gateway.tell(departure.stream.at, departure.stream.sequence, ToSeat::No { epoch, attempt }).await
}

pub(super) async fn brings_all(suite: &Suite) -> Checked {
    let (mut departure, frozen) = asked(suite).await?;
    let attempt = departure.coming.attempt;
    // A hint, which may be lost; the question comes again, and it was sent before that.
    match departure.gateway.news(&mut departure.stream).await? {
        News::Moved(told, copied) => {
            demand!(told == attempt, "MOVED tells of {told}, and {attempt} is the attempt");
            let blocks = u64::from(departure.coming.plan.blocks) * departure.coming.block_bytes();
            demand!(copied.bytes >= blocks && copied.held == 0, "MOVED tells {copied:?}, and {blocks} bytes were there from the start");
        }
        News::Message(message, why) => {
            let asks_again = message == ToGateway::CommitTarget { epoch: departure.stream.epoch, attempt, frozen };
            demand!(asks_again, "{message:?} came of what asked to be committed {why}");
        }
        News::Entry | News::Again(_) | News::Scheduled { .. } => {}
    }
    departure.gateway.end(&departure.stream).await
}

pub(super) async fn no_and_resume(suite: &Suite) -> Checked {
    let (mut departure, frozen) = asked(suite).await?;
    no(&mut departure).await?;
    asks_to_stay(&mut departure, frozen).await?;
    resume(suite, departure).await
}

pub(super) async fn unanswered(suite: &Suite) -> Checked {
    let (mut departure, frozen) = asked(suite).await?;
    asks_to_stay(&mut departure, frozen).await?;
    resume(suite, departure).await
}

pub(super) async fn never_unasked(suite: &Suite) -> Checked {
    let (mut departure, frozen) = asked(suite).await?;
    // A target that aborts and is gone is no answer of the gateway.
    departure.coming.say(&KvFrame::Abort { why: "gone".to_owned() }).await?;
    departure.coming.hang_up().await?;
    asks_to_stay(&mut departure, frozen).await?;
    resume(suite, departure).await
}

pub(super) async fn asks_after_attach(suite: &Suite) -> Checked {
    let (mut departure, frozen) = asked(suite).await?;
    let (mut gateway, _) = suite.attached_as(departure.gateway.name).await?;
    let held = gateway.all_held().await?;
    let (sequence, epoch) = (departure.stream.sequence, departure.stream.epoch);
    let [(request, phase, tag, entries)] = held[..] else { return failed(format!("one request was to be held, and {held:?} are")) };
    let wanted = (gateway.request(sequence), epoch, frozen);
    demand!((request, tag, entries) == wanted, "{request} is held under {tag} with {entries} entries, and {wanted:?} was");
    demand!(matches!(phase, Phase::Asking | Phase::Reclaiming), "what asked to be committed is held as {phase:?}");
    gateway.tell(departure.stream.at, sequence, ToSeat::Keep { epoch, next: frozen }).await?;
    departure.gateway = gateway;
    asks_to_stay(&mut departure, frozen).await?;
    resume(suite, departure).await
}

pub(super) async fn refused(suite: &Suite) -> Checked {
    let spec = suite.sampled(suite.options.output);
    let mut departure = Departure::begin(suite, &spec).await?;
    let reason = "the cellar is full";
    departure.coming.say(&KvFrame::Refuse(Refusal::Other(reason.to_owned()))).await?;
    let why = departure.stays(suite, &spec).await?;
    demand!(why.contains(reason), "the target refused since {reason}, and ABORTED says: {why}");
    Ok(())
}

pub(super) async fn aborted(suite: &Suite) -> Checked {
    let spec = suite.sampled(suite.options.output);
    let mut departure = copying(suite).await?;
    let reason = "the roof leaks";
    departure.coming.say(&KvFrame::Abort { why: reason.to_owned() }).await?;
    let why = departure.stays(suite, &spec).await?;
    demand!(why.contains(reason), "the target gave up since {reason}, and ABORTED says: {why}");
    Ok(())
}

pub(super) async fn connection_lost(suite: &Suite) -> Checked {
    let spec = suite.sampled(suite.options.output);
    let mut departure = copying(suite).await?;
    departure.coming.hang_up().await?;
    departure.stays(suite, &spec).await.map(drop)
}

pub(super) async fn other_incarnation(suite: &Suite) -> Checked {
    let spec = suite.sampled(suite.options.output);
    let mut order = Order::give(suite, &spec, Told::Elsewhere).await?;
    let (message, why) = order.answer().await?;
    let wanted = ToGateway::Aborted { epoch: Tag(1), attempt: Tag(2) };
    demand!(message == wanted, "ABORTED was due, and {message:?} came {why}");
    order.goes_on(suite, &spec).await
}

pub(super) async fn held_not_sent(suite: &Suite) -> Checked {
    let mut departure = Departure::begin(suite, &suite.sampled(suite.options.output)).await?;
    let held = (departure.coming.plan.keys.len() as u32).min(2);
    if held == 0 {
        return skipped("no block is full; give a longer --prompt");
    }
    let brought = departure.coming.take(held, AHEAD).await?;
    departure.coming.say(&KvFrame::Prepared { entries: brought.next() }).await?;
    let frozen = departure.asked().await?;
    asks_to_stay(&mut departure, frozen).await?;
    resume(suite, departure).await
}

pub(super) async fn credit(suite: &Suite) -> Checked {
    let mut departure = Departure::begin(suite, &suite.sampled(suite.options.output)).await?;
    let brought = departure.coming.take(0, 1).await?;
    demand!(brought.blocks.len() as u32 >= departure.coming.plan.blocks, "{} blocks came", brought.blocks.len());
    departure.gateway.end(&departure.stream).await
}

pub(super) async fn honoured_once(suite: &Suite) -> Checked {
    let spec = suite.sampled(suite.options.output);
    let mut departure = Departure::begin(suite, &spec).await?;
    departure.coming.say(&KvFrame::Refuse(Refusal::Other("try again".to_owned()))).await?;
    let (message, why) = departure.answer().await?;
    demand!(matches!(message, ToGateway::Aborted { .. }), "ABORTED was due, and {message:?} came {why}");
    let Departure { gateway, stream, target, .. } = &mut departure;
    gateway.move_to(stream, Tag(2), target.place, &target.to()?).await?;
    let (message, why) = departure.answer().await?;
    demand!(
        matches!(message, ToGateway::Aborted { attempt: Tag(2), .. }),
        "ABORTED was due again for an attempt that ended, and {message:?} came {why}"
    );
    let Departure { gateway, stream, target, .. } = &mut departure;
    gateway.move_to(stream, Tag(3), target.place, &target.to()?).await?;
    departure.comes_as(Tag(3)).await?;
    departure.coming.say(&KvFrame::Refuse(Refusal::Other("no more".to_owned()))).await?;
    departure.stays(suite, &spec).await.map(drop)
}

pub(super) async fn other_epoch(suite: &Suite) -> Checked {
    let spec = suite.sampled(suite.options.output);
    let order = Order::give(suite, &spec, Told::OtherEpochFirst).await?;
    let mut departure = order.accept(&spec).await?;
    demand!(departure.coming.attempt == Tag(3), "{} came, which was told under another epoch", departure.coming.attempt);
    departure.coming.say(&KvFrame::Refuse(Refusal::Other("no more".to_owned()))).await?;
    departure.stays(suite, &spec).await.map(drop)
}

pub(super) async fn stopped(suite: &Suite) -> Checked {
    let mut departure = copying(suite).await?;
    departure.gateway.end(&departure.stream).await?;
    departure.coming.ended().await
}

pub(super) async fn taken_back(suite: &Suite) -> Checked {
    let (mut departure, _) = asked(suite).await?;
    let spec = suite.sampled(suite.options.output);
    departure.stream.epoch = Tag(5);
    let delivered = departure.stream.entries.clone();
    departure.gateway.start(&departure.stream, &delivered, &spec).await?;
    departure.coming.ended().await?;
    departure.goes_on(suite, &spec).await
}

/// ABORTED for the attempt.
async fn is_over(departure: &mut Departure, attempt: Tag) -> Checked {
    let (wanted, (message, why)) = (ToGateway::Aborted { epoch: departure.stream.epoch, attempt }, departure.answer().await?);
    demand!(message == wanted, "{wanted:?} was due, and {message:?} came {why}");
    Ok(())
}

pub(super) async fn no_while_copying(suite: &Suite) -> Checked {
    let mut departure = copying(suite).await?;
    let attempt = departure.coming.attempt;
    no(&mut departure).await?;
    is_over(&mut departure, attempt).await?;
    departure.coming.ended().await?;
    // The answer may have been lost.
    no(&mut departure).await?;
    departure.stays(suite, &suite.sampled(suite.options.output)).await.map(drop)
}

pub(super) async fn no_while_frozen(suite: &Suite) -> Checked {
    let mut departure = Departure::begin(suite, &suite.sampled(suite.options.output)).await?;
    departure.coming.take(0, AHEAD).await?;
    no(&mut departure).await?;
    departure.stays(suite, &suite.sampled(suite.options.output)).await.map(drop)
}

pub(super) async fn no_before_move(suite: &Suite) -> Checked {
    let spec = suite.sampled(suite.options.output);
    let mut departure = Departure::begin(suite, &spec).await?;
    let first = departure.coming.attempt;
    departure.coming.say(&KvFrame::Refuse(Refusal::Other("try again".to_owned()))).await?;
    is_over(&mut departure, first).await?;
    let (over, next) = (Tag(first.0 + 1), Tag(first.0 + 2));
    let (place, sequence, epoch) = (departure.stream.at, departure.stream.sequence, departure.stream.epoch);
    departure.gateway.tell(place, sequence, ToSeat::No { epoch, attempt: over }).await?;
    is_over(&mut departure, over).await?;
    let Departure { gateway, stream, target, .. } = &mut departure;
    gateway.move_to(stream, over, target.place, &target.to()?).await?;
    is_over(&mut departure, over).await?;
    let Departure { gateway, stream, target, .. } = &mut departure;
    gateway.move_to(stream, next, target.place, &target.to()?).await?;
    departure.comes_as(next).await?;
    departure.coming.say(&KvFrame::Refuse(Refusal::Other("no more".to_owned()))).await?;
    departure.stays(suite, &spec).await.map(drop)
}

/// The gateway attaches again and is told of the request in this phase. Gives its entries.
async fn told_again(suite: &Suite, departure: &mut Departure, phase: Phase) -> Checked<u32> {
    let (mut gateway, place) = suite.attached_as(departure.gateway.name).await?;
    let held = gateway.all_held().await?;
    let [(request, told, tag, entries)] = held[..] else { return failed(format!("one request was to be held, and {held:?} are")) };
    let (sequence, epoch) = (departure.stream.sequence, departure.stream.epoch);
    let wanted = (gateway.request(sequence), phase, epoch);
    demand!((request, told, tag) == wanted, "{request} is told as {told:?} under {tag}, and {wanted:?} was due");
    departure.stream.was_reattached = true;
    gateway.tell(place, sequence, ToSeat::Keep { epoch, next: departure.stream.next() }).await?;
    departure.gateway = gateway;
    Ok(entries)
}

pub(super) async fn told_in_each_phase(suite: &Suite) -> Checked {
    let mut departure = Departure::begin(suite, &suite.sampled(suite.options.output)).await?;
    told_again(suite, &mut departure, Phase::Copying).await?;
    let brought = departure.coming.take(0, AHEAD).await?;
    let entries = told_again(suite, &mut departure, Phase::Frozen).await?;
    demand!(entries == brought.next(), "{entries} entries stand still, and {} were brought", brought.next());
    // Those that went to the older connection come again, and before the question that counts them.
    departure.gateway.entries(&mut departure.stream, entries).await?;
    departure.coming.say(&KvFrame::Prepared { entries }).await?;
    let frozen = departure.asked().await?;
    no(&mut departure).await?;
    asks_to_stay(&mut departure, frozen).await?;
    let entries = told_again(suite, &mut departure, Phase::Reclaiming).await?;
    demand!(entries == frozen, "{entries} entries are held, and {frozen} were asked for");
    asks_to_stay(&mut departure, frozen).await?;
    resume(suite, departure).await
}
