use baton_migration::{GatewayName, LostClass, Phase, Place, RequestName, Tag, ToGateway, ToSeat};
use baton_units::{Incarnation, ReplicaId};
use proptest::prelude::*;

use super::{
    handshake::{FleetKey, Freeze, Hello, HelloError, KvLayout, Role, Side, Transcript, VERSION},
    *,
};

fn request() -> RequestName {
    RequestName { gateway: GatewayName { id: 7, incarnation: u64::MAX }, sequence: 42 }
}

fn place(replica: u32) -> Place {
    Place { replica: ReplicaId(replica), incarnation: Incarnation(u64::MAX - 1) }
}

fn token(id: u32) -> OutputEntry {
    OutputEntry::Token { id, logprobs: Some(TokenLogprobs { chosen: -0.5, top: vec![(id, -0.5), (9, -1.25)] }) }
}

fn control_frames() -> Vec<ControlFrame> {
    let seat = |message, with: &[u8]| ControlFrame::ToSeat { request: request(), message, with: with.to_vec() };
    let reasoned = |message, why: &str| ControlFrame::ToGateway { request: request(), message, why: why.to_owned() };
    let gateway = |message| reasoned(message, "");
    let (epoch, attempt) = (Tag(3), Tag(4));
    vec![
        ControlFrame::Heartbeat(Heartbeat { sequence: 1, steps: 2, step_predicted_us: 3, waiting: 4, running: 5 }),
        ControlFrame::Lease { sequence: u64::MAX },
        ControlFrame::Holds { request: request(), phase: Phase::Withdrawing, tag: attempt, entries: 9 },
        ControlFrame::AllHeld,
        ControlFrame::Expect { request: request(), attempt, source: place(1), nonce: [200; 16] },
        seat(ToSeat::Start { epoch, delivered: vec![token(5), OutputEntry::Finish(FinishReason::StopToken(2))] }, b"what to run"),
        seat(ToSeat::Keep { epoch, next: 2 }, b""),
        seat(ToSeat::Move { epoch, attempt, target: place(0) }, b"where"),
        seat(ToSeat::No { epoch, attempt }, b""),
        seat(ToSeat::Resume { epoch, attempt, resumed: Tag(5), next: 2 }, b""),
        seat(ToSeat::Stop { upto: Tag::ALL }, b""),
        seat(ToSeat::Ack { epoch, next: 3 }, b""),
        gateway(ToGateway::Output { epoch, index: 0, entry: token(1) }),
        gateway(ToGateway::Output { epoch, index: 1, entry: OutputEntry::Finish(FinishReason::EndOfSequence) }),
        gateway(ToGateway::CommitTarget { epoch, attempt, frozen: 2 }),
        gateway(ToGateway::CommitSource { epoch, attempt, frozen: 2 }),
        reasoned(ToGateway::Aborted { epoch, attempt }, "the target refuses"),
        gateway(ToGateway::Withdraw { attempt }),
        gateway(ToGateway::Stopped { upto: epoch }),
        gateway(ToGateway::Lost { epoch, class: LostClass::Lost }),
        reasoned(ToGateway::Lost { epoch, class: LostClass::Refused }, "its temperature is negative"),
        reasoned(ToGateway::Lost { epoch, class: LostClass::Busy }, "its queue is full"),
        ControlFrame::Scheduled { request: request(), epoch, cached: 32, waited_us: 1 << 40 },
        ControlFrame::Moved { request: request(), attempt, copied: Copied { bytes: 1 << 40, held: 2, rounds: 3, gap_us: 4_000 } },
        ControlFrame::CopyPrefix { request: request(), attempt, target: place(1), to: b"where".to_vec(), prefix: b"of what".to_vec() },
        ControlFrame::PrefixCopied {
            request: request(),
            attempt,
            copied: PrefixCopied { blocks: 7, held: 2, bytes: 1 << 40, took_us: 1 << 33 },
        },
    ]
}

