//! What other processes send over control and KV connections: frames, and what is in them. What is understood says the same when it is
//! sent and read again.
#![no_main]

use baton_wire::migration::{ControlFrame, KvFrame, MoveTo, Opener, RunRequest, Sealer, handshake::Hello};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: (u16, Vec<u8>)| {
    let (kind, body) = input;
    if let Ok(frame) = ControlFrame::decode(kind, &body) {
        let (kind, body) = sealed(|sealer, out| frame.seal(sealer, out));
        // Written out, since a NaN is not itself.
        assert_eq!(format!("{:?}", ControlFrame::decode(kind, &body).expect("what was sent is read")), format!("{frame:?}"));
    }
    if let Ok(frame) = KvFrame::decode(kind, &body)
        && !KvFrame::is_block(kind)
    {
        let (kind, body) = sealed(|sealer, out| frame.seal(sealer, out));
        assert_eq!(format!("{:?}", KvFrame::decode(kind, &body).expect("what was sent is read")), format!("{frame:?}"));
    }
    if let Ok(run) = RunRequest::from_bytes(&body) {
        assert_eq!(format!("{:?}", RunRequest::from_bytes(&run.to_bytes()).expect("what was sent is read")), format!("{run:?}"));
    }
    if let Ok(to) = MoveTo::from_bytes(&body) {
        assert_eq!(format!("{:?}", MoveTo::from_bytes(&to.to_bytes()).expect("what was sent is read")), format!("{to:?}"));
    }
    if let Ok(hello) = Hello::from_body(&body) {
        assert_eq!(Hello::from_body(&hello.to_bytes()[4..]).expect("what was sent is read"), hello);
    }
    let mut opener = Opener::new(None);
    let mut rest = &body[..];
    while let Ok(Some(opened)) = opener.open(rest) {
        rest = &rest[opened.taken..];
    }
});

fn sealed(seal: impl FnOnce(&mut Sealer, &mut Vec<u8>)) -> (u16, Vec<u8>) {
    let mut out = Vec::new();
    seal(&mut Sealer::new(None), &mut out);
    let mut opener = Opener::new(None);
    let opened = opener.open(&out).expect("a frame that was sealed opens").expect("it is whole");
    assert_eq!(opened.taken, out.len());
    (opened.kind, opened.body.to_vec())
}
