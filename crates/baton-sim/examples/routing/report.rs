//! What a cell's runs come to, in text and as JSON.

use std::fmt::{self, Write as _};

use baton_sim::{Interval, Outcome, Ratio, RequestKind, percentile};
use serde::Serialize;

use crate::rule::Rule;

/// The most that a rule may be above the best one and count as good.
const NEAR: f64 = 1.15;

/// One run.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Seen {
    seed: u64,
    ttft_ms_p50: f64,
    ttft_ms_p90: f64,
    ttft_ms_p99: f64,
    ttft_ms_mean: f64,
    /// Of each kind of request: its name, how many, p50, p90 and p99 of its times to first token.
    ttft_ms_by_kind: Vec<(RequestKind, usize, [f64; 3])>,
    tpot_ms_p50: f64,
    tpot_ms_p99: f64,
    hit_rate: f64,
    requests_max_over_mean: f64,
    copies: u32,
    held: u32,
    /// Refused or failed.
    lost: usize,
    violations: Vec<String>,
}

impl Seen {
    pub(crate) fn new(seed: u64, outcome: &Outcome) -> Self {
        let (ttft, tpot) = (outcome.ttft_ms(), outcome.tpot_ms());
        let by_kind = [RequestKind::Step, RequestKind::Short, RequestKind::Long].into_iter().filter_map(|kind| {
            let ttft = outcome.ttft_ms_of(kind);
            (!ttft.is_empty()).then(|| (kind, ttft.len(), [0.5, 0.9, 0.99].map(|share| percentile(&ttft, share))))
        });
        Self {
            seed,
            ttft_ms_p50: percentile(&ttft, 0.5),
            ttft_ms_p90: percentile(&ttft, 0.9),
            ttft_ms_p99: percentile(&ttft, 0.99),
            ttft_ms_mean: ttft.iter().sum::<f64>() / ttft.len().max(1) as f64,
            ttft_ms_by_kind: by_kind.collect(),
            tpot_ms_p50: percentile(&tpot, 0.5),
            tpot_ms_p99: percentile(&tpot, 0.99),
            hit_rate: outcome.hit_rate(),
            requests_max_over_mean: outcome.imbalance(),
            copies: outcome.copies,
            held: outcome.held,
            lost: outcome.requests.iter().filter(|request| request.failed || request.refused.is_some()).count(),
            violations: outcome.violations.clone(),
        }
    }
}

/// One rule in one cell.
#[derive(Debug, Serialize)]
pub(crate) struct Row {
    rule: String,
    /// It is shown beside the others and never counted as the best.
    reference: bool,
    seeds: Vec<Seen>,
    /// To the best rule of the cell; [`Report::new`] fills them in.
    p90_to_best: Ratio,
    p99_to_best: Ratio,
}

const UNKNOWN: Ratio = Ratio { mean: f64::NAN, low: f64::NAN, high: f64::NAN };

impl Row {
    pub(crate) fn new(rule: &Rule, seeds: Vec<Seen>) -> Self {
        Self { rule: rule.to_string(), reference: rule.is_reference(), seeds, p90_to_best: UNKNOWN, p99_to_best: UNKNOWN }
    }

    fn values(&self, of: fn(&Seen) -> f64) -> Vec<f64> {
        self.seeds.iter().map(of).collect()
    }

    fn mean(&self, of: fn(&Seen) -> f64) -> f64 {
        Interval::of(&self.values(of)).mean
    }

    /// The larger of its two ratios.
    fn worst(&self) -> f64 {
        self.p90_to_best.mean.max(self.p99_to_best.mean)
    }
}

/// One cell.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    cell: String,
    rows: Vec<Row>,
}

impl Report {
    pub(crate) fn new(cell: String, mut rows: Vec<Row>) -> Self {
        let p90 = ratios_to_best(&rows, |seen| seen.ttft_ms_p90);
        let p99 = ratios_to_best(&rows, |seen| seen.ttft_ms_p99);
        for ((row, p90), p99) in rows.iter_mut().zip(p90).zip(p99) {
            (row.p90_to_best, row.p99_to_best) = (p90, p99);
        }
        Self { cell, rows }
    }

