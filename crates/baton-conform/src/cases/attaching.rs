use baton_migration::{GatewayName, Phase, Tag, ToGateway, ToSeat};
use baton_wire::migration::ControlFrame;

use crate::{
    Checked, Suite,
    gateway::{Gateway, Stream},
    verdict::{demand, failed, skipped},
};

/// Requests that are run one after the other until a heartbeat falls into one.
const TRIES: u64 = 200;
/// More than lie in the time after which nothing computes, and after which all is freed.
const BEATS_STOPPED: usize = 13;
const BEATS_FREED: usize = 33;

pub(super) async fn heartbeats(suite: &Suite) -> Checked {
    let (mut gateway, place) = suite.attached().await?;
    let first = gateway.next_beat().await?;
    let second = gateway.next_beat().await?;
    demand!(second.sequence == first.sequence + 1, "heartbeat {} came after {}", second.sequence, first.sequence);
    let mut worked = false;
    let spec = suite.greedy(suite.options.output);
    for sequence in 1..=TRIES {
        let mut stream = Stream::new(place, sequence, Tag(1));
        gateway.start(&stream, &[], &spec).await?;
        gateway.finish(&mut stream).await?;
        gateway.end(&stream).await?;
        worked = gateway.beats.iter().any(|(_, beat)| beat.running + beat.waiting > 0);
        if worked {
            break;
        }
    }
    demand!(worked, "no heartbeat told of a request in {TRIES} requests");
    let before = gateway.beats.last().map_or(0, |(_, beat)| beat.sequence);
    // Two of them, since the first may have been sent before the last step was booked.
    let idle = [gateway.next_beat().await?, gateway.next_beat().await?][1];
    demand!(idle.sequence == before + 2, "heartbeat {} came after {before}", idle.sequence);
    demand!(idle.steps > first.steps, "requests ran, and {} steps are told of as before", idle.steps);
    demand!(idle.running + idle.waiting == 0, "{} requests run and {} wait, and none was given", idle.running, idle.waiting);
    Ok(())
}

pub(super) async fn nothing_held(suite: &Suite) -> Checked {
    let (mut gateway, _) = suite.attached().await?;
    let held = gateway.all_held().await?;
    demand!(held.is_empty(), "a new gateway is told of {held:?}");
    Ok(())
}

/// A request with some entries that nobody acknowledges.
async fn begun(suite: &Suite, output: u32) -> Checked<(Gateway, Stream)> {
    let (mut gateway, place) = suite.attached().await?;
    gateway.all_held().await?;
    let mut stream = Stream::new(place, 1, Tag(3));
    stream.acknowledges = false;
    gateway.start(&stream, &[], &suite.sampled(output)).await?;
    gateway.entries(&mut stream, 5).await?;
    Ok((gateway, stream))
}

/// It is held as it ran, and goes on to what it gives alone.
async fn goes_on(suite: &Suite, gateway: &mut Gateway, stream: &mut Stream, output: u32) -> Checked {
    let held = gateway.all_held().await?;
    let [(request, phase, tag, entries)] = held[..] else { return failed(format!("one request was to be held, and {held:?} are")) };
    demand!(
        (request, phase, tag) == (gateway.request(1), Phase::Running, stream.epoch),
        "{request} is held as {phase:?} under {tag}, and ran under {}",
        stream.epoch
    );
    demand!(entries >= stream.next(), "{entries} entries are held, and {} came", stream.next());
    let next = stream.next();
    stream.was_reattached = true;
    gateway.tell(stream.at, 1, ToSeat::Keep { epoch: stream.epoch, next }).await?;
    stream.acknowledges = true;
    gateway.finish(stream).await?;
    gateway.end(stream).await?;
    suite.same(&stream.entries, &suite.alone(&suite.sampled(output)).await?)
}

pub(super) async fn held(suite: &Suite) -> Checked {
    let output = suite.options.output;
    let (older, mut stream) = begun(suite, output).await?;
    let (mut gateway, _) = suite.attached_as(older.name).await?;
    goes_on(suite, &mut gateway, &mut stream, output).await
}

