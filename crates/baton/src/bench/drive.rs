//! Sends a plan, open loop: what is due is sent whether or not earlier requests have ended.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use http::Method;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use tokio::{sync::mpsc, task::JoinSet, time::Instant};

use super::{
    client::{ChatCall, ChatMessage, Client, Ending, Seen},
    text::Writer,
    workload::{Plan, Session},
};

/// What every request of a run has in common.
#[derive(Debug, Clone)]
pub(crate) struct Target {
    pub(crate) client: Client,
    pub(crate) model: String,
    pub(crate) ignore_eos: bool,
    pub(crate) send_session: bool,
    pub(crate) writer: Writer,
    /// Real seconds per model second: a plan is in model time, and so are samples.
    pub(crate) time_scale: f64,
}

/// One request of a run. Latencies count from when it was due, so time that the load generator lost is not hidden.
#[derive(Debug, Clone)]
pub(crate) struct Sample {
    /// Position within its session.
    pub(crate) turn: usize,
    pub(crate) ending: Ending,
    pub(crate) ttft: Option<Duration>,
    pub(crate) e2e: Duration,
    /// Gaps between pieces of output.
    pub(crate) gaps: Vec<Duration>,
    pub(crate) prompt_tokens: Option<u32>,
    pub(crate) cached_tokens: Option<u32>,
    pub(crate) output_tokens: u32,
}

/// What a run gave.
#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) samples: Vec<Sample>,
    pub(crate) wall: Duration,
    /// Requests never sent, since one before them in their session failed.
    pub(crate) abandoned: usize,
    /// Requests per replica by a Baton gateway's own record; empty for other targets.
    pub(crate) replicas: BTreeMap<String, usize>,
}

impl Sample {
    /// Mean time per output token after the first; `None` below two tokens.
    pub(crate) fn tpot(&self) -> Option<Duration> {
        let after_first = self.output_tokens.checked_sub(1).filter(|tokens| *tokens > 0)?;
        Some(self.gaps.iter().sum::<Duration>() / after_first)
    }
}

pub(crate) async fn drive(target: &Arc<Target>, plan: Plan, label: &str) -> Run {
    let requests = plan.requests();
    let bar = progress_bar(requests as u64, label);
    let plan = Arc::new(plan);
    let run = format!("bench-{:016x}", fastrand::u64(..));
    let (sender, mut receiver) = mpsc::unbounded_channel();
    let begun = Instant::now();
    let mut sessions = JoinSet::new();
    for index in 0..plan.sessions.len() {
        let (target, plan, sender) = (Arc::clone(target), Arc::clone(&plan), sender.clone());
        let ids = format!("{run}-{index}");
        sessions.spawn(async move { run_session(&target, &plan, &plan.sessions[index], &ids, begun, &sender).await });
    }
    // Bounded by the plan: each request sends one sample.
    drop(sender);
    let mut samples = Vec::with_capacity(requests);
    let mut failed = 0;
    while let Some(sample) = receiver.recv().await {
        failed += usize::from(sample.ending != Ending::Finished);
        samples.push(sample);
        bar.inc(1);
        if failed > 0 {
            bar.set_message(format!("{label}, {failed} failed"));
        }
    }
    bar.finish_and_clear();
    let wall = begun.elapsed().div_f64(target.time_scale);
    Run { abandoned: requests - samples.len(), wall, samples, replicas: replicas(&target.client, &run).await }
}

/// Where a run's requests went. A gateway remembers a bounded number of decisions, so a very long run shows its end.
async fn replicas(client: &Client, run: &str) -> BTreeMap<String, usize> {
    let mut counts = BTreeMap::new();
    let Ok(answer) = client.admin(Method::GET, "/baton/v1/decisions?limit=4096", None).await else { return counts };
    let decisions = answer["decisions"].as_array().into_iter().flatten();
    for decision in decisions.filter(|decision| decision["x_request_id"].as_str().is_some_and(|id| id.starts_with(run))) {
        *counts.entry(format!("r{}", decision["chosen"])).or_default() += 1;
    }
    counts
}

async fn run_session(target: &Target, plan: &Plan, session: &Session, ids: &str, begun: Instant, samples: &mpsc::UnboundedSender<Sample>) {
    let mut messages = Vec::new();
    let mut due = begun + session.start.mul_f64(target.time_scale);
    for (turn, request) in session.turns.iter().enumerate() {
        due += request.think.mul_f64(target.time_scale);
        let texts = request.added.iter().map(|passage| ChatMessage { role: passage.role, content: plan.text(passage, &target.writer) });
        messages.extend(texts);
        tokio::time::sleep_until(due).await;
        let late = due.elapsed();
        let call = ChatCall {
            model: &target.model,
            messages: &messages,
            max_tokens: request.max_tokens,
            ignore_eos: target.ignore_eos,
            session: target.send_session.then_some(session.id.as_str()),
            id: &format!("{ids}-{turn}"),
        };
        let seen = target.client.chat(&call).await;
        due = Instant::now();
        messages.push(ChatMessage { role: "assistant", content: seen.text.clone() });
        let is_finished = seen.ending == Ending::Finished;
        // The receiver lives until all senders are gone.
        let _ = samples.send(sample(turn, late, seen, target.time_scale));
        if !is_finished {
            return;
        }
    }
}

fn sample(turn: usize, late: Duration, seen: Seen, time_scale: f64) -> Sample {
    let usage = seen.usage.as_ref();
    let model_time = |span: Duration| span.div_f64(time_scale);
    Sample {
        turn,
        ttft: seen.pieces.first().map(|first| model_time(late + *first)),
        e2e: model_time(late + seen.end),
        gaps: seen.pieces.windows(2).map(|pair| model_time(pair[1].saturating_sub(pair[0]))).collect(),
        prompt_tokens: usage.map(|usage| usage.prompt_tokens),
        cached_tokens: usage.and_then(baton_wire::openai::Usage::cached_tokens),
        output_tokens: usage.map_or(seen.pieces.len() as u32, |usage| usage.completion_tokens),
        ending: seen.ending,
    }
}

fn progress_bar(requests: u64, label: &str) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(Some(requests), ProgressDrawTarget::stderr());
    let style = ProgressStyle::with_template("{msg} [{bar:30}] {pos}/{len} requests, {elapsed}").expect("the template is valid");
    let bar = bar.with_style(style).with_message(label.to_owned());
    bar.enable_steady_tick(Duration::from_millis(200));
    bar
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn latencies_count_from_when_a_request_was_due() {
        let ms = Duration::from_millis;
        let seen = Seen { ending: Ending::Finished, text: String::new(), pieces: vec![ms(10), ms(30), ms(40)], end: ms(45), usage: None };
        let real = sample(0, ms(100), seen.clone(), 1.0);
        assert_eq!((real.ttft, real.e2e, real.tpot()), (Some(ms(110)), ms(145), Some(ms(15))));
        let slowed = sample(0, ms(100), seen, 10.0);
        assert_eq!((slowed.ttft, slowed.tpot()), (Some(ms(11)), Some(Duration::from_micros(1500))));
    }
}
