//! Prompt text of a wanted length in tokens, the same for the same seed.

use fastrand::Rng;

/// Common words: most are one token with their space in a byte-pair vocabulary, and a model answers them with text.
const WORDS: &str = "time year people way day man thing woman life child world school state family student group country problem hand part \
    place case week company system program question work number night point home water room mother area money story fact month lot \
    right study book eye job word business issue side kind head house service friend father power hour game line end member law car \
    city community name president team minute idea body information back parent face others level office door health person art war \
    history party result change morning reason research girl guy moment air teacher force education foot boy age policy music market \
    sense nation plan college interest death experience effect use class control field development role effort rate heart drug show \
    leader light voice wife police mind price report decision son view relationship town road arm difference value building action \
    season society tax director position player record paper space ground form event official matter center couple site project \
    activity star table need court oil situation cost industry figure street image phone data picture practice piece land product \
    doctor wall patient worker news test movie north love step ship green open small large early young long little important few \
    public bad same able good new first last great own other old high different strong possible whole free military true federal \
    international full special easy clear recent certain personal red difficult available likely short single medical current wrong \
    private past foreign fine common poor natural significant similar hot dead central happy serious ready simple left physical \
    general environmental financial blue democratic dark various entire close legal religious cold final main";

/// Makes text; calibrated to a target's tokenizer.
#[derive(Debug, Clone)]
pub(crate) struct Writer {
    words: Vec<&'static str>,
    tokens_per_word: f64,
}

impl Writer {
    /// Counts a token as 4 bytes, as long as the target has not said otherwise.
    pub(crate) fn by_bytes() -> Self {
        let words: Vec<&str> = WORDS.split_whitespace().collect();
        let bytes: usize = words.iter().map(|word| word.len() + 1).sum();
        let tokens_per_word = bytes as f64 / words.len() as f64 / 4.0;
        Self { words, tokens_per_word }
    }

    /// Takes over what a target's tokenizer made of `words` words.
    pub(crate) fn calibrated(self, words: usize, tokens: usize) -> Self {
        if words == 0 || tokens == 0 {
            return self;
        }
        Self { tokens_per_word: tokens as f64 / words as f64, ..self }
    }

    pub(crate) fn tokens_per_word(&self) -> f64 {
        self.tokens_per_word
    }

    /// About `tokens` tokens of text, at least one word.
    pub(crate) fn text(&self, rng: &mut Rng, tokens: u32) -> String {
        self.words(rng, (f64::from(tokens) / self.tokens_per_word).round().max(1.0) as usize)
    }

    pub(crate) fn words(&self, rng: &mut Rng, count: usize) -> String {
        let words: Vec<&str> = (0..count).map(|_| self.words[rng.usize(..self.words.len())]).collect();
        words.join(" ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_has_about_the_wanted_length_and_follows_its_seed() {
        let writer = Writer::by_bytes();
        let text = writer.text(&mut Rng::with_seed(1), 1000);
        assert!((3800..4200).contains(&text.len()), "{}", text.len());
        assert_eq!(text, writer.text(&mut Rng::with_seed(1), 1000));
        assert_ne!(text, writer.text(&mut Rng::with_seed(2), 1000));
        let calibrated = writer.calibrated(10, 20);
        assert_eq!(calibrated.text(&mut Rng::with_seed(1), 100).split(' ').count(), 50);
    }
}
