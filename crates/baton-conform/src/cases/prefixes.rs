//! Copies of cached prefixes, without a request.

use std::collections::BTreeMap;

use baton_link::Identity;
use baton_migration::{Place, Tag, ToGateway, ToSeat};
use baton_units::{BlockSize, Tokens};
use baton_wire::migration::{BlockHeader, ControlFrame, HeldBlocks, KvFrame, KvPlan, MoveTo, PrefixCopied, Refusal, RunRequest};
use xxhash_rust::xxh3::xxh3_64;

use crate::{
    Checked, Suite,
    gateway::{Gateway, News, Stream},
    kv::{Coming, Going, Target, announce},
    suite::{movable, random},
    verdict::{Unmet, demand, failed, skipped},
};

const ATTEMPT: Tag = Tag(1);
/// The copy's name; the request that computes the prefix, and the one that finds it, have others.
const COPY: u64 = 1;
const COMPUTES: u64 = 2;
const FINDS: u64 = 3;
const NONCE: [u8; 16] = [9; 16];

/// A replica that has computed a prompt under a salt of its own.
struct Holder {
    gateway: Gateway,
    place: Place,
    spec: RunRequest,
    size: BlockSize,
}

/// A copy on its way from the replica to the suite.
struct Sending {
    holder: Holder,
    target: Target,
    to: MoveTo,
    coming: Coming,
}

/// All full blocks of a prefix, as they came.
struct Luggage {
    plan: KvPlan,
    blocks: BTreeMap<u32, Vec<u8>>,
}

impl Holder {
    async fn computed(suite: &Suite) -> Checked<Self> {
        let (gateway, place) = suite.attached().await?;
        let spec = RunRequest { salt: Some(format!("{:x}", random()?)), ..suite.greedy(2) };
        let (layout, _) = movable(gateway.hello(place))?;
        let size = BlockSize::new(layout.block_size).unwrap_or(BlockSize::DEFAULT);
        let mut holder = Self { gateway, place, spec, size };
        holder.cached_at(place, COMPUTES).await?;
        Ok(holder)
    }

    /// Prompt tokens that a replica finds cached, by its own word.
    async fn cached_at(&mut self, place: Place, sequence: u64) -> Checked<u32> {
        let mut stream = Stream::new(place, sequence, Tag(1));
        self.gateway.start(&stream, &[], &self.spec).await?;
        let mut found = None;
        while !stream.has_finished() {
            match self.gateway.news(&mut stream).await? {
                News::Scheduled { cached } => found = Some(cached),
                News::Message(message, why) => return failed(format!("an entry was due, and {message:?} came {why}")),
                News::Entry | News::Again(_) | News::Moved(..) => {}
            }
        }
        self.gateway.end(&stream).await?;
        found.map_or_else(|| skipped("the replica does not say what it finds cached"), Ok)
    }

    /// Blocks of the prompt that are full.
    fn full(&self) -> u32 {
        Tokens(self.spec.prompt.len() as u32).full_blocks(self.size).0
    }

    async fn order(&mut self, target: Place, to: &MoveTo) -> Checked {
        let (request, prefix) = (self.gateway.request(COPY), self.spec.to_bytes());
        let copy = ControlFrame::CopyPrefix { request, attempt: ATTEMPT, target, to: to.to_bytes(), prefix };
        self.gateway.send(self.place, &copy).await
    }

    /// What the replica says of the copy; skipped where it does not know the word, and ends the connection.
    async fn told(&mut self, place: Place) -> Checked<Result<PrefixCopied, String>> {
        match told(&mut self.gateway, place).await {
            Err(Unmet::Failed(why)) if why.contains("ended its control connection") => skipped("the replica copies no prefixes"),
            told => told,
        }
    }

    async fn copied(&mut self, place: Place, wanted: PrefixCopied) -> Checked {
        match self.told(place).await? {
            Ok(copied) if PrefixCopied { took_us: 0, ..copied } == wanted => Ok(()),
            Ok(copied) => failed(format!("COPIED says {copied:?}, and {wanted:?} was due")),
            Err(why) => failed(format!("COPIED was due, and ABORTED came: {why}")),
        }
    }

    async fn sends(suite: &Suite) -> Checked<Sending> {
        let mut holder = Self::computed(suite).await?;
        let target = Target::like(suite, holder.gateway.hello(holder.place)).await?;
        let to = target.to()?;
        holder.order(target.place, &to).await?;
        let coming = tokio::select! {
            coming = target.accept_prefix() => coming?,
            told = holder.told(holder.place) => return failed(format!("the holder said {:?} before it came", told?)),
        };
        let opened = (coming.request, coming.attempt, coming.source, coming.target, coming.nonce);
        let wanted = (holder.gateway.request(COPY), ATTEMPT, holder.place, target.place, to.nonce);
        demand!(opened == wanted, "OPEN says {opened:?}, and the gateway said {wanted:?}");
        Ok(Sending { holder, target, to, coming })
    }
}

