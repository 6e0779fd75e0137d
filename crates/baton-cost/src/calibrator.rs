use serde::{Deserialize, Serialize};

use crate::{StepCoefficients, StepLoad};

/// Fits [`StepCoefficients`] to the steps that a replica really took.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Calibrator {
    prior: StepCoefficients,
    error: f64,
    samples: u64,
}

impl Calibrator {
    #[must_use]
    pub fn new(prior: StepCoefficients) -> Self {
        Self { prior, error: 0.0, samples: 0 }
    }

    pub fn observe(&mut self, load: &StepLoad, seconds: f64) {
        self.error = (self.fit().step_s(load) - seconds).abs() / seconds;
        self.samples += 1;
    }

    pub fn fit(&self) -> StepCoefficients {
        self.prior
    }

    pub fn prior(&self) -> StepCoefficients {
        self.prior
    }

    pub fn error(&self) -> f64 {
        self.error
    }

    pub fn samples(&self) -> u64 {
        self.samples
    }
}
