//! What holds of every plan.

use super::*;

const PERIOD: Duration = Duration::from_millis(50);

fn any_replica(id: u32) -> impl Strategy<Value = ReplicaFacts> {
    let one = (16u32..6000, 0i32..3, any::<bool>(), 0u32..8);
    let queue = (16u32..6000, 0.0f64..4000.0, any::<bool>());
    let state = prop_oneof![6 => Just(ReplicaState::Ready), 1 => Just(ReplicaState::Draining), 1 => Just(ReplicaState::Suspect)];
    (prop::collection::vec(one, 0..12), prop::collection::vec(queue, 0..3), state, 400u32..3000, 0u64..2).prop_map(
        move |(ones, queue, state, spare, numerics)| {
            let base = u64::from(id) * 100;
            let ones = ones.into_iter().zip(base..).map(|((tokens, priority, prefilling, program), request)| RunningFacts {
                priority: Priority(priority),
                prefilling,
                program: Some(u64::from(program)),
                ..running(request, tokens)
            });
            let queue = queue.into_iter().zip(base + 50..).map(|((tokens, arrived_ms, fresh), request)| WaitingFacts {
                fresh,
                program: Some(request % 8),
                ..waiting(request, tokens, arrived_ms)
            });
            let filled = replica(id, 0).run(ones).wait(queue);
            // More or less room than its requests and its queue want.
            let total = filled.blocks_used.0 + spare / 4;
            ReplicaFacts { state, numerics, blocks_total: Blocks(total), watermark: Blocks(total / 100), ..filled }
        },
    )
}

fn any_fleet() -> impl Strategy<Value = FleetFacts> {
    (2u32..7).prop_flat_map(|count| (0..count).map(any_replica).collect::<Vec<_>>()).prop_map(|replicas| {
        let programs = (0..8).map(|program| (program, (program * program) as f64)).collect();
        FleetFacts { programs, ..fleet(replicas) }
    })
}

fn any_config() -> impl Strategy<Value = MoverConfig> {
    prop::option::of(-1i32..3).prop_map(|quiet_from| MoverConfig { quiet_from: quiet_from.map(Priority), ..config() })
}