async fn told(gateway: &mut Gateway, place: Place) -> Checked<Result<PrefixCopied, String>> {
    let wanted = gateway.request(COPY);
    let told = |from, frame| match frame {
        ControlFrame::PrefixCopied { request, attempt: ATTEMPT, copied } if request == wanted && from == place => Some(Ok(copied)),
        ControlFrame::ToGateway { request, message: ToGateway::Aborted { attempt: ATTEMPT, .. }, why }
            if request == wanted && from == place =>
        {
            Some(Err(why))
        }
        _ => None,
    };
    gateway.until("COPIED or ABORTED", told).await
}

impl Sending {
    /// Answers that the first `held` blocks are here, and takes the rest up to the end.
    async fn take(&mut self, held: u32) -> Checked<Luggage> {
        let (coming, size) = (&mut self.coming, self.holder.size.get());
        let plan = coming.plan.clone();
        let full = self.holder.full();
        demand!(
            plan.blocks == full && plan.keys.len() as u32 == full,
            "PREFIX counts {} blocks and {} keys of {full}",
            plan.blocks,
            plan.keys.len()
        );
        let tokens = &self.holder.spec.prompt[..(full * size) as usize];
        demand!(plan.tokens == tokens, "the tokens in PREFIX are not those of the full blocks");
        let (bytes, mut blocks) = (coming.block_bytes(), BTreeMap::new());
        // One at a time.
        coming.say(&KvFrame::Have { blocks: HeldBlocks { held }, credit: bytes }).await?;
        loop {
            match coming.next().await? {
                (KvFrame::Block(BlockHeader { index, tokens, checksum }), block) => {
                    demand!(index == held + blocks.len() as u32 && tokens == size, "block {index} came with {tokens} tokens");
                    demand!(block.len() as u64 == bytes && xxh3_64(&block) == checksum, "block {index} is not what its header says");
                    blocks.insert(index, block);
                    coming.say(&KvFrame::Credit { bytes }).await?;
                }
                (KvFrame::PrefixSent, _) => break,
                (other, _) => return failed(format!("a block or the end was due, and {other:?} came")),
            }
        }
        demand!(blocks.len() as u32 == full - held, "{} blocks came, and {} were missing", blocks.len(), full - held);
        Ok(Luggage { plan, blocks })
    }

    async fn installed(&mut self, held: u32) -> Checked {
        let (blocks, bytes) = (self.holder.full(), self.coming.block_bytes());
        self.coming.say(&KvFrame::Installed { blocks }).await?;
        let sent = u64::from(blocks - held) * bytes;
        self.holder.copied(self.holder.place, PrefixCopied { blocks, held, bytes: sent, took_us: 0 }).await
    }

    async fn aborted(mut self) -> Checked<String> {
        match self.holder.told(self.holder.place).await? {
            Err(why) => Ok(why),
            Ok(copied) => failed(format!("ABORTED was due, and COPIED came: {copied:?}")),
        }
    }
}

pub(super) async fn between_two(suite: &Suite) -> Checked {
    let Some(address) = &suite.options.peer else { return skipped("no --peer was given") };
    let mut holder = Holder::computed(suite).await?;
    let peer = holder.gateway.attach(address).await?;
    let (_, kv_address) = movable(holder.gateway.hello(peer))?;
    announce(&mut holder.gateway, peer, COPY, ATTEMPT, holder.place, NONCE).await?;
    // What was announced is known before the holder comes.
    holder.gateway.tell(peer, FINDS + 1, ToSeat::Stop { upto: Tag(1) }).await?;
    holder.gateway.stopped(peer, FINDS + 1).await?;
    holder.order(peer, &MoveTo { kv_address, nonce: NONCE }).await?;
    let blocks = holder.full();
    match holder.told(peer).await? {
        Ok(copied) => demand!((copied.blocks, copied.held) == (blocks, 0), "the peer has {copied:?} of {blocks} blocks"),
        Err(why) => return failed(format!("COPIED was due from the peer, and ABORTED came: {why}")),
    }
    let found = holder.cached_at(peer, FINDS).await?;
    // The last token is computed in any case.
    let most = Tokens(holder.spec.prompt.len() as u32 - 1).full_blocks(holder.size).0;
    let wanted = blocks.min(most) * holder.size.get();
    demand!(found == wanted, "the peer found {found} tokens, and {wanted} were copied to it");
    let kept = holder.cached_at(holder.place, FINDS).await?;
    demand!(kept == wanted, "the holder finds {kept} tokens, and had {wanted}");
    Ok(())
}