fn kv_frames() -> Vec<KvFrame> {
    let plan = KvPlan { tokens: vec![1, 2, 3], keys: vec![u64::MAX], blocks: 2, request: b"what to run".to_vec() };
    vec![
        KvFrame::Open { request: request(), attempt: Tag(4), source: place(0), target: place(1), nonce: [7; 16] },
        KvFrame::Prepare(plan.clone()),
        KvFrame::Prefix(plan.clone()),
        KvFrame::PrefixSent,
        KvFrame::Installed { blocks: 7 },
        KvFrame::Have { blocks: HeldBlocks { held: 1 }, credit: 1 << 20 },
        KvFrame::Refuse(Refusal::NoRoom { needed: 9, free: 3 }),
        KvFrame::Credit { bytes: 5 },
        KvFrame::Block(BlockHeader { index: 1, tokens: 16, checksum: u64::MAX }),
        KvFrame::State { entries: vec![token(1)], plan },
        KvFrame::Prepared { entries: 1 },
        KvFrame::Abort { why: "preempted".to_owned() },
    ]
}

fn key() -> FrameKey {
    FrameKey::new(&[1; 32])
}

#[test]
fn frames_come_out_as_they_went_in() {
    for key in [None, Some(key())] {
        let (mut sealer, mut opener, mut bytes) = (Sealer::new(key.clone()), Opener::new(key), Vec::new());
        for frame in control_frames() {
            frame.seal(&mut sealer, &mut bytes);
        }
        for frame in kv_frames() {
            frame.seal(&mut sealer, &mut bytes);
        }
        let mut rest = bytes.as_slice();
        for frame in control_frames() {
            let Opened { kind, body, taken } = opener.open(rest).unwrap().unwrap();
            assert_eq!(ControlFrame::decode(kind, body).unwrap(), frame);
            rest = &rest[taken..];
        }
        for frame in kv_frames() {
            let Opened { kind, body, taken } = opener.open(rest).unwrap().unwrap();
            assert_eq!(KvFrame::decode(kind, body).unwrap(), frame);
            rest = &rest[taken..];
        }
        assert_eq!(opener.open(rest).unwrap(), None);
    }
}

#[test]
fn a_class_of_losses_that_is_not_known_is_a_loss() {
    const LOST: u16 = 0x36;
    let named = |class: &str| body::body(&(body::name(request()), 3_u32, class, "why"));
    for (name, class) in [("lost", LostClass::Lost), ("refused", LostClass::Refused), ("busy", LostClass::Busy), ("later", LostClass::Lost)]
    {
        let message = ToGateway::Lost { epoch: Tag(3), class };
        let frame = ControlFrame::ToGateway { request: request(), message, why: "why".to_owned() };
        assert_eq!(ControlFrame::decode(LOST, &named(name)).unwrap(), frame, "{name}");
    }
    let unnamed = body::body(&(body::name(request()), 3_u32, 1_u8, "why"));
    assert!(ControlFrame::decode(LOST, &unnamed).is_err());
}

#[test]
fn log_probabilities_travel_although_equality_leaves_them_out() {
    let OutputEntry::Token { logprobs: sent, .. } = token(5) else { unreachable!() };
    let frame = ControlFrame::ToGateway {
        request: request(),
        message: ToGateway::Output { epoch: Tag(1), index: 0, entry: token(5) },
        why: String::new(),
    };
    let mut bytes = Vec::new();
    frame.seal(&mut Sealer::new(None), &mut bytes);
    let Opened { kind, body, .. } = Opener::new(None).open(&bytes).unwrap().unwrap();
    let ControlFrame::ToGateway { message: ToGateway::Output { entry: OutputEntry::Token { logprobs, .. }, .. }, .. } =
        ControlFrame::decode(kind, body).unwrap()
    else {
        panic!("a token")
    };
    assert_eq!(logprobs, sent);
    assert!(OutputEntry::Token { id: 5, logprobs: None } == token(5));
}

#[test]
fn a_blocks_bytes_lie_between_what_is_sealed_around_them() {
    let (mut sealer, mut opener) = (Sealer::new(Some(key())), Opener::new(Some(key())));
    let header = BlockHeader { index: 3, tokens: 16, checksum: 77 };
    let bytes = [9; 100];
    let (before, mac) = KvFrame::seal_block(header, bytes.len(), &mut sealer);
    let first = before.first_chunk().unwrap();
    let read = opener.header(first).unwrap();
    assert!(KvFrame::is_block(read.kind));
    assert_eq!(read.body as usize, KvFrame::BLOCK_HEADER_BYTES + bytes.len());
    let covered = &before[HEADER_BYTES..];
    opener.check(first, covered, &mac.unwrap()).unwrap();
    assert_eq!(KvFrame::decode(read.kind, covered).unwrap(), KvFrame::Block(header));
    let mut altered = covered.to_vec();
    altered[0] ^= 1;
    assert_eq!(opener.check(first, &altered, &mac.unwrap()), Err(FrameError::NotAuthentic(1)));
}

