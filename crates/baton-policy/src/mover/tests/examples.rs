//! Each reason once, with its numbers.

use super::*;

fn plan(facts: &FleetFacts) -> Vec<String> {
    Mover::new(config()).plan(facts, &cold, at(5000.0)).iter().map(ToString::to_string).collect()
}

#[test]
fn freeness_counts_steps_and_missing_tokens() {
    let free = |replica: &ReplicaFacts| freeness(replica, &config());
    assert_eq!(free(&replica(0, 1000)), f64::INFINITY);
    // 990 less 300 blocks, for three sequences.
    let three = replica(0, 1000).run((0..3).map(|request| running(request, 1600)));
    assert_eq!(free(&three), 16.0 * 690.0 / 3.0);
    // The head wants 701 blocks of the 690.
    assert_eq!(free(&three.clone().wait([waiting(9, 11_200, 0.0)])), 16.0 * -11.0);
    assert_eq!(free(&ReplicaFacts { state: ReplicaState::Draining, ..three }), f64::NEG_INFINITY);
}

#[test]
fn the_fuller_replica_gives_its_shortest_request() {
    let full = replica(0, 1000).run((0..10).map(|request| running(request, 1500 + request as u32)));
    let facts = fleet([full, replica(1, 1000).run([running(20, 1600)])]);
    assert_eq!(plan(&facts), Vec::<String>::new(), "memory lasts for 74 steps");
    let fuller = replica(0, 1000).run((0..10).map(|request| running(request, 1550 + request as u32)));
    let facts = fleet([fuller, replica(1, 1000).run([running(20, 1600)])]);
    insta::assert_snapshot!(plan(&facts).join("\n"), @"q0 of 1550 tokens, r0 to r1, balance: r0 has 21 steps left, r1 14240 steps left; the end is put off by 194 ms; 3.6 ms by KV of 203.4 MB, 11.7 ms in all");
}

#[test]
fn a_waiting_head_goes_where_it_fits() {
    let full = replica(0, 1000).run((0..4).map(|request| running(request, 3500))).wait([waiting(9, 4096, 4000.0)]);
    let facts = fleet([full.clone(), replica(1, 1000).run([running(20, 1600)])]);
    insta::assert_snapshot!(plan(&facts).join("\n"), @"q9 of 4096 tokens, r0 to r1, defragment: q9 needs 257 blocks where 114 blocks are free, though the fleet has them; 129.4 ms to compute it there");
    // Behind an older one it would wait there too.
    let busy = replica(1, 1000).run([running(20, 1600)]).wait([waiting(21, 64, 3000.0)]);
    let moves = Mover::new(config()).plan(&fleet([full, busy]), &cold, at(5000.0));
    assert!(moves.iter().all(|one| one.request != RequestId(9)), "{moves:?}");
}

/// No replica has the 257 blocks and one for a request of 4,096 tokens, the fleet has.
#[test]
fn room_in_pieces_is_brought_together() {
    let holed = |id: u32| replica(id, 1000).run((0..6).map(|request| running(u64::from(id) * 10 + request, 2240)));
    let facts = fleet((0..4).map(holed));
    let head = waiting(99, 4096, 4000.0);
    assert!(facts.replicas.iter().all(|replica| replica.capacity() - replica.blocks_used < head.demand));
    // At a replica, or still at the router.
    let mut at_replica = facts.clone();
    at_replica.replicas[2].waiting.push(head);
    for mut facts in [at_replica, FleetFacts { held: Some(head), ..facts }] {
        let mut mover = Mover::new(config());
        let moves = mover.plan(&facts, &cold, at(5000.0));
        assert!(moves.iter().any(|one| matches!(one.reason, MoveReason::Defragment { head: RequestId(99), .. })), "{moves:?}");
        carry_out(&mut facts, &moves);
        assert!(facts.replicas.iter().any(|replica| replica.capacity() - replica.blocks_used >= head.demand), "after one plan");
    }
}

#[test]
fn moves_that_could_not_make_room_are_not_begun() {
    let full = |id: u32| replica(id, 1000).run((0..10).map(|request| running(u64::from(id) * 10 + request, 1568)));
    let facts = fleet([full(0).wait([waiting(99, 4096, 4000.0)]), full(1), full(2)]);
    assert_eq!(plan(&facts), Vec::<String>::new());
}

