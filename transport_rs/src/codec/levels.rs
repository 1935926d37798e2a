//! The levels of the two code maps, and the constants by which encoder and decoder compute instead of searching.
//!
//! # The dynamic map
//!
//! Its definition counts zero bits: after the sign, the number of zeros says the power of ten, a one ends them, and the
//! bits that are left divide that decade evenly. Written out: decade `i` of 0..7 spans `[0.1, 1] * 10^(i - 6)`. It is
//! cut into `2^i` equal cells, whose middles are its levels. All of them, their negatives, 0 and 1 are 256 levels; a
//! code is the place of its level in rising order, so that 127 is 0 and 255 is 1. (-1 is missing: it becomes -0.993.)
//!
//! A positive code is `127 + p`, and `p` runs from `2^i` to `2^(i+1) - 1` in decade `i`. So both ways are straight lines
//! within a decade: `level = rise * p + start`, and, as a cell holds just what is nearest to its middle, `p` is the whole
//! part of `steps * magnitude + first`. Only between two decades the nearest level is not that of the cell:
//! [`THRESHOLDS`] has the middles there.
//!
//! How many thresholds a magnitude has reached follows from its exponent but for one comparison: a third of the distance
//! from [`BINADE_BELOW`] is that number or one less, since no two thresholds share a power of two.

/// Seven decades, and the level 1 as an eighth: `p` is 128.
pub const DECADES: usize = 8;

/// `1 / 127`. Rounded, yet 127 times it is 1 again.
pub const LINEAR_STEP: f32 = 1.0 / 127.0;

/// From this magnitude on a value belongs to decade `i`; below the first it is 0.
pub const THRESHOLDS: [f32; DECADES] = per_decade(Constant::Threshold);

/// `n` powers of two above this exponent, a magnitude has reached `n / 3` thresholds, and perhaps that one.
pub const BINADE_BELOW: i32 = 127 - 23;

/// Cells for each unit of magnitude.
pub const STEPS: [f32; DECADES] = per_decade(Constant::Steps);

/// The start of the line of `p` over the magnitude.
pub const FIRSTS: [f32; DECADES] = per_decade(Constant::First);

/// The largest `p` of the decade.
pub const LASTS: [f32; DECADES] = per_decade(Constant::Last);

/// The distance of two levels.
pub const RISES: [f32; DECADES] = per_decade(Constant::Rise);

/// The start of the line of the level over `p`.
pub const STARTS: [f32; DECADES] = per_decade(Constant::Start);

/// The level of each `p`, as the lines give it.
pub const DYNAMIC_MAGNITUDES: [f32; 129] = dynamic_magnitudes();

/// Where the decades end, and how many levels they have.
const TOPS: [f64; DECADES] = [1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0, f64::NAN];
const COUNTS: [f64; DECADES] = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0];

#[derive(Clone, Copy)]
enum Constant {
    Threshold,
    Steps,
    First,
    Last,
    Rise,
    Start,
}

#[expect(clippy::cast_possible_truncation, reason = "rounded once, at the very end")]
#[expect(clippy::indexing_slicing, reason = "at compile time: a wrong index does not build")]
const fn per_decade(constant: Constant) -> [f32; DECADES] {
    let mut values = [0.0; DECADES];
    let mut decade = 0;
    while decade < DECADES {
        values[decade] = in_decade(decade, constant) as f32;
        decade += 1;
    }
    values
}

#[expect(clippy::indexing_slicing, reason = "at compile time: a wrong index does not build")]
const fn in_decade(decade: usize, constant: Constant) -> f64 {
    let levels = COUNTS[decade];
    if decade == DECADES - 1 {
        return match constant {
            Constant::Threshold => 0.5 + 0.5 * highest_level(decade - 1),
            Constant::First | Constant::Last => levels,
            Constant::Steps | Constant::Start => 0.0,
            Constant::Rise => 1.0 / levels,
        };
    }
    let top = TOPS[decade];
    let lowest = top * (0.1 + 0.45 / levels);
    match constant {
        Constant::Threshold if decade == 0 => lowest / 2.0,
        Constant::Threshold => f64::midpoint(highest_level(decade - 1), lowest),
        Constant::Steps => levels / (0.9 * top),
        Constant::First => levels - levels / 9.0,
        Constant::Last => 2.0 * levels - 1.0,
        Constant::Rise => 0.9 * top / levels,
        Constant::Start => lowest - 0.9 * top,
    }
}

#[expect(clippy::indexing_slicing, reason = "at compile time: a wrong index does not build")]
const fn highest_level(decade: usize) -> f64 {
    TOPS[decade] * (1.0 - 0.45 / COUNTS[decade])
}

#[expect(clippy::cast_precision_loss, reason = "128 at most")]
#[expect(clippy::indexing_slicing, reason = "at compile time: a wrong index does not build")]
const fn dynamic_magnitudes() -> [f32; 129] {
    let mut magnitudes = [0.0; 129];
    let mut p: usize = 1;
    while p < magnitudes.len() {
        let decade = p.ilog2() as usize;
        magnitudes[p] = RISES[decade] * (p as f32) + STARTS[decade];
        p += 1;
    }
    magnitudes
}
