use baton_units::Priority;

use super::*;

#[test]
fn a_request_that_can_never_fit_is_refused_with_what_would() {
    // 6 blocks of 4: the last of 25 tokens needs no KV.
    let mut engine = Engine::new(config(6, 4, 1000)).unwrap();
    let error = engine.submit(request(1, &prompt(0, 25), greedy(1)), Time::ZERO).unwrap_err();
    assert_eq!(error, SubmitError::NeverFits { prompt: Tokens(25), fits: Tokens(24) });
    assert_eq!(error.to_string(), "the prompt has 25 tokens, and at most 24 tokens fit beside the first output token; shorten the prompt");
    let mut world = World::new(config(6, 4, 1000));
    world.submit(request(1, &prompt(0, 24), greedy(9)));
    world.run();
    assert_eq!((world.tokens(1, 0).len(), world.told[&(1, 0)].finish), (1, Some(FinishReason::Length)));
}

#[test]
fn what_is_wrong_with_a_request_is_said_at_once() {
    let mut engine = Engine::new(EngineConfig { max_waiting: 1, ..config(8, 4, 32) }).unwrap();
    let mut submit = |request| engine.submit(request, Time::ZERO);
    assert_eq!(submit(request(1, &[], greedy(1))), Err(SubmitError::EmptyPrompt));
    assert_eq!(submit(request(1, &[VOCABULARY], greedy(1))), Err(SubmitError::OutOfVocabulary { token: 40, size: 40 }));
    assert_eq!(submit(NewRequest { choices: 0, ..request(1, &[5], greedy(1)) }), Err(SubmitError::NoChoices));
    let biased = SamplingOptions { logit_bias: vec![(99, 1.0)], ..greedy(1) };
    assert!(matches!(submit(request(1, &[5], biased)), Err(SubmitError::Sampling(_))));
    assert_eq!(submit(request(1, &[5], greedy(1))), Ok(()));
    assert_eq!(submit(request(1, &[5], greedy(1))), Err(SubmitError::Duplicate(RequestId(1))));
    assert_eq!(submit(request(2, &[5], greedy(1))), Err(SubmitError::QueueFull { limit: 1 }));
}

#[test]
fn a_repeated_prompt_hits_all_full_blocks_but_never_its_last_token() {
    let mut world = World::new(config(64, 4, 64));
    for (id, len) in [(1, 16), (2, 16), (3, 17), (4, 19)] {
        world.submit(request(id, &prompt(0, len), greedy(2)));
        world.run();
    }
    let cached: Vec<u32> = (1..=4).map(|id| world.told[&(id, 0)].cached).collect();
    assert_eq!(cached, [0, 12, 16, 16]);
    let counters = world.engine.status().counters;
    assert_eq!((counters.prefix_queries, counters.prefix_hits), (16 + 16 + 17 + 19, 12 + 16 + 16));
    assert_eq!((counters.prompt_tokens, counters.prompt_tokens_cached), (68, 44));
}

#[test]
fn output_is_cached_like_a_prompt() {
    let mut world = World::new(config(64, 4, 64));
    world.submit(request(1, &prompt(0, 6), greedy(8)));
    world.run();
    let turn = [prompt(0, 6), world.tokens(1, 0), vec![5]].concat();
    world.submit(request(2, &turn, greedy(1)));
    world.run();
    // 6 + 8 tokens, the last of which has no KV: three full blocks.
    assert_eq!(world.told[&(2, 0)].cached, 12);
}

#[test]
fn another_salt_or_adapter_never_hits() {
    let mut world = World::new(config(64, 4, 64));
    let of = |id, salt: Option<&str>, adapter: Option<&str>| NewRequest {
        salt: salt.map(str::to_owned),
        adapter: adapter.map(str::to_owned),
        ..request(id, &prompt(0, 20), greedy(1))
    };
    let domains = [(None, None), (Some("a"), None), (Some("b"), None), (None, Some("x")), (Some("a"), Some("x"))];
    for round in 0..2 {
        for (id, (salt, adapter)) in (10 * round..).zip(domains) {
            world.submit(of(id, salt, adapter));
            world.run();
            assert_eq!(world.told[&(id, 0)].cached, if round == 0 { 0 } else { 16 }, "{salt:?} {adapter:?}");
        }
    }
}

