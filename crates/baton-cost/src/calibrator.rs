use baton_units::Tokens;

use crate::{StepCoefficients, StepLoad};

/// Coefficients in the order of [`Row`].
const FIXED: usize = 0;
const TOKEN: usize = 1;
const ATTENDED: usize = 2;
const KV: usize = 3;
const WEIGHTS: usize = 4;
const COUNT: usize = 5;

/// One number per coefficient.
type Row = [f64; COUNT];

/// Relative standard deviation of the prior: the formulas are right within about [`PRIOR_FACTOR`].
const PRIOR_SPREAD: f64 = 0.5;
/// What the formulas may be wrong by as a whole before the machine itself is taken to be another one.
const PRIOR_FACTOR: f64 = 2.0;
/// First samples whose median tells how fast the machine is as a whole, and the fewest that do.
const PACE_SAMPLES: usize = 15;
const PACE_SAMPLES_MIN: usize = 3;
/// The same, in units of a tenth of a typical step, where the prior is zero and thus says nothing.
const UNKNOWN_SPREAD: f64 = 5.0;
/// Relative noise of a sample until it is known; makes the prior worth `(1.5 / 0.5)^2 = 9` samples.
const NOISE_AT_FIRST: f64 = 1.5;
/// Noise that counts when a sample is assigned to a side, at most.
const NOISE_OF_SIDES: f64 = 0.25;
/// Samples of a kind that are remembered.
const MEMORY: f64 = 128.0;
/// The same while predictions err to one side.
const MEMORY_IN_DRIFT: f64 = 16.0;
/// Mean residual over noise from which errors count as one-sided, a tracking signal (Trigg and Leach, 1967); noise alone passes
/// it 1 % of the time.
const DRIFT_SIGNAL: f64 = 0.5;
/// Weight of a new residual in its mean and in the noise.
const SIGNAL_RATE: f64 = 1.0 / 16.0;
/// Residual, in standard deviations, from which a sample's pull is bounded (Huber, 1964).
const HUBER: f64 = 1.5;
/// Samples over which [`Calibrator::error`] averages.
const ERROR_SAMPLES: f64 = 64.0;
/// Descent sweeps per sample; the fit starts where the last one ended, so a few suffice.
const SWEEPS: usize = 8;

/// Fits [`StepCoefficients`] to the steps that a replica really took: non-negative, robust, forgetting, the formula as prior.
///
/// It fits the very function that [`StepCoefficients::step_s`] evaluates, `fixed + max(compute, memory)`, so every
/// coefficient keeps its meaning. The maximum is not linear, but either side of it is: each sample is assigned to the side
/// that more likely decided it (the fixed part belongs to both) and is then one row of a linear least-squares problem, the
/// alternation of Magnani and Boyd (Convex piecewise-linear fitting, 2009) done online. The likelihood counts how well each
/// side is known, so an unconfirmed side takes the blame for a surprise and a wrong prior cannot lock samples out of it.
/// Steps that only decode and steps with a prefill are forgotten apart, faster while predictions err to one side. An engine whose parts add up, such as a CPU, fits too: its weights end up in `fixed_s`.
///
/// A machine far from the formulas is first of all slower or faster as a whole: what the first samples say of that in the
/// median, beyond a factor of two, scales the prior, so that it goes on telling the parts apart.
///
/// Errors are relative, coefficients are in units of the prior: results do not depend on any unit. One sample costs
/// O(coefficients^2), without allocation.
#[derive(Debug, Clone, PartialEq)]
pub struct Calibrator {
    prior: StepCoefficients,
    /// Seconds per unit of `fit`: the prior, or a stand-in where the prior is zero.
    scale: Row,
    /// The fit in units of `scale`; never negative.
    fit: Row,
    /// The prior in units of `scale`: one, or zero.
    prior_fit: Row,
    prior_precision: Row,
    pace: Pace,
    /// Of steps that only decode, and of steps with a prefill: neither makes the other forgotten.
    evidence: [Evidence; 2],
    error: f64,
    samples: u64,
}

impl Calibrator {
    /// A fit that is `prior` until samples say otherwise.
    #[must_use]
    pub fn new(prior: StepCoefficients) -> Self {
        let scale = scales(&prior);
        let known = to_row(&prior).map(|value| value > 0.0);
        let prior_fit = known.map(|known| if known { 1.0 } else { 0.0 });
        Self {
            prior,
            scale,
            fit: prior_fit,
            prior_fit,
            prior_precision: known.map(|known| (if known { PRIOR_SPREAD } else { UNKNOWN_SPREAD }).powi(-2)),
            pace: Pace::default(),
            evidence: [Evidence::default(); 2],
            error: 0.0,
            samples: 0,
        }
    }