#[test]
fn an_important_request_gets_quiet() {
    let quiet = MoverConfig { quiet_from: Some(Priority(-1)), ..config() };
    let important = RunningFacts { priority: Priority(-1), ..running(1, 500) };
    let mixed = replica(0, 29_802).run((10..20).map(|request| running(request, 3000))).run([important]);
    let facts = fleet([mixed, replica(1, 29_802)]);
    let moves = Mover::new(quiet).plan(&facts, &cold, at(0.0));
    insta::assert_snapshot!(moves.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"), @"q10 of 3000 tokens, r0 to r1, priority: an important request on r0 asks for quiet, 13936 tokens too few there and nothing to do on r1; worth 23211 ms; 3.9 ms by KV of 394.3 MB, 19.6 ms in all");
    assert_eq!(plan(&facts), Vec::<String>::new(), "where nobody asks for it, memory is all that counts");
}

#[test]
fn an_over_served_program_yields_and_not_too_often() {
    let of = |request, program| RunningFacts { program: Some(program), ..running(request, 1200) };
    let contended = replica(0, 1000).run((0..13).map(|request| of(request, 7)));
    let waits = WaitingFacts { program: Some(1), ..waiting(50, 700, 3000.0) };
    let mut facts = fleet([contended.wait([waits]), replica(1, 700).run((60..67).map(|request| of(request, 1)))]);
    facts.replicas[1].waiting.push(waiting(70, 64, 0.0));
    facts.programs = [(1, 10.0), (2, 12.0), (7, 100.0)].into();
    let mut mover = Mover::new(MoverConfig { freeness_low: -1e9, ..config() });
    let moves = mover.plan(&facts, &cold, at(5000.0));
    assert!(
        moves.iter().all(|one| matches!(one.reason, MoveReason::Fairness { program: 7, .. } | MoveReason::Defragment { .. })),
        "{moves:?}"
    );
    assert_eq!(moves.iter().filter(|one| one.from == ReplicaId(0)).count(), 1, "{moves:?}");
}

#[test]
fn a_lost_replica_s_requests_go_on_from_their_tokens() {
    let lost = ReplicaFacts { state: ReplicaState::Dead, ..replica(0, 1000).run([running(1, 800), running(2, 900)]) };
    let other = ReplicaFacts { numerics: 2, ..replica(2, 1000) };
    let facts = fleet([lost, replica(1, 1000), other]);
    let moves = Mover::new(config()).plan(&facts, &cold, at(0.0));
    assert_eq!(
        moves.iter().map(|one| (one.request.0, one.to.0, one.way)).collect::<Vec<_>>(),
        [(1, 1, MoveWay::Recompute), (2, 1, MoveWay::Recompute)]
    );
    insta::assert_snapshot!(moves[0].to_string(), @"q1 of 800 tokens, r0 to r1, forced: r0 is dead; 22.5 ms to compute it there");
}

#[test]
fn an_order_is_carried_out_or_told_why_not() {
    let facts = fleet([replica(0, 1000).run([running(1, 800)]), replica(1, 1000), replica(2, 20)]);
    let mut mover = Mover::new(config());
    let mut order = |request, to: Option<u32>| mover.order(&facts, RequestId(request), to.map(ReplicaId), &cold, at(0.0));
    assert_eq!(order(5, None), Err(OrderRefusal::NotHere(RequestId(5))));
    assert_eq!(order(1, Some(2)).unwrap_err(), OrderRefusal::Target { request: RequestId(1), target: ReplicaId(2), demand: Blocks(51) });
    let ordered = order(1, None).unwrap();
    assert_eq!((ordered.to, ordered.way, ordered.reason), (ReplicaId(1), MoveWay::Kv, MoveReason::Operator));
    assert_eq!(order(1, None), Err(OrderRefusal::Moving(RequestId(1))));
}

#[test]
fn a_head_that_is_leaving_asks_for_no_room() {
    let full = replica(0, 1000).run((0..7).map(|request| running(request, 2000))).wait([waiting(9, 4096, 4000.0)]);
    let facts = fleet([full, replica(1, 1000).run([running(20, 1600)]), replica(2, 1000).run([running(30, 12_000)])]);
    let mut mover = Mover::new(config());
    assert_eq!(mover.plan(&facts, &cold, at(5000.0)).iter().map(|one| one.request.0).collect::<Vec<_>>(), [9]);
    assert_eq!(mover.plan(&facts, &cold, at(5050.0)), vec![], "it is on its way");
}

/// Blocks that are on their way count, else two sources would choose the same target.
#[test]
fn what_is_on_its_way_counts_at_its_target() {
    let full = |id: u32| replica(id, 1000).run((0..10).map(|request| running(u64::from(id) * 100 + request, 1560)));
    let facts = fleet([full(0), full(1), replica(2, 1000).run([running(900, 1600)])]);
    let mut mover = Mover::new(config());
    let first = mover.plan(&facts, &cold, at(0.0));
    assert_eq!((first.len(), mover.ongoing()), (1, 1), "one copy at a time to each target");
    assert_eq!(mover.plan(&facts, &cold, at(50.0)), vec![], "the only target takes one in");
    mover.ended(first[0].request);
    let next = mover.plan(&facts, &cold, at(100.0));
    assert_eq!(next.len(), 1);
    assert!(next[0].request != first[0].request, "who moved rests");
}

#[test]
fn what_a_target_has_in_its_cache_does_not_travel() {
    let full = replica(0, 1000).run((0..10).map(|request| running(request, 1550 + request as u32)));
    let facts = fleet([full, replica(1, 1000).run([running(20, 1600)])]);
    let has = |request: RequestId, on: ReplicaId| Tokens(if (request, on) == (RequestId(0), ReplicaId(1)) { 1024 } else { 0 });
    let [all, rest] = [&cold as Cached<'_>, &has].map(|cached| Mover::new(config()).plan(&facts, cached, at(5000.0)).remove(0).price);
    assert_eq!(all.bytes - rest.bytes, 1024.0 * 131_072.0, "{all} and {rest}");
    assert!(rest.recompute.compute_s < 0.5 * all.recompute.compute_s, "{all} and {rest}");
    // By a link so slow that the copy is most of it.
    let slow = |replica: ReplicaFacts| ReplicaFacts { link: Link::custom(0.05), ..replica };
    let drained = ReplicaFacts { state: ReplicaState::Draining, ..slow(replica(0, 1000).run([running(0, 1536)])) };
    let facts = fleet([drained, slow(replica(1, 1000))]);
    let forecast = |cached: Cached<'_>| drain_forecast(&facts, ReplicaId(0), &config(), cached, Duration::from_millis(1)).unwrap();
    let (cold_s, warm_s) = (forecast(&cold).finishes_in.as_secs_f64(), forecast(&has).finishes_in.as_secs_f64());
    assert!(warm_s < 0.5 * cold_s, "{warm_s} and {cold_s}");
}

/// Of three requests one decodes and leaves at once, one has its first token when the booked prefill is done, and one cannot be moved.
#[test]
fn a_forecast_counts_the_end_of_those_that_stay() {
    let prefilling = RunningFacts { prefilling: true, ..running(2, 900) };
    let stays = |left: Option<u32>| RunningFacts { movable: false, left_at_most: left.map(Tokens), ..running(3, 500) };
    let forecast = |left: Option<u32>| {
        let drained = replica(0, 1000).run([running(1, 800), prefilling, stays(left)]);
        let drained = ReplicaFacts { state: ReplicaState::Draining, queue_s: 0.5, ..drained };
        let step_s = drained.step_s();
        let forecast = drain_forecast(&fleet([drained, replica(1, 1000)]), ReplicaId(0), &config(), &cold, Duration::from_millis(1));
        (forecast.unwrap(), step_s)
    };
    let (long, step_s) = forecast(Some(1000));
    assert_eq!((long.moves, long.stays, long.stays_for), (2, 1, Some(Duration::from_secs_f64(1000.0 * step_s))));
    assert_eq!(Some(long.finishes_in), long.stays_for);
    let (short, _) = forecast(Some(1));
    assert_eq!(short.stays_for, Some(Duration::from_secs_f64(step_s)));
    let moved_s = short.finishes_in.as_secs_f64();
    assert!((0.5..0.55).contains(&moved_s), "a move after the prefill: {moved_s}");
    // Of twenty that may move, those that end before their turn do not count their move.
    let ends_soon = |request: u64| RunningFacts { left_at_most: Some(Tokens(2)), ..running(request, 3000) };
    let drained = |all: Vec<RunningFacts>| ReplicaFacts { state: ReplicaState::Draining, ..replica(0, 10_000).run(all) };
    let forecast_of = |drained: ReplicaFacts| {
        drain_forecast(&fleet([drained, replica(1, 10_000)]), ReplicaId(0), &config(), &cold, Duration::from_millis(1)).unwrap()
    };
    let soon = drained((0..20).map(ends_soon).collect());
    let most_s = 2.0 * soon.step_s();
    let soon = forecast_of(soon);
    assert!(soon.moves < 3 && soon.moves + soon.stays == 20 && soon.finishes_in.as_secs_f64() <= most_s + 1e-9, "{soon:?} {most_s}");
    let late = forecast_of(drained((0..20).map(|request| running(request, 3000)).collect()));
    assert!((late.moves, late.stays) == (20, 0) && late.finishes_in > 10 * soon.finishes_in, "{late:?}");
    // Nobody can say when one without a bound ends.
    let (unbounded, _) = forecast(None);
    assert_eq!((unbounded.stays, unbounded.stays_for, unbounded.finishes_in), (1, None, short.finishes_in));
}
