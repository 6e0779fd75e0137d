use super::*;
use crate::{History, MoveRefusal, OutputEnds, Phase, Prefix};

#[test]
fn a_target_that_holds_the_prefix_gets_only_the_tail() {
    let config = config(64, 4, 64);
    let (mut source, mut target) = two(&config);
    target.submit(request(9, &prompt(0, 18), greedy(1)));
    target.run();
    let new = request(1, &prompt(0, 18), greedy(12));
    source.submit(new.clone());
    (0..4).for_each(|_| _ = source.step());
    // 18 + 4 tokens, the last without KV: 6 blocks, of which the prompt's 4 full ones are there.
    assert_eq!(migrate(&mut source, &mut target, 1, 0), (Blocks(6), Blocks(4)));
    target.run();
    assert_eq!(target.told[&(1, 0)].tokens, alone(&config, &new, 0).tokens);
    assert_eq!(target.told[&(1, 0)].cached, 0, "as it was when it was first admitted");
    // The prefix that moved keeps serving where it was.
    source.submit(request(2, &prompt(0, 18), greedy(1)));
    source.run();
    assert_eq!(source.told[&(2, 0)].cached, 16);
}

#[test]
fn blocks_that_arrive_are_told_of_once_and_only_when_their_sequence_joins() {
    let (mut source, mut target) = two(&config(64, 4, 64));
    source.submit(request(1, &prompt(0, 10), greedy(12)));
    source.step();
    let id = source.engine.find(RequestId(1), 0).unwrap();
    let prepared = target.engine.prepare(&source.engine.export(id, source.now).unwrap()).unwrap();
    copy(&source, id, &mut target, prepared, 0..2);
    target.check();
    assert_eq!(target.events, [], "what is not complete cannot be hit");
    target.engine.abandon(prepared);
    migrate(&mut source, &mut target, 1, 0);
    let keys = source.engine.pool.block_size();
    let root = target.engine.domain(&request(1, &[], greedy(1))).root();
    let hashes: Vec<_> = chain_keys(root, &prompt(0, 10), keys).iter().map(|key| EngineHash(key.0)).collect();
    let stored = KvEvent::Stored { hashes, parent: None, tokens: prompt(0, 8), block_size: keys, adapter: None, salt: None };
    assert_eq!(target.events, [stored]);
    target.run();
}

/// Fetched blocks are a hit like computed ones, and count as nobody's while nobody uses them.
#[test]
fn a_prefix_that_is_installed_is_cached_as_if_it_had_been_computed() {
    let config = EngineConfig { max_running: 1, ..config(12, 4, 48) };
    let (mut source, mut target) = two(&config);
    let (long, salt) = (prompt(0, 18), Some("s".to_owned()));
    let salted = |id, prompt: &[u32]| NewRequest { salt: salt.clone(), ..request(id, prompt, greedy(3)) };
    source.submit(salted(1, &long));
    source.run();
    let prefix = Prefix { model: "m".to_owned(), tokens: long.clone(), adapter: None, salt: salt.clone(), public: Tokens::ZERO };
    let from = source.engine.hold_prefix(&prefix, Blocks::ZERO).unwrap();
    assert_eq!(source.engine.prepared(from).unwrap().held, Blocks(4));
    target.submit(salted(2, &long[..9]));
    target.run();
    target.events.clear();
    let to = target.engine.hold_prefix(&prefix, Blocks(4)).unwrap();
    assert_eq!((target.engine.prepared(to).unwrap().held, target.engine.pool.used()), (Blocks(2), Blocks(4)));
    assert!(target.engine.grow(to, Tokens(17)).is_err(), "there are no more blocks of it");
    // It takes no place: the one that there is serves another request meanwhile.
    target.submit(request(3, &prompt(7, 5), greedy(2)));
    target.run();
    let (here, there) = (source.engine.prepared(from).unwrap(), target.engine.prepared(to).unwrap());
    for index in 2..4 {
        let bytes = source.executor.kv().unwrap().block(here.blocks[index]);
        target.executor.kv_mut().unwrap().block_mut(there.blocks[index]).copy_from_slice(bytes);
    }
    assert_eq!(target.engine.install(to), Ok(Blocks(4)));
    assert!(source.engine.abandon(from));
    target.check();
    assert!(matches!(&target.events[..], [.., KvEvent::Stored { hashes, .. }] if hashes.len() == 2), "{:?}", target.events);
    assert_eq!((source.engine.pool.used(), target.engine.pool.used()), (Blocks(0), Blocks(0)));
    target.submit(salted(4, &long));
    target.run();
    assert_eq!(target.told[&(4, 0)].cached, 16);
    assert_eq!(target.told[&(4, 0)].tokens, alone(&config, &salted(4, &long), 0).tokens);
    let other = Prefix { salt: None, ..prefix.clone() };
    let unsalted = source.engine.hold_prefix(&other, Blocks::ZERO).unwrap();
    assert_eq!(source.engine.prepared(unsalted).unwrap().held, Blocks(0), "another salt's prefix is never found");
    assert!(source.engine.abandon(unsalted));
    let large = Prefix { tokens: prompt(2, 52), ..prefix };
    let error = source.engine.hold_prefix(&large, Blocks(13)).unwrap_err();
    assert_eq!(error.to_string(), "13 blocks more are needed and 12 blocks can be had; free some or wait");
}

