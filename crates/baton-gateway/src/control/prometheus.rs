//! Reading other servers' metrics.

/// A server's metrics, or of a server with several ranks those of one.
#[derive(Debug, Clone, Copy)]
pub(super) struct Page<'a> {
    text: &'a str,
    /// A label with its value: samples that have the label with another one are not seen.
    only: Option<(&'a str, u32)>,
}

impl<'a> Page<'a> {
    pub(super) fn new(text: &'a str) -> Self {
        Self { text, only: None }
    }

    /// What is told of one rank, which `label` names, and of all together.
    pub(super) fn of_rank(text: &'a str, label: &'a str, rank: Option<u32>) -> Self {
        Self { text, only: rank.map(|rank| (label, rank)) }
    }

    /// Sum over all label sets of the samples called `name`.
    pub(super) fn sum(self, name: &str) -> Option<f64> {
        self.samples(name).filter_map(|(_, value)| value.parse::<f64>().ok()).reduce(|a, b| a + b)
    }

    /// A label's value on the first sample called `name` that has it.
    pub(super) fn label(self, name: &str, label: &str) -> Option<&'a str> {
        self.samples(name).find_map(|(labels, _)| value(labels, label))
    }

    fn samples(self, name: &str) -> impl Iterator<Item = (&'a str, &'a str)> {
        let is_seen = move |labels| {
            let Some((label, rank)) = self.only else { return true };
            value(labels, label).is_none_or(|value| value.parse() == Ok(rank))
        };
        samples(self.text, name).filter(move |(labels, _)| is_seen(*labels))
    }
}

fn value<'a>(labels: &'a str, label: &str) -> Option<&'a str> {
    let is_whole = |at: usize| at == 0 || labels.as_bytes()[at - 1] == b',';
    let after = |at: usize| labels[at + label.len()..].strip_prefix("=\"");
    labels.match_indices(label).filter(|(at, _)| is_whole(*at)).find_map(|(at, _)| after(at)?.split('"').next())
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
        let page = Page::new(PAGE);
        assert_eq!(page.sum("vllm:num_requests_running"), Some(0.0));
        assert_eq!(page.label("vllm:cache_config_info", "block_size"), Some("32"));
        assert_eq!(page.label("vllm:cache_config_info", "num_gpu_blocks"), Some("128"));
        assert!(page.sum("process_start_time_seconds").is_some_and(|start| start > 1e9));
    }

    #[test]
    fn names_match_whole_and_label_sets_add_up() {
        let text = "a_total{x=\"1\"} 2\na_total{x=\"2\"} 3 1700000000\na_total_created 9\nb 7\nb_info{my_x=\"no\",x=\"yes\"} 1\n";
        let page = Page::new(text);
        assert_eq!((page.sum("a_total"), page.sum("b"), page.sum("c")), (Some(5.0), Some(7.0), None));
        assert_eq!(page.label("b_info", "x"), Some("yes"));
    }

    #[test]
    fn a_rank_sees_its_own_and_what_is_told_of_all() {
        let text = "running{engine=\"0\",model=\"m\"} 2\nrunning{engine=\"1\",model=\"m\"} 3\nrunning{engine=\"11\"} 4\nstart 9\n\
            info{blocks=\"7\",engine=\"0\"} 1\ninfo{blocks=\"8\",engine=\"1\"} 1\n";
        let of = |rank| Page::of_rank(text, "engine", rank);
        assert_eq!([Some(0), Some(1), Some(2), None].map(|rank| of(rank).sum("running")), [Some(2.0), Some(3.0), None, Some(9.0)]);
        assert_eq!([Some(0), Some(1), Some(2)].map(|rank| of(rank).label("info", "blocks")), [Some("7"), Some("8"), None]);
        assert_eq!(of(Some(2)).sum("start"), Some(9.0));
    }
}
