//! Weights of 4 and of 8 bits, as in GGUF's `Q4_1`, `Q4_0` and `Q8_0`: found again in the floats that those were
//! widened to.

use super::BlockError;
use super::scalar::WHOLE;
use crate::codec::numbers::{f16_to_f32, f32_to_f16};

/// This many weights along the inputs share their levels.
pub const GROUP: usize = 32;
pub(crate) const GROUP_BYTES: usize = GROUP / 2;
const LAST_CODE: f32 = 15.0;
const LARGEST_CODE: f32 = 127.0;

/// Each weight is its code, from 0 to 15, times the step of its group, plus the least of the group: rounded once.
#[derive(Clone, Copy, Debug)]
pub struct Q4<'a> {
    /// 16 bytes for each group: their lower halves are its first 16 weights, the upper ones the others.
    pub codes: &'a [u8],
    /// Step and least of each group.
    pub levels: &'a [[f32; 2]],
}

/// Each weight is its code times the step of its group: exactly.
#[derive(Clone, Copy, Debug)]
pub struct Q8<'a> {
    /// Whole numbers from -127 to 127.
    pub codes: &'a [i8],
    /// One for each group.
    pub steps: &'a [f32],
}

impl<'a> Q8<'a> {
    /// Some groups of them.
    pub(super) fn groups(self, first: usize, end: usize) -> Self {
        let codes: &'a [i8] = self.codes.get(first * GROUP..end * GROUP).unwrap_or_default();
        Self { codes, steps: self.steps.get(first..end).unwrap_or_default() }
    }

    pub(super) fn fits(self, outputs: usize, inputs: usize) -> bool {
        inputs.is_multiple_of(GROUP)
            && self.codes.len() == outputs * inputs
            && self.codes.len() == self.steps.len() * GROUP
    }

    pub(super) fn weights(self) -> impl Iterator<Item = f32> {
        let groups = self.codes.as_chunks::<GROUP>().0.iter().zip(self.steps);
        groups.flat_map(|(codes, step)| codes.iter().map(move |code| f32::from(*code) * step))
    }
}

impl<'a> Q4<'a> {
    /// Some groups of them.
    pub(super) fn groups(self, first: usize, end: usize) -> Self {
        let codes: &'a [u8] = self.codes.get(first * GROUP_BYTES..end * GROUP_BYTES).unwrap_or_default();
        Self { codes, levels: self.levels.get(first..end).unwrap_or_default() }
    }

    pub(super) fn fits(self, outputs: usize, inputs: usize) -> bool {
        let groups = outputs * inputs / GROUP;
        inputs.is_multiple_of(GROUP) && self.levels.len() == groups && self.codes.len() == groups * GROUP_BYTES
    }

    /// The weight of a number.
    pub(super) fn weight(self, at: usize) -> f32 {
        let pair = self.codes.get(at / GROUP * GROUP_BYTES + at % GROUP_BYTES).copied().unwrap_or_default();
        let [step, least] = self.levels.get(at / GROUP).copied().unwrap_or_default();
        let code = if at % GROUP < GROUP_BYTES { pair & 15 } else { pair >> 4 };
        f32::from(code).mul_add(step, least)
    }
}

/// [`pack`] for 8 bits.
///
/// # Errors
///
/// The same as [`pack`]'s.
pub fn pack_q8(weights: &[f32], codes: &mut [i8], steps: &mut [f32]) -> Result<bool, BlockError> {
    let (groups, rest) = weights.as_chunks::<GROUP>();
    let (places, no_place) = codes.as_chunks_mut::<GROUP>();
    let fits = rest.is_empty() && no_place.is_empty() && [places.len(), steps.len()] == [groups.len(); 2];
    if !fits {
        return Err(BlockError::Length("codes"));
    }
    Ok(groups.iter().zip(places).zip(steps).all(|((group, codes), place)| {
        let step = to_f16(group.iter().fold(0.0_f32, |most, weight| most.max(weight.abs())) / LARGEST_CODE);
        *place = step;
        let per_step = if step == 0.0 { 0.0 } else { step.recip() };
        let mut differences = 0;
        for (weight, place) in group.iter().zip(codes) {
            let shifted = (weight * per_step).clamp(-LARGEST_CODE, LARGEST_CODE) + WHOLE;
            differences |= ((shifted - WHOLE) * step - weight).to_bits() << 1;
            #[expect(clippy::cast_possible_truncation, reason = "from -127 to 127")]
            let code = shifted.to_bits() as i8;
            *place = code;
        }
        differences == 0
    }))
}

/// Writes `codes` and `levels` of `weights`, and returns whether they stand for exactly these weights. It stops at the
/// first group for which they do not.
///
/// # Errors
///
/// [`BlockError::Length`] if the outputs have another number of groups, or the weights end within a group.
pub fn pack(weights: &[f32], codes: &mut [u8], levels: &mut [[f32; 2]]) -> Result<bool, BlockError> {
    let (groups, rest) = weights.as_chunks::<GROUP>();
    let (places, no_place) = codes.as_chunks_mut::<GROUP_BYTES>();
    let fits = rest.is_empty() && no_place.is_empty() && [places.len(), levels.len()] == [groups.len(); 2];
    let mut all = groups.iter().zip(places).zip(levels);
    if !fits {
        return Err(BlockError::Length("codes"));
    }
    Ok(all.all(|((group, codes), levels)| {
        // Q4_1 has all between the least and the largest; Q4_0 has the largest magnitude at one end, and 0 in the middle.
        let (least, most) = group.iter().fold((f32::MAX, f32::MIN), |(least, most), w| (least.min(*w), most.max(*w)));
        let end = if least.abs() > most.abs() { least } else { most };
        [((most - least) / LAST_CODE, least), (end / -8.0, end)].into_iter().any(|(step, least)| {
            let step = to_f16(step);
            *levels = [step, least];
            pack_group(group, step, least, codes)
        })
    }))
}

fn pack_group(group: &[f32; GROUP], step: f32, least: f32, codes: &mut [u8; GROUP_BYTES]) -> bool {
    let per_step = if step == 0.0 { 0.0 } else { step.recip() };
    let mut found = [0; GROUP];
    let mut differences = 0;
    for (weight, found) in group.iter().zip(&mut found) {
        let shifted = ((weight - least) * per_step).clamp(0.0, LAST_CODE) + WHOLE;
        let widened = (shifted - WHOLE) * step + least; // the product is exact: there is no other rounding
        differences |= (widened - weight).to_bits() << 1; // but of a sign of 0
        #[expect(clippy::cast_possible_truncation, reason = "from 0 to 15")]
        let code = shifted.to_bits() as u8;
        *found = code;
    }
    let (low, high) = found.split_at(GROUP_BYTES);
    codes.iter_mut().zip(low.iter().zip(high)).for_each(|(pair, (low, high))| *pair = low | high << 4);
    differences == 0
}

/// To the nearest that is a `binary16`; 0 if there is none.
fn to_f16(value: f32) -> f32 {
    let nearest = if value.is_finite() { f16_to_f32(f32_to_f16(value)) } else { 0.0 };
    if nearest.is_finite() { nearest } else { 0.0 }
}