/// A sequence takes the place along at which its salt enters, and so does a prefix.
#[test]
fn what_moves_is_public_as_far_as_it_was() {
    let config = config(64, 4, 64);
    let (mut source, mut target) = two(&config);
    let of = |id, salt: &str| NewRequest { salt: Some(salt.to_owned()), public: Tokens(10), ..request(id, &prompt(0, 20), greedy(8)) };
    source.submit(of(1, "a"));
    source.step();
    migrate(&mut source, &mut target, 1, 0);
    target.run();
    for (id, salt, cached) in [(2, "b", 8), (3, "a", 16)] {
        target.submit(of(id, salt));
        target.run();
        assert_eq!(target.told[&(id, 0)].cached, cached, "{salt}");
    }
    let held = |engine: &mut Engine, salt: &str, public| {
        let NewRequest { prompt: tokens, adapter, salt, .. } = of(0, salt);
        let prefix = Prefix { model: "m".to_owned(), tokens, adapter, salt, public: Tokens(public) };
        let id = engine.hold_prefix(&prefix, Blocks::ZERO).unwrap();
        let held = engine.prepared(id).unwrap().held;
        assert!(engine.abandon(id));
        held
    };
    let found = [("a", 10), ("b", 10), ("c", 10), ("a", 0)].map(|(salt, public)| held(&mut target.engine, salt, public));
    assert_eq!(found, [Blocks(5), Blocks(5), Blocks(2), Blocks(0)]);
}

#[test]
fn a_sequence_moves_back_and_forth_and_at_any_point_of_its_prefill() {
    let config = EngineConfig { budget: TokenBudget::Fixed(Tokens(7)), ..config(64, 4, 64) };
    let hot = SamplingOptions { temperature: 1.0, logprobs: Some(2), min_tokens: 3, ..greedy(14) };
    let new = request(1, &prompt(0, 30), hot);
    let (mut here, mut there) = two(&config);
    here.submit(new.clone());
    let mut phases = Vec::new();
    while here.step() {
        let Some(id) = here.engine.find(RequestId(1), 0) else { break };
        phases.push(here.engine.look(id).unwrap().phase);
        migrate(&mut here, &mut there, 1, 0);
        std::mem::swap(&mut here, &mut there);
    }
    assert_eq!(phases, [vec![Phase::Prefilling; 4], vec![Phase::Decoding; 13]].concat());
    let expected = alone(&config, &new, 0);
    assert_eq!((&here.told[&(1, 0)].tokens, here.told[&(1, 0)].finish), (&expected.tokens, expected.finish));
}