#[test]
fn a_frame_that_is_repeated_left_out_or_altered_ends_the_connection() {
    let frame = ControlFrame::Lease { sequence: 1 };
    let mut sealer = Sealer::new(Some(key()));
    let mut sealed = || {
        let mut bytes = Vec::new();
        frame.seal(&mut sealer, &mut bytes);
        bytes
    };
    let (first, second) = (sealed(), sealed());
    let mut opener = Opener::new(Some(key()));
    assert_eq!(opener.open(&second), Err(FrameError::OutOfOrder { got: 2, wanted: 1 }));
    let mut opener = Opener::new(Some(key()));
    opener.open(&first).unwrap().unwrap();
    assert_eq!(opener.open(&first), Err(FrameError::OutOfOrder { got: 1, wanted: 2 }));
    for place in HEADER_BYTES..first.len() {
        let mut altered = first.clone();
        altered[place] ^= 0x10;
        assert_eq!(Opener::new(Some(key())).open(&altered), Err(FrameError::NotAuthentic(1)));
    }
    let other = FrameKey::new(&[2; 32]);
    assert_eq!(Opener::new(Some(other)).open(&first), Err(FrameError::NotAuthentic(1)));
}

fn hello(nonce: u8) -> Hello {
    let layout = KvLayout { format: "cpu-1/f32le/layers=30".to_owned(), block_size: 16, block_bytes: 1 << 20 };
    Hello {
        version: VERSION,
        role: Role::Replica,
        id: 1,
        incarnation: 2,
        numerics_id: "abc".to_owned(),
        kv_layout: Some(layout),
        freeze: Some(Freeze::Resumable),
        kv_address: Some("127.0.0.1:1".to_owned()),
        nonce: [nonce; 32],
    }
}

#[test]
fn hellos_are_read_as_sent_and_another_version_is_told() {
    let bytes = hello(200).to_bytes();
    let (length, body) = bytes.split_first_chunk().unwrap();
    assert_eq!(Hello::body_bytes(*length).unwrap(), body.len());
    assert_eq!(Hello::from_body(body).unwrap(), hello(200));
    let other = Hello { version: 2, ..hello(0) }.to_bytes();
    assert_eq!(Hello::from_body(&other[4..]), Err(HelloError::Version(2)));
    assert_eq!(Hello::body_bytes(u32::MAX.to_le_bytes()), Err(HelloError::TooLong(u32::MAX)));
}

#[test]
fn a_proof_is_good_for_one_side_of_one_connection_and_one_key() {
    let transcript = |nonce| Transcript { dialer: hello(nonce).to_bytes(), listener: hello(nonce + 1).to_bytes() };
    let key = FleetKey::new("secret");
    let proof = key.proof(Side::Dialer, &transcript(1));
    assert_eq!(key.check(Side::Dialer, &transcript(1), &proof), Ok(()));
    assert_eq!(key.check(Side::Listener, &transcript(1), &proof), Err(HelloError::WrongKey));
    assert_eq!(key.check(Side::Dialer, &transcript(2), &proof), Err(HelloError::WrongKey));
    assert_eq!(FleetKey::new("other").check(Side::Dialer, &transcript(1), &proof), Err(HelloError::WrongKey));
    let mut bytes = Vec::new();
    ControlFrame::AllHeld.seal(&mut Sealer::new(Some(key.frame_key(Side::Dialer, &transcript(1)))), &mut bytes);
    let opened = |side, nonce| Opener::new(Some(key.frame_key(side, &transcript(nonce)))).open(&bytes).is_ok();
    assert!(opened(Side::Dialer, 1) && !opened(Side::Listener, 1) && !opened(Side::Dialer, 2));
}

