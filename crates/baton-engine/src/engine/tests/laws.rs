use std::time::Duration;

use proptest::prelude::*;

use super::*;
use baton_units::Priority;

/// One thing that happens to an engine.
#[derive(Debug, Clone)]
enum Happening {
    Submit(Submission),
    Step,
    Abort(usize),
    AbortInFlight(usize),
    Stop(usize, u32),
    Reset,
}

#[derive(Debug, Clone)]
pub(super) struct Submission {
    /// Prompts are cuts of a few base texts, so that they share prefixes.
    text: u32,
    len: u32,
    choices: u32,
    options: SamplingOptions,
    priority: i32,
    salt: Option<&'static str>,
    public: u32,
    adapter: Option<&'static str>,
}

fn options() -> impl Strategy<Value = SamplingOptions> {
    let max_tokens = prop_oneof![4 => (1u32..14).prop_map(Some), 1 => Just(None)];
    let bias = prop_oneof![4 => Just(vec![]), 1 => Just(vec![(EOS, 100.0)])];
    let stops = prop_oneof![3 => Just(vec![]), 1 => Just(vec![11, 12, 13, 14, 15])];
    (max_tokens, bias, stops, 0u32..4, any::<bool>(), any::<bool>(), prop::option::of(0u32..3)).prop_map(
        |(max_tokens, logit_bias, stop_token_ids, min_tokens, hot, ignore_eos, logprobs)| SamplingOptions {
            temperature: f32::from(u8::from(hot)),
            min_tokens: min_tokens.min(max_tokens.unwrap_or(u32::MAX)),
            max_tokens,
            logit_bias,
            stop_token_ids,
            ignore_eos,
            logprobs,
            ..SamplingOptions::default()
        },
    )
}

pub(super) fn submission() -> impl Strategy<Value = Submission> {
    let salts = prop::sample::select(vec![None, None, Some("tenant")]);
    let adapters = prop::sample::select(vec![None, None, None, Some("lora")]);
    (0u32..3, 1u32..40, 1u32..4, options(), -2i32..3, (salts, 0u32..20), adapters).prop_map(
        |(text, len, choices, options, priority, (salt, public), adapter)| Submission {
            text,
            len,
            choices,
            options,
            priority,
            salt,
            public,
            adapter,
        },
    )
}

fn happening() -> impl Strategy<Value = Happening> {
    prop_oneof![
        5 => submission().prop_map(Happening::Submit),
        10 => Just(Happening::Step),
        1 => (0usize..20).prop_map(Happening::Abort),
        1 => (0usize..20).prop_map(Happening::AbortInFlight),
        1 => (0usize..20, 0u32..3).prop_map(|(index, choice)| Happening::Stop(index, choice)),
        1 => Just(Happening::Reset),
    ]
}

pub(super) fn any_config() -> impl Strategy<Value = EngineConfig> {
    let budget = prop_oneof![
        3 => (1u32..40).prop_map(|tokens| TokenBudget::Fixed(Tokens(tokens))),
        1 => (1u32..8, 8u32..40, 900u64..1_400).prop_map(|(least, most, target_us)| TokenBudget::Latency {
            target: Duration::from_micros(target_us),
            least: Tokens(least),
            most: Tokens(most),
        }),
    ];
    let order = prop::sample::select(vec![Order::Arrival, Order::Priority]);
    (2u32..40, 1u32..9, 10u32..60, 1u32..7, budget, prop::option::of(1u32..10), 0.0f64..0.3, order).prop_map(
        |(blocks, block_size, max_model_len, max_running, budget, long_prefill, watermark, order)| EngineConfig {
            max_running,
            budget,
            long_prefill: long_prefill.map(Tokens),
            watermark,
            order,
            ..config(blocks, block_size, max_model_len)
        },
    )
}

impl Submission {
    pub(super) fn request(self, id: u64) -> NewRequest {
        let Self { text, len, choices, options, priority, salt, public, adapter } = self;
        NewRequest {
            choices,
            priority: Priority(priority),
            salt: salt.map(str::to_owned),
            public: Tokens(public),
            adapter: adapter.map(str::to_owned),
            ..request(id, &prompt(text * 10, len), options)
        }
    }
}

struct Run {
    world: World,
    accepted: Vec<NewRequest>,
    cut_short: BTreeSet<(u64, u32)>,
}

