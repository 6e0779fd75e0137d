//! The four workloads as plans: who sends what and when, fixed by a seed before anything is sent.

use std::{collections::BTreeSet, time::Duration};

use clap::ValueEnum;
use fastrand::Rng;
use serde::Serialize;

use super::text::Writer;

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Workload {
    /// Tasks of 20 steps that share a growing prefix: a common system prompt, 300 more tokens a step
    Agent,
    /// Single requests under one of 6 long system prompts, Zipf-distributed
    Shared,
    /// As `shared`, with 5 % very long prompts of their own
    Mixed,
    /// Conversations of several turns with a short system prompt
    Chat,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Arrivals {
    /// Independent clients: exponential gaps
    Poisson,
    /// Equal gaps
    Fixed,
}

/// Everything that will be sent.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Plan {
    pub(crate) sessions: Vec<Session>,
    seed: u64,
}

/// One client: an agent's task, a conversation, or a single request.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Session {
    pub(crate) id: String,
    /// When its first request is due, from the start of the run.
    pub(crate) start: Duration,
    pub(crate) turns: Vec<Turn>,
}

/// One request: it repeats the session so far and adds to it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Turn {
    /// Pause after the end of the turn before.
    pub(crate) think: Duration,
    pub(crate) added: Vec<Passage>,
    pub(crate) max_tokens: u32,
}

/// One message of text to be made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Passage {
    pub(crate) role: &'static str,
    pub(crate) tokens: u32,
    /// Passages of equal numbers and lengths have equal text.
    number: u64,
}

/// Tokens in a plan.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Volume {
    /// Prompt tokens of all requests.
    pub(crate) prompt: u64,
    /// Those that no request before had: what a fleet with one perfect cache would compute.
    pub(crate) new: u64,
    pub(crate) output: u64,
    /// The longest prompt with its output.
    pub(crate) context_max: u64,
}

const SHARED_PROMPTS: u64 = 6;
const STEPS: u32 = 20;
/// Own passages begin past the numbers of the shared ones.
const OWN: u64 = 1 << 32;

/// Makes plans of one workload and shape.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Generator {
    pub(crate) workload: Workload,
    /// Multiplies every length in tokens; 1 is the shape as described.
    pub(crate) scale: f64,
    pub(crate) arrivals: Arrivals,
    /// Sessions per second.
    pub(crate) rate: f64,
    /// Multiplies pauses between turns.
    pub(crate) think: f64,
    pub(crate) seed: u64,
}