/// Two tenants send the same prompt, whose first 10 tokens are public: two blocks of four and a half.
#[test]
fn whole_blocks_of_public_tokens_hit_across_salts_and_nothing_behind_them_does() {
    let mut world = World::new(config(64, 4, 64));
    let of = |id, salt: Option<&str>, public| NewRequest {
        salt: salt.map(str::to_owned),
        public: Tokens(public),
        ..request(id, &prompt(0, 20), greedy(6))
    };
    let cached = [
        (of(1, Some("a"), 10), 0),
        (of(2, Some("a"), 10), 16),
        (of(3, Some("b"), 10), 8),
        (of(4, Some("b"), 10), 16),
        // Who has no salt shares what is public, and so does who names less of it public; who names nothing shares nothing.
        (of(5, None, 10), 8),
        (of(6, Some("c"), 4), 4),
        (of(7, Some("c"), 0), 0),
    ];
    for (request, cached) in cached {
        let id = request.id.0;
        world.submit(request);
        world.run();
        assert_eq!(world.told[&(id, 0)].cached, cached, "request {id}");
    }
    // Output is under the salt, even that of a prompt that is public to its end and said to be more.
    let long = SamplingOptions { ignore_eos: true, ..greedy(9) };
    let whole = |id, salt: &str| NewRequest { salt: Some(salt.to_owned()), public: Tokens(99), ..request(id, &prompt(9, 8), long.clone()) };
    world.submit(whole(8, "a"));
    world.run();
    let turn = [prompt(9, 8), world.tokens(8, 0)].concat();
    for (id, salt, cached) in [(9, "b", 8), (10, "a", 16)] {
        world.submit(NewRequest { prompt: turn.clone(), public: Tokens(8), ..whole(id, salt) });
        world.run();
        assert_eq!(world.told[&(id, 0)].cached, cached, "request {id}");
    }
}

#[test]
fn equal_prompts_computed_at_once_keep_one_copy() {
    let mut world = World::new(config(64, 4, 64));
    for id in 1..=3 {
        world.submit(request(id, &prompt(0, 17), greedy(4)));
    }
    world.step();
    // 4 shared full blocks and one partly filled block each.
    assert_eq!(world.engine.pool.used(), Blocks(4 + 3));
    world.run();
    assert_eq!(world.engine.status().counters.prefix_hits, 0);
    assert_eq!(world.tokens(1, 0), world.tokens(3, 0));
}

#[test]
fn choices_share_the_prompt_and_copy_only_the_block_they_write() {
    let mut world = World::new(config(64, 4, 64));
    let hot = SamplingOptions { temperature: 1.0, ..greedy(3) };
    world.submit(NewRequest { choices: 3, ..request(1, &prompt(0, 10), hot) });
    world.step();
    assert_eq!((world.engine.running.len(), world.engine.pool.used()), (3, Blocks(3)));
    world.step();
    // Two full blocks are shared; the third is its own for each.
    assert_eq!(world.engine.pool.used(), Blocks(2 + 3));
    assert_eq!(world.engine.copies.len(), 2);
    world.run();
    let outputs: BTreeSet<_> = (0..3).map(|choice| world.tokens(1, choice)).collect();
    assert_eq!(outputs.len(), 3, "each choice draws for itself");
}

#[test]
fn choices_that_find_no_place_wait_and_hit_the_prompt() {
    let mut world = World::new(EngineConfig { max_running: 2, ..config(64, 4, 64) });
    world.submit(NewRequest { choices: 4, ..request(1, &prompt(0, 10), greedy(5)) });
    world.step();
    assert_eq!((world.engine.running.len(), world.engine.waiting.len()), (2, 2));
    world.run();
    assert_eq!(world.told.len(), 4);
    assert_eq!(world.engine.counters.computed_tokens, 10 + 4 * 4 + 1 + 2 * 2);
}

#[test]
fn preemption_takes_the_last_and_its_output_is_as_if_nothing_had_been() {
    // 8 blocks of 4 = 32 slots for two sequences that grow to 23 each.
    let tight = config(8, 4, 64);
    let mut world = World::new(tight.clone());
    let requests = [request(1, &prompt(0, 8), greedy(16)), request(2, &prompt(20, 8), greedy(16))];
    for request in &requests {
        world.submit(request.clone());
    }
    world.run();
    assert_eq!((world.told[&(1, 0)].preemptions, world.told[&(2, 0)].preemptions), (0, 1));
    for request in &requests {
        assert_eq!(world.told[&(request.id.0, 0)].tokens, alone(&tight, request, 0).tokens);
    }
}

#[test]
fn nobody_passes_the_first_in_the_queue() {
    // 12 blocks; the first holds 8, the second wants 8, the third would fit beside the first.
    let mut world = World::new(config(12, 4, 64));
    world.submit(request(1, &prompt(0, 30), greedy(3)));
    world.submit(request(2, &prompt(40, 30), greedy(2)));
    world.submit(request(3, &prompt(80, 4), greedy(1)));
    world.run();
    let start = |id| world.told[&(id, 0)].token_times[0];
    assert!(start(1) < start(2) && start(2) <= start(3));
}

