use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    sync::Arc,
    time::Duration,
};

use baton_link::Identity;
use baton_migration::{GatewayName, Place, Tag, ToSeat};
use baton_wire::{
    migration::{
        OutputEntry, RunRequest, RunSampling,
        handshake::{FleetKey, Hello, KvLayout, Role, VERSION},
    },
    replica::Report,
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpStream, UdpSocket, lookup_host},
    sync::Mutex,
};

use crate::{
    gateway::{Gateway, Stream, same_within},
    verdict::{Checked, failed, skipped},
};

/// What the suite is told of the replicas under test.
#[derive(Debug, Clone)]
pub struct Options {
    /// `host:port` of the replica's control address.
    pub replica: String,
    /// Of a second one that computes the same bits; without it no request moves between two.
    pub peer: Option<String>,
    /// As the fleet names it.
    pub model: String,
    pub fleet_key: Option<Arc<FleetKey>>,
    /// Prompts are of token ids below this.
    pub vocabulary: u32,
    /// Tokens of a prompt.
    pub prompt: u32,
    /// Tokens of a long output. Above 256 a request that nobody acknowledges stands and waits; where it cannot be above, some cases are
    /// skipped.
    pub output: u32,
    /// `host:port` where the replicas report by HTTP; none skips what only a report shows.
    pub http: Vec<String>,
    /// Also what waits for leases to end, which takes real time.
    pub long: bool,
    /// What does not come within this does not come.
    pub patience: Duration,
    /// By how much log-probabilities of the same token may differ between runs: above 0 for engines in which they depend on what shares a step.
    pub tolerance: f32,
}

impl Options {
    /// The defaults around the two that have none.
    pub fn new(replica: &str, model: &str) -> Self {
        Self {
            replica: replica.to_owned(),
            peer: None,
            model: model.to_owned(),
            fleet_key: None,
            vocabulary: 200,
            prompt: 60,
            output: 500,
            http: Vec::new(),
            long: false,
            patience: Duration::from_secs(20),
            tolerance: 0.0,
        }
    }
}

/// All that cases share.
pub struct Suite {
    pub(crate) options: Options,
    /// What requests give where nothing moves, by what was run.
    alone: Mutex<BTreeMap<Vec<u8>, Vec<OutputEntry>>>,
    /// Of the replicas' pools before the first case.
    pub(crate) reports: Vec<Report>,
}

impl Suite {
    /// # Errors
    /// When an address for reports was given where none can be had.
    pub async fn new(options: Options) -> Checked<Self> {
        let mut reports = Vec::new();
        for address in &options.http {
            reports.push(report(address, options.patience).await?);
        }
        Ok(Self { options, alone: Mutex::default(), reports })
    }

    /// The same tokens, log-probabilities and finish: what a move must not change.
    pub(crate) fn same(&self, moved: &[OutputEntry], alone: &[OutputEntry]) -> Checked {
        same_within(moved, alone, self.options.tolerance)
    }

    pub(crate) fn patience(&self) -> Duration {
        self.options.patience
    }

    /// A gateway that nobody has seen before, attached to the replica.
    pub(crate) async fn attached(&self) -> Checked<(Gateway, Place)> {
        self.attached_as(GatewayName { id: random()?, incarnation: 1 }).await
    }

    pub(crate) async fn attached_as(&self, name: GatewayName) -> Checked<(Gateway, Place)> {
        let mut gateway = Gateway::new(self, name);
        let place = gateway.attach(&self.options.replica).await?;
        Ok((gateway, place))
    }

    /// The replica takes gateways still.
    pub(crate) async fn lives(&self) -> Checked {
        let (mut gateway, _) = self.attached().await?;
        gateway.all_held().await.map(drop)
    }

    /// Of `output` tokens, each the likeliest.
    pub(crate) fn greedy(&self, output: u32) -> RunRequest {
        let Options { model, vocabulary, prompt, .. } = &self.options;
        let sampling = RunSampling {
            temperature: 0.0,
            repetition_penalty: 1.2,
            ignore_eos: true,
            max_tokens: Some(output),
            logprobs: Some(0),
            ..RunSampling::default()
        };
        let prompt = (0..*prompt).map(|index| (index * 7 + 11) % vocabulary).collect();
        RunRequest { model: model.clone(), prompt, sampling, seed: 1, ..RunRequest::default() }
    }