pub(super) async fn not_cached(suite: &Suite) -> Checked {
    let mut holder = Holder::computed(suite).await?;
    let target = Target::like(suite, holder.gateway.hello(holder.place)).await?;
    holder.spec.salt = Some(format!("{:x}", random()?));
    holder.order(target.place, &target.to()?).await?;
    match holder.told(holder.place).await? {
        Err(why) => {
            demand!(why.len() <= 256, "the reason has {} bytes", why.len());
            Ok(())
        }
        Ok(copied) => failed(format!("ABORTED was due, and COPIED came: {copied:?}")),
    }
}

pub(super) async fn holder_brings(suite: &Suite) -> Checked {
    for held in [0, 2] {
        let mut sending = Holder::sends(suite).await?;
        sending.take(held).await?;
        sending.installed(held).await?;
    }
    Ok(())
}

pub(super) async fn copied_once(suite: &Suite) -> Checked {
    let mut sending = Holder::sends(suite).await?;
    sending.take(0).await?;
    sending.installed(0).await?;
    let Sending { mut holder, target, to, .. } = sending;
    holder.order(target.place, &to).await?;
    let again = tokio::select! {
        told = holder.told(holder.place) => told?,
        coming = target.accept_prefix() => return failed(format!("it was copied again, with {:?}", coming?.plan.blocks)),
    };
    let blocks = holder.full();
    demand!(again.as_ref().is_ok_and(|copied| copied.blocks == blocks), "COPIED with {blocks} blocks was due again, and {again:?} came");
    Ok(())
}

pub(super) async fn holder_gives_up(suite: &Suite) -> Checked {
    let mut refused = Holder::sends(suite).await?;
    refused.coming.say(&KvFrame::Refuse(Refusal::Other("no room for it".to_owned()))).await?;
    let why = refused.aborted().await?;
    demand!(why.contains("no room for it"), "the target refused with a reason, and the gateway was told {why:?}");
    let mut aborted = Holder::sends(suite).await?;
    let bytes = aborted.coming.block_bytes();
    aborted.coming.say(&KvFrame::Have { blocks: HeldBlocks { held: 0 }, credit: bytes }).await?;
    aborted.coming.next().await?;
    aborted.coming.say(&KvFrame::Abort { why: "it is too much".to_owned() }).await?;
    aborted.aborted().await?;
    let mut lost = Holder::sends(suite).await?;
    lost.coming.hang_up().await?;
    lost.aborted().await?;
    Ok(())
}

pub(super) async fn holder_stops(suite: &Suite) -> Checked {
    let mut sending = Holder::sends(suite).await?;
    let bytes = sending.coming.block_bytes();
    sending.coming.say(&KvFrame::Have { blocks: HeldBlocks { held: 0 }, credit: bytes }).await?;
    sending.coming.next().await?;
    let (holder, coming) = (&mut sending.holder, &mut sending.coming);
    holder.gateway.tell(holder.place, COPY, ToSeat::Stop { upto: Tag::ALL }).await?;
    holder.gateway.stopped(holder.place, COPY).await?;
    coming.ended().await
}

/// Two salts in turn, for which the first half of the prompt does not count.
pub(super) async fn public_tokens(suite: &Suite) -> Checked {
    let mut holder = Holder::computed(suite).await?;
    holder.spec.public = holder.spec.prompt.len() as u32 / 2;
    let size = holder.size;
    let whole_blocks = |tokens: u32| Tokens(tokens).full_blocks(size).to_tokens(size).0;
    let (public, most) = (whole_blocks(holder.spec.public), whole_blocks(holder.spec.prompt.len() as u32 - 1));
    let mut found = Vec::new();
    for salt in [random()?, random()?] {
        holder.spec.salt = Some(format!("{salt:x}"));
        for _ in 0..2 {
            let (place, sequence) = (holder.place, FINDS + 1 + found.len() as u64);
            found.push(holder.cached_at(place, sequence).await?);
        }
    }
    if found == [0, most, 0, most] {
        return skipped("the replica shares less: all of a salted prompt is under its salt");
    }
    // Another client may have had what is public before.
    let wanted = [found[0].min(public), most, public, most];
    demand!(found == wanted, "{found:?} tokens were found under one salt, again, under another, again; {wanted:?} were due");
    Ok(())
}

