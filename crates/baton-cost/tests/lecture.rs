//! Every number of the lecture comes out of the functions that price everything else.

use std::collections::{BTreeMap, BTreeSet};

use baton_cost::lecture::{self, Status};
use serde::Deserialize;

#[derive(Deserialize)]
struct Golden {
    rows: Vec<GoldenRow>,
}

#[derive(Deserialize)]
struct GoldenRow {
    id: String,
    value: f64,
    unit: String,
    lecture: f64,
    rel_tol: Option<f64>,
    status: String,
}

#[test]
fn every_number_matches_the_formula_and_the_lecture() {
    let rows: BTreeMap<&str, lecture::Row> = lecture::rows().into_iter().map(|row| (row.id, row)).collect();
    for golden in golden() {
        let row = rows.get(golden.id.as_str()).unwrap_or_else(|| panic!("{} is missing", golden.id));
        assert!(off(row.value, golden.value) <= 0.01, "{}: {}, by hand {}", golden.id, row.value, golden.value);
        if let Some(tolerance) = golden.rel_tol {
            assert!(off(row.value, golden.value) <= tolerance, "{}: {}, by hand {}", golden.id, row.value, golden.value);
            assert!(off(row.value, golden.lecture) <= tolerance, "{}: {}, lecture {}", golden.id, row.value, golden.lecture);
        }
        assert_eq!(row.unit, golden.unit, "{}", golden.id);
    }
}

#[test]
fn there_is_one_row_for_each_number_and_no_other() {
    let rows = lecture::rows();
    let got: BTreeSet<&str> = rows.iter().map(|row| row.id).collect();
    let golden = golden();
    let want: BTreeSet<&str> = golden.iter().map(|row| row.id.as_str()).collect();
    assert_eq!(got, want);
    assert_eq!(rows.len(), golden.len());
}

#[test]
fn a_number_that_differs_from_the_lecture_says_so() {
    let rows: BTreeMap<&str, lecture::Row> = lecture::rows().into_iter().map(|row| (row.id, row)).collect();
    for golden in golden() {
        let want = match golden.status.as_str() {
            "ok" => None,
            "disputed" => Some(Status::Disputed),
            "modelled" => Some(Status::Modelled),
            other => panic!("{}: status {other}", golden.id),
        };
        let row = &rows[golden.id.as_str()];
        assert_eq!((row.status, row.note.is_some()), (want, want.is_some()), "{}", golden.id);
    }
}

/// A value that is typed in rather than computed would not follow its assumptions.
#[test]
fn values_follow_their_assumptions() {
    let mut given = lecture::Assumptions::default();
    given.device.mfu /= 2.0;
    let halved: BTreeMap<&str, f64> = lecture::rows_under(&given).into_iter().map(|row| (row.id, row.value)).collect();
    for row in lecture::rows() {
        let ratio = halved[row.id] / row.value;
        let want = match row.id {
            id if id.starts_with("prefill_16k_flop") => 1.0,
            id if id.starts_with("prefill_") || id.starts_with("agent_task") || id.starts_with("recompute_") => 2.0,
            "breakeven_mha" | "breakeven_gqa8" => 0.5,
            "agent_step_cold" | "agent_step_warm" | "affinity_512" | "replicate_threshold" | "scatter_loss" => 2.0,
            "affinity_loss_512_at_80ms" => ratio,
            _ => 1.0,
        };
        assert!((ratio - want).abs() < 1e-9, "{}: {ratio}, not {want}", row.id);
    }
}

fn off(got: f64, want: f64) -> f64 {
    (got - want).abs() / want.abs()
}

fn golden() -> Vec<GoldenRow> {
    serde_json::from_str::<Golden>(include_str!("golden/lecture.json")).expect("the golden file is JSON").rows
}
