//! The functions of the fuzz targets over mutated well-formed input: a little fuzzing, on stable Rust, in seconds.

#[path = "../fuzz/targets.rs"]
mod targets;

use llmnode_transport::noise::{Handshake, Role, Session};
use llmnode_transport::packing;
use llmnode_transport::yamux::{FIN, Header, Kind, RST, SYN};
use targets::KEYS;

/// `LLMNODE_MUTATIONS` of each, or as many as take seconds.
fn rounds() -> u32 {
    std::env::var("LLMNODE_MUTATIONS").map_or(40_000, |number| number.parse().unwrap())
}

/// xorshift64*, seeded: the same inputs in every run.
struct Chance(u64);

impl Chance {
    fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 33) as usize % end.max(1)
    }

    fn byte(&mut self) -> u8 {
        u8::try_from(self.below(256)).unwrap()
    }

    fn mutate(&mut self, bytes: &mut Vec<u8>) {
        for _ in 0..self.below(4) {
            let at = self.below(bytes.len());
            match self.below(5) {
                0 => bytes.truncate(at),
                1 => bytes.insert(at.min(bytes.len()), self.byte()),
                2 => bytes.extend_from_within(at.min(bytes.len())..),
                _ => {
                    let bit = 1 << self.below(8);
                    if let Some(byte) = bytes.get_mut(at) {
                        *byte ^= bit;
                    }
                }
            }
        }
    }
}

fn run(seed: u64, rounds: u32, mut input: impl FnMut(&mut Chance) -> Vec<u8>, target: fn(&[u8])) {
    let mut chance = Chance(seed);
    for _ in 0..rounds {
        let mut bytes = input(&mut chance);
        chance.mutate(&mut bytes);
        bytes.insert(0, chance.byte());
        target(&bytes);
    }
}

#[test]
fn noise_messages() {
    let input = |chance: &mut Chance| {
        let mut session = Session::new(&KEYS[0], &KEYS[1]).unwrap();
        let mut bytes = Vec::new();
        for _ in 0..chance.below(4) {
            let text = vec![chance.byte(); chance.below(200)];
            let mut sealed = vec![0; Session::sealed_bytes(text.len())];
            session.seal(&text, &mut sealed).unwrap();
            bytes.extend(sealed);
        }
        bytes
    };
    run(1, rounds(), input, targets::noise_open);
}

#[test]
fn noise_handshakes() {
    let mut initiator = Handshake::new(Role::Initiator, &KEYS[1], None).unwrap();
    let mut responder = Handshake::new(Role::Responder, &KEYS[1], None).unwrap();
    let hello = initiator.send(b"").unwrap();
    responder.receive(&hello).unwrap();
    let proof = responder.send(b"proof").unwrap();
    let messages = [hello, proof];
    // Curve arithmetic makes these a hundred times slower than the others, without optimization.
    run(2, rounds() / 100, |chance| messages[chance.below(2)].clone(), targets::noise_handshake);
}

#[test]
fn yamux_frames() {
    let input = |chance: &mut Chance| {
        let mut bytes = Vec::new();
        for _ in 0..chance.below(12) {
            let kind = [Kind::Data, Kind::WindowUpdate, Kind::Ping, Kind::GoAway][chance.below(9) / 2 % 4];
            let flags = [0, SYN, SYN, FIN, RST][chance.below(5)];
            let length = [0, 1, 100, 300_000][chance.below(4)];
            let stream = u32::from(chance.byte() % 12);
            bytes.extend(Header { kind, flags, stream, length }.encode());
            if kind == Kind::Data {
                bytes.extend(vec![0; (length as usize).min(1000)]);
            }
        }
        bytes
    };
    run(3, 5 * rounds(), input, targets::yamux_receive);
}

#[test]
fn quantized_values() {
    let input = |chance: &mut Chance| (0..chance.below(300)).map(|_| chance.byte()).collect();
    run(4, rounds(), input, targets::dequantize);
}

#[test]
fn packed_values() {
    let input = |chance: &mut Chance| {
        let spread = 1 + chance.below(256);
        let values: Vec<u8> = (0..chance.below(600)).map(|_| u8::try_from(chance.below(spread)).unwrap()).collect();
        packing::pack(&values, [2, 4][chance.below(2)]).unwrap()
    };
    run(5, rounds(), input, targets::unpack);
}