    /// Takes in one step. What is no measurement (no positive, finite time; a load that is no number) is ignored.
    pub fn observe(&mut self, load: &StepLoad, seconds: f64) {
        self.observe_steps(load, 1.0, seconds, Shown::Step);
    }

    /// Takes in one whole prefill, for engines that show only the TTFT of a request that did not queue.
    ///
    /// What does not grow with the prompt, weights included, counts as fixed: such samples cannot tell it apart, and the prior
    /// should be [`StepCoefficients::weights_as_fixed`]. `chunk` is the engine's token budget per step, zero if it does not chunk.
    pub fn observe_prefill(&mut self, new: Tokens, cached: Tokens, chunk: Tokens, seconds: f64) {
        let (load, steps) = StepLoad::prefill_chunks(new, cached, chunk)
            .fold((StepLoad::default(), 0.0), |(load, steps), chunk| (load.and(chunk), steps + 1.0));
        self.observe_steps(&load, steps, seconds, Shown::Prefill);
    }

    /// The coefficients as fitted so far.
    pub fn fit(&self) -> StepCoefficients {
        from_row(&std::array::from_fn(|j| self.fit[j] * self.scale[j]))
    }

    pub fn prior(&self) -> StepCoefficients {
        self.prior
    }

    /// Relative prediction error, |predicted - actual| / actual, each measured before its sample was taken in: the mean of
    /// the first samples, then an exponential average. 0 before the first.
    pub fn error(&self) -> f64 {
        self.error
    }

    /// Samples taken in.
    pub fn samples(&self) -> u64 {
        self.samples
    }

    fn observe_steps(&mut self, load: &StepLoad, steps: f64, seconds: f64, shown: Shown) {
        let (compute, memory) = self.sides(load, steps);
        let usable = seconds > 0.0 && seconds.is_finite() && steps > 0.0 && compute.iter().chain(&memory).all(|term| term.is_finite());
        if !usable {
            return;
        }
        let predict = |fit: &Row| match shown {
            Shown::Step => dot(&compute, fit).max(dot(&memory, fit)),
            Shown::Prefill => dot(&compute, fit),
        };
        if let Some(factor) = self.pace.observe(seconds / predict(&self.prior_fit)) {
            self.scale_prior(factor);
        }
        let predicted = predict(&self.fit);
        self.samples += 1;
        let error_rate = (1.0 / self.samples as f64).max(1.0 / ERROR_SAMPLES);
        self.error += ((predicted - seconds).abs() / seconds - self.error) * error_rate;

        let kind = usize::from(load.new_tokens > load.decode_rows);
        let by_compute = shown == Shown::Prefill || self.compute_decided(&compute, &memory, seconds, kind);
        let row = if by_compute { compute } else { memory };
        // Relative to the prediction; half the sample bounds the row where the prediction is far too small.
        let unit = predicted.max(seconds / 2.0);
        self.take_in(&row.map(|term| term / unit), seconds / unit, kind);
    }

    /// Makes the prior that of a machine `factor` times as slow, and begins the fit there; what samples have shown stays.
    fn scale_prior(&mut self, factor: f64) {
        let before = self.fit;
        for j in 0..COUNT {
            if self.prior_fit[j] == 0.0 {
                continue;
            }
            self.fit[j] *= factor;
            self.prior_fit[j] *= factor;
            self.prior_precision[j] /= factor.powi(2);
        }
        let moved: Row = std::array::from_fn(|j| self.fit[j] - before[j]);
        self.fit_moved(&moved);
    }

    /// Seconds per unit of `fit` on either side of the maximum.
    fn sides(&self, load: &StepLoad, steps: f64) -> (Row, Row) {
        let s = &self.scale;
        let fixed = s[FIXED] * steps;
        let compute = [fixed, s[TOKEN] * load.new_tokens, s[ATTENDED] * load.attended, 0.0, 0.0];
        let memory = [fixed, 0.0, 0.0, s[KV] * load.kv_tokens_read, s[WEIGHTS] * steps];
        (compute, memory)
    }

