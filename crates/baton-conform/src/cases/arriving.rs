//! The replica is the target, and the suite its source.

use baton_link::Identity;
use baton_migration::{Phase, Place, Tag, ToGateway, ToSeat};
use baton_units::Incarnation;
use baton_wire::migration::{
    BlockHeader, KvFrame, OutputEntry, RunRequest,
    handshake::{Hello, KvLayout},
};
use xxhash_rust::xxh3::xxh3_64;

use crate::{
    Checked, Suite,
    gateway::{Gateway, News, Stream},
    kv::{Brought, Going, announce, brought},
    suite::random,
    verdict::{demand, failed, skipped},
};

const ATTEMPT: Tag = Tag(2);
const SEQUENCE: u64 = 1;
const NONCE: [u8; 16] = [7; 16];

/// A request that the suite brings.
struct Arrival {
    gateway: Gateway,
    place: Place,
    going: Going,
    brought: Brought,
}

/// What a replica said at first, as its gateway is told of it, and what a source says.
struct Said {
    announced: Place,
    identity: Identity,
    target: Place,
    nonce: [u8; 16],
}

/// What some request has, under a salt that no other one has.
async fn luggage(suite: &Suite) -> Checked<Brought> {
    brought(suite, &suite.sampled(suite.options.output)).await?.salted(&format!("{:x}", random()?))
}

/// Opens the attempt; `change` makes something of it wrong.
async fn opened(suite: &Suite, brought: Brought, change: impl FnOnce(&mut Said)) -> Checked<Arrival> {
    let (mut gateway, place) = suite.attached().await?;
    let identity = suite.like(gateway.hello(place), None);
    let mut said = Said { announced: identity.hello.place(), identity, target: place, nonce: NONCE };
    change(&mut said);
    announce(&mut gateway, place, SEQUENCE, ATTEMPT, said.announced, NONCE).await?;
    let going = open(suite, &mut gateway, place, &brought, &said).await?;
    Ok(Arrival { gateway, place, going, brought })
}

async fn open(suite: &Suite, gateway: &mut Gateway, place: Place, brought: &Brought, said: &Said) -> Checked<Going> {
    // What was announced is known to the replica before the source comes: the gateway's next word is answered.
    gateway.tell(place, SEQUENCE + 1, ToSeat::Stop { upto: Tag(1) }).await?;
    gateway.stopped(place, SEQUENCE + 1).await?;
    let mut going = Going::dial(suite, gateway.hello(place), &said.identity).await?;
    let (request, source) = (gateway.request(SEQUENCE), said.identity.hello.place());
    going.say(&KvFrame::Open { request, attempt: ATTEMPT, source, target: said.target, nonce: said.nonce }).await?;
    going.say(&KvFrame::Prepare(brought.plan.clone())).await?;
    Ok(going)
}

/// With all blocks and the state there.
async fn prepared(suite: &Suite) -> Checked<Arrival> {
    let mut arrival = opened(suite, luggage(suite).await?, |_| {}).await?;
    let held = arrival.going.have().await?;
    demand!(held == 0, "{held} blocks are held of a prefix that was never there");
    arrival.going.blocks(&arrival.brought, 0).await?;
    arrival.going.state(&arrival.brought).await?;
    arrival.is_prepared().await?;
    Ok(arrival)
}

impl Arrival {
    async fn is_prepared(&mut self) -> Checked {
        let (entries, wanted) = (self.going.prepared().await?, self.brought.next());
        demand!(entries == wanted, "PREPARED says {entries} entries, and {wanted} were brought");
        Ok(())
    }

    async fn withdraws(&mut self) -> Checked {
        let (message, _) = self.gateway.answer("WITHDRAW", SEQUENCE).await?;
        demand!(message == ToGateway::Withdraw { attempt: ATTEMPT }, "WITHDRAW({ATTEMPT}) was due, and {message:?} came");
        Ok(())
    }

    /// It asks whether the request still comes, and lets go when it is told that it does not.
    async fn withdraws_and_stops(mut self) -> Checked {
        self.withdraws().await?;
        self.stops().await
    }