/// What some replica has, under a salt that no other one has.
async fn luggage(suite: &Suite) -> Checked<(Holder, Luggage)> {
    let mut sending = Holder::sends(suite).await?;
    let mut luggage = sending.take(0).await?;
    sending.installed(0).await?;
    let mut holder = sending.holder;
    holder.spec.salt = Some(format!("{:x}", random()?));
    let run = RunRequest::from_bytes(&luggage.plan.request).map_err(Unmet::Failed)?;
    luggage.plan.request = RunRequest { salt: holder.spec.salt.clone(), ..run }.to_bytes();
    Ok((holder, luggage))
}

/// The suite comes to the replica with a prefix.
async fn opened(suite: &Suite, announced: bool) -> Checked<(Holder, Luggage, Going)> {
    let (_, luggage) = luggage(suite).await?;
    let (gateway, place) = suite.attached().await?;
    let (layout, _) = movable(gateway.hello(place))?;
    let run = RunRequest::from_bytes(&luggage.plan.request).map_err(Unmet::Failed)?;
    let spec = RunRequest { salt: run.salt, ..suite.greedy(2) };
    let size = BlockSize::new(layout.block_size).unwrap_or(BlockSize::DEFAULT);
    let mut holder = Holder { gateway, place, spec, size };
    let identity: Identity = suite.like(holder.gateway.hello(place), None);
    let source = identity.hello.place();
    if announced {
        announce(&mut holder.gateway, place, COPY, ATTEMPT, source, NONCE).await?;
    }
    holder.gateway.tell(place, FINDS + 1, ToSeat::Stop { upto: Tag(1) }).await?;
    holder.gateway.stopped(place, FINDS + 1).await?;
    let mut going = Going::dial(suite, holder.gateway.hello(place), &identity).await?;
    let request = holder.gateway.request(COPY);
    going.say(&KvFrame::Open { request, attempt: ATTEMPT, source, target: place, nonce: NONCE }).await?;
    going.say(&KvFrame::Prefix(luggage.plan.clone())).await?;
    Ok((holder, luggage, going))
}

pub(super) async fn target_installs(suite: &Suite) -> Checked {
    let (mut holder, luggage, mut going) = opened(suite, true).await?;
    let held = going.have().await?;
    demand!(held == 0, "{held} blocks are held of a prefix that was never there");
    for (&index, block) in &luggage.blocks {
        going.block(index, holder.size.get(), block).await?;
    }
    going.say(&KvFrame::PrefixSent).await?;
    let blocks = holder.full();
    match going.next().await? {
        KvFrame::Installed { blocks: told } if told == blocks => {}
        other => return failed(format!("INSTALLED with {blocks} blocks was due, and {other:?} came")),
    }
    let bytes = luggage.blocks.values().map(|block| block.len() as u64).sum();
    holder.copied(holder.place, PrefixCopied { blocks, held: 0, bytes, took_us: 0 }).await?;
    let found = holder.cached_at(holder.place, FINDS).await?;
    let most = Tokens(holder.spec.prompt.len() as u32 - 1).full_blocks(holder.size).0;
    demand!(found == blocks.min(most) * holder.size.get(), "{found} tokens are found, and {blocks} blocks were brought");
    Ok(())
}

pub(super) async fn unannounced(suite: &Suite) -> Checked {
    let (_, _, mut going) = opened(suite, false).await?;
    going.refused().await.map(drop)
}

pub(super) async fn incomplete(suite: &Suite) -> Checked {
    for altered in [false, true] {
        let (mut holder, luggage, mut going) = opened(suite, true).await?;
        going.have().await?;
        for (&index, block) in luggage.blocks.iter().skip(1) {
            going.block(index, holder.size.get(), block).await?;
        }
        if altered {
            let checksum = xxh3_64(&luggage.blocks[&0]) ^ 1;
            going.block_with(BlockHeader { index: 0, tokens: holder.size.get(), checksum }, &luggage.blocks[&0]).await?;
        } else {
            going.say(&KvFrame::PrefixSent).await?;
        }
        match holder.told(holder.place).await? {
            Err(_) => {}
            Ok(copied) => return failed(format!("ABORTED was due, and COPIED came: {copied:?}")),
        }
        going.given_up().await?;
        let found = holder.cached_at(holder.place, FINDS).await?;
        demand!(found == 0, "{found} tokens are found of a prefix that did not come whole");
    }
    Ok(())
}

pub(super) async fn target_stops(suite: &Suite) -> Checked {
    let (mut holder, luggage, mut going) = opened(suite, true).await?;
    going.have().await?;
    going.block(0, holder.size.get(), &luggage.blocks[&0]).await?;
    holder.gateway.tell(holder.place, COPY, ToSeat::Stop { upto: Tag::ALL }).await?;
    holder.gateway.stopped(holder.place, COPY).await?;
    going.given_up().await
}
