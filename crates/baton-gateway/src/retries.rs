//! How often requests may be tried again where engines answer that they cannot serve: a share of the requests that come, so that a fleet which
//! is overloaded does not get its load several times over. Engines that are lost are another matter: they get nothing more.

/// Retries for each request.
const SHARE: f64 = 0.2;
/// Retries at once, after a quiet time.
const MOST: f64 = 100.0;

/// Retries that are left.
#[derive(Debug)]
pub(crate) struct Retries {
    left: f64,
}

impl Default for Retries {
    fn default() -> Self {
        Self { left: MOST }
    }
}

impl Retries {
    /// A request came.
    pub(crate) fn earn(&mut self) {
        self.left = (self.left + SHARE).min(MOST);
    }

    /// Whether one more may be tried again.
    pub(crate) fn spend(&mut self) -> bool {
        let may = self.left >= 1.0;
        self.left -= if may { 1.0 } else { 0.0 };
        may
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fleet_that_refuses_all_gets_a_fifth_more_at_most() {
        let mut retries = Retries::default();
        let spent = (0..10_000)
            .filter(|_| {
                retries.earn();
                retries.spend()
            })
            .count();
        assert!((2_000..=2_101).contains(&spent), "{spent}");
        (0..10_000).for_each(|_| retries.earn());
        assert_eq!((0..1_000).filter(|_| retries.spend()).count(), 100, "no more than that is saved up");
    }
}
