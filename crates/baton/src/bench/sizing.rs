//! Fits a workload to a target: prompts to its context, the whole run to a few minutes of its measured speed.

use std::time::Duration;

use anyhow::{Context, Result};
use fastrand::Rng;
use tokio::{task::JoinSet, time::Instant};

use super::{
    client::{ChatCall, ChatMessage, Ending},
    drive::Target,
    workload::{Generator, Plan, Volume, Workload},
};

/// Part of the context that prompts may fill; the rest is for the template and for text that is longer than planned.
const CONTEXT_SHARE: f64 = 0.9;
/// Offered load, in the best case of perfect caches, over measured capacity.
const UTILISATION: f64 = 0.6;
/// A cold cache on each of a few replicas computes about this many times what one perfect cache would.
const COLD_FACTOR: u64 = 3;
/// Below this a step is shorter than a KV block, and no shape is left.
const SCALE_MIN: f64 = 0.05;
const PROBE_REQUESTS: u32 = 8;
const PROBE_TOKENS: u32 = 128;

/// Tokens per second of the whole target.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Capacity {
    pub(crate) prefill_per_s: f64,
    pub(crate) decode_per_s: f64,
}

impl Capacity {
    /// Time to compute a volume with every prompt token in `prompt` computed.
    fn seconds(&self, prompt: u64, output: u64) -> f64 {
        prompt as f64 / self.prefill_per_s + output as f64 / self.decode_per_s
    }

    /// With perfect caches.
    fn best_s(&self, volume: &Volume) -> f64 {
        self.seconds(volume.new, volume.output)
    }

    /// With caches as cold as scattered routing leaves them.
    fn worst_s(&self, volume: &Volume) -> f64 {
        self.seconds(volume.prompt.min(COLD_FACTOR * volume.new), volume.output)
    }
}

/// What the person asked for; what is `None` is chosen.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Wishes {
    pub(crate) sessions: Option<usize>,
    pub(crate) scale: Option<f64>,
    pub(crate) rate: Option<f64>,
    pub(crate) duration: Option<Duration>,
}

impl Wishes {
    /// Whether the target's speed decides anything.
    pub(crate) fn need_capacity(&self) -> bool {
        self.rate.is_none() || self.sessions.is_none() && self.duration.is_none() || self.scale.is_none()
    }
}

/// The plan that meets the wishes, fits the context, and should end within `budget`.
pub(crate) fn fit(
    mut generator: Generator,
    wishes: &Wishes,
    capacity: Option<Capacity>,
    context: Option<u32>,
    budget: Duration,
) -> (Generator, Plan) {
    let sessions = wishes.sessions.unwrap_or(match (wishes.duration, generator.workload) {
        (Some(_), _) => usize::MAX >> 16,
        (None, Workload::Agent | Workload::Chat) => 24,
        (None, Workload::Shared | Workload::Mixed) => 400,
    });
    let sessions_min = match (wishes.sessions, generator.workload) {
        (Some(sessions), _) => sessions,
        (None, Workload::Agent) => 6,
        (None, Workload::Chat) => 9,
        (None, Workload::Shared | Workload::Mixed) => 60,
    };
    let mut scale = 1.0;
    loop {
        // Rounded, so that what is printed makes the same plan again.
        generator.scale = wishes.scale.unwrap_or((scale * 1e3f64).round() / 1e3);
        let (sized, plan) = with_sessions(generator, wishes, capacity, sessions, sessions_min, budget);
        let volume = plan.volume();
        let fits_context = context.is_none_or(|context| volume.context_max as f64 <= f64::from(context) * CONTEXT_SHARE);
        let fits_budget =
            capacity.is_none_or(|capacity| run_s(&sized, &plan, capacity) <= budget.as_secs_f64()) || wishes.duration.is_some();
        if wishes.scale.is_some() || fits_context && fits_budget || scale * 0.9 < SCALE_MIN {
            return (sized, plan);
        }
        scale *= 0.9;
    }
}

/// At this scale: as many sessions as the budget allows, between the least and the most.
fn with_sessions(
    mut generator: Generator,
    wishes: &Wishes,
    capacity: Option<Capacity>,
    most: usize,
    least: usize,
    budget: Duration,
) -> (Generator, Plan) {
    let sample = Generator { rate: 1.0, ..generator }.plan(least.max(1), None);
    let volume = sample.volume();
    let per_session_s = capacity.map(|capacity| capacity.best_s(&volume) / sample.sessions.len().max(1) as f64);
    generator.rate = wishes.rate.or(per_session_s.map(|seconds| three_digits(UTILISATION / seconds))).unwrap_or(1.0);
    if wishes.duration.is_some() || wishes.sessions.is_some() {
        return (generator, generator.plan(most, wishes.duration));
    }
    let Some(capacity) = capacity else { return (generator, generator.plan(most, None)) };
    let mut sessions = most;
    loop {
        let plan = generator.plan(sessions, None);
        if sessions <= least || run_s(&generator, &plan, capacity) <= budget.as_secs_f64() {
            return (generator, plan);
        }
        sessions = (sessions * 4 / 5).max(least);
    }
}

/// The number to three significant digits, rounded down.
fn three_digits(number: f64) -> f64 {
    let unit = 10f64.powi(number.log10().floor() as i32 - 2);
    let digits = (number / unit).floor();
    if unit < 1.0 { digits / (1.0 / unit).round() } else { digits * unit }
}

