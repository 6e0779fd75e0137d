use baton_migration::{LostClass, Tag, ToGateway, ToSeat};
use baton_wire::migration::{ControlFrame, FinishReason, OutputEntry, RunRequest};

use crate::{
    Checked, Suite,
    gateway::{Gateway, News, Stream, same_tokens},
    verdict::{demand, failed, skipped},
};

/// Tokens of a short output.
const SHORT: u32 = 40;
/// Entries that need not be acknowledged, and those that a step may add before its end is heard of.
const UNACKNOWLEDGED: u32 = 256 + 64;
const REASON_MAX: usize = 256;

pub(super) async fn start_to_finish(suite: &Suite) -> Checked {
    for spec in [suite.greedy(SHORT), suite.sampled(SHORT)] {
        let alone = suite.alone(&spec).await?;
        demand!(alone.len() as u32 == SHORT + 1, "{} entries came of {SHORT} tokens and a finish", alone.len());
        demand!(alone.last() == Some(&OutputEntry::Finish(FinishReason::Length)), "it finished with {:?}", alone.last());
        let wanted = spec.sampling.logprobs.unwrap_or(0) as usize;
        let told = alone.iter().all(|entry| match entry {
            OutputEntry::Token { logprobs: Some(logprobs), .. } => logprobs.top.len() == wanted && logprobs.chosen <= 0.0,
            OutputEntry::Token { logprobs: None, .. } => false,
            OutputEntry::Finish(_) => true,
        });
        demand!(told, "not every token has its log-probability and those of the {wanted} likeliest");
    }
    Ok(())
}

pub(super) async fn scheduled(suite: &Suite) -> Checked {
    let (mut gateway, place) = suite.attached().await?;
    let mut stream = Stream::new(place, 1, Tag(1));
    let spec = suite.greedy(SHORT);
    gateway.start(&stream, &[], &spec).await?;
    let mut times = 0;
    while !stream.has_finished() {
        match gateway.news(&mut stream).await? {
            News::Scheduled { cached } => {
                times += 1;
                demand!(stream.entries.is_empty(), "SCHEDULED came behind entry {}", stream.next());
                demand!(cached as usize <= spec.prompt.len(), "{cached} of {} prompt tokens were cached", spec.prompt.len());
            }
            News::Message(message, why) => return failed(format!("an entry was due, and {message:?} came {why}")),
            News::Entry | News::Again(_) | News::Moved(..) => {}
        }
    }
    demand!(times == 1, "SCHEDULED came {times} times");
    gateway.end(&stream).await
}

/// A request that has some entries, and will not end unacknowledged if outputs may be long.
async fn begun(suite: &Suite, spec: &RunRequest, epoch: Tag) -> Checked<(Gateway, Stream)> {
    let (mut gateway, place) = suite.attached().await?;
    let mut stream = Stream::new(place, 1, epoch);
    stream.acknowledges = false;
    gateway.start(&stream, &[], spec).await?;
    gateway.entries(&mut stream, 5).await?;
    Ok((gateway, stream))
}

/// Acknowledges from now on, to the end.
async fn ended(gateway: &mut Gateway, stream: &mut Stream) -> Checked {
    stream.acknowledges = true;
    gateway.acknowledge(stream).await?;
    gateway.finish(stream).await?;
    gateway.end(stream).await
}

/// Waits until the entry of `index` comes again.
async fn again(gateway: &mut Gateway, stream: &mut Stream, index: u32) -> Checked {
    loop {
        match gateway.news(stream).await? {
            News::Again(came) if came == index => return Ok(()),
            News::Message(message, why) => return failed(format!("entry {index} was due again, and {message:?} came {why}")),
            News::Entry | News::Again(_) | News::Scheduled { .. } | News::Moved(..) => {}
        }
    }
}

pub(super) async fn start_again(suite: &Suite) -> Checked {
    let spec = suite.greedy(SHORT);
    let (mut gateway, mut stream) = begun(suite, &spec, Tag(1)).await?;
    gateway.settle(&mut stream).await?;
    gateway.start(&stream, &[], &spec).await?;
    again(&mut gateway, &mut stream, 0).await?;
    ended(&mut gateway, &mut stream).await?;
    suite.same(&stream.entries, &suite.alone(&spec).await?)
}