    async fn stops(mut self) -> Checked {
        self.gateway.tell(self.place, SEQUENCE, ToSeat::Stop { upto: ATTEMPT }).await?;
        self.gateway.stopped(self.place, SEQUENCE).await.map(drop)
    }

    /// When the connection has ended another one may come.
    async fn lets_go(mut self) -> Checked {
        self.gateway.tell(self.place, SEQUENCE, ToSeat::Stop { upto: ATTEMPT }).await?;
        self.gateway.stopped(self.place, SEQUENCE).await?;
        self.going.given_up().await
    }

    /// The gateway attaches again and is told of the request in this phase.
    async fn told_again(&mut self, suite: &Suite, phase: Phase) -> Checked {
        let (gateway, _) = suite.attached_as(self.gateway.name).await?;
        self.gateway = gateway;
        let held = self.gateway.all_held().await?;
        let [(request, told, tag, _)] = held[..] else { return failed(format!("one request was to be held, and {held:?} are")) };
        let wanted = (self.gateway.request(SEQUENCE), phase, ATTEMPT);
        demand!((request, told, tag) == wanted, "{request} is told as {told:?} under {tag}, and {wanted:?} was due");
        Ok(())
    }

    /// It goes on as if it had always been here.
    async fn starts(mut self, suite: &Suite) -> Checked {
        let spec = suite.sampled(suite.options.output);
        let mut stream = Stream::new(self.place, SEQUENCE, ATTEMPT);
        // A client that has not taken all of it yet.
        let delivered = self.brought.entries[..self.brought.entries.len() - 1].to_vec();
        stream.entries.clone_from(&delivered);
        self.gateway.start(&stream, &delivered, &spec).await?;
        while !stream.has_finished() {
            match self.gateway.news(&mut stream).await? {
                News::Scheduled { .. } => return failed("SCHEDULED came of a request whose prompt was computed elsewhere"),
                // It was asked before it was told.
                News::Message(ToGateway::Withdraw { attempt: ATTEMPT }, _) | News::Entry | News::Again(_) | News::Moved(..) => {}
                News::Message(message, why) => return failed(format!("an entry was due, and {message:?} came {why}")),
            }
        }
        self.gateway.end(&stream).await?;
        suite.same(&stream.entries, &suite.alone(&spec).await?)
    }
}

pub(super) async fn unannounced(suite: &Suite) -> Checked {
    let brought = luggage(suite).await?;
    let (mut gateway, place) = suite.attached().await?;
    let identity = suite.like(gateway.hello(place), None);
    let said = Said { announced: identity.hello.place(), identity, target: place, nonce: NONCE };
    open(suite, &mut gateway, place, &brought, &said).await?.refused().await.map(drop)
}

pub(super) async fn wrong_opening(suite: &Suite) -> Checked {
    let brought = luggage(suite).await?;
    let changes: [fn(&mut Said); 3] = [
        |said| said.nonce[15] ^= 1,
        |said| said.announced.incarnation.0 += 1,
        |said| said.target.incarnation = Incarnation(said.target.incarnation.0 ^ 1),
    ];
    for change in changes {
        opened(suite, brought.clone(), change).await?.going.refused().await?;
    }
    // And as it was announced it is taken.
    let mut arrival = opened(suite, brought, |_| {}).await?;
    arrival.going.have().await?;
    arrival.stops().await
}

pub(super) async fn other_numerics(suite: &Suite) -> Checked {
    let brought = luggage(suite).await?;
    let changes: [fn(&mut Hello); 3] = [
        |hello| hello.numerics_id.push('x'),
        |hello| hello.kv_layout = None,
        |hello| hello.kv_layout = hello.kv_layout.take().map(|layout| KvLayout { block_bytes: layout.block_bytes + 1, ..layout }),
    ];
    for change in changes {
        opened(suite, brought.clone(), |said| change(&mut said.identity.hello)).await?.going.refused().await?;
    }
    Ok(())
}