/// Expected length of a run: its arrivals and one session after the last of them, or its work if that takes longer.
fn run_s(generator: &Generator, plan: &Plan, capacity: Capacity) -> f64 {
    let sessions = plan.sessions.len().max(1) as f64;
    let volume = plan.volume();
    let think_s: f64 = plan.sessions.iter().flat_map(|session| &session.turns).map(|turn| turn.think.as_secs_f64()).sum::<f64>() / sessions;
    let session_s = think_s + capacity.worst_s(&volume) / sessions;
    (sessions / generator.rate + session_s).max(capacity.worst_s(&volume) + think_s)
}

/// Measures the target with a few short requests that share nothing.
pub(crate) async fn probe(target: &Target, seed: u64) -> Result<Capacity> {
    let mut rng = Rng::with_seed(seed ^ 0x7072_6f62);
    // The first request of a process pays for what later ones find ready.
    burst(target, &mut rng, 1, PROBE_TOKENS, 1).await?;
    let (prefill_s, tokens) = burst(target, &mut rng, PROBE_REQUESTS, PROBE_TOKENS, 1).await?;
    let prefill_per_s = f64::from(tokens) / prefill_s;
    let output = 16;
    let (both_s, tokens) = burst(target, &mut rng, PROBE_REQUESTS, 16, output).await?;
    let decode_s = (both_s - f64::from(tokens) / prefill_per_s).max(both_s * 0.1);
    Ok(Capacity { prefill_per_s, decode_per_s: f64::from(PROBE_REQUESTS * output) / decode_s })
}

/// Model seconds that so many requests at once take, and the prompt tokens that they had together.
async fn burst(target: &Target, rng: &mut Rng, requests: u32, prompt_tokens: u32, output_tokens: u32) -> Result<(f64, u32)> {
    let begun = Instant::now();
    let mut calls = JoinSet::new();
    for _ in 0..requests {
        let content = target.writer.text(rng, prompt_tokens);
        let target = target.clone();
        calls.spawn(async move {
            let messages = [ChatMessage { role: "user", content }];
            let call = ChatCall {
                model: &target.model,
                messages: &messages,
                max_tokens: output_tokens,
                ignore_eos: target.ignore_eos,
                session: None,
                id: "bench-probe",
            };
            target.client.chat(&call).await
        });
    }
    let mut tokens = 0;
    while let Some(seen) = calls.join_next().await {
        let seen = seen.context("a probe panicked")?;
        match seen.ending {
            Ending::Finished => tokens += seen.usage.map_or(prompt_tokens, |usage| usage.prompt_tokens),
            Ending::Refused => {
                anyhow::bail!("the target refuses requests; measure when it is idle, or set --rate, --scale-shape and a number of requests")
            }
            Ending::Error(error) => anyhow::bail!("the target does not answer a short request: {error}"),
        }
    }
    Ok((begun.elapsed().as_secs_f64() / target.time_scale, tokens))
}

#[cfg(test)]
mod tests {
    use super::{super::workload::Arrivals, *};

    const FREE: Wishes = Wishes { sessions: None, scale: None, rate: None, duration: None };
    const BUDGET: Duration = Duration::from_mins(2);

    fn generator(workload: Workload) -> Generator {
        Generator { workload, scale: 1.0, arrivals: Arrivals::Poisson, rate: 1.0, think: 1.0, seed: 1 }
    }

    /// Two CPU cores with a small model.
    const SLOW: Capacity = Capacity { prefill_per_s: 250.0, decode_per_s: 100.0 };
    const FAST: Capacity = Capacity { prefill_per_s: 100_000.0, decode_per_s: 20_000.0 };

    #[test]
    fn a_slow_target_gets_a_small_workload_that_ends_in_time() {
        for workload in [Workload::Agent, Workload::Shared, Workload::Mixed, Workload::Chat] {
            let (sized, plan) = fit(generator(workload), &FREE, Some(SLOW), Some(8192), BUDGET);
            let expected_s = run_s(&sized, &plan, SLOW);
            assert!(expected_s <= BUDGET.as_secs_f64(), "{workload:?} takes {expected_s} s at scale {}", sized.scale);
            assert!(sized.scale >= SCALE_MIN && plan.sessions.len() >= 6, "{workload:?} {}", sized.scale);
            assert!(plan.volume().context_max <= 7373);
        }
    }

    #[test]
    fn a_fast_target_gets_the_shape_as_described() {
        let (sized, plan) = fit(generator(Workload::Agent), &FREE, Some(FAST), Some(32_768), BUDGET);
        assert!((sized.scale - 1.0).abs() < 1e-12);
        assert_eq!(plan.sessions.len(), 24);
        let (short, _) = fit(generator(Workload::Agent), &FREE, Some(FAST), Some(4096), BUDGET);
        assert!((0.4..0.5).contains(&short.scale), "{}", short.scale);
    }

    #[test]
    fn what_is_asked_for_is_kept() {
        let wishes = Wishes { sessions: Some(3), scale: Some(2.0), rate: Some(7.0), duration: None };
        assert!(!wishes.need_capacity());
        let (sized, plan) = fit(generator(Workload::Agent), &wishes, None, Some(100), BUDGET);
        assert_eq!((sized.scale, sized.rate, plan.sessions.len()), (2.0, 7.0, 3));
        let for_a_while = Wishes { duration: Some(Duration::from_secs(10)), rate: Some(5.0), ..FREE };
        let (_, plan) = fit(generator(Workload::Shared), &for_a_while, Some(FAST), None, BUDGET);
        assert!((20..80).contains(&plan.sessions.len()), "{}", plan.sessions.len());
        assert!(plan.sessions.iter().all(|session| session.start < Duration::from_secs(10)));
    }
}
