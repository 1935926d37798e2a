//! The slow twin: one value at a time, in `f64`.

use llmnode_transport::blocks::{Block, Half, Linear, Shape, Weight};
use llmnode_transport::codec::numbers::{bf16_to_f32, f16_to_f32};

/// One sequence from its beginning, as the words of the module and of `Block` say it.
pub fn slowly(shape: &Shape, blocks: &[Block<'_>], hidden: &[f32], rounds_kv: bool) -> Vec<f64> {
    let wide = |values: &[f32]| values.iter().map(|value| f64::from(*value)).collect::<Vec<_>>();
    let norm = |values: &[f64], weight: &[f32]| {
        let mean = values.iter().map(|value| value * value).sum::<f64>() / values.len() as f64;
        let root = (mean + f64::from(shape.epsilon)).sqrt();
        values.iter().zip(weight).map(|(value, weight)| value / root * f64::from(*weight)).collect::<Vec<_>>()
    };
    let product = |values: &[f64], linear: Linear<'_>| {
        let (weights, inputs) = match linear.weight {
            Weight::Floats(weights) => (wide(weights), values.to_vec()),
            Weight::Halves(half, weights) => {
                let widen = if half == Half::Bf16 { bf16_to_f32 } else { f16_to_f32 };
                (weights.iter().map(|weight| f64::from(widen(*weight))).collect(), values.to_vec())
            }
            Weight::Q4(q4) => {
                let groups = q4.codes.chunks(16).zip(q4.levels);
                let weights = groups.flat_map(|(codes, [step, least])| {
                    let codes = codes.iter().map(|pair| pair & 15).chain(codes.iter().map(|pair| pair >> 4));
                    codes.map(|code| f64::from(f32::from(code).mul_add(*step, *least)))
                });
                (weights.collect(), values.to_vec())
            }
            Weight::Q8(q8) => {
                let groups = q8.codes.chunks(32).zip(q8.steps);
                let weights =
                    groups.flat_map(|(codes, step)| codes.iter().map(move |code| f64::from(f32::from(*code) * step)));
                (weights.collect(), values.to_vec())
            }
            Weight::Codes(codes, scales) => {
                let most = values.iter().map(|value| value.abs()).filter(|value| *value < 6.0).fold(0.0, f64::max);
                let step = most / 127.0;
                let rounded =
                    values.iter().map(|value| if value.abs() < 6.0 { (value / step).round() * step } else { *value });
                let rows = codes.chunks(values.len()).zip(scales);
                let weights =
                    rows.flat_map(|(row, scale)| row.iter().map(move |code| f64::from(*code) * f64::from(*scale)));
                (weights.collect(), rounded.collect())
            }
        };
        let rows = weights.chunks(values.len()).enumerate();
        let outputs = rows.map(|(output, weights)| {
            let bias = linear.bias.map_or(0.0, |bias| f64::from(bias[output]));
            bias + weights.iter().zip(&inputs).map(|(weight, value)| weight * value).sum::<f64>()
        });
        outputs.collect::<Vec<_>>()
    };
    let turn = |head: &[f64], position: usize| {
        let half = head.len() / 2;
        let mut turned = vec![0.0; head.len()];
        for pair in 0..half {
            let angle = f64::from(position as f32 * shape.frequencies[pair]);
            let (sine, cosine) =
                (angle.sin() * f64::from(shape.rotary_scaling), angle.cos() * f64::from(shape.rotary_scaling));
            turned[pair] = head[pair] * cosine - head[half + pair] * sine;
            turned[half + pair] = head[half + pair] * cosine + head[pair] * sine;
        }
        turned
    };
    let mut rows: Vec<Vec<f64>> = hidden.chunks(shape.hidden).map(wide).collect();
    for block in blocks {
        let mut kept: Vec<[Vec<Vec<f64>>; 2]> = Vec::new(); // keys and values by head, of each position
        for (position, row) in rows.iter_mut().enumerate() {
            let joined = product(&norm(row, block.attended_norm), block.qkv);
            let mut heads: Vec<Vec<f64>> = joined.chunks(shape.head_dim).map(<[f64]>::to_vec).collect();
            let values = heads.split_off(shape.heads + shape.kv_heads);
            for (number, head) in heads.iter_mut().enumerate() {
                if let Some((of_queries, of_keys)) = block.head_norms {
                    *head = norm(head, if number < shape.heads { of_queries } else { of_keys });
                }
                if block.is_rotated {
                    *head = turn(head, position);
                }
            }
            let mut pair = [heads.split_off(shape.heads), values];
            if rounds_kv {
                pair.iter_mut().flatten().for_each(round);
            }
            kept.push(pair);
            let mut attended = Vec::new();
            for (number, query) in heads.iter().enumerate() {
                let of_keys = number / (shape.heads / shape.kv_heads);
                let first = block.window.map_or(0, |window| (position + 1).saturating_sub(window));
                let weights: Vec<f64> = kept[first..]
                    .iter()
                    .map(|[keys, _]| keys[of_keys].iter().zip(query).map(|(key, query)| key * query).sum::<f64>())
                    .map(|score| (score * f64::from(block.scaling)).exp())
                    .collect();
                for value in 0..shape.head_dim {
                    let sum: f64 =
                        kept[first..].iter().zip(&weights).map(|([_, values], by)| values[of_keys][value] * by).sum();
                    attended.push(sum / weights.iter().sum::<f64>());
                }
            }
            row.iter_mut().zip(product(&attended, block.output)).for_each(|(row, added)| *row += added);
            let gates = product(&norm(row, block.fed_norm), block.gate_up);
            let (gates, up) = gates.split_at(shape.inner);
            let fed: Vec<f64> = gates.iter().zip(up).map(|(gate, up)| gate / (1.0 + (-gate).exp()) * up).collect();
            row.iter_mut().zip(product(&fed, block.down)).for_each(|(row, added)| *row += added);
        }
    }
    rows.concat()
}

/// To 127 steps of either sign of its largest number.
fn round(head: &mut Vec<f64>) {
    let step = head.iter().fold(0.0_f64, |largest, value| largest.max(value.abs())) / 127.0;
    for value in head {
        *value = (*value / step).round() * step;
    }
}
