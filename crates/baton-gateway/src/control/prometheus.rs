//! Reading other servers' metrics.

/// Sum over all label sets of the samples called `name`.
pub(super) fn sum(page: &str, name: &str) -> Option<f64> {
    samples(page, name).filter_map(|(_, value)| value.parse::<f64>().ok()).reduce(|a, b| a + b)
}

/// A label's value on the first sample called `name` that has it.
pub(super) fn label<'a>(page: &'a str, name: &str, label: &str) -> Option<&'a str> {
    let key = format!("{label}=\"");
    samples(page, name).find_map(|(labels, _)| {
        let start = labels.match_indices(&key).map(|(at, _)| at).find(|&at| at == 0 || labels.as_bytes()[at - 1] == b',')?;
        labels[start + key.len()..].split('"').next()
    })
}

/// Labels (without braces) and value text of each sample called `name`.
fn samples<'a>(page: &'a str, name: &str) -> impl Iterator<Item = (&'a str, &'a str)> {
    page.lines().filter_map(move |line| {
        let rest = line.strip_prefix(name)?;
        match rest.strip_prefix('{') {
            Some(rest) => {
                let (labels, value) = rest.rsplit_once('}')?;
                Some((labels, value.split_whitespace().next()?))
            }
            None => rest.starts_with(' ').then(|| Some(("", rest.split_whitespace().next()?)))?,
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: &str = include_str!("../../tests/fixtures/metrics-fresh.txt");

    #[test]
    fn a_vllm_page_gives_its_numbers() {
        assert_eq!(sum(PAGE, "vllm:num_requests_running"), Some(0.0));
        assert_eq!(label(PAGE, "vllm:cache_config_info", "block_size"), Some("32"));
        assert_eq!(label(PAGE, "vllm:cache_config_info", "num_gpu_blocks"), Some("128"));
        assert!(sum(PAGE, "process_start_time_seconds").is_some_and(|start| start > 1e9));
    }

    #[test]
    fn names_match_whole_and_label_sets_add_up() {
        let page = "a_total{x=\"1\"} 2\na_total{x=\"2\"} 3 1700000000\na_total_created 9\nb 7\nb_info{my_x=\"no\",x=\"yes\"} 1\n";
        assert_eq!((sum(page, "a_total"), sum(page, "b"), sum(page, "c")), (Some(5.0), Some(7.0), None));
        assert_eq!(label(page, "b_info", "x"), Some("yes"));
    }
}