fn run_request() -> RunRequest {
    RunRequest {
        model: "m".to_owned(),
        prompt: vec![1, 2, 3],
        sampling: RunSampling { temperature: 0.5, logit_bias: vec![(5, -1.5)], max_tokens: Some(9), ..RunSampling::default() },
        seed: u64::MAX,
        choice_index: 2,
        salt: Some("s".to_owned()),
        ends: Some(RunEnds { eos: vec![2], length_limit: 12 }),
        progress: RunProgress { computed: 4, age_us: 77, cached: Some(1), ..RunProgress::default() },
        ..RunRequest::default()
    }
}

fn hex(bytes: &[u8]) -> String {
    let digit = |value: u8| char::from_digit(u32::from(value), 16).expect("it is below 16");
    bytes.iter().flat_map(|byte| [digit(byte >> 4), digit(byte & 15)]).collect()
}

/// Each frame twice, without a key and with one; then what else has bytes of its own.
fn golden() -> String {
    let mut lines = Vec::new();
    for (name, key) in [("plain", None), ("sealed", Some(key()))] {
        let mut sealer = Sealer::new(key);
        for frame in control_frames() {
            let mut bytes = Vec::new();
            frame.seal(&mut sealer, &mut bytes);
            lines.push(format!("{name} {}", hex(&bytes)));
        }
        for frame in kv_frames() {
            let mut bytes = Vec::new();
            frame.seal(&mut sealer, &mut bytes);
            lines.push(format!("{name} {}", hex(&bytes)));
        }
    }
    let header = BlockHeader { index: 3, tokens: 16, checksum: 77 };
    let (before, mac) = KvFrame::seal_block(header, 100, &mut Sealer::new(Some(key())));
    lines.push(format!("block {} {}", hex(&before), hex(&mac.expect("there is a key"))));
    lines.push(format!("run {}", hex(&run_request().to_bytes())));
    let to = MoveTo { kv_address: "127.0.0.1:1".to_owned(), nonce: [200; 16] };
    lines.push(format!("move-to {}", hex(&to.to_bytes())));
    let transcript = Transcript { dialer: hello(1).to_bytes(), listener: hello(200).to_bytes() };
    lines.push(format!("hellos {} {}", hex(&transcript.dialer), hex(&transcript.listener)));
    let fleet = FleetKey::new("secret");
    for side in [Side::Dialer, Side::Listener] {
        let mut bytes = Vec::new();
        ControlFrame::AllHeld.seal(&mut Sealer::new(Some(fleet.frame_key(side, &transcript))), &mut bytes);
        lines.push(format!("{side:?} {} {}", hex(&fleet.proof(side, &transcript)), hex(&bytes)).to_lowercase());
    }
    lines.join("\n") + "\n"
}

/// By these an implementation in another language knows that it reads and writes the same (`python/baton-vllm/tests`).
#[test]
fn the_bytes_are_those_that_others_are_tested_with() {
    let written = include_str!("../../tests/fixtures/migration-1.txt");
    let golden = golden();
    assert!(golden == written, "tests/fixtures/migration-1.txt should be:\n{golden}");
}

#[derive(serde::Serialize)]
struct Least {
    model: &'static str,
    prompt: Vec<u32>,
    seed: u64,
}

#[test]
fn what_to_run_comes_out_as_it_went_in_and_needs_only_what_has_no_default() {
    let run = run_request();
    assert_eq!(RunRequest::from_bytes(&run.to_bytes()), Ok(run));
    let bytes = rmp_serde::to_vec_named(&Least { model: "m", prompt: vec![1], seed: 7 }).unwrap();
    let least = RunRequest { model: "m".to_owned(), prompt: vec![1], seed: 7, ..RunRequest::default() };
    assert_eq!(RunRequest::from_bytes(&bytes), Ok(least));
    assert!(RunRequest::from_bytes(b"what").is_err());
    let to = MoveTo { kv_address: "127.0.0.1:1".to_owned(), nonce: [200; 16] };
    assert_eq!(MoveTo::from_bytes(&to.to_bytes()), Ok(to));
}

proptest! {
    #[test]
    fn no_bytes_of_a_stranger_make_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200), kind in 0u16..0x60) {
        let _ = Opener::new(None).open(&bytes);
        let _ = Opener::new(Some(key())).open(&bytes);
        let _ = ControlFrame::decode(kind, &bytes);
        let _ = KvFrame::decode(kind, &bytes);
        let _ = Hello::from_body(&bytes);
    }
}