#[test]
fn what_is_frozen_is_neither_scheduled_nor_preempted_and_thaws_to_its_place() {
    // 8 blocks of 4 = 32 slots for two sequences that grow to 27 each.
    let tight = config(8, 4, 64);
    let mut world = World::new(tight.clone());
    let requests = [request(1, &prompt(0, 8), greedy(20)), request(2, &prompt(20, 8), greedy(20))];
    for request in &requests {
        world.submit(request.clone());
    }
    world.step();
    let (first, second) = (world.engine.find(RequestId(1), 0).unwrap(), world.engine.find(RequestId(2), 0).unwrap());
    assert!(world.engine.freeze(second) && !world.engine.freeze(second));
    // The second one would be preempted first; as it is frozen, the first one runs until it lacks a block, and then waits for it.
    while world.step() {}
    let frozen = world.engine.look(second).unwrap();
    assert_eq!((frozen.frozen, frozen.phase, frozen.preemptions, frozen.computed), (true, Phase::Decoding, 0, Tokens(8)));
    let waiting = world.engine.look(first).unwrap();
    assert_eq!((waiting.phase, waiting.preemptions, waiting.total), (Phase::Waiting, 1, Tokens(25)));
    assert!(world.engine.thaw(second) && !world.engine.thaw(second));
    world.run();
    for request in &requests {
        assert_eq!(world.told[&(request.id.0, 0)].tokens, alone(&tight, request, 0).tokens);
    }
}

#[test]
fn what_was_copied_before_a_preemption_is_right_but_lies_elsewhere_at_the_source() {
    let tight = config(8, 4, 64);
    let (mut source, mut target) = two(&tight);
    let requests = [request(1, &prompt(0, 8), greedy(16)), request(2, &prompt(20, 8), greedy(16))];
    for request in &requests {
        source.submit(request.clone());
    }
    source.step();
    let id = source.engine.find(RequestId(2), 0).unwrap();
    let prepared = target.engine.prepare(&source.engine.export(id, source.now).unwrap()).unwrap();
    copy(&source, id, &mut target, prepared, 0..2);
    while source.engine.look(id).unwrap().preemptions == 0 {
        source.step();
    }
    assert_eq!(source.engine.look(id).unwrap().phase, Phase::Waiting);
    // What it had computed is at the target; the rest is computed there.
    assert!(source.engine.freeze(id));
    let state = SequenceState { computed: Tokens(8), ..source.engine.export(id, source.now).unwrap() };
    target.engine.join(prepared, &state, target.now).unwrap();
    assert!(source.engine.release(id));
    hand_over(&mut source, &mut target, &state);
    source.run();
    target.run();
    assert_eq!(target.told[&(2, 0)].tokens, alone(&tight, &requests[1], 0).tokens);
    assert_eq!(target.told[&(2, 0)].preemptions, 1);
}

#[test]
fn what_is_prepared_keeps_its_place_and_blocks_until_it_is_abandoned() {
    let config = EngineConfig { max_running: 2, ..config(16, 4, 64) };
    let (mut source, mut target) = two(&config);
    for id in 1..=2 {
        source.submit(request(id, &prompt(id as u32 * 20, 14), greedy(9)));
    }
    source.step();
    let export = |world: &World, id| world.engine.export(world.engine.find(RequestId(id), 0).unwrap(), world.now).unwrap();
    let (first, second) = (export(&source, 1), export(&source, 2));
    let prepared = [target.engine.prepare(&first).unwrap(), target.engine.prepare(&second).unwrap()];
    assert_eq!(target.engine.pool.used(), Blocks(8));
    assert_eq!(target.engine.prepare(&first), Err(MoveRefusal::NoPlace { limit: 2 }));
    target.submit(request(3, &prompt(80, 5), greedy(1)));
    assert!(!target.step(), "both places are taken");
    assert!(target.engine.abandon(prepared[1]) && !target.engine.abandon(prepared[1]));
    target.engine.grow(prepared[0], Tokens(17)).unwrap();
    assert_eq!(target.engine.pool.used(), Blocks(5));
    let error = target.engine.grow(prepared[0], Tokens(65)).unwrap_err();
    assert_eq!(error.to_string(), "12 blocks more are needed and 11 blocks can be had; free some or wait");
    let views: Vec<_> = target.engine.preparations().map(|view| (view.id, view.request, view.held, view.blocks.len())).collect();
    assert_eq!(views, [(prepared[0], Some(RequestId(1)), Blocks(0), 5)]);
    target.check();
    assert!(target.step());
    assert!(target.engine.abandon(prepared[0]));
    assert_eq!(target.engine.pool.used(), Blocks(0));
    target.run();
    source.run();
}