pub(super) async fn stopped_before(suite: &Suite) -> Checked {
    let brought = luggage(suite).await?;
    let (mut gateway, place) = suite.attached().await?;
    let identity = suite.like(gateway.hello(place), None);
    let said = Said { announced: identity.hello.place(), identity, target: place, nonce: NONCE };
    announce(&mut gateway, place, SEQUENCE, ATTEMPT, said.announced, NONCE).await?;
    gateway.tell(place, SEQUENCE, ToSeat::Stop { upto: ATTEMPT }).await?;
    gateway.stopped(place, SEQUENCE).await?;
    // Repeated by a network that is late.
    announce(&mut gateway, place, SEQUENCE, ATTEMPT, said.announced, NONCE).await?;
    open(suite, &mut gateway, place, &brought, &said).await?.refused().await.map(drop)
}

pub(super) async fn whole(suite: &Suite) -> Checked {
    prepared(suite).await?.starts(suite).await
}

pub(super) async fn state_again(suite: &Suite) -> Checked {
    let mut arrival = prepared(suite).await?;
    arrival.going.state(&arrival.brought).await?;
    arrival.is_prepared().await?;
    arrival.starts(suite).await
}

pub(super) async fn told_as_held(suite: &Suite) -> Checked {
    let mut arrival = prepared(suite).await?;
    let (gateway, _) = suite.attached_as(arrival.gateway.name).await?;
    arrival.gateway = gateway;
    let held = arrival.gateway.all_held().await?;
    let [(request, phase, tag, entries)] = held[..] else { return failed(format!("one request was to be held, and {held:?} are")) };
    let wanted = (arrival.gateway.request(SEQUENCE), ATTEMPT, arrival.brought.next());
    demand!((request, tag, entries) == wanted, "{request} is held under {tag} with {entries} entries, and {wanted:?} was prepared");
    demand!(matches!(phase, Phase::Prepared | Phase::Withdrawing), "what is prepared is held as {phase:?}");
    arrival.stops().await
}

pub(super) async fn held_prefix(suite: &Suite) -> Checked {
    let spec = RunRequest { salt: Some(format!("{:x}", random()?)), ..suite.sampled(suite.options.output) };
    let brought = brought(suite, &spec).await?;
    let mut arrival = opened(suite, brought, |_| {}).await?;
    let held = arrival.going.have().await?;
    if held == 0 {
        arrival.stops().await?;
        return skipped("the replica keeps no prefix");
    }
    let full = arrival.brought.plan.keys.len() as u32;
    demand!(held <= full, "{held} blocks are held, and {full} are full");
    arrival.going.blocks(&arrival.brought, held).await?;
    arrival.going.state(&arrival.brought).await?;
    arrival.is_prepared().await?;
    arrival.starts(suite).await
}

pub(super) async fn wrong_checksum(suite: &Suite) -> Checked {
    let mut arrival = opened(suite, luggage(suite).await?, |_| {}).await?;
    arrival.going.have().await?;
    let (&index, (tokens, bytes)) = arrival.brought.blocks.first_key_value().expect("a prompt has a block");
    let header = BlockHeader { index, tokens: *tokens, checksum: xxh3_64(bytes) ^ 1 };
    arrival.going.block_with(header, bytes).await?;
    arrival.going.given_up().await?;
    arrival.withdraws_and_stops().await
}

pub(super) async fn missing_block(suite: &Suite) -> Checked {
    let mut arrival = opened(suite, luggage(suite).await?, |_| {}).await?;
    arrival.going.have().await?;
    arrival.brought.blocks.pop_last();
    arrival.going.blocks(&arrival.brought, 0).await?;
    arrival.going.state(&arrival.brought).await?;
    arrival.going.given_up().await?;
    arrival.withdraws_and_stops().await
}

pub(super) async fn other_state(suite: &Suite) -> Checked {
    let mut arrival = opened(suite, luggage(suite).await?, |_| {}).await?;
    arrival.going.have().await?;
    arrival.going.blocks(&arrival.brought, 0).await?;
    if let Some(OutputEntry::Token { id, .. }) = arrival.brought.entries.last_mut() {
        *id ^= 1;
    }
    arrival.going.state(&arrival.brought).await?;
    arrival.going.given_up().await?;
    arrival.withdraws_and_stops().await
}

pub(super) async fn source_leaves(suite: &Suite) -> Checked {
    let mut arrival = opened(suite, luggage(suite).await?, |_| {}).await?;
    arrival.going.have().await?;
    arrival.going.hang_up().await?;
    arrival.withdraws_and_stops().await
}

