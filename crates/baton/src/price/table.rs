//! The same numbers for people.

use std::io::{self, Write};

use baton_cost::{
    Link, MovePrice, MoveWay,
    lecture::{Row, Status},
};

use super::quote::{Quote, Unit};

pub(super) fn print_quote(quote: &Quote, out: &mut impl Write) -> io::Result<()> {
    writeln!(out, "{} on {}, link {}", quote.model, quote.device.name, quote.link.name)?;
    let device = &quote.device;
    let peak = format!("{} x {}", prefixed(device.flops, "FLOP/s"), number(device.mfu));
    writeln!(out, "{peak}, {}, {}", prefixed(device.bytes_per_s, "B/s"), prefixed(device.memory_bytes, "B"))?;
    let prices = || quote.sections.iter().flat_map(|section| &section.prices);
    let width = prices().map(|price| price.label.chars().count()).max().unwrap_or(0);
    for section in &quote.sections {
        writeln!(out, "\n{}", section.name)?;
        for price in &section.prices {
            let shown = shown(price.value, price.unit);
            let (value, unit) = shown.split_once(' ').unwrap_or((&shown, ""));
            writeln!(out, "{}", format!("  {:width$}  {value:>13} {unit}", price.label).trim_end())?;
        }
    }
    Ok(())
}

pub(super) fn print_lecture(rows: &[Row], out: &mut impl Write) -> io::Result<()> {
    let width = rows.iter().map(|row| row.id.len()).max().unwrap_or(0);
    for row in rows {
        let mark = match row.status {
            None => "",
            Some(Status::Disputed) => "  disputed",
            Some(Status::Modelled) => "  modelled",
        };
        writeln!(out, "{}", format!("{:width$}  {:>14} {:<11}{mark}", row.id, number(row.value), row.unit).trim_end())?;
    }
    let mut notes: Vec<&str> = rows.iter().filter_map(|row| row.note).collect();
    notes.dedup();
    for note in notes {
        let ids: Vec<&str> = rows.iter().filter(|row| row.note == Some(note)).map(|row| row.id).collect();
        writeln!(out, "\n{}: {note}", ids.join(", "))?;
    }
    Ok(())
}

pub(super) fn print_move(link: &Link, price: &MovePrice, out: &mut impl Write) -> io::Result<()> {
    let ms = |seconds: f64| shown(seconds * 1e3, Unit::Ms);
    let latency = if link.latency_s > 0.0 { format!(" after {}", ms(link.latency_s)) } else { String::new() };
    writeln!(out, "{}, {}{latency}", link.name, prefixed(link.bytes_per_s, "B/s"))?;
    let rounds = if price.rounds == 1 { "1 round".to_owned() } else { format!("{} rounds", price.rounds) };
    writeln!(out, "  {} in {rounds}, {} on the link", prefixed(price.bytes, "B"), ms(price.copy_s))?;
    for (way, label) in [(MoveWay::Kv, "copied live"), (MoveWay::Fetch, "fetched"), (MoveWay::Recompute, "recomputed")] {
        let Some(way_price) = price.way(way) else { continue };
        let mark = if way == price.cheapest { "  cheapest" } else { "" };
        let (cost, gap) = (ms(way_price.cost_s()), ms(way_price.gap_s));
        writeln!(out, "  {label:<12}{cost:>10}: {gap} without a token, {} in all{mark}", ms(way_price.total_s))?;
    }
    if price.break_even_bytes_per_s.is_finite() {
        return writeln!(out, "  the link is faster than recomputing above {}", prefixed(price.break_even_bytes_per_s, "B/s"));
    }
    writeln!(out, "  recomputing takes less than the link's latency")
}

fn shown(value: f64, unit: Unit) -> String {
    match unit {
        Unit::Bytes => prefixed(value, "B"),
        Unit::BytesPerSecond => prefixed(value, "B/s"),
        Unit::Flop => prefixed(value, "FLOP"),
        Unit::Ms if value >= 10_000.0 => format!("{} s", number(value / 1e3)),
        Unit::Ms => format!("{} ms", number(value)),
        Unit::Seconds => format!("{} s", number(value)),
        Unit::Count("") => number(value),
        Unit::Count(what) => format!("{} {what}", number(value)),
        Unit::Times => format!("{} x", number(value)),
        Unit::Share => format!("{} %", number(value * 100.0)),
    }
}

/// With the decimal prefix that leaves one to three digits before the point.
fn prefixed(value: f64, unit: &str) -> String {
    let (scale, prefix) = [(1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")]
        .into_iter()
        .find(|(scale, _)| value.abs() >= *scale)
        .unwrap_or((1.0, ""));
    format!("{} {prefix}{unit}", number(value / scale))
}

/// Four significant digits, all digits of larger numbers, thousands apart.
fn number(value: f64) -> String {
    if !value.is_finite() {
        return value.to_string();
    }
    let magnitude = if value == 0.0 { 0.0 } else { value.abs().log10().floor() };
    if magnitude < -4.0 {
        return format!("{value:.3e}");
    }
    let decimals = (3.0 - magnitude).max(0.0) as usize;
    let text = format!("{value:.decimals$}");
    let text = if decimals > 0 { text.trim_end_matches('0').trim_end_matches('.') } else { &text };
    let (whole, fraction) = text.split_once('.').map_or((text, String::new()), |(whole, fraction)| (whole, format!(".{fraction}")));
    let (sign, digits) = whole.strip_prefix('-').map_or(("", whole), |digits| ("-", digits));
    let grouped: Vec<String> = digits
        .bytes()
        .enumerate()
        .map(|(place, digit)| {
            let comma = if place > 0 && (digits.len() - place).is_multiple_of(3) { "," } else { "" };
            format!("{comma}{}", char::from(digit))
        })
        .collect();
    format!("{sign}{}{fraction}", grouped.concat())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_keep_four_digits_and_group_thousands() {
        let cases = [
            (0.0, "0"),
            (1.342_177_28, "1.342"),
            (129.444, "129.4"),
            (20.0, "20"),
            (6_738_415_616.0, "6,738,415,616"),
            (-1234.5, "-1,234"),
            (0.00858, "0.00858"),
            (0.000_017_8, "1.780e-5"),
            (999.97, "1,000"),
        ];
        for (value, want) in cases {
            assert_eq!(number(value), want);
        }
    }

    #[test]
    fn bytes_take_decimal_prefixes() {
        assert_eq!(prefixed(536_870_912.0, "B"), "536.9 MB");
        assert_eq!(prefixed(12.0, "B"), "12 B");
    }
}
