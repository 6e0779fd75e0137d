//! Stop strings, matched on text as it comes.

/// Finds stop strings across token boundaries. Text that may be the beginning of a stop string is held back until it is not.
#[derive(Debug, Clone)]
pub(crate) struct StopMatcher {
    stops: Vec<String>,
    include_stop: bool,
    held: String,
}

/// What a piece of text releases.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Released {
    /// No stop string so far; the text is safe to send.
    Text(String),
    /// Text up to the stop string (or through it, if it is to be included), and which one it was.
    Stopped { text: String, stop: String },
}

impl StopMatcher {
    pub(crate) fn new(stops: &[String], include_stop: bool) -> Self {
        Self { stops: stops.to_vec(), include_stop, held: String::new() }
    }

    /// Takes the next text. The stop string that begins first ends the output; of several that begin there, the first listed.
    pub(crate) fn push(&mut self, piece: &str) -> Released {
        if self.stops.is_empty() {
            return Released::Text(piece.to_owned());
        }
        self.held.push_str(piece);
        let found = self.stops.iter().filter_map(|stop| Some((self.held.find(stop.as_str())?, stop))).min_by_key(|&(at, _)| at);
        if let Some((at, stop)) = found {
            let end = if self.include_stop { at + stop.len() } else { at };
            let stop = stop.clone();
            let text = self.held[..end].to_owned();
            self.held.clear();
            return Released::Stopped { text, stop };
        }
        let keep = self.longest_beginning();
        let rest = self.held.split_off(self.held.len() - keep);
        Released::Text(std::mem::replace(&mut self.held, rest))
    }

    /// Passes text on that no stop string may match, as before `min_tokens`.
    pub(crate) fn pass(&mut self, piece: &str) -> String {
        std::mem::take(&mut self.held) + piece
    }

    /// What is held back now.
    pub(crate) fn held(&self) -> &str {
        &self.held
    }

    /// What was held back, when no text follows.
    pub(crate) fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    /// Bytes at the end of the held text that begin some stop string.
    fn longest_beginning(&self) -> usize {
        let begins = |stop: &String| {
            let cuts = stop.char_indices().map(|(cut, _)| cut).skip(1).collect::<Vec<_>>();
            cuts.into_iter().rev().find(|&cut| self.held.ends_with(&stop[..cut])).unwrap_or(0)
        };
        self.stops.iter().map(begins).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn matcher(stops: &[&str], include: bool) -> StopMatcher {
        StopMatcher::new(&stops.iter().map(|&stop| stop.to_owned()).collect::<Vec<_>>(), include)
    }

    /// All pieces through a matcher: the text sent, and the stop string that ended it.
    fn run(stops: &[&str], include: bool, pieces: &[&str]) -> (String, Option<String>) {
        let mut matcher = matcher(stops, include);
        let mut sent = String::new();
        for piece in pieces {
            match matcher.push(piece) {
                Released::Text(text) => sent += &text,
                Released::Stopped { text, stop } => return (sent + &text, Some(stop)),
            }
        }
        (sent + &matcher.finish(), None)
    }

    #[test]
    fn a_stop_string_is_found_across_pieces_and_not_sent() {
        assert_eq!(run(&["END"], false, &["abE", "N", "Dxy"]), ("ab".into(), Some("END".into())));
        assert_eq!(run(&["END"], true, &["abE", "N", "Dxy"]), ("abEND".into(), Some("END".into())));
        assert_eq!(run(&["END"], false, &["abE", "N"]), ("abEN".into(), None));
        assert_eq!(run(&["é!"], false, &["é", "?é", "!"]), ("é?".into(), Some("é!".into())));
    }

    #[test]
    fn only_a_possible_beginning_is_held_back() {
        let mut matcher = matcher(&["END"], false);
        assert_eq!(matcher.push("xE"), Released::Text("x".into()));
        assert_eq!(matcher.push("x"), Released::Text("Ex".into()));
    }

    #[test]
    fn the_stop_string_that_begins_first_wins() {
        assert_eq!(run(&["cd", "bc"], false, &["abcd"]), ("a".into(), Some("bc".into())));
        assert_eq!(run(&["bc", "bcd"], false, &["abcd"]), ("a".into(), Some("bc".into())));
    }

    #[test]
    fn text_before_the_minimum_is_never_matched() {
        let mut matcher = matcher(&["ab"], false);
        assert_eq!(matcher.pass("ab"), "ab");
        assert_eq!(matcher.push("a"), Released::Text(String::new()));
        assert_eq!(matcher.pass("b"), "ab");
    }

    proptest! {
        #[test]
        fn any_cutting_stops_where_the_whole_text_does(
            text in "[abc]{0,24}",
            stop in "[abc]{1,3}",
            cuts in prop::collection::vec(0usize..24, 0..8),
            include: bool,
        ) {
            let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.min(text.len())).chain([0, text.len()]).collect();
            cuts.sort_unstable();
            let pieces: Vec<&str> = cuts.windows(2).map(|cut| &text[cut[0]..cut[1]]).collect();
            let expected = match text.find(&stop) {
                Some(at) => (text[..if include { at + stop.len() } else { at }].to_owned(), Some(stop.clone())),
                None => (text.clone(), None),
            };
            prop_assert_eq!(run(&[&stop], include, &pieces), expected);
        }
    }
}