pub(super) async fn older_start(suite: &Suite) -> Checked {
    let spec = suite.greedy(SHORT);
    let (mut gateway, mut stream) = begun(suite, &spec, Tag(5)).await?;
    let older = Stream::new(stream.at, stream.sequence, Tag(4));
    gateway.start(&older, &[], &spec).await?;
    loop {
        match gateway.news(&mut stream).await? {
            News::Message(ToGateway::Lost { epoch: Tag(4), .. }, _) => break,
            News::Message(message, why) => return failed(format!("LOST(t4) was due, and {message:?} came {why}")),
            News::Entry | News::Again(_) | News::Scheduled { .. } | News::Moved(..) => {}
        }
    }
    ended(&mut gateway, &mut stream).await?;
    suite.same(&stream.entries, &suite.alone(&spec).await?)
}

async fn continues(suite: &Suite, spec: &RunRequest) -> Checked {
    let alone = suite.alone(spec).await?;
    for delivered in [1, 17, SHORT as usize - 1] {
        let (mut gateway, place) = suite.attached().await?;
        let mut stream = Stream::new(place, 1, Tag(3));
        stream.entries = alone[..delivered].to_vec();
        gateway.start(&stream, &alone[..delivered], spec).await?;
        gateway.finish(&mut stream).await?;
        gateway.end(&stream).await?;
        same_tokens(&stream.entries, &alone)?;
    }
    Ok(())
}

pub(super) async fn continues_greedy(suite: &Suite) -> Checked {
    continues(suite, &suite.greedy(SHORT)).await
}

pub(super) async fn continues_sampled(suite: &Suite) -> Checked {
    continues(suite, &suite.sampled(SHORT)).await
}

pub(super) async fn higher_epoch(suite: &Suite) -> Checked {
    let spec = suite.sampled(SHORT);
    let (mut gateway, mut stream) = begun(suite, &spec, Tag(1)).await?;
    stream.epoch = Tag(7);
    let delivered = stream.entries[..3].to_vec();
    stream.entries.truncate(3);
    gateway.start(&stream, &delivered, &spec).await?;
    ended(&mut gateway, &mut stream).await?;
    suite.same(&stream.entries, &suite.alone(&spec).await?)
}

pub(super) async fn other_entries(suite: &Suite) -> Checked {
    let spec = suite.greedy(SHORT);
    let alone = suite.alone(&spec).await?;
    let other = |entry: &OutputEntry| match entry {
        OutputEntry::Token { id, logprobs } => OutputEntry::Token { id: (id + 1) % suite.options.vocabulary, logprobs: logprobs.clone() },
        finish @ OutputEntry::Finish(_) => finish.clone(),
    };
    let delivered = vec![alone[0].clone(), other(&alone[1])];
    let mut outputs = Vec::new();
    for warm in [false, true] {
        let (mut gateway, mut stream) = if warm {
            begun(suite, &spec, Tag(1)).await?
        } else {
            let (gateway, place) = suite.attached().await?;
            (gateway, Stream::new(place, 1, Tag(1)))
        };
        stream.epoch = Tag(8);
        stream.entries.clone_from(&delivered);
        gateway.start(&stream, &delivered, &spec).await?;
        ended(&mut gateway, &mut stream).await?;
        outputs.push(stream.entries);
    }
    same_tokens(&outputs[1], &outputs[0])
}

pub(super) async fn complete(suite: &Suite) -> Checked {
    let spec = suite.greedy(SHORT);
    let alone = suite.alone(&spec).await?;
    for delivered in [alone.len() - 1, alone.len()] {
        let (mut gateway, place) = suite.attached().await?;
        let mut stream = Stream::new(place, 1, Tag(1));
        gateway.start(&stream, &alone[..delivered], &spec).await?;
        // Heard again it sends from there, which is all.
        gateway.start(&stream, &[], &spec).await?;
        loop {
            let wanted = gateway.request(1);
            let (index, entry) = gateway
                .until("the finish", |_, frame| match frame {
                    ControlFrame::ToGateway { request, message: ToGateway::Output { index, entry, .. }, .. } if request == wanted => {
                        Some((index as usize, entry))
                    }
                    _ => None,
                })
                .await?;
            demand!(alone.get(index) == Some(&entry), "entry {index} is {entry:?}, and the START had {:?}", alone.get(index));
            if index + 1 == alone.len() {
                break;
            }
        }
        stream.entries.clone_from(&alone);
        gateway.end(&stream).await?;
    }
    Ok(())
}