impl Run {
    fn new(config: EngineConfig) -> Self {
        Self { world: World::new(config), accepted: Vec::new(), cut_short: BTreeSet::new() }
    }

    fn submit(&mut self, submission: Submission, id: u64) {
        let (len, new) = (submission.len, submission.request(id));
        let fits = self.world.engine.max_model_len() - Tokens(1);
        let submitted = self.world.engine.submit(new.clone(), self.world.now);
        if Tokens(len) > fits {
            assert_eq!(submitted, Err(SubmitError::NeverFits { prompt: Tokens(len), fits }));
        } else {
            assert_eq!(submitted, Ok(()));
            self.accepted.push(new);
        }
    }

    fn happen(&mut self, happening: Happening, id: u64) {
        let target = |index: usize| self.accepted.get(index % self.accepted.len().max(1)).map(|request| request.id);
        match happening {
            Happening::Submit(submission) => self.submit(submission, id),
            Happening::Step => _ = self.world.step(),
            Happening::Abort(index) => {
                if let Some(request) = target(index) {
                    self.world.engine.abort(request);
                    self.cut((0..3).map(|choice| (request.0, choice)));
                    self.world.check();
                }
            }
            Happening::AbortInFlight(index) => {
                if let Some(request) = target(index) {
                    self.cut((0..3).map(|choice| (request.0, choice)));
                    self.world.step_during(|engine| _ = engine.abort(request));
                }
            }
            Happening::Stop(index, choice) => {
                if let Some(request) = target(index)
                    && self.world.engine.stop(request, choice)
                {
                    self.cut(std::iter::once((request.0, choice)));
                    self.world.check();
                }
            }
            Happening::Reset => {
                self.world.engine.reset_prefix_cache();
                self.world.check();
            }
        }
    }

    fn cut(&mut self, choices: impl Iterator<Item = (u64, u32)>) {
        let finished = |choice: &(u64, u32)| self.world.told.get(choice).is_some_and(|told| told.finish.is_some());
        let cut: Vec<_> = choices.filter(|choice| !finished(choice)).collect();
        self.cut_short.extend(cut);
    }

    /// Every choice that nobody cut short ends, with the output that it has alone; the others have a part of it.
    fn check_outputs(&self) {
        for request in &self.accepted {
            for choice in 0..request.choices {
                let expected = alone(&self.world.engine.config, request, choice);
                let told = self.world.told.get(&(request.id.0, choice)).cloned().unwrap_or_default();
                if self.cut_short.contains(&(request.id.0, choice)) {
                    assert!(expected.tokens.starts_with(&told.tokens));
                } else {
                    assert_eq!((told.tokens, told.finish), (expected.tokens, expected.finish), "{request:?}");
                }
            }
        }
    }
}

fn run(config: &EngineConfig, happenings: &[Happening]) -> Run {
    let mut run = Run::new(config.clone());
    for (id, happening) in (0..).zip(happenings) {
        run.happen(happening.clone(), id);
    }
    run.world.run();
    run
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]

    /// Blocks are conserved, references are tables, nothing is computed twice but after preemption, budgets hold, every admitted
    /// request finishes, events replayed are the pool's content (all checked at every step by `World`), and outputs depend on none
    /// of batching, chunk size, preemption, prefix hits, block size, order.
    #[test]
    fn the_laws_hold_whatever_happens(config in any_config(), happenings in prop::collection::vec(happening(), 1..60)) {
        let run = run(&config, &happenings);
        run.check_outputs();
        let (engine, counters) = (&run.world.engine, run.world.engine.counters);
        prop_assert_eq!(engine.pool.available(), engine.pool.total());
        let choices: u64 = run.accepted.iter().map(|request| u64::from(request.choices)).sum();
        prop_assert_eq!(choices, counters.finished_stop + counters.finished_length + counters.finished_abort);
    }

    #[test]
    fn equal_calls_give_equal_results(config in any_config(), happenings in prop::collection::vec(happening(), 1..40)) {
        let (first, second) = (run(&config, &happenings), run(&config, &happenings));
        prop_assert_eq!(first.world.told, second.world.told);
        prop_assert_eq!(first.world.events, second.world.events);
        prop_assert_eq!(first.world.engine.status(), second.world.engine.status());
    }
}