#[test]
fn an_older_request_goes_before_those_that_came_while_it_ran_elsewhere() {
    let (mut source, mut target) = two(&config(16, 4, 64));
    source.submit(request(1, &prompt(0, 8), greedy(30)));
    target.now += Duration::from_millis(5);
    (0..10).for_each(|_| _ = source.step());
    target.now = source.now;
    target.submit(request(2, &prompt(20, 8), greedy(30)));
    target.step();
    migrate(&mut source, &mut target, 1, 0);
    target.run();
    let preemptions = |id| target.told[&(id, 0)].preemptions;
    assert_eq!((preemptions(1), preemptions(2)), (0, 1), "the younger one gives its blocks");
}

#[test]
fn choices_move_alone_once_they_are_made_and_together_before() {
    let config = EngineConfig { budget: TokenBudget::Fixed(Tokens(6)), ..config(64, 4, 64) };
    let hot = SamplingOptions { temperature: 1.0, ..greedy(8) };
    let new = NewRequest { choices: 3, ..request(1, &prompt(0, 10), hot) };
    let (mut source, mut target) = two(&config);
    source.submit(new.clone());
    source.step();
    assert_eq!(source.engine.find(RequestId(1), 2), source.engine.find(RequestId(1), 0));
    migrate(&mut source, &mut target, 1, 0);
    assert!(source.engine.is_idle());
    (0..3).for_each(|_| _ = target.step());
    // Back one by one, the last one first; then one of them again.
    for choice in [2, 0] {
        migrate(&mut target, &mut source, 1, choice);
        source.step();
        target.step();
    }
    let duplicate = target.engine.export(target.engine.find(RequestId(1), 1).unwrap(), target.now).unwrap();
    assert_eq!((duplicate.request.choices, duplicate.request.first_choice), (1, 1));
    migrate(&mut target, &mut source, 1, 1);
    assert!(target.engine.is_idle());
    let same_place = |pair: &[Sequence]| Rank { choice: 0, ..pair[0].rank } == Rank { choice: 0, ..pair[1].rank };
    assert!(source.engine.running.windows(2).all(same_place), "they are one request again");
    assert_eq!(source.engine.prepare(&duplicate), Err(SubmitError::Duplicate(RequestId(1)).into()));
    migrate(&mut source, &mut target, 1, 0);
    assert!(source.engine.stop(RequestId(1), 2));
    source.run();
    target.run();
    for (world, choice) in [(&target, 0), (&source, 1)] {
        assert_eq!(world.tokens(1, choice), alone(&config, &new, choice).tokens.iter().map(|&(token, _)| token).collect::<Vec<_>>());
    }
}

#[test]
fn an_abort_ends_what_is_frozen_and_leaves_what_is_prepared() {
    let (mut source, mut target) = two(&config(16, 4, 64));
    source.submit(request(1, &prompt(0, 8), greedy(9)));
    source.step();
    let id = source.engine.find(RequestId(1), 0).unwrap();
    let prepared = target.engine.prepare(&source.engine.export(id, source.now).unwrap()).unwrap();
    assert!(source.engine.freeze(id) && source.engine.abort(RequestId(1)));
    assert!(source.engine.is_idle() && source.engine.pool.used() == Blocks(0));
    assert_eq!(source.engine.look(id), None);
    assert!(!source.engine.release(id) && !source.engine.thaw(id));
    assert!(!target.engine.abort(RequestId(1)), "it has not joined");
    assert!(target.engine.abandon(prepared));
}

/// The owner of a stream knows nothing but the request, its seed and what its client has.
#[test]
fn a_request_goes_on_after_output_from_elsewhere_as_if_it_had_put_it_out() {
    let config = EngineConfig { budget: TokenBudget::Fixed(Tokens(5)), ..config(64, 4, 64) };
    let forced = vec![(EOS, 100.0)];
    let hot = SamplingOptions { temperature: 1.0, logprobs: Some(2), max_tokens: Some(20), ..SamplingOptions::default() };
    let late_end = SamplingOptions { min_tokens: 9, logit_bias: forced, ..hot.clone() };
    for options in [greedy(12), hot, late_end] {
        let new = request(7, &prompt(0, 10), options);
        let expected = alone(&config, &new, 0);
        for delivered in 0..expected.tokens.len() {
            let mut world = World::new(config.clone());
            let told = expected.tokens[..delivered].to_vec();
            let output: Vec<u32> = told.iter().map(|&(token, _)| token).collect();
            let state = travelled(&SequenceState::restart(new.clone(), output, "m"));
            assert_eq!(state.history, History::default());
            world.engine.resume(&state, world.now).unwrap();
            world.told.insert((7, 0), Told { tokens: told, ..Told::default() });
            world.run();
            let told = &world.told[&(7, 0)];
            assert_eq!((&told.tokens, told.finish), (&expected.tokens, expected.finish), "after {delivered} tokens");
            assert!(world.engine.counters.prompt_tokens == if delivered == 0 { 10 } else { 0 });
        }
    }
}