pub(super) async fn stays_prepared(suite: &Suite) -> Checked {
    let mut arrival = prepared(suite).await?;
    arrival.going.hang_up().await?;
    arrival.withdraws().await?;
    arrival.starts(suite).await
}

pub(super) async fn no_credit(suite: &Suite) -> Checked {
    /// A target that gives so much at once may have given it all.
    const BLOCKS_MAX: u64 = 4096;
    let mut arrival = opened(suite, luggage(suite).await?, |_| {}).await?;
    arrival.going.have().await?;
    let blocks = (4 * arrival.going.credit / arrival.going.block_bytes()).min(BLOCKS_MAX);
    let (&index, (tokens, bytes)) = arrival.brought.blocks.first_key_value().expect("a prompt has a block");
    let all_went = arrival.going.heedless(index, *tokens, bytes, blocks).await;
    // It may have given credit as fast as blocks came.
    let brought = if all_went { arrival.going.blocks(&arrival.brought, 0).await } else { failed("it ended") };
    let taken = match brought {
        Ok(()) => arrival.going.state(&arrival.brought).await.is_ok() && arrival.going.prepared().await.is_ok(),
        Err(_) => false,
    };
    if taken {
        arrival.starts(suite).await?;
    } else {
        arrival.withdraws_and_stops().await?;
    }
    suite.lives().await
}

pub(super) async fn silent(suite: &Suite) -> Checked {
    /// Of the request of which nothing more is said.
    const SILENT: u64 = SEQUENCE + 7;
    let (mut gateway, place) = suite.attached().await?;
    let identity = suite.like(gateway.hello(place), None);
    let source = identity.hello.place();
    announce(&mut gateway, place, SILENT, ATTEMPT, source, NONCE).await?;
    // One that is introduced, and one that has opened its attempt.
    let mut introduced = Going::dial(suite, gateway.hello(place), &identity).await?;
    let mut opened = Going::dial(suite, gateway.hello(place), &identity).await?;
    let request = gateway.request(SILENT);
    opened.say(&KvFrame::Open { request, attempt: ATTEMPT, source, target: place, nonce: NONCE }).await?;
    prepared(suite).await?.starts(suite).await?;
    if suite.options.long {
        introduced.given_up().await?;
        opened.given_up().await?;
    }
    let held = suite.attached_as(gateway.name).await?.0.all_held().await?;
    demand!(held.is_empty(), "{held:?} are held of a source that brought nothing");
    suite.lives().await
}

pub(super) async fn other_tokens(suite: &Suite) -> Checked {
    let spec = RunRequest { salt: Some(format!("{:x}", random()?)), ..suite.sampled(suite.options.output) };
    let brought = brought(suite, &spec).await?;
    let size = brought.tokens_of_block();
    if brought.plan.keys.len() < 2 || spec.prompt.len() < 2 * size {
        return skipped("the prompt has no two full blocks; give a longer --prompt");
    }
    let mut arrival = opened(suite, brought.clone(), |_| {}).await?;
    let held = arrival.going.have().await?;
    arrival.lets_go().await?;
    if held < 2 {
        return skipped("the replica keeps no prefix");
    }
    for at in [0, size] {
        let mut other = brought.clone();
        other.change_prompt(at)?;
        let mut arrival = opened(suite, other, |_| {}).await?;
        let (held, same) = (arrival.going.have().await?, (at / size) as u32);
        demand!(held <= same, "{held} blocks are counted as held, and only {same} have the tokens of the plan");
        arrival.lets_go().await?;
    }
    Ok(())
}

pub(super) async fn told_in_each_phase(suite: &Suite) -> Checked {
    let mut arrival = opened(suite, luggage(suite).await?, |_| {}).await?;
    arrival.going.have().await?;
    arrival.told_again(suite, Phase::Preparing).await?;
    arrival.going.hang_up().await?;
    arrival.withdraws().await?;
    arrival.told_again(suite, Phase::Withdrawing).await?;
    // It asks again.
    arrival.withdraws_and_stops().await
}