impl Generator {
    /// The first `sessions` sessions, or those due within `duration` when that is fewer.
    pub(crate) fn plan(&self, sessions: usize, duration: Option<Duration>) -> Plan {
        let mut clock = Rng::with_seed(self.seed);
        let mut due_s = 0.0;
        let mut planned = Vec::new();
        for index in 0..sessions {
            if index > 0 {
                due_s += self.gap_s(&mut clock);
            }
            let start = Duration::from_secs_f64(due_s);
            if duration.is_some_and(|duration| start >= duration) {
                break;
            }
            // Every session has its own generator, so that its content does not depend on how many come before it.
            let mut rng = Rng::with_seed(self.seed ^ (index as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
            let turns = self.turns(index as u64, &mut rng);
            planned.push(Session { id: format!("bench-{}-{index}", self.seed), start, turns });
        }
        Plan { sessions: planned, seed: self.seed }
    }

    fn gap_s(&self, rng: &mut Rng) -> f64 {
        match self.arrivals {
            Arrivals::Fixed => 1.0 / self.rate,
            // Inverse of the exponential distribution; 1 - u is never 0.
            Arrivals::Poisson => -(1.0 - rng.f64()).ln() / self.rate,
        }
    }

    fn turns(&self, session: u64, rng: &mut Rng) -> Vec<Turn> {
        match self.workload {
            Workload::Agent => self.agent(session, rng),
            Workload::Shared => vec![self.shared(session, rng)],
            Workload::Mixed => {
                let is_long = rng.f64() < 0.05;
                vec![if is_long { self.very_long(session) } else { self.shared(session, rng) }]
            }
            Workload::Chat => self.chat(session, rng),
        }
    }

    /// 2,000 tokens at first (1,900 of them common to all tasks), then 300 more a step: 100 of an answer, 200 of an observation.
    /// Contexts of the 20 steps sum up to 97,000 tokens.
    fn agent(&self, session: u64, rng: &mut Rng) -> Vec<Turn> {
        let step = |step: u32| {
            let own = |role, tokens| self.passage(role, tokens, OWN + (session << 16) + u64::from(step));
            let added = if step == 0 { vec![self.passage("system", 1900, 0), own("user", 100)] } else { vec![own("user", 200)] };
            let think = if step == 0 { Duration::ZERO } else { self.pause(rng, 0.75, 2.25) };
            Turn { think, added, max_tokens: self.scaled(100) }
        };
        (0..STEPS).map(step).collect()
    }

    /// A Zipf(1) draw of 6 system prompts of 4,096 tokens, 300 tokens of its own, 32 out.
    fn shared(&self, session: u64, rng: &mut Rng) -> Turn {
        let harmonic: f64 = (1..=SHARED_PROMPTS).map(|rank| 1.0 / rank as f64).sum();
        let mut mass = rng.f64() * harmonic;
        let mut rank = 1;
        while rank < SHARED_PROMPTS && mass >= 1.0 / rank as f64 {
            mass -= 1.0 / rank as f64;
            rank += 1;
        }
        let added = vec![self.passage("system", 4096, rank), self.passage("user", 300, OWN + session)];
        Turn { think: Duration::ZERO, added, max_tokens: self.scaled(32) }
    }

    /// 32,768 tokens that nobody else sends.
    fn very_long(&self, session: u64) -> Turn {
        let added = vec![self.passage("user", 32_768, OWN + session)];
        Turn { think: Duration::ZERO, added, max_tokens: self.scaled(32) }
    }

    /// 3 to 10 turns: a common system prompt of 200 tokens, questions of 20 to 200, answers of 50 to 250, pauses of 2 to 10 s.
    fn chat(&self, session: u64, rng: &mut Rng) -> Vec<Turn> {
        let turns = rng.u32(3..=10);
        let turn = |turn: u32| {
            let question = self.passage("user", rng.u32(20..=200), OWN + (session << 16) + u64::from(turn));
            let added = if turn == 0 { vec![self.passage("system", 200, 0), question] } else { vec![question] };
            let think = if turn == 0 { Duration::ZERO } else { self.pause(rng, 2.0, 10.0) };
            Turn { think, added, max_tokens: self.scaled(rng.u32(50..=250)) }
        };
        (0..turns).map(turn).collect()
    }

    fn passage(&self, role: &'static str, tokens: u32, number: u64) -> Passage {
        Passage { role, tokens: self.scaled(tokens), number }
    }

    fn pause(&self, rng: &mut Rng, least_s: f64, most_s: f64) -> Duration {
        Duration::from_secs_f64((least_s + rng.f64() * (most_s - least_s)) * self.think)
    }

    fn scaled(&self, tokens: u32) -> u32 {
        (f64::from(tokens) * self.scale).round().max(1.0) as u32
    }
}

impl Plan {
    pub(crate) fn requests(&self) -> usize {
        self.sessions.iter().map(|session| session.turns.len()).sum()
    }

    /// Counts with answers of full length.
    pub(crate) fn volume(&self) -> Volume {
        let mut volume = Volume::default();
        let mut seen = BTreeSet::new();
        for session in &self.sessions {
            let mut context = 0;
            for turn in &session.turns {
                for passage in &turn.added {
                    context += u64::from(passage.tokens);
                    if seen.insert((passage.number, passage.tokens, passage.role)) {
                        volume.new += u64::from(passage.tokens);
                    }
                }
                volume.prompt += context;
                context += u64::from(turn.max_tokens);
                volume.output += u64::from(turn.max_tokens);
                volume.context_max = volume.context_max.max(context);
            }
        }
        volume
    }

    pub(crate) fn text(&self, passage: &Passage, writer: &Writer) -> String {
        let mut rng = Rng::with_seed(self.seed.wrapping_mul(0xd6e8_feb8_6659_fd93) ^ passage.number);
        // A generator's first draws follow its seed too closely for neighbouring numbers.
        rng.u64(..);
        writer.text(&mut rng, passage.tokens)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn generator(workload: Workload) -> Generator {
        Generator { workload, scale: 1.0, arrivals: Arrivals::Poisson, rate: 2.0, think: 1.0, seed: 7 }
    }

    const ALL: [Workload; 4] = [Workload::Agent, Workload::Shared, Workload::Mixed, Workload::Chat];

    #[test]
    fn a_seed_fixes_the_plan_and_its_text() {
        let writer = Writer::by_bytes();
        for workload in ALL {
            let plan = generator(workload).plan(30, None);
            assert_eq!(plan, generator(workload).plan(30, None));
            let other = Generator { seed: 8, ..generator(workload) }.plan(30, None);
            assert_ne!(plan, other);
            let passage = plan.sessions[3].turns[0].added.last().unwrap();
            assert_eq!(plan.text(passage, &writer), plan.text(passage, &writer));
            assert_ne!(plan.text(passage, &writer), other.text(other.sessions[3].turns[0].added.last().unwrap(), &writer));
            // A longer plan begins like a shorter one, so runs of different length can be compared.
            assert_eq!(generator(workload).plan(40, None).sessions[..30], plan.sessions);
        }
    }

    #[test]
    fn agents_have_the_lectures_shape() {
        let volume = generator(Workload::Agent).plan(1, None).volume();
        // An answer is part of the next step's prompt: 300 new tokens a step, 97,000 over 20 steps.
        assert_eq!((volume.prompt, volume.context_max), (97_000, 7_800));
        assert_eq!(volume.new + 19 * 100, 7_700);
        let small = Generator { scale: 0.1, ..generator(Workload::Agent) }.plan(1, None);
        assert_eq!((small.requests(), small.volume().prompt), (20, 9_700));
        // The second task brings no system prompt of its own.
        assert_eq!(generator(Workload::Agent).plan(2, None).volume().new - volume.new, volume.new - 1900);
    }

    #[test]
    fn shared_prompts_follow_zipf() {
        let plan = generator(Workload::Shared).plan(6000, None);
        let count = |rank| plan.sessions.iter().filter(|session| session.turns[0].added[0].number == rank).count() as f64;
        // 1 / H(6) = 0.408 for the first, a sixth of it for the last.
        assert!((count(1) / 6000.0 - 0.408).abs() < 0.02 && (count(6) / 6000.0 - 0.068).abs() < 0.015);
        let starts: Vec<_> = plan.sessions.iter().map(|session| session.start).collect();
        assert!(starts.is_sorted());
        assert!((starts.last().unwrap().as_secs_f64() / 3000.0 - 1.0).abs() < 0.05);
    }

    #[test]
    fn one_in_twenty_of_a_mix_is_very_long() {
        let plan = generator(Workload::Mixed).plan(4000, None);
        let long = plan.sessions.iter().filter(|session| session.turns[0].added[0].tokens > 30_000).count();
        assert!((150..250).contains(&long), "{long}");
    }

    #[test]
    fn a_duration_and_a_fixed_rate_bound_the_sessions() {
        let fixed = Generator { arrivals: Arrivals::Fixed, ..generator(Workload::Chat) };
        assert_eq!(fixed.plan(100, Some(Duration::from_secs(5))).sessions.len(), 10);
        assert_eq!(fixed.plan(4, Some(Duration::from_secs(5))).sessions.len(), 4);
    }
}