pub(super) async fn newer_connection(suite: &Suite) -> Checked {
    let output = suite.options.output;
    let (mut older, mut stream) = begun(suite, output).await?;
    let (mut gateway, _) = suite.attached_as(older.name).await?;
    // Written where nothing is read any more: it must not be heard, whether it can be sent or not.
    let _ = older.tell(stream.at, 1, ToSeat::Stop { upto: Tag::ALL }).await;
    older.ended().await?;
    goes_on(suite, &mut gateway, &mut stream, output).await
}

pub(super) async fn newer_incarnation(suite: &Suite) -> Checked {
    let (mut older, stream) = begun(suite, suite.options.output).await?;
    let GatewayName { id, incarnation } = older.name;
    let (mut newer, _) = suite.attached_as(GatewayName { id, incarnation: incarnation + 1 }).await?;
    let held = newer.all_held().await?;
    demand!(held.is_empty(), "the next incarnation is told of {held:?}");
    older.ended().await?;
    // Whoever asks for it by the old name finds nothing.
    let (mut former, place) = suite.attached_as(older.name).await?;
    let held = former.all_held().await?;
    demand!(held.is_empty(), "{held:?} are held, and their gateway has begun anew");
    former.tell(place, 1, ToSeat::Keep { epoch: stream.epoch, next: 0 }).await?;
    former.lost(1, stream.epoch).await.map(drop)
}

/// Lets so many heartbeats go unanswered; what comes of the request meanwhile is its stream's.
async fn unanswered(gateway: &mut Gateway, stream: &mut Stream, beats: usize) -> Checked {
    gateway.leases = false;
    let wanted = gateway.request(stream.sequence);
    let until = gateway.beats.len() + beats;
    while gateway.beats.len() < until {
        let (_, frame) = gateway.next_of_all().await?;
        take(stream, wanted, frame);
    }
    Ok(())
}

fn take(stream: &mut Stream, wanted: baton_migration::RequestName, frame: ControlFrame) {
    if let ControlFrame::ToGateway { request, message: ToGateway::Output { index, entry, .. }, .. } = frame
        && request == wanted
        && index == stream.next()
    {
        stream.entries.push(entry);
    }
}

/// Answers the last heartbeat, and those to come.
async fn answer(gateway: &mut Gateway) -> Checked {
    gateway.leases = true;
    let Some(&(place, beat)) = gateway.beats.last() else { return failed("no heartbeat came") };
    gateway.send(place, &ControlFrame::Lease { sequence: beat.sequence }).await
}

pub(super) async fn lease_stops(suite: &Suite) -> Checked {
    let output = suite.options.output;
    if !suite.options.long {
        return skipped("it waits for real time; give --long");
    }
    if output <= 320 {
        return skipped("the output would end before the lease does; give --output 321 or more");
    }
    let (mut gateway, mut stream) = begun(suite, output).await?;
    unanswered(&mut gateway, &mut stream, BEATS_STOPPED).await?;
    let stands = stream.next();
    // It stood for want of acknowledgement; with it, it stands for want of a lease.
    gateway.acknowledge(&mut stream).await?;
    let (wanted, probe) = (gateway.request(1), 2);
    gateway.tell(stream.at, probe, ToSeat::Keep { epoch: Tag(1), next: 0 }).await?;
    let probed = gateway.request(probe);
    gateway
        .until("LOST", |_, frame| {
            let probed = matches!(&frame, ControlFrame::ToGateway { request, message: ToGateway::Lost { .. }, .. } if *request == probed);
            take(&mut stream, wanted, frame);
            probed.then_some(())
        })
        .await?;
    unanswered(&mut gateway, &mut stream, 2).await?;
    demand!(stream.next() == stands, "entries {stands} to {} came without a lease", stream.next());
    answer(&mut gateway).await?;
    goes_on(suite, &mut gateway, &mut stream, output).await
}

pub(super) async fn lease_frees(suite: &Suite) -> Checked {
    if !suite.options.long {
        return skipped("it waits for real time; give --long");
    }
    let (mut gateway, mut stream) = begun(suite, suite.options.output).await?;
    unanswered(&mut gateway, &mut stream, BEATS_FREED).await?;
    answer(&mut gateway).await?;
    let held = gateway.all_held().await?;
    demand!(held.is_empty(), "{held:?} are held after 16 s without a lease");
    gateway.tell(stream.at, 1, ToSeat::Keep { epoch: stream.epoch, next: 0 }).await?;
    gateway.lost(1, stream.epoch).await.map(drop)
}
