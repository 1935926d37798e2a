//! Values that begin where a cache line does.

use std::ops::{Deref, DerefMut};

use super::LANES;

/// Elsewhere each vector would lie in two lines, and reading it would take twice the time.
pub(crate) struct Aligned {
    buffer: Vec<f32>,
    start: usize,
    length: usize,
}

impl Aligned {
    pub(crate) fn zeros(length: usize) -> Self {
        let buffer = vec![0.0_f32; length + LANES - 1];
        let start = buffer.as_ptr().align_offset(LANES * size_of::<f32>()).min(LANES - 1);
        Self { buffer, start, length }
    }

    pub(crate) fn of(values: &[f32]) -> Self {
        let mut aligned = Self::zeros(values.len());
        aligned.copy_from_slice(values);
        aligned
    }
}

impl Deref for Aligned {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        self.buffer.get(self.start..self.start + self.length).unwrap_or_default()
    }
}

impl DerefMut for Aligned {
    fn deref_mut(&mut self) -> &mut [f32] {
        self.buffer.get_mut(self.start..self.start + self.length).unwrap_or_default()
    }
}