pub(super) async fn keep(suite: &Suite) -> Checked {
    let spec = suite.greedy(SHORT);
    let (mut gateway, mut stream) = begun(suite, &spec, Tag(1)).await?;
    gateway.settle(&mut stream).await?;
    gateway.tell(stream.at, 1, ToSeat::Keep { epoch: Tag(1), next: 2 }).await?;
    again(&mut gateway, &mut stream, 2).await?;
    ended(&mut gateway, &mut stream).await?;
    suite.same(&stream.entries, &suite.alone(&spec).await?)
}

pub(super) async fn keep_nothing(suite: &Suite) -> Checked {
    let (mut gateway, place) = suite.attached().await?;
    gateway.tell(place, 1, ToSeat::Keep { epoch: Tag(3), next: 0 }).await?;
    let (class, why) = gateway.lost(1, Tag(3)).await?;
    let says_nothing = class == LostClass::Lost && why.is_empty();
    demand!(says_nothing, "what is not held is LOST for no reason of its own, and it said: {class:?}, {why}");
    gateway.start(&Stream::new(place, 1, Tag(3)), &[], &suite.greedy(SHORT)).await?;
    gateway.lost(1, Tag(3)).await.map(drop)
}

pub(super) async fn cannot_run(suite: &Suite) -> Checked {
    let (mut gateway, place) = suite.attached().await?;
    let spec = suite.greedy(SHORT);
    let other = RunRequest { model: format!("not {}", spec.model), ..spec.clone() };
    let endless = RunRequest { prompt: vec![1; 4 << 20], ..spec };
    // Another replica may serve that model or have that much memory, and nobody reads what is nothing.
    let cannot = [
        (1, other.to_bytes(), [LostClass::Busy, LostClass::Refused]),
        (2, b"what is this".to_vec(), [LostClass::Refused; 2]),
        (3, endless.to_bytes(), [LostClass::Busy, LostClass::Refused]),
    ];
    for (sequence, with, classes) in cannot {
        let start = ToSeat::Start { epoch: Tag(1), delivered: Vec::new() };
        gateway.tell_with(place, sequence, start, with).await?;
        let (class, why) = gateway.lost(sequence, Tag(1)).await?;
        demand!(classes.contains(&class), "request {sequence} cannot run, and LOST is of class {class:?}");
        demand!(!why.is_empty(), "request {sequence} cannot run anywhere, and LOST does not say why");
        demand!(why.len() <= REASON_MAX, "the reason has {} bytes", why.len());
        gateway.tell(place, sequence, ToSeat::Keep { epoch: Tag(1), next: 0 }).await?;
        gateway.lost(sequence, Tag(1)).await?;
    }
    Ok(())
}

pub(super) async fn flow_control(suite: &Suite) -> Checked {
    let output = suite.options.output;
    if output <= UNACKNOWLEDGED {
        return skipped(format!("outputs of {output} tokens may never stand; give --output {} or more", UNACKNOWLEDGED + 1));
    }
    let spec = suite.greedy(output);
    let (mut gateway, mut stream) = begun(suite, &spec, Tag(1)).await?;
    gateway.entries(&mut stream, 257).await?;
    passes(suite, &mut gateway, &mut stream, 2).await?;
    demand!(stream.next() <= UNACKNOWLEDGED, "{} entries came, and none was acknowledged", stream.next());
    let stands = stream.next();
    // Of so many, more than half are left.
    let next = stands - 200;
    gateway.tell(stream.at, 1, ToSeat::Ack { epoch: Tag(1), next }).await?;
    passes(suite, &mut gateway, &mut stream, 3).await?;
    demand!(stream.next() == stands, "it went on with 200 entries that were not acknowledged");
    ended(&mut gateway, &mut stream).await?;
    suite.same(&stream.entries, &suite.alone(&spec).await?)
}