    /// A rule other than `price` that is near the best at both percentiles.
    fn near_at_both(&self) -> Option<&Row> {
        let others = self.rows.iter().filter(|row| !row.reference && !row.rule.starts_with("price"));
        others.filter(|row| row.worst() <= NEAR).min_by(|a, b| a.worst().total_cmp(&b.worst()))
    }

    /// The best rule at each percentile, `price` among them.
    fn best(&self, ratio: fn(&Row) -> &Ratio) -> &Row {
        let rules = self.rows.iter().filter(|row| !row.reference);
        rules.min_by(|a, b| ratio(a).mean.total_cmp(&ratio(b).mean)).expect("a cell has rules")
    }

    /// Rules that no other one beats at both percentiles, from the lowest p90 on.
    fn frontier(&self) -> Vec<&Row> {
        let point = |row: &Row| (row.p90_to_best.mean, row.p99_to_best.mean);
        let beaten = |row: &Row| {
            let (p90, p99) = point(row);
            self.rows.iter().any(|other| {
                let (other_p90, other_p99) = point(other);
                other_p90 <= p90 && other_p99 <= p99 && (other_p90 < p90 || other_p99 < p99)
            })
        };
        let mut rows: Vec<&Row> = self.rows.iter().filter(|row| !beaten(row)).collect();
        rows.sort_by(|a, b| a.p90_to_best.mean.total_cmp(&b.p90_to_best.mean));
        rows
    }
}

/// Each row's ratio, pair by pair, to the rule with the lowest geometric mean. Of many rules that are equally good, one is the best by
/// luck: the others' intervals then hold 1 all the same.
fn ratios_to_best(rows: &[Row], of: fn(&Seen) -> f64) -> Vec<Ratio> {
    let log_mean = |row: &&Row| row.values(of).iter().map(|value| value.ln()).sum::<f64>();
    let best = rows.iter().filter(|row| !row.reference).min_by(|a, b| log_mean(a).total_cmp(&log_mean(b)));
    let base = best.or(rows.first()).map(|row| row.values(of)).unwrap_or_default();
    rows.iter().map(|row| Ratio::of(&row.values(of), &base)).collect()
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.cell)?;
        writeln!(
            f,
            "  {:<18}{:>16}{:>16}{:>18}{:>9}{:>13}{:>7}{:>6}{:>8}{:>7}{:>6}  p90 of each kind",
            "rule", "p50 ms", "p90 ms", "p99 ms", "mean", "TPOT p50/p99", "hit %", "imb", "copies", "held", "lost"
        )?;
        for row in &self.rows {
            let span = |of: fn(&Seen) -> f64| {
                let Interval { mean, half_width } = Interval::of(&row.values(of));
                format!("{mean:.1} ±{half_width:.1}")
            };
            write!(
                f,
                "  {:<18}{:>16}{:>16}{:>18}{:>9.1}{:>13}{:>7.1}{:>6.2}{:>8.0}{:>7.0}{:>6.0} ",
                row.rule,
                span(|seen| seen.ttft_ms_p50),
                span(|seen| seen.ttft_ms_p90),
                span(|seen| seen.ttft_ms_p99),
                row.mean(|seen| seen.ttft_ms_mean),
                format!("{:.1}/{:.1}", row.mean(|seen| seen.tpot_ms_p50), row.mean(|seen| seen.tpot_ms_p99)),
                100.0 * row.mean(|seen| seen.hit_rate),
                row.mean(|seen| seen.requests_max_over_mean),
                row.mean(|seen| f64::from(seen.copies)),
                row.mean(|seen| f64::from(seen.held)),
                row.mean(|seen| seen.lost as f64),
            )?;
            for (place, (kind, _, _)) in row.seeds.first().map_or(&[][..], |seen| &seen.ttft_ms_by_kind).iter().enumerate() {
                let p90 = row.seeds.iter().map(|seen| seen.ttft_ms_by_kind[place].2[1]).sum::<f64>() / row.seeds.len() as f64;
                write!(f, " {kind:?} {p90:.0}")?;
            }
            writeln!(f)?;
            for violation in row.seeds.iter().flat_map(|seen| &seen.violations).take(5) {
                writeln!(f, "    BROKEN LAW: {violation}")?;
            }
        }
        Ok(())
    }
}