#[test]
fn what_cannot_go_on_exactly_is_refused_with_the_reason() {
    let (mut source, mut target) = two(&config(16, 4, 64));
    source.submit(request(1, &prompt(0, 10), greedy(9)));
    (0..3).for_each(|_| _ = source.step());
    let state = source.engine.export(source.engine.find(RequestId(1), 0).unwrap(), source.now).unwrap();
    assert_eq!((state.computed, state.output.len()), (Tokens(12), 3));
    assert_eq!(state.ends, Some(OutputEnds { eos: vec![EOS], length_limit: Tokens(19) }));
    let mut refusal = |change: &dyn Fn(&mut SequenceState)| {
        let mut state = state.clone();
        change(&mut state);
        let error = target.engine.prepare(&state).unwrap_err();
        assert_eq!(target.engine.resume(&state, Time::ZERO).as_ref(), Err(&error));
        error.to_string()
    };
    assert_eq!(refusal(&|state| state.model = "n".to_owned()), "the sequence is of model \"n\", this engine runs \"m\"");
    let ends = |eos: &[u32], limit| Some(OutputEnds { eos: eos.to_vec(), length_limit: Tokens(limit) });
    let eos = refusal(&|state| state.ends = ends(&[1, EOS], 19));
    assert_eq!(eos, "outputs end with tokens [1, 3] at the source and with [3] here; the stream might end elsewhere");
    let long = refusal(&|state| state.ends = ends(&[EOS], 65));
    assert_eq!(long, "the sequence may reach 65 tokens, and at most 64 tokens are held here");
    assert_eq!(refusal(&|state| state.output = vec![5; 9]), "the output is complete; nothing is left to compute");
    assert_eq!(refusal(&|state| state.output[2] = EOS), "the output is complete; nothing is left to compute");
    assert!(refusal(&|state| state.computed = Tokens(13)).contains("the last token"));
    assert!(refusal(&|state| state.request.choices = 2).contains("one choice"));
    assert!(
        refusal(&|state| (state.request.choices, state.output, state.computed, state.history.forked) = (2, vec![], Tokens(0), true))
            .contains("makes none")
    );
    assert_eq!(refusal(&|state| state.output[1] = VOCABULARY), "token 40 is outside the vocabulary of 40 tokens");
    assert_eq!(refusal(&|state| state.request.choices = 0), "the number of choices is 0; ask for at least 1");

    let prepared = target.engine.prepare(&state).unwrap();
    let mut join = |id, change: &dyn Fn(&mut SequenceState)| {
        let mut state = state.clone();
        change(&mut state);
        target.engine.join(id, &state, Time::ZERO).unwrap_err().to_string()
    };
    assert_eq!(join(PreparedId(99), &|_| {}), "nothing is prepared as 99");
    let grown = |state: &mut SequenceState| (state.output, state.computed) = (vec![9; 8], Tokens(17));
    assert_eq!(join(prepared, &grown), "17 tokens have KV, and room was made for 12 tokens; make room for the rest and copy it first");
    assert!(target.engine.abandon(prepared));
    target.submit(request(2, &prompt(0, 10), greedy(1)));
    target.run();
    let prepared = target.engine.prepare(&state).unwrap();
    let mut join = |change: &dyn Fn(&mut SequenceState)| {
        let mut state = state.clone();
        change(&mut state);
        target.engine.join(prepared, &state, Time::ZERO).unwrap_err().to_string()
    };
    assert_eq!(join(&|state| state.request.prompt[7] = 5), "the first 8 tokens are not those that were prepared for");
    assert_eq!(join(&|state| state.request.salt = Some("other".to_owned())), "the first 8 tokens are not those that were prepared for");
    assert!(target.engine.join(prepared, &state, Time::ZERO).is_ok());
    assert_eq!(target.engine.join(prepared, &state, Time::ZERO), Err(SubmitError::Duplicate(RequestId(1)).into()));
}
