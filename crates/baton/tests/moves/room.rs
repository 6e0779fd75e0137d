//! A long request that fits nowhere, in a fleet that has the memory in pieces.

use crate::{
    client::{Ask, Reading},
    fleet::{Fleet, Make},
};

/// KV blocks of 16 tokens of each of two replicas.
const BLOCKS: &str = "320";
/// Two at each replica, where they hold 50 blocks each when they begin and 113 when they end. So 220 are free at first, and the long one
/// needs more than 250: once one of them has left there is room, and where none leaves there is none before one ends.
const RESIDENTS: usize = 4;
const RESIDENT: (usize, u32) = (800, 1000);
const LONG: (usize, u32) = (4000, 20);

/// Chat of a prompt and an output of so many tokens; one is four bytes.
fn ask(about: usize, (prompt, output): (usize, u32)) -> Ask {
    Ask::chat(&format!("{about:04}{}", "word".repeat(prompt - 1)), output)
}

/// Has the residents begin and then the long one, and gives how many of them ran when that began.
fn residents_at_first_token(fleet: &Fleet) -> usize {
    let name = |number: usize| format!("resident-{number}");
    let residents = (0..RESIDENTS).map(|number| {
        let mut reading = ask(number, RESIDENT).send(fleet.url(), &name(number));
        reading.read_until(1);
        reading
    });
    let residents: Vec<Reading> = residents.collect();
    let at = |replica: &str| (0..RESIDENTS).filter(|&number| fleet.request(&name(number)).unwrap()["replica"] == replica).count();
    assert_eq!((at("r0"), at("r1")), (RESIDENTS / 2, RESIDENTS / 2));
    std::thread::scope(|scope| {
        let residents: Vec<_> = residents.into_iter().map(|reading| scope.spawn(|| reading.read_to_end())).collect();
        let mut long = ask(RESIDENTS, LONG).send(fleet.url(), "long");
        long.read_until(1);
        let running = (0..RESIDENTS).filter(|&number| fleet.request(&name(number)).is_some()).count();
        let (long, tokens) = (long.read_to_end(), LONG.1 as usize);
        assert!(long.is_whole() && long.tokens() == tokens, "{long:?}");
        for resident in residents {
            let answer = resident.join().unwrap();
            assert!(answer.is_whole() && answer.tokens() == RESIDENT.1 as usize, "{answer:?}");
        }
        running
    })
}

fn fleet(config: &str) -> Fleet {
    Make::timed().with(&["--blocks", BLOCKS, "--max-model-len", "8192"]).configured(config).fleet(2)
}

#[test]
fn a_long_request_starts_where_running_ones_make_room() {
    let fleet = fleet("");
    assert_eq!(residents_at_first_token(&fleet), RESIDENTS, "{:?}", fleet.moves());
    let moves = fleet.moves();
    assert!(moves.iter().any(|one| one["kind"] == "defragment" && one["outcome"] == "moved"), "{moves:?}");
    fleet.until_at_rest();
}

#[test]
fn without_moves_it_waits_until_others_end() {
    let fleet = fleet("[moves]\nenabled = false\n");
    assert!(residents_at_first_token(&fleet) < RESIDENTS);
    assert!(fleet.moves().is_empty(), "{:?}", fleet.moves());
    fleet.until_at_rest();
}