#[test]
fn with_priorities_the_more_important_is_admitted_first_and_keeps_its_blocks() {
    let by = |order| {
        let mut world = World::new(EngineConfig { order, max_running: 1, ..config(64, 4, 64) });
        for (id, priority) in [(1, 5), (2, 5), (3, -1)] {
            let new = NewRequest { priority: Priority(priority), ..request(id, &prompt(id as u32, 6), greedy(2)) };
            world.submit(new);
        }
        world.run();
        let mut order: Vec<u64> = vec![1, 2, 3];
        order.sort_by_key(|&id| world.told[&(id, 0)].token_times[0]);
        order
    };
    assert_eq!(by(Order::Arrival), [1, 2, 3]);
    assert_eq!(by(Order::Priority), [3, 1, 2]);

    let mut world = World::new(EngineConfig { order: Order::Priority, ..config(8, 4, 64) });
    world.submit(NewRequest { priority: Priority(3), ..request(1, &prompt(0, 8), greedy(16)) });
    world.step();
    world.submit(NewRequest { priority: Priority(1), ..request(2, &prompt(20, 8), greedy(16)) });
    world.run();
    assert_eq!((world.told[&(1, 0)].preemptions, world.told[&(2, 0)].preemptions), (1, 0));
}

#[test]
fn an_output_ends_by_eos_stop_token_or_length() {
    let finish = |options: SamplingOptions| {
        let mut world = World::new(config(64, 4, 20));
        world.submit(request(1, &prompt(0, 10), options));
        world.run();
        (world.tokens(1, 0).len(), world.told[&(1, 0)].finish.unwrap())
    };
    let forced = |token: u32, options: SamplingOptions| SamplingOptions { logit_bias: vec![(token, 100.0)], ..options };
    assert_eq!(finish(forced(EOS, greedy(5))), (1, FinishReason::EndOfSequence));
    assert_eq!(finish(forced(EOS, SamplingOptions { min_tokens: 3, ..greedy(5) })), (4, FinishReason::EndOfSequence));
    assert_eq!(finish(forced(EOS, SamplingOptions { ignore_eos: true, ..greedy(5) })), (5, FinishReason::Length));
    let stop = SamplingOptions { stop_token_ids: vec![9], min_tokens: 2, ..greedy(5) };
    assert_eq!(finish(forced(9, stop)), (3, FinishReason::StopToken(9)));
    assert_eq!(finish(greedy(5)), (5, FinishReason::Length));
    assert_eq!(finish(greedy(50)), (10, FinishReason::Length));
}

#[test]
fn an_abort_frees_everything_at_once_or_after_the_step_in_flight() {
    let mut world = World::new(config(64, 4, 64));
    world.submit(NewRequest { choices: 2, ..request(1, &prompt(0, 10), greedy(9)) });
    world.submit(request(2, &prompt(20, 10), greedy(9)));
    world.step();
    assert!(world.engine.abort(RequestId(1)));
    assert_eq!(world.engine.running.len(), 1);
    world.step_during(|engine| assert!(engine.abort(RequestId(2))));
    assert!(world.engine.is_idle());
    assert_eq!(world.engine.pool.used(), Blocks(0));
    assert!(!world.engine.abort(RequestId(2)));
    assert_eq!(world.engine.counters.finished_abort, 3);
    // A request aborted before its choices were made takes all of them with it, and its id is free again.
    world.submit(NewRequest { choices: 4, ..request(1, &prompt(0, 10), greedy(9)) });
    world.step_during(|engine| assert!(engine.abort(RequestId(1))));
    assert_eq!(world.engine.counters.finished_abort, 7);
    assert!(world.engine.is_idle());
}

#[test]
fn stopping_one_choice_leaves_the_others() {
    let mut world = World::new(config(64, 4, 64));
    world.submit(NewRequest { choices: 2, ..request(1, &prompt(0, 10), greedy(6)) });
    assert!(!world.engine.stop(RequestId(1), 0), "there is no text yet");
    world.step();
    assert!(world.engine.stop(RequestId(1), 0));
    world.run();
    assert_eq!((world.tokens(1, 0).len(), world.tokens(1, 1).len()), (1, 6));
    assert_eq!((world.engine.counters.finished_stop, world.engine.counters.finished_length), (1, 1));
}

#[test]
fn a_reset_forgets_prefixes_and_disturbs_nobody() {
    let mut world = World::new(config(64, 4, 64));
    world.submit(request(1, &prompt(0, 17), greedy(8)));
    world.step();
    world.engine.reset_prefix_cache();
    world.run();
    world.submit(request(2, &prompt(0, 17), greedy(8)));
    world.run();
    assert_eq!(world.told[&(2, 0)].cached, 0);
    assert_eq!(world.tokens(1, 0), world.tokens(2, 0));
    assert!(world.events.contains(&KvEvent::Cleared));
}

