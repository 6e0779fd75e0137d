/// Philox4x32-10: a counter-based generator (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11).
///
/// Equal key and counter give equal words anywhere, so a draw needs no state that would have to travel with a request.
pub fn philox4x32_10(key: [u32; 2], counter: [u32; 4]) -> [u32; 4] {
    const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
    const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
    let (mut key, mut words) = (key, counter);
    for _ in 0..10 {
        let left = u64::from(MULTIPLIERS[0]) * u64::from(words[0]);
        let right = u64::from(MULTIPLIERS[1]) * u64::from(words[2]);
        words = [(right >> 32) as u32 ^ words[1] ^ key[0], right as u32, (left >> 32) as u32 ^ words[3] ^ key[1], left as u32];
        key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
    }
    words
}

/// A number in [0, 1) with 53 random bits, for the draw of one output token.
pub(crate) fn uniform(seed: u64, prompt_index: u32, choice_index: u32, output_index: u32) -> f64 {
    let words = philox4x32_10([seed as u32, (seed >> 32) as u32], [output_index, choice_index, prompt_index, 0]);
    let bits = (u64::from(words[1]) << 32 | u64::from(words[0])) >> 11;
    bits as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Vectors `philox4x32 10` of the Random123 distribution's file of known answers.
    #[test]
    fn the_published_known_answers_come_out() {
        assert_eq!(philox4x32_10([0; 2], [0; 4]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(philox4x32_10([u32::MAX; 2], [u32::MAX; 4]), [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
        assert_eq!(
            philox4x32_10([0xa409_3822, 0x299f_31d0], [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344]),
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
        );
    }

    #[test]
    fn every_coordinate_changes_the_draw() {
        let draws = [uniform(1, 0, 0, 0), uniform(1 << 32, 0, 0, 0), uniform(1, 1, 0, 0), uniform(1, 0, 1, 0), uniform(1, 0, 0, 1)];
        for (index, draw) in draws.iter().enumerate() {
            assert!((0.0..1.0).contains(draw));
            assert!(!draws[..index].contains(draw));
        }
    }
}