/// One line a cell and percentile: each rule's ratio to the best, with its interval; references in brackets.
pub(crate) fn ratios(reports: &[Report]) -> String {
    let mut text = String::from("Ratio to the best rule of each line, geometric mean over paired seeds [95 %]; references in ().\n");
    for report in reports {
        for (name, ratio) in [("p90", p90 as fn(&Row) -> &Ratio), ("p99", p99)] {
            let _ = write!(text, "{} {name}: ", report.cell);
            let cells = report.rows.iter().map(|row| {
                let Ratio { mean, low, high } = ratio(row);
                let entry = format!("{} {mean:.2} [{low:.2}, {high:.2}]", row.rule);
                if row.reference { format!("({entry})") } else { entry }
            });
            let _ = writeln!(text, "{}", cells.collect::<Vec<_>>().join("  "));
        }
    }
    text
}

fn p90(row: &Row) -> &Ratio {
    &row.p90_to_best
}

fn p99(row: &Row) -> &Ratio {
    &row.p99_to_best
}

/// `price` in one cell at one percentile.
struct Point<'a> {
    report: &'a Report,
    price: &'a Row,
    percentile: &'static str,
    ratio: Ratio,
    best: &'a str,
}

impl fmt::Display for Point<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Ratio { mean, low, high } = self.ratio;
        write!(f, "{mean:.2} [{low:.2}, {high:.2}] at {} of {}, where {} is best", self.percentile, self.report.cell, self.best)
    }
}

/// Where `price` is beaten by more than noise, from the worst on; its worst cell; and where one other rule is near the best at both
/// percentiles.
pub(crate) fn findings(reports: &[Report]) -> String {
    let mut points: Vec<Point<'_>> = reports.iter().flat_map(points).collect();
    points.sort_by(|a, b| b.ratio.mean.total_cmp(&a.ratio.mean));
    let Some(worst) = points.first() else { return String::new() };
    let mut text = format!("Worst of price: {worst}.\nprice beaten by more than noise:\n");
    for point in points.iter().filter(|point| point.ratio.is_more()) {
        let _ = writeln!(text, "  {point}; {}", alternatives(point));
    }
    let avoidable = points.iter().filter(|point| point.ratio.mean > NEAR && point.report.near_at_both().is_some()).count();
    let _ = writeln!(text, "Points where price is above {NEAR} although one other rule is within it at both percentiles: {avoidable}.");
    text
}

fn points(report: &Report) -> Vec<Point<'_>> {
    let price = report.rows.iter().find(|row| row.rule == Rule::PRICE.to_string());
    let point = |price, percentile, ratio: fn(&Row) -> &Ratio| Point {
        report,
        price,
        percentile,
        ratio: *ratio(price),
        best: &report.best(ratio).rule,
    };
    price.into_iter().flat_map(|price| [point(price, "p90", p90), point(price, "p99", p99)]).collect()
}

/// A rule that does well at both percentiles, or what there is to choose from.
fn alternatives(Point { report, price, .. }: &Point<'_>) -> String {
    let choice = |row: &&Row| format!("{} {:.2}/{:.2}", row.rule, row.p90_to_best.mean, row.p99_to_best.mean);
    report.near_at_both().map_or_else(
        || {
            format!(
                "no other rule is near at both, frontier p90/p99: {}",
                report.frontier().iter().map(choice).collect::<Vec<_>>().join(", ")
            )
        },
        |other| format!("{} is near at both (worst {:.2}; price {:.2})", other.rule, other.worst(), price.worst()),
    )
}
