//! The arithmetic of the forward pass, written once over [`Simd`](crate::simd::Simd).

pub(crate) mod activations;
pub(crate) mod attention;
pub(crate) mod multiply;
pub(crate) mod pointwise;