    /// Drawn by a seed, with penalties and log-probabilities.
    pub(crate) fn sampled(&self, output: u32) -> RunRequest {
        let greedy = self.greedy(output);
        let sampling = RunSampling {
            temperature: 1.0,
            top_p: 0.95,
            repetition_penalty: 1.0,
            presence_penalty: 0.5,
            logprobs: Some(2),
            ..greedy.sampling
        };
        RunRequest { sampling, seed: 77, choice_index: 1, ..greedy }
    }

    /// What the request gives where it is started once and left alone.
    pub(crate) async fn alone(&self, spec: &RunRequest) -> Checked<Vec<OutputEntry>> {
        let key = RunRequest { salt: None, ..spec.clone() }.to_bytes();
        let mut known = self.alone.lock().await;
        if let Some(entries) = known.get(&key) {
            return Ok(entries.clone());
        }
        let (mut gateway, place) = self.attached().await?;
        let mut stream = Stream::new(place, 1, Tag(1));
        gateway.start(&stream, &[], spec).await?;
        gateway.finish(&mut stream).await?;
        gateway.tell(place, 1, ToSeat::Stop { upto: Tag::ALL }).await?;
        gateway.stopped(place, 1).await?;
        known.insert(key, stream.entries.clone());
        Ok(stream.entries)
    }

    pub(crate) fn identity_of(&self, name: GatewayName) -> Identity {
        Identity::of_gateway(name, self.options.fleet_key.clone())
    }

    /// A replica that computes what `other` does, for the suite to play.
    pub(crate) fn like(&self, other: &Hello, kv_address: Option<String>) -> Identity {
        let hello = Hello {
            version: VERSION,
            role: Role::Replica,
            // An id that no replica has by its name but by a chance of one in four billion.
            id: other.id ^ 0x5a5a_5a5a,
            incarnation: 1,
            kv_address,
            ..other.clone()
        };
        Identity { hello, fleet_key: self.options.fleet_key.clone() }
    }

    /// The address of this machine by which the replica can reach it.
    pub(crate) async fn own_address(&self) -> Checked<IpAddr> {
        let to = lookup_host(&self.options.replica).await?.next();
        let Some(to) = to else { return failed(format!("{} names no address", self.options.replica)) };
        let any: IpAddr = if to.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
        // Nothing is sent: it is only asked which way it would go.
        let socket = UdpSocket::bind((any, 0)).await?;
        socket.connect(to).await?;
        Ok(socket.local_addr()?.ip())
    }

    /// The pools are as they were before the first case, and nothing runs.
    pub(crate) async fn is_empty(&self) -> Checked {
        for (address, before) in self.options.http.iter().zip(&self.reports) {
            let settled = async {
                loop {
                    let now = report(address, self.patience()).await?;
                    if now.kv_blocks_free == before.kv_blocks_free && now.running + now.waiting == 0 {
                        return Ok::<_, crate::Unmet>(());
                    }
                    // No replica tells by itself that it is empty; the whole is bounded below.
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
            };
            if tokio::time::timeout(self.patience(), settled).await.is_err() {
                let now = report(address, self.patience()).await?;
                return failed(format!(
                    "{address} had {} free blocks before all cases, and has {} with {} running and {} waiting requests",
                    before.kv_blocks_free, now.kv_blocks_free, now.running, now.waiting
                ));
            }
        }
        Ok(())
    }
}

/// The layout of a replica that can send and take KV.
pub(crate) fn movable(hello: &Hello) -> Checked<(KvLayout, String)> {
    match (&hello.kv_layout, &hello.kv_address) {
        (Some(layout), Some(address)) => Ok((layout.clone(), address.clone())),
        _ => skipped("the replica moves no KV"),
    }
}

pub(crate) fn random() -> Checked<u64> {
    let mut bytes = [0; 8];
    match getrandom::fill(&mut bytes) {
        Ok(()) => Ok(u64::from_le_bytes(bytes)),
        Err(error) => failed(format!("the system gives no random numbers: {error}")),
    }
}

async fn report(address: &str, patience: Duration) -> Checked<Report> {
    let ask = async {
        let mut stream = TcpStream::connect(address).await?;
        let head = format!("GET /baton/v1/replica HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n");
        stream.write_all(head.as_bytes()).await?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await?;
        Ok::<_, std::io::Error>(answer)
    };
    let Ok(answer) = tokio::time::timeout(patience, ask).await else { return failed(format!("{address} sends no report")) };
    let answer = answer?;
    let body = answer.split_once("\r\n\r\n").map_or("", |(_, body)| body);
    serde_json::from_str(body).or_else(|error| failed(format!("{address} sent no report that can be read: {error}")))
}