    /// Whether the arithmetic rather than the reading decided, by likelihood: `seconds` is a noisy sight of the side that
    /// decided, and the other side is no longer than that one. With both sides known, the longer one decided, whatever was seen.
    fn compute_decided(&self, compute: &Row, memory: &Row, seconds: f64, kind: usize) -> bool {
        let noise = (self.evidence[kind].noise.min(NOISE_OF_SIDES) * seconds).powi(2);
        let compute = Side { mean: dot(compute, &self.fit), variance: self.variance(compute) };
        let memory = Side { mean: dot(memory, &self.fit), variance: self.variance(memory) };
        compute.ln_decided(&memory, seconds, noise) >= memory.ln_decided(&compute, seconds, noise)
    }

    /// Variance of a row's prediction from what is unknown of its own coefficients; correlations are left out.
    fn variance(&self, row: &Row) -> f64 {
        (0..COUNT).filter(|&j| j != FIXED).map(|j| row[j].powi(2) / (self.prior_precision[j] + self.precision(j, j))).sum()
    }

    fn take_in(&mut self, row: &Row, target: f64, kind: usize) {
        let unknown = self.variance(row);
        self.evidence[kind].add(row, target - dot(row, &self.fit), unknown);
        self.descend();
    }

    /// Projected Gauss-Seidel on the least-squares problem with the prior as ridge; each coordinate step is exact and stops at zero.
    fn descend(&mut self) {
        let prior = self.prior_weight();
        let precision: [Row; COUNT] = std::array::from_fn(|j| std::array::from_fn(|k| self.precision(j, k)));
        let mut pull: Row = std::array::from_fn(|j| self.evidence.iter().map(|evidence| evidence.pull[j] / evidence.noise.powi(2)).sum());
        let before = self.fit;
        for _ in 0..SWEEPS {
            for j in 0..COUNT {
                let slope = pull[j] - prior[j] * (self.fit[j] - self.prior_fit[j]);
                let next = (self.fit[j] + slope / (precision[j][j] + prior[j])).max(0.0);
                let step = next - self.fit[j];
                self.fit[j] = next;
                for k in 0..COUNT {
                    pull[k] -= precision[k][j] * step;
                }
            }
        }
        let moved: Row = std::array::from_fn(|j| self.fit[j] - before[j]);
        self.fit_moved(&moved);
    }

    fn fit_moved(&mut self, moved: &Row) {
        for evidence in &mut self.evidence {
            evidence.fit_moved(moved);
        }
    }

    /// Precision of the prior in this fit. It falls as the fit leaves the prior behind (a Student-t prior by reweighting), so
    /// that a formula that is far off stops pulling.
    fn prior_weight(&self) -> Row {
        // A short memory holds less evidence; as much less prior keeps it from being outweighed for as long as it is short.
        let share = self.evidence.iter().map(|evidence| evidence.memory).fold(MEMORY, f64::min) / MEMORY;
        std::array::from_fn(|j| {
            let precision = self.prior_precision[j];
            share * precision / (1.0 + precision * (self.fit[j] - self.prior_fit[j]).powi(2))
        })
    }

    fn precision(&self, j: usize, k: usize) -> f64 {
        self.evidence.iter().map(|evidence| evidence.information[j][k] / evidence.noise.powi(2)).sum()
    }
}

/// What a sample's time is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Shown {
    Step,
    Prefill,
}

/// How fast the machine is as a whole, from its first samples.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Pace {
    /// Seconds seen over seconds by the prior, as logarithms in ascending order.
    ratios: [f64; PACE_SAMPLES],
    count: usize,
    /// Logarithm of what the prior is scaled by.
    factor: f64,
}

impl Default for Pace {
    fn default() -> Self {
        Self { ratios: [0.0; PACE_SAMPLES], count: 0, factor: 0.0 }
    }
}

impl Pace {
    /// Takes in what a sample took over what the scaled prior says; gives by how much to scale the prior further.
    fn observe(&mut self, ratio: f64) -> Option<f64> {
        let ratio = ratio.ln() + self.factor;
        if self.count == PACE_SAMPLES || !ratio.is_finite() {
            return None;
        }
        let place = self.ratios[..self.count].partition_point(|&seen| seen < ratio);
        self.ratios.copy_within(place..self.count, place + 1);
        self.ratios[place] = ratio;
        self.count += 1;
        if self.count < PACE_SAMPLES_MIN {
            return None;
        }
        let median = self.ratios[self.count / 2];
        let factor = median.signum() * (median.abs() - PRIOR_FACTOR.ln()).max(0.0);
        let further = factor - self.factor;
        self.factor = factor;
        (further != 0.0).then(|| further.exp())
    }
}