/// Another request of the same gateway runs from start to finish, whatever the first one does.
async fn passes(suite: &Suite, gateway: &mut Gateway, stands: &mut Stream, sequence: u64) -> Checked {
    let other = gateway.request(sequence);
    let own = gateway.request(stands.sequence);
    let place = stands.at;
    gateway.start(&Stream::new(place, sequence, Tag(1)), &[], &suite.sampled(SHORT)).await?;
    loop {
        let (_, frame) = gateway.next().await?;
        let ControlFrame::ToGateway { request, message: ToGateway::Output { index, entry, .. }, .. } = frame else { continue };
        if request == own && index == stands.next() {
            stands.entries.push(entry);
        } else if request == other && matches!(entry, OutputEntry::Finish(_)) {
            break;
        }
    }
    gateway.tell(place, sequence, ToSeat::Stop { upto: Tag::ALL }).await?;
    let wanted = other;
    let own_entries = &mut stands.entries;
    gateway
        .until("STOPPED", |_, frame| match frame {
            ControlFrame::ToGateway { request, message, .. } if request == wanted => {
                matches!(message, ToGateway::Stopped { .. }).then_some(())
            }
            ControlFrame::ToGateway { request, message: ToGateway::Output { index, entry, .. }, .. } if request == own => {
                if index as usize == own_entries.len() {
                    own_entries.push(entry);
                }
                None
            }
            _ => None,
        })
        .await
}

pub(super) async fn stop(suite: &Suite) -> Checked {
    let spec = suite.greedy(suite.options.output);
    let (mut gateway, stream) = begun(suite, &spec, Tag(3)).await?;
    gateway.tell(stream.at, 1, ToSeat::Stop { upto: Tag(3) }).await?;
    let upto = gateway.stopped(stream.at, 1).await?;
    demand!(upto == Tag(3), "STOP(t3) was answered by STOPPED({upto})");
    // Its tombstone answers, and nothing comes before that.
    gateway.start(&stream, &[], &spec).await?;
    let (message, _) = gateway.message("LOST", 1).await?;
    demand!(
        message == ToGateway::Lost { epoch: Tag(3), class: LostClass::Lost },
        "{message:?} came of a request that was stopped, where LOST was due"
    );
    // What is stopped twice, or was never there, is answered as well.
    for sequence in [1, 2] {
        gateway.tell(stream.at, sequence, ToSeat::Stop { upto: Tag(3) }).await?;
        gateway.stopped(stream.at, sequence).await?;
    }
    // A higher epoch runs again.
    let mut again = Stream::new(stream.at, 1, Tag(4));
    let short = suite.greedy(SHORT);
    gateway.start(&again, &[], &short).await?;
    gateway.finish(&mut again).await?;
    gateway.end(&again).await?;
    suite.same(&again.entries, &suite.alone(&short).await?)
}

pub(super) async fn stop_below(suite: &Suite) -> Checked {
    let spec = suite.greedy(SHORT);
    let (mut gateway, mut stream) = begun(suite, &spec, Tag(5)).await?;
    gateway.tell(stream.at, 1, ToSeat::Stop { upto: Tag(4) }).await?;
    loop {
        match gateway.news(&mut stream).await? {
            News::Message(ToGateway::Stopped { upto: Tag(4) }, _) => break,
            News::Message(message, why) => return failed(format!("STOPPED(t4) was due, and {message:?} came {why}")),
            News::Entry | News::Again(_) | News::Scheduled { .. } | News::Moved(..) => {}
        }
    }
    ended(&mut gateway, &mut stream).await?;
    suite.same(&stream.entries, &suite.alone(&spec).await?)
}

pub(super) async fn stop_all(suite: &Suite) -> Checked {
    let spec = suite.greedy(suite.options.output);
    let (mut gateway, stream) = begun(suite, &spec, Tag(1)).await?;
    gateway.end(&stream).await?;
    let later = Stream::new(stream.at, 1, Tag(1_000));
    gateway.start(&later, &[], &spec).await?;
    let (message, _) = gateway.message("LOST", 1).await?;
    demand!(
        message == ToGateway::Lost { epoch: Tag(1_000), class: LostClass::Lost },
        "{message:?} came of a request that has ended, where LOST was due"
    );
    Ok(())
}