#[test]
fn the_status_says_what_is_there() {
    let mut world = World::new(EngineConfig { max_running: 1, budget: TokenBudget::Fixed(Tokens(8)), ..config(16, 4, 64) });
    world.submit(request(1, &prompt(0, 20), greedy(3)));
    world.submit(request(2, &prompt(40, 30), greedy(3)));
    world.step();
    let status = world.engine.status();
    assert_eq!((status.waiting, status.running, status.prefill_backlog), (1, 1, Tokens(12 + 30)));
    assert_eq!((status.blocks_total, status.blocks_free, status.blocks_reclaimable), (Blocks(16), Blocks(14), Blocks(0)));
    assert_eq!((status.token_budget, status.counters.steps, status.counters.computed_tokens), (Tokens(8), 1, 8));
    world.run();
    let status = world.engine.status();
    assert_eq!((status.waiting, status.running, status.prefill_backlog), (0, 0, Tokens(0)));
    // 22 and 32 tokens have KV: 5 and 8 full blocks.
    assert_eq!((status.blocks_free, status.blocks_reclaimable), (Blocks(3), Blocks(13)));
    assert_eq!((status.counters.generation_tokens, status.counters.finished_length), (6, 2));
}

#[test]
fn a_seed_is_drawn_when_none_is_given_and_differs_between_requests() {
    let mut world = World::new(config(64, 4, 64));
    for id in 1..=2 {
        let hot = SamplingOptions { temperature: 1.0, ..greedy(8) };
        world.submit(NewRequest { seed: None, ..request(id, &prompt(0, 8), hot) });
    }
    world.run();
    assert_ne!(world.tokens(1, 0), world.tokens(2, 0));
}

#[test]
fn the_watermark_keeps_blocks_for_those_who_run() {
    let both_run = |watermark| {
        let mut world = World::new(EngineConfig { watermark, ..config(10, 4, 64) });
        world.submit(request(1, &prompt(0, 16), greedy(4)));
        world.submit(request(2, &prompt(40, 16), greedy(4)));
        world.step();
        let both = world.engine.running.len() == 2;
        world.run();
        both
    };
    // Two prompts take 8 of 10 blocks.
    assert!(both_run(0.2));
    assert!(!both_run(0.21));
    // Alone, a request may have everything.
    let mut world = World::new(EngineConfig { watermark: 0.9, ..config(10, 4, 64) });
    world.submit(request(1, &prompt(0, 30), greedy(8)));
    world.run();
    assert_eq!(world.tokens(1, 0).len(), 8);
}

#[test]
fn a_bounded_prefill_lets_a_short_prompt_pass() {
    let short_first = |long_prefill: Option<u32>| {
        let config = EngineConfig { long_prefill: long_prefill.map(Tokens), budget: TokenBudget::Fixed(Tokens(16)), ..config(64, 4, 128) };
        let mut world = World::new(config);
        world.submit(request(1, &prompt(0, 60), greedy(1)));
        world.submit(request(2, &prompt(80, 4), greedy(1)));
        world.run();
        world.told[&(2, 0)].token_times < world.told[&(1, 0)].token_times
    };
    assert!(!short_first(None));
    assert!(short_first(Some(12)));
}

#[test]
fn a_slow_machine_still_prefills_its_least() {
    // A step takes 1 ms without any token, so no budget meets half a millisecond.
    let budget = TokenBudget::Latency { target: Duration::from_micros(500), least: Tokens(5), most: Tokens(100) };
    let mut world = World::new(EngineConfig { budget, ..config(64, 4, 64) });
    world.submit(request(1, &prompt(0, 20), greedy(1)));
    world.run();
    assert_eq!(world.engine.counters.steps, 4);
}

#[test]
fn what_a_step_prices_is_what_it_computes() {
    let blocks: Vec<BlockId> = (0..8).map(BlockId).collect();
    let row = |tokens, start| BatchRow { sequence: SequenceId(0), tokens, start, blocks: &blocks, sample: None };
    let batch = Batch { rows: vec![row(&[1, 2, 3][..], 10), row(&[4][..], 7), row(&[5][..], 0)] };
    let load = StepLoad { new_tokens: 5.0, attended: 3.0 * 13.0 + 8.0 + 1.0, kv_tokens_read: 8.0 + 1.0, decode_rows: 2.0 };
    assert_eq!((batch.load(), batch.tokens()), (load, Tokens(5)));
}