/// What steps of one kind have shown.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Evidence {
    /// Sum of weighted outer products of the rows seen, forgotten exponentially.
    information: [Row; COUNT],
    /// Sum of weighted rows times their residual under the present fit, forgotten alike.
    pull: Row,
    /// Running mean of the relative residual: what the fit lags behind.
    bias: f64,
    /// Relative standard deviation of a sample around fit and bias.
    noise: f64,
    /// Samples remembered at present.
    memory: f64,
}

impl Default for Evidence {
    fn default() -> Self {
        Self { information: [[0.0; COUNT]; COUNT], pull: [0.0; COUNT], bias: 0.0, noise: NOISE_AT_FIRST, memory: MEMORY }
    }
}

impl Evidence {
    /// Takes in a row whose prediction has the variance `unknown` by itself.
    fn add(&mut self, row: &Row, residual: f64, unknown: f64) {
        let bound = HUBER * (self.noise.powi(2) + self.bias.powi(2) + unknown).sqrt();
        let weight = (bound / residual.abs()).min(1.0);
        self.track(residual);
        self.memory = if self.bias.abs() > DRIFT_SIGNAL * self.noise { MEMORY_IN_DRIFT } else { MEMORY };
        let kept = 1.0 - 1.0 / self.memory;
        for j in 0..COUNT {
            for k in 0..COUNT {
                self.information[j][k] = kept * self.information[j][k] + weight * row[j] * row[k];
            }
            self.pull[j] = kept * self.pull[j] + weight * row[j] * residual;
        }
    }

    /// Follows the residual; the bound lets one outlier in a little and a lasting change in fast.
    fn track(&mut self, residual: f64) {
        let bound = 4.0 * self.noise.hypot(self.bias);
        let bounded = residual.clamp(-bound, bound);
        // 1.25 mean absolute deviations are one standard deviation of a normal.
        let noise = 1.25 * (bounded - self.bias).abs();
        self.bias += (bounded - self.bias) * SIGNAL_RATE;
        self.noise = (self.noise + (noise - self.noise) * SIGNAL_RATE).max(1e-4);
    }

    fn fit_moved(&mut self, moved: &Row) {
        for j in 0..COUNT {
            self.pull[j] -= dot(&self.information[j], moved);
        }
    }
}

/// Units for the coefficients: the prior where there is one, else what would take a tenth of a typical step.
fn scales(prior: &StepCoefficients) -> Row {
    // 256 prompt tokens and 8 rows of 1,024 tokens of context; any magnitude will do where the prior says nothing.
    let typical = StepLoad::prefill(Tokens(256), Tokens(0)).and(StepLoad::decode(8.0, 8192.0));
    let amounts = [1.0, typical.new_tokens, typical.attended, typical.kv_tokens_read, 1.0];
    let step_s = prior.step_s(&typical);
    let step_s = if step_s > 0.0 { step_s } else { 1e-3 };
    let row = to_row(prior);
    std::array::from_fn(|j| if row[j] > 0.0 { row[j] } else { 0.1 * step_s / amounts[j] })
}

/// One side of the maximum: seconds, and how well they are known.
struct Side {
    mean: f64,
    variance: f64,
}

impl Side {
    /// Log-likelihood that this side decided a step seen to take `seconds`, with `noise` the variance of what is seen.
    fn ln_decided(&self, other: &Self, seconds: f64, noise: f64) -> f64 {
        let seen = self.variance + noise;
        let gain = self.variance / seen;
        let (mean, variance) = (self.mean + gain * (seconds - self.mean), gain * noise);
        let longer = (mean - other.mean) / (variance + other.variance).sqrt().max(f64::MIN_POSITIVE);
        // The logistic curve nearest to the normal distribution; the bounds keep far-off sides comparable.
        let ln_longer = -(-1.702 * longer.clamp(-100.0, 100.0)).exp().ln_1p();
        ln_longer - 0.5 * ((seconds - self.mean).powi(2) / seen + seen.ln())
    }
}

fn dot(a: &Row, b: &Row) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn to_row(coefficients: &StepCoefficients) -> Row {
    let StepCoefficients { fixed_s, per_token_s, per_attended_s, per_kv_token_s, weights_s } = *coefficients;
    [fixed_s, per_token_s, per_attended_s, per_kv_token_s, weights_s]
}

fn from_row(row: &Row) -> StepCoefficients {
    StepCoefficients {
        fixed_s: row[FIXED],
        per_token_s: row[TOKEN],
        per_attended_s: row[ATTENDED],
        per_kv_token_s: row[KV],
        weights_s: row[WEIGHTS],
    }
}

#[cfg(test)]
mod tests;