proptest! {
    /// a.5 (i) and (ii): a request moves once, from where it is, to where there is room; nobody gives and takes.
    #[test]
    fn a_plan_keeps_requests_and_blocks(facts in any_fleet(), config in any_config()) {
        let moves = Mover::new(config).plan(&facts, &cold, at(5000.0));
        let mut after = facts.clone();
        carry_out(&mut after, &moves);
        prop_assert_eq!(requests(&facts), requests(&after));
        for (before, after) in facts.replicas.iter().zip(&after.replicas) {
            let came = moves.iter().filter(|one| one.to == after.id);
            let copies = |moves: &mut dyn Iterator<Item = &Move>| moves.filter(|one| one.way == MoveWay::Kv).count();
            prop_assert!(copies(&mut came.clone()) <= 1 && copies(&mut moves.iter().filter(|one| one.from == after.id)) <= 1);
            prop_assert!(came.clone().count() == 0 || moves.iter().all(|one| one.from != after.id), "{moves:?}");
            // (vi) and more: only a replica that is ready takes.
            prop_assert!(came.clone().count() == 0 || before.state == ReplicaState::Ready);
            if copies(&mut came.clone()) > 0 {
                prop_assert!(after.blocks_used <= after.capacity());
            }
        }
    }

    /// Equal numerics for all that has output.
    #[test]
    fn what_has_output_goes_where_it_stays_exact(facts in any_fleet()) {
        for one in Mover::new(config()).plan(&facts, &cold, at(5000.0)) {
            let numerics = |id| facts.replicas.iter().find(|replica| replica.id == id).unwrap().numerics;
            let waits = facts.replicas.iter().flat_map(|replica| &replica.waiting).find(|own| own.request == one.request);
            prop_assert!(numerics(one.from) == numerics(one.to) || waits.is_some_and(|waits| waits.fresh), "{one}");
        }
    }

    /// a.5 (iii): one more request, or one more block, never makes a replica look freer.
    #[test]
    fn more_load_never_raises_freeness(facts in any_replica(0), tokens in 1u32..9000, priority in -1i32..3, config in any_config()) {
        let before = freeness(&facts, &config);
        let added = RunningFacts { priority: Priority(priority), ..running(99, tokens) };
        prop_assert!(freeness(&facts.clone().run([added]), &config) <= before);
        prop_assert!(freeness(&facts.clone().wait([waiting(99, tokens, 0.0)]), &config) <= before);
        let fuller = ReplicaFacts { blocks_used: facts.blocks_used + Blocks(1), ..facts.clone() };
        prop_assert!(freeness(&fuller, &config) <= before);
    }

    /// a.5 (iv): for balance or quiet the first end of memory is put off.
    #[test]
    fn a_pair_never_ends_sooner(facts in any_fleet(), config in any_config()) {
        for one in Mover::new(config.clone()).plan(&facts, &cold, at(5000.0)) {
            if !matches!(one.reason, MoveReason::Balance { .. } | MoveReason::Priority { .. }) {
                continue;
            }
            let least = |facts: &FleetFacts| {
                let pair = facts.replicas.iter().filter(|replica| [one.from, one.to].contains(&replica.id));
                pair.map(|replica| freeness(replica, &config)).fold(f64::INFINITY, f64::min)
            };
            let mut after = facts.clone();
            // Alone: other moves of the plan may have made one of the two busier or freer.
            carry_out(&mut after, std::slice::from_ref(&one));
            let others = facts.replicas.iter().any(|replica| [one.from, one.to].contains(&replica.id) && !replica.waiting.is_empty());
            prop_assert!(others || least(&after) > least(&facts), "{one}: {} to {}", least(&facts), least(&after));
        }
    }

    /// a.5 (v): nobody moves twice within the cooldown, and under a load that stays the same the moves end.
    #[test]
    fn under_a_constant_load_moves_come_to_an_end(facts in any_fleet()) {
        let (mut facts, mut mover, mut last) = (facts, Mover::new(config()), BTreeMap::new());
        let mut latest = 0;
        for cycle in 0..600u32 {
            let now = at(5000.0 + f64::from(cycle) * 50.0);
            let moves = mover.plan(&facts, &cold, now);
            for one in &moves {
                latest = cycle;
                let chosen = matches!(one.reason, MoveReason::Balance { .. } | MoveReason::Defragment { .. } | MoveReason::Priority { .. });
                let before: Option<Time> = last.insert(one.request, now);
                prop_assert!(!chosen || before.is_none_or(|before| now.since(before) >= config().cooldown), "{one}");
                mover.ended(one.request);
            }
            carry_out(&mut facts, &moves);
            admit(&mut facts);
        }
        prop_assert!(latest < 500, "the last moves are in cycle {latest}");
        prop_assert_eq!(mover.ongoing(), 0);
    }

    /// a.5 (vi): with room elsewhere a draining replica is empty after one move a cycle at most, and nothing goes to it.
    #[test]
    fn a_draining_replica_becomes_empty(tokens in prop::collection::vec(16u32..4000, 1..20), queue in prop::collection::vec(16u32..4000, 0..5)) {
        let drained = replica(0, 20_000)
            .run(tokens.iter().zip(0..).map(|(&tokens, request)| running(request, tokens)))
            .wait(queue.iter().zip(50..).map(|(&tokens, request)| waiting(request, tokens, 0.0)));
        let mut facts = fleet([ReplicaFacts { state: ReplicaState::Draining, ..drained }, replica(1, 20_000), replica(2, 20_000)]);
        let (forecast, mut mover) = (drain_forecast(&facts, ReplicaId(0), &config(), &cold, PERIOD).unwrap(), Mover::new(config()));
        prop_assert_eq!((forecast.moves as usize, forecast.stays), (tokens.len() + queue.len(), 0));
        let mut cycles = 0;
        while !facts.replicas[0].running.is_empty() {
            let moves = mover.plan(&facts, &cold, Time::ZERO + PERIOD * cycles);
            prop_assert!(moves.iter().all(|one| one.from == ReplicaId(0) && matches!(one.reason, MoveReason::Drain { .. })), "{moves:?}");
            for one in &moves {
                prop_assert!(way_price(&one.price).total_s < PERIOD.as_secs_f64() || one.way == MoveWay::Recompute);
                mover.ended(one.request);
            }
            carry_out(&mut facts, &moves);
            admit(&mut facts);
            cycles += 1;
            prop_assert!(cycles as usize <= tokens.len(), "one each time");
        }
        prop_assert!(facts.replicas[0].waiting.is_empty());
        prop_assert_eq!(forecast.finishes_in.div_duration_f64(PERIOD).round() as u32, cycles);
    }

    /// Nobody waits, and memory lasts: nothing to do.
    #[test]
    fn nothing_moves_at_low_load(counts in prop::collection::vec(0u64..20, 2..8), tokens in 16u32..2000) {
        let facts = fleet(counts.iter().zip(0..).map(|(&count, id)| replica(id, 29_802).run((0..count).map(|one| running(u64::from(id) * 100 + one, tokens)))));
        prop_assert_eq!(Mover::new(config()).plan(&facts, &cold, at(0.0)), vec![]);
    }

    #[test]
    fn equal_facts_give_equal_plans(facts in any_fleet()) {
        let plan = || Mover::new(config()).plan(&facts, &cold, at(5000.0));
        prop_assert_eq!(plan(), plan());
    }
}
